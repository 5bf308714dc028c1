/* arithmetic.cu - the device's arithmetic over all float32, for test_cuda_arithmetic.py. C ABI.
 *
 * Includes the kernels' own headers, so that what is tested is what runs.
 */
#include "token_parallel.cuh"

static __device__ bool same(float a, float b) {
  return __float_as_uint(a) == __float_as_uint(b) || (a != a && b != b);
}

/* Counts the inputs in [begin, begin + n) for which a form of silu differs from the definition:
 * mismatches[0] gdn_verify_silu, [1] the fast kernel's with a bias, [2] without (-0 becomes +0). */
static __global__ void compare_silu(unsigned begin, unsigned n, unsigned long long *mismatches) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const float x = __uint_as_float(begin + i);
    const float defined = x * __frcp_rn(1.0f + gdn_verify_exp(-x));
    if (!same(gdn_verify_silu(x), defined)) atomicAdd(&mismatches[0], 1ull);
    float y[1][1] = {{x}};
    activate<1, 1, true>(GDN_VERIFY_SILU, y);
    if (!same(y[0][0], defined)) atomicAdd(&mismatches[1], 1ull);
    y[0][0] = x;
    activate<1, 1, false>(GDN_VERIFY_SILU, y);
    if (!same(y[0][0], x == 0.0f ? 0.0f : defined)) atomicAdd(&mismatches[2], 1ull);
  }
}

static __global__ void exp_of(unsigned begin, unsigned n, float *out) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = gdn_verify_exp(__uint_as_float(begin + i));
}

/* Both run on the default stream of the current device and return a cudaError_t. */
extern "C" int launch_compare_silu(unsigned begin, unsigned n, unsigned long long *mismatches) {
  compare_silu<<<1024, 256>>>(begin, n, mismatches);
  return (int)cudaDeviceSynchronize();
}

extern "C" int launch_exp(unsigned begin, unsigned n, float *out) {
  exp_of<<<1024, 256>>>(begin, n, out);
  return (int)cudaDeviceSynchronize();
}
