/* head_norm.cuh - the L2 norm of the fast kernel: the sum over a head's 128 channels, in the order
 * of the definition, and the factor that it gives.
 */
#ifndef GDN_VERIFY_HEAD_NORM_CUH
#define GDN_VERIFY_HEAD_NORM_CUH

#include "device.cuh"

#define FAST_HEAD_DIM 128
#define FAST_GROUPS (FAST_HEAD_DIM / GDN_VERIFY_GROUP)

/* Lanes that share a group of the definition, with V channels each. */
#define LANES_OF_GROUP(V) (GDN_VERIFY_GROUP / (V))

/* Which token the lanes of each part of a group end with: four bits a part, of 2^splits parts. */
static __device__ __forceinline__ constexpr unsigned tokens_of_lanes(int t, int splits) {
  unsigned tokens = 0;
  for (int part = 0; part < 1 << splits; ++part) {
    int token = 0;
    for (int level = splits - 1; level >= 0; --level) {
      const int count = (t + (1 << level) - 1) >> level;
      const bool second = (part >> (splits - 1 - level) & 1) != 0;
      token = 2 * token + (second && 2 * token + 1 < count ? 1 : 0);
    }
    tokens |= (unsigned)token << (4 * part);
  }
  return tokens;
}

/* Adds the upper half of the first 2 * n values of x to the lower, for n = from, from / 2, .. to. */
template <int V>
static __device__ __forceinline__ void fold(float (&x)[V], int from, int to) {
#pragma unroll
  for (int n = from; n >= to; n /= 2) {
#pragma unroll
    for (int v = 0; v < n; ++v) x[v] = x[v] + x[v + n];
  }
}

/* The factors of T tokens of a head, from this thread's squares[t][v].
 *
 * The tree adds channel i and i + 16, then + 8, + 4, + 2, + 1. The first levels are within a thread
 * as far as its channels come in pieces (see channel_of), the last as far as a piece has
 * neighbours; those between are lanes that exchange. Instead of carrying every token through every
 * level in all lanes, two tokens share a shuffle: at each level one half of the lanes goes on with
 * the first, the other half with the second. Addition commutes, so that the bits are those of the
 * plain tree. After it a lane holds one group's sum of one token; the four groups of the head are
 * added left to right, through shared memory where they lie in several warps. */
template <int V, int PIECE, int T>
static __device__ __forceinline__ void head_factors(float (&squares)[T][V], float l2_eps,
                                                    float (*partial)[FAST_GROUPS],
                                                    float (&factor)[T]) {
  constexpr unsigned ALL = 0xFFFFFFFFu;
  constexpr int LEVELS = V == 1 ? 5 : V == 2 ? 4 : 3;
  const int lane = (int)(threadIdx.x & 31u);
#pragma unroll
  for (int t = 0; t < T; ++t) fold(squares[t], V / 2, PIECE);
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int offset = LANES_OF_GROUP(V) / 2 >> level;
    const int count = (T + (1 << level) - 1) >> level; /* values that a lane still carries */
    const bool second = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; 2 * i < count; ++i) {
#pragma unroll
      for (int v = 0; v < PIECE; ++v) {
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
  fold(squares[0], PIECE / 2, 1);
  const float sum = squares[0][0];

  /* the token that this lane ended with */
  constexpr int SPLITS = T == 1 ? 0 : T == 2 ? 1 : T <= 4 ? 2 : 3; /* levels that tokens shared */
  static_assert(T <= 1 << SPLITS && SPLITS <= LEVELS, "a lane ends with one token");
  constexpr unsigned TOKENS = tokens_of_lanes(T, SPLITS);
  const int part = lane % LANES_OF_GROUP(V) >> (LEVELS - SPLITS);
  const int token = T == 1 ? 0 : (int)(TOKENS >> (4 * part) & 15u);

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
    mine[token][group] = sum; /* by several lanes, the same */
    __syncthreads();          /* the same */
    const float4 groups = *(const float4 *)mine[token];
    total = ((groups.x + groups.y) + groups.z) + groups.w;
  }
  const float own = gdn_verify_l2_scale(total, l2_eps);
#pragma unroll
  for (int t = 0; t < T; ++t) {
    int holder = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level)
      holder += (t >> level & 1) * (LANES_OF_GROUP(V) / 2 >> level);
    factor[t] = T == 1 ? own : __shfl_sync(ALL, own, holder);
  }
}

#endif /* GDN_VERIFY_HEAD_NORM_CUH */
