/* serial_walk.cu - the design that the fused operator started from, to be compared with it: a block
 * of 256 channels (two heads) of one sequence walks the K tokens one after the other, the window in
 * registers, one barrier a token for the L2 norm.
 *
 * float32 state and windows, channel-major and contiguous; bfloat16 rows. Same arithmetic, same bits
 * as the operator (numerics.h); compiled and called by contenders.py.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "numerics.h"

#define BLOCK 256
#define WARPS_PER_HEAD 4 /* head_dim 128 */

static __global__ void __launch_bounds__(BLOCK)
    serial_walk(float4 *state, const __nv_bfloat16 *input, int64_t input_seq, int64_t input_token,
                const __nv_bfloat16 *weight, __nv_bfloat16 *output, float4 *snapshots,
                int num_tokens, int d_inner, int qk_channels, float l2_eps) {
  __shared__ float partial[2][BLOCK / 32];
  const int channel = (int)(blockIdx.x * BLOCK + threadIdx.x);
  const int64_t seq = blockIdx.y;
  const int warp = (int)threadIdx.x / 32;
  const int head = warp / WARPS_PER_HEAD * WARPS_PER_HEAD; /* its first warp */

  float taps[4];
  for (int k = 0; k < 4; ++k) taps[k] = __bfloat162float(weight[4 * channel + k]);
  float4 window = state[seq * d_inner + channel];
  input += seq * input_seq + channel;
  for (int t = 0; t < num_tokens; ++t) {
    window.x = window.y, window.y = window.z, window.z = window.w;
    window.w = __bfloat162float(input[t * input_token]);
    float acc = __fadd_rn(0.0f, __fmul_rn(window.x, taps[0]));
    acc = __fadd_rn(acc, __fmul_rn(window.y, taps[1]));
    acc = __fadd_rn(acc, __fmul_rn(window.z, taps[2]));
    acc = __fadd_rn(acc, __fmul_rn(window.w, taps[3]));
    float y = gdn_verify_silu(acc);
    float sum = __fmul_rn(y, y);
    for (int offset = 16; offset > 0; offset /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, offset));
    /* two sets of sums take turns, so that one barrier a token is enough */
    if (threadIdx.x % 32 == 0) partial[t % 2][warp] = sum;
    __syncthreads();
    if (channel < qk_channels) {
      const float *sums = partial[t % 2] + head;
      float total = sums[0];
      for (int w = 1; w < WARPS_PER_HEAD; ++w) total = __fadd_rn(total, sums[w]);
      y = __fmul_rn(y, gdn_verify_l2_scale(total, l2_eps));
    }
    const int64_t at = (seq * num_tokens + t) * d_inner + channel;
    output[at] = __float2bfloat16_rn(y);
    snapshots[at] = window;
  }
  state[seq * d_inner + channel] = window;
}

/* Returns a cudaError_t. d_inner: a multiple of 256; qk_channels: of 128. */
extern "C" int serial_walk_launch(void *state, const void *input, int64_t input_seq,
                                  int64_t input_token, const void *weight, void *output,
                                  void *snapshots, int n_seq, int num_tokens, int d_inner,
                                  int qk_channels, float l2_eps, void *stream) {
  const dim3 grid((unsigned)(d_inner / BLOCK), (unsigned)n_seq);
  serial_walk<<<grid, BLOCK, 0, (cudaStream_t)stream>>>(
      (float4 *)state, (const __nv_bfloat16 *)input, input_seq, input_token,
      (const __nv_bfloat16 *)weight, (__nv_bfloat16 *)output, (float4 *)snapshots, num_tokens,
      d_inner, qk_channels, l2_eps);
  return (int)cudaGetLastError();
}
