/* floor.cu - what no operator can beat: an empty launch, and a copy kernel that reads and writes as
 * many bytes. Built and called by floor.py; C ABI, nothing of it is in the package.
 *
 * The copy moves 16 bytes a step. It reads `read_bytes` once and writes `write_bytes` once (what it
 * writes beyond what it read is a constant), with the same launch attributes as the operator, and stores
 * plainly or marks what it stores as the first to leave the caches.
 */
#include <cuda_runtime.h>
#include <stdint.h>

static __device__ __forceinline__ void depend(void) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __global__ void empty_kernel(void) { depend(); }

template <int STEPS, bool STREAMING>
static __global__ void copy_kernel(uint4 *to, int64_t n_write, const uint4 *from, int64_t n_read) {
  depend();
  const int64_t base = (int64_t)blockIdx.x * blockDim.x * STEPS + threadIdx.x;
  uint4 x[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int64_t at = base + (int64_t)i * blockDim.x;
    x[i] = at < n_read ? from[at] : make_uint4(1u, 2u, 3u, 4u);
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int64_t at = base + (int64_t)i * blockDim.x;
    if (at >= n_write) continue;
    if (STREAMING)
      __stcs(to + at, x[i]);
    else
      to[at] = x[i];
  }
}

static int launch(const void *kernel, int64_t blocks, int threads, int pdl, void *stream,
                  void **arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)stream;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  return (int)cudaLaunchKernelExC(&config, kernel, arguments);
}

/* Both return a cudaError_t. steps: 1, 2, 4 or 8. read_bytes <= write_bytes, multiples of 16. */
extern "C" int floor_copy(void *to, int64_t write_bytes, const void *from, int64_t read_bytes,
                          int threads, int steps, int streaming, int pdl, void *stream) {
  int64_t n_write = write_bytes / 16, n_read = read_bytes / 16;
  void *arguments[] = {&to, &n_write, &from, &n_read};
  static const void *const kernels[2][4] = {
      {(const void *)copy_kernel<1, false>, (const void *)copy_kernel<2, false>,
       (const void *)copy_kernel<4, false>, (const void *)copy_kernel<8, false>},
      {(const void *)copy_kernel<1, true>, (const void *)copy_kernel<2, true>,
       (const void *)copy_kernel<4, true>, (const void *)copy_kernel<8, true>},
  };
  const void *kernel = kernels[streaming ? 1 : 0][steps == 1   ? 0
                                                  : steps == 2 ? 1
                                                  : steps == 4 ? 2
                                                               : 3];
  const int64_t per_block = (int64_t)threads * steps;
  return launch(kernel, (n_write + per_block - 1) / per_block, threads, pdl, stream, arguments);
}

extern "C" int floor_empty(int pdl, void *stream) {
  return launch((const void *)empty_kernel, 1, 32, pdl, stream, nullptr);
}
