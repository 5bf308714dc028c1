/* emulation.h - the CUDA kernels as ordinary C++, for machines without a GPU.
 *
 * Included before a .cu file, which a host compiler then compiles as C++, as it is. A launch runs
 * its blocks one after the other, and the threads of a block as coroutines, which give way at
 * barriers and shuffles. Host memory is device memory. A warp runs as far as it can without the
 * others, warps, lanes and blocks forwards or backwards, so that a missing barrier shows as a wrong
 * result: see gdn_verify_emulate_backwards.
 *
 * What it does not show: time, what dependent launches overlap, memory accesses of a warp, and the
 * reciprocal's intrinsic, which is a division here.
 */
#ifndef GDN_VERIFY_EMULATION_H
#define GDN_VERIFY_EMULATION_H

#define GDN_VERIFY_CUDA_HOST_H /* in place of csrc/cuda_host.h */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

#include <functional>

#include "problem.h"

/* ---- cuda_host.h ----------------------------------------------------------------------------- */

extern "C" {
gdn_verify_status gdn_verify_fail_cuda(gdn_verify_error *err, const char *what, cudaError_t error);
gdn_verify_status gdn_verify_check_device_indices(const gdn_verify_problem *problem, void *stream,
                                                  gdn_verify_error *err);
gdn_verify_status gdn_verify_check_device_commit(const gdn_verify_commit_problem *problem,
                                                 void *stream, gdn_verify_error *err);
}

/* Runs `thread` for all threads of all blocks, `shared` bytes of dynamic shared memory a block. */
void emulate_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &thread);

template <typename Argument>
cudaError_t gdn_verify_launch(void (*kernel)(const Argument), dim3 grid, dim3 block, size_t shared,
                              bool, void *, const Argument &argument) {
  emulate_grid(grid, block, shared, [&] { kernel(argument); });
  return cudaSuccess;
}

/* ---- what nvcc knows by itself --------------------------------------------------------------- */

#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __grid_constant__
#define __grid_constant__
#endif

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* Wait for all threads of the block, or all lanes of the warp; see emulation.cpp. */
int emulate_barrier(int value);
uint32_t emulate_shuffle(uint32_t value, int source_lane);
int emulate_lane(void);

static inline void __syncthreads(void) { emulate_barrier(0); }
static inline int __syncthreads_or(int value) { return emulate_barrier(value); }

static inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float __shfl_sync(unsigned, float x, int lane) {
  return __uint_as_float(emulate_shuffle(__float_as_uint(x), lane & 31));
}
static inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return __uint_as_float(emulate_shuffle(__float_as_uint(x), emulate_lane() ^ mask));
}

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
template <typename Number> /* of one type: no argument is converted */
static inline Number min(Number a, Number b) {
  return a < b ? a : b;
}
template <typename Number>
static inline Number max(Number a, Number b) {
  return a > b ? a : b;
}
static inline void __stcs(uint4 *to, uint4 x) { *to = x; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}

#endif /* GDN_VERIFY_EMULATION_H */
