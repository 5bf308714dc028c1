/* head_norm.cuh - the L2 norm of the fast kernel: the sum over a head's 128 channels, in the order of the
 * definition, and the factor that it gives.
 */
#ifndef GDN_VERIFY_HEAD_NORM_CUH
#define GDN_VERIFY_HEAD_NORM_CUH

#include "device.cuh"

#define FAST_HEAD_DIM 128
#define FAST_GROUPS (FAST_HEAD_DIM / GDN_VERIFY_GROUP)

/* Lanes apart at level l of the halving tree, whose partners are 16 >> l channels apart. */
static __device__ __forceinline__ constexpr int tree_offset(int v, int level) {
  return (GDN_VERIFY_GROUP / 2 / v) >> level;
}

/* The factors of T tokens of a head, from this thread's squares[t][v].
 *
 * The tree adds channel i and i + 16, then + 8, + 4, + 2, + 1: with V channels a lane these are the
 * lanes 16 / V apart, and so on, then the channels of one lane. Instead of carrying every token
 * through every level in all lanes, two tokens share a shuffle: at each level one half of the lanes
 * goes on with the first, the other half with the second. Addition commutes, so that the bits are
 * those of the plain tree. After it a lane holds one group's sum of one token; the four groups of the
 * head are added left to right, through shared memory where they lie in several warps. */
template <int V, int T>
static __device__ __forceinline__ void head_factors(float (&squares)[T][V], float l2_eps,
                                                    float (*partial)[FAST_GROUPS],
                                                    float (&factor)[T]) {
  constexpr unsigned ALL = 0xFFFFFFFFu;
  constexpr int LEVELS = V == 1 ? 5 : V == 2 ? 4 : 3;
  static_assert(T <= 1 << LEVELS, "a lane ends with one token");
  const int lane = (int)(threadIdx.x & 31u);
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int offset = tree_offset(V, level);
    const int count = (T + (1 << level) - 1) >> level; /* values that a lane still carries */
    const bool second = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; 2 * i < count; ++i) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float a = squares[2 * i][v];
        if (2 * i + 1 < count) {
          const float b = squares[2 * i + 1][v];
          squares[i][v] = (second ? b : a) + __shfl_xor_sync(ALL, second ? a : b, offset);
        } else {
          squares[i][v] = a + __shfl_xor_sync(ALL, a, offset);
        }
      }
    }
  }
  float sum = squares[0][0];
  if constexpr (V == 2) sum = squares[0][0] + squares[0][1];
  if constexpr (V == 4) sum = (squares[0][0] + squares[0][2]) + (squares[0][1] + squares[0][3]);

  /* which token this lane ended with; of lanes with the same one, the first speaks */
  int token = 0;
  bool speaks = true;
#pragma unroll
  for (int level = LEVELS - 1; level >= 0; --level) {
    const int count = (T + (1 << level) - 1) >> level;
    const bool second = (lane & tree_offset(V, level)) != 0;
    const bool paired = 2 * token + 1 < count;
    speaks = speaks && (paired || !second);
    token = 2 * token + (paired && second ? 1 : 0);
  }

  float total;
  if constexpr (V == 4) {
    const int in_group = lane & 7;
    total = __shfl_sync(ALL, sum, in_group);
#pragma unroll
    for (int g = 1; g < FAST_GROUPS; ++g) total = total + __shfl_sync(ALL, sum, in_group + 8 * g);
    if (T < 3) __syncthreads(); /* conv_state has been read */
  } else {
    const int group = (int)threadIdx.x * V / GDN_VERIFY_GROUP;
    float (*mine)[FAST_GROUPS] = partial + threadIdx.y * T;
    if (speaks) mine[token][group] = sum;
    __syncthreads(); /* the same */
    const float4 groups = *(const float4 *)mine[token];
    total = ((groups.x + groups.y) + groups.z) + groups.w;
  }
  const float own = gdn_verify_l2_scale(total, l2_eps);
#pragma unroll
  for (int t = 0; t < T; ++t) {
    int holder = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) holder += (t >> level & 1) * tree_offset(V, level);
    factor[t] = T == 1 ? own : __shfl_sync(ALL, own, holder);
  }
}

#endif /* GDN_VERIFY_HEAD_NORM_CUH */
