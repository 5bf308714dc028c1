/* cuda_host.cu - launches, errors of the CUDA runtime, and GDN_VERIFY_CHECK: index tensors read back and
 * checked by the same code as on the CPU. No kernels. */
#include "cuda_host.h"

#include <stdlib.h>

#include <atomic>

gdn_verify_status gdn_verify_fail_cuda(gdn_verify_error *err, const char *what, cudaError_t error) {
  (void)cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
      error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                           "gdn_verify was built for the architectures %s, but device %d is %d.%d: "
                           "rebuild with TORCH_CUDA_ARCH_LIST=%d.%d",
                           gdn_verify_cuda_archs(), device, major, minor, major, minor);
  }
  return gdn_verify_fail(err, GDN_VERIFY_CUDA_ERROR, "%s failed: %s", what,
                         cudaGetErrorString(error));
}

/* Whether this library's code for the current device waits for its predecessor: code below 9.0 has no
 * wait, and must not overlap what it would wait for. Asked of one kernel, once a device. */
static bool waits_for_predecessor(const void *kernel) {
  enum {
    UNKNOWN,
    NO,
    YES,
    DEVICES = 64
  };
  static std::atomic<signed char> known[DEVICES];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device < DEVICES && known[device] != UNKNOWN) return known[device] == YES;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    (void)cudaGetLastError(); /* the launch will say so */
    return false;
  }
  const bool waits = attributes.ptxVersion >= 90;
  if (device < DEVICES) known[device] = waits ? YES : NO;
  return waits;
}

cudaError_t gdn_verify_launch_kernel(const void *kernel, dim3 grid, dim3 block, size_t shared,
                                     bool pdl, void *stream, const void *argument) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid;
  launch.blockDim = block;
  launch.dynamicSmemBytes = shared;
  launch.stream = (cudaStream_t)stream;
  launch.attrs = &attribute;
  launch.numAttrs = pdl && waits_for_predecessor(kernel) ? 1 : 0;
  void *arguments[] = {(void *)argument};
  return cudaLaunchKernelExC(&launch, kernel, arguments);
}

/* An index tensor [outer, inner] on its way to the host. */
typedef struct IndexCopy {
  const int32_t **pointer; /* device pointer before, host pointer after; to null: absent */
  int64_t *outer_stride;   /* becomes `inner` */
  int64_t *inner_stride;   /* becomes 1; null where inner is 1 */
  int64_t outer, inner;
} IndexCopy;

/* Rows of `width` side by side in one copy, anything else element by element. */
static cudaError_t copy_rows(int32_t *to, const int32_t *from, int64_t rows, int64_t pitch,
                             int64_t width, int64_t stride, cudaStream_t stream) {
  const size_t bytes = sizeof *to;
  if ((stride == 1 || width == 1) && pitch >= width)
    return cudaMemcpy2DAsync(to, (size_t)width * bytes, from, (size_t)pitch * bytes,
                             (size_t)width * bytes, (size_t)rows, cudaMemcpyDeviceToHost, stream);
  cudaError_t error = cudaSuccess;
  for (int64_t i = 0; error == cudaSuccess && i < rows * width; ++i)
    error = cudaMemcpyAsync(to + i, from + i / width * pitch + i % width * stride, bytes,
                            cudaMemcpyDeviceToHost, stream);
  return error;
}

/* Copies every tensor into one allocation, which the caller frees. */
static cudaError_t copy_to_host(const IndexCopy *copies, int n, cudaStream_t stream,
                                int32_t **storage) {
  int64_t total = 1;
  for (int i = 0; i < n; ++i)
    if (*copies[i].pointer) total += copies[i].outer * copies[i].inner;
  int32_t *to = *storage = (int32_t *)malloc((size_t)total * sizeof *to);
  if (!to) return cudaErrorMemoryAllocation;
  for (int i = 0; i < n; ++i) {
    const IndexCopy *copy = &copies[i];
    if (!*copy->pointer || copy->outer * copy->inner == 0) continue;
    const cudaError_t error =
        copy_rows(to, *copy->pointer, copy->outer, *copy->outer_stride, copy->inner,
                  copy->inner_stride ? *copy->inner_stride : 1, stream);
    if (error != cudaSuccess) return error;
    *copy->pointer = to;
    *copy->outer_stride = copy->inner;
    if (copy->inner_stride) *copy->inner_stride = 1;
    to += copy->outer * copy->inner;
  }
  return cudaStreamSynchronize(stream);
}

static bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError(); /* the legacy stream while another is captured: counts as captured */
  return true;
}

gdn_verify_status gdn_verify_check_device_indices(const gdn_verify_problem *problem, void *stream,
                                                  gdn_verify_error *err) {
  if (capturing((cudaStream_t)stream)) return GDN_VERIFY_OK;
  gdn_verify_problem host = *problem;
  const int64_t n = host.n_seq;
  const IndexCopy copies[] = {
      {&host.slot_index, &host.slot_index_stride, NULL, n, 1},
      {&host.row_index, &host.row_index_stride, NULL, n, 1},
      {&host.accepted, &host.accepted_stride, NULL, n, 1},
      {&host.cu_seqlens, &host.cu_seqlens_stride, NULL, n + 1, 1},
      {&host.parent, &host.parent_seq, &host.parent_token, n, host.num_tokens}};
  int32_t *storage = NULL;
  const cudaError_t error = copy_to_host(copies, 5, (cudaStream_t)stream, &storage);
  const gdn_verify_status status = error == cudaSuccess
                                       ? gdn_verify_check_indices(&host, err)
                                       : gdn_verify_fail_cuda(err, "reading the indices", error);
  free(storage);
  return status;
}

gdn_verify_status gdn_verify_check_device_commit(const gdn_verify_commit_problem *problem,
                                                 void *stream, gdn_verify_error *err) {
  if (capturing((cudaStream_t)stream)) return GDN_VERIFY_OK;
  gdn_verify_commit_problem host = *problem;
  const int64_t n = host.n_seq;
  const IndexCopy copies[] = {{&host.slot_index, &host.slot_index_stride, NULL, n, 1},
                              {&host.row_index, &host.row_index_stride, NULL, n, 1},
                              {&host.accepted, &host.accepted_stride, NULL, n, 1}};
  int32_t *storage = NULL;
  const cudaError_t error = copy_to_host(copies, 3, (cudaStream_t)stream, &storage);
  const gdn_verify_status status = error == cudaSuccess
                                       ? gdn_verify_check_commit_indices(&host, err)
                                       : gdn_verify_fail_cuda(err, "reading the indices", error);
  free(storage);
  return status;
}
