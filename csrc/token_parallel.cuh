/* token_parallel.cuh - the fast kernel: d_conv 4, head_dim 128, the input's dtype throughout.
 *
 * There is no recurrence: the window after token t is just the last inputs, so that all (channel,
 * token) pairs are independent. A block owns 128 channels (one q or k head, or as many v channels)
 * of one sequence for all its tokens. threadIdx.x owns V adjacent channels, threadIdx.y a group of T
 * consecutive tokens; every thread loads its T + 3 inputs up front.
 *
 * Invariants
 * - Whoever overwrites conv_state or an old snapshot comes after everyone who reads it: a barrier of
 *   the block lies between, and no other block touches these channels of this sequence.
 * - The order of the L2 sum depends on neither V nor T: see sum_heads.
 */
#ifndef GDN_VERIFY_TOKEN_PARALLEL_CUH
#define GDN_VERIFY_TOKEN_PARALLEL_CUH

#include "device.cuh"

#define FAST_D_CONV 4
#define FAST_HEAD_DIM 128
#define FAST_GROUPS (FAST_HEAD_DIM / GDN_VERIFY_GROUP)

/* How the columns of a window lie in memory. */
typedef enum WindowLayout {
  LAYOUT_STRIDED = 0,       /* any strides: element by element */
  LAYOUT_CHANNEL_MAJOR = 1, /* [D, 4] contiguous: the V windows of a thread are one piece */
  LAYOUT_TOKEN_MAJOR = 2    /* channel stride 1: the V channels of a column are one piece */
} WindowLayout;

typedef struct FastLaunch {
  gdn_verify_problem p;
  int32_t state_layout;    /* WindowLayout */
  int32_t snapshot_layout; /* WindowLayout; of a history LAYOUT_TOKEN_MAJOR or LAYOUT_STRIDED */
} FastLaunch;

/* ---- windows: x[column][channel], the last `columns` of 4 ------------------------------------- */

/* Loads what a start window contributes to x of a thread whose first token is `first`: x[j] is the
 * entry of token first + j - 3, as far as that is below 0. The window has `columns` columns. */
template <typename State, int V>
static __device__ __forceinline__ void load_columns(const State *from, int32_t layout,
                                                    int64_t channel_stride, int64_t column_stride,
                                                    int columns, int first, float (*x)[V]) {
  if (first == 0 && layout == LAYOUT_CHANNEL_MAJOR) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float window[4];
      load_pack<State, 4>(from + 4 * v, window);
#pragma unroll
      for (int j = 0; j < 3; ++j) x[j][v] = window[j + 1];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (first + j >= 3) break;
    const State *column = from + (columns - 3 + first + j) * column_stride;
    if (layout == LAYOUT_TOKEN_MAJOR) {
      load_pack<State, V>(column, x[j]);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) x[j][v] = to_float(column[v * channel_stride]);
    }
  }
}

template <typename State, int V>
static __device__ __forceinline__ void store_column(State *to, int32_t layout,
                                                    int64_t channel_stride, const float (&x)[V]) {
  if (layout == LAYOUT_TOKEN_MAJOR) {
    store_pack<State, V>(to, x);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v * channel_stride] = from_float<State>(x[v]);
  }
}

/* Stores the window x[0 .. 3] (its last `columns`). */
template <typename State, int V>
static __device__ __forceinline__ void store_window(State *to, int32_t layout,
                                                    int64_t channel_stride, int64_t column_stride,
                                                    int columns, const float (*x)[V]) {
  if (layout == LAYOUT_CHANNEL_MAJOR) {
    float windows[4 * V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) windows[4 * v + j] = x[j][v];
    }
    store_pack<State, 4 * V>(to, windows);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < 4 - columns) continue;
    store_column<State, V>(to + (j - (4 - columns)) * column_stride, layout, channel_stride, x[j]);
  }
}

/* ---- the L2 norm ----------------------------------------------------------------------------- */

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
  if constexpr (V == 4)
    sum = (squares[0][0] + squares[0][2]) + (squares[0][1] + squares[0][3]);

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
    for (int g = 1; g < FAST_GROUPS; ++g)
      total = total + __shfl_sync(ALL, sum, in_group + 8 * g);
    __syncthreads(); /* conv_state may be overwritten from here on */
  } else {
    const int group = (int)threadIdx.x * V / GDN_VERIFY_GROUP;
    float(*mine)[FAST_GROUPS] = partial + threadIdx.y * T;
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
    for (int level = 0; level < LEVELS; ++level)
      holder += (t >> level & 1) * tree_offset(V, level);
    factor[t] = T == 1 ? own : __shfl_sync(ALL, own, holder);
  }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* y[t] = conv of the window x[t .. t + 3], for all T tokens of the thread.
 *
 * The sum starts with the first product instead of bias or +0 plus it where there is no bias. That
 * differs where all four products are -0, whose sum is -0 instead of +0: the next step, whatever it
 * is, adds a zero. */
template <int V, int T, bool BIAS>
static __device__ __forceinline__ void convolve(const float (&x)[T + 3][V],
                                                const float (&weight)[4][V], const float (&bias)[V],
                                                float (&y)[T][V]) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float sum = __fmul_rn(x[t][v], weight[0][v]);
      if (BIAS) sum = __fadd_rn(bias[v], sum);
#pragma unroll
      for (int k = 1; k < FAST_D_CONV; ++k)
        sum = __fadd_rn(sum, __fmul_rn(x[t + k][v], weight[k][v]));
      y[t][v] = sum;
    }
  }
}

/* 1 / x, correctly rounded, for normal x below 2^126: what __frcp_rn does there, without its test
 * for everything else. */
static __device__ __forceinline__ float quick_rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/* The activation, in place. Without a bias, y may be -0 where the definition has +0 (see convolve):
 * adding +0 after the last product mends that, and changes nothing else, since a product that is
 * rounded to zero keeps its sign in the fused form too. */
template <int V, int T, bool BIAS>
static __device__ __forceinline__ void activate(int32_t activation, float (&y)[T][V]) {
  if (activation != GDN_VERIFY_SILU) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (!BIAS) y[t][v] = __fadd_rn(y[t][v], 0.0f);
    }
    return;
  }
  float largest = 0.0f; /* NaN does not count: its product is NaN whatever the factor */
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int v = 0; v < V; ++v) largest = fmaxf(largest, fabsf(y[t][v]));
  }
  if (largest <= 80.0f) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float factor = quick_rcp(gdn_verify_one_plus_exp(-y[t][v]));
        y[t][v] = BIAS ? __fmul_rn(y[t][v], factor) : __fmaf_rn(y[t][v], factor, 0.0f);
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v)
        y[t][v] = gdn_verify_silu(BIAS ? y[t][v] : __fadd_rn(y[t][v], 0.0f));
    }
  }
}

template <typename Input, int V>
static __device__ __forceinline__ void load_weight(const gdn_verify_problem &p, int64_t channel,
                                                   float (&weight)[4][V], float (&bias)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int64_t at = (channel + v) * p.weight_channel;
#pragma unroll
    for (int k = 0; k < FAST_D_CONV; ++k)
      weight[k][v] = load_element(p.weight, at + k * p.weight_tap, p.weight_dtype);
    bias[v] = p.bias ? load_element(p.bias, (channel + v) * p.bias_channel, p.bias_dtype) : 0.0f;
  }
}

/* Sets this block's channels of `count` output rows to zero. */
template <typename Input, int V>
static __device__ __forceinline__ void zero_rows(const gdn_verify_problem &p, int64_t offset,
                                                 int64_t count, int64_t channel) {
  const float zeros[V] = {};
  for (int64_t row = threadIdx.y; row < count; row += blockDim.y)
    store_pack<Input, V>((Input *)p.output + offset + row * p.output_token + channel, zeros);
}

/* Most threads of a block: with T tokens each, at least 17 tokens, or as many as fit. */
static constexpr int max_threads(int v, int t) {
  const int lanes = FAST_HEAD_DIM / v;
  const int wanted = t >= 9 ? 512 : (17 + t - 1) / t * lanes;
  return wanted < 1024 ? wanted : 1024;
}

template <typename Input, typename State, int V, int T>
__global__ void __launch_bounds__(max_threads(V, T))
    token_parallel_kernel(const __grid_constant__ FastLaunch launch) {
  const gdn_verify_problem &p = launch.p;
  extern __shared__ __align__(16) float partial[][FAST_GROUPS]; /* [blockDim.y * T] */
  const int64_t channel = (int64_t)blockIdx.y * FAST_HEAD_DIM + threadIdx.x * V;
  const int first = (int)threadIdx.y * T;

  float weight[4][V], bias[V];
  load_weight<Input, V>(p, channel, weight, bias);
  wait_for_predecessor();
  release_successor();

  gdn_verify_sequence s;
  if (blockIdx.x == p.n_seq) { /* with cu_seqlens: the rows that no sequence owns */
    int64_t owned = p.cu_seqlens[p.n_seq * p.cu_seqlens_stride];
    owned = owned < 0 ? 0 : owned;
    zero_rows<Input, V>(p, owned * p.output_token, p.total_rows - owned, channel);
    return;
  }
  const gdn_verify_verdict verdict = gdn_verify_resolve(&p, blockIdx.x, &s);
  if (verdict != GDN_VERIFY_RUN) {
    if (verdict != GDN_VERIFY_EMPTY)
      zero_rows<Input, V>(p, s.output_offset, s.num_rows, channel);
    return;
  }
  const int rows = (int)s.num_rows;

  /* x[j] is the input of token first + j - 3, or what the start window holds there */
  float x[T + 3][V];
  const Input *input =
      (const Input *)p.input + s.input_offset + (first - 3) * p.input_token + channel;
#pragma unroll
  for (int j = 0; j < T + 3; ++j) {
    const int token = first + j - 3;
    if ((j >= 3 || token >= 0) && token < rows) {
      load_pack<Input, V>(input + j * p.input_token, x[j]);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) x[j][v] = 0.0f;
    }
  }
  if (first < 3) {
    const bool from_state = s.start < 0;
    const StartWindow w = start_window<State>(p, s);
    load_columns<State, V>((const State *)w.base + channel * w.channel_stride,
                           from_state ? launch.state_layout : launch.snapshot_layout,
                           w.channel_stride, w.column_stride, p.state_len, T >= 3 ? 0 : first, x);
  }
  if (s.start >= 0) __syncthreads(); /* the old snapshots have been read */

  /* snapshots go out first: they are most of the traffic */
  if (p.snapshot_kind == GDN_VERIFY_WINDOWS) {
    State *to = (State *)p.snapshots + s.row * p.snapshot_row + first * p.snapshot_token +
                channel * p.snapshot_channel;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (first + t < rows)
        store_window<State, V>(to + t * p.snapshot_token, launch.snapshot_layout,
                               p.snapshot_channel, p.snapshot_column, p.state_len, x + t);
    }
  } else if (p.snapshot_kind == GDN_VERIFY_HISTORY) {
    /* row i holds the entry that token i - (S - 1) brought */
    State *to = (State *)p.snapshots + s.row * p.snapshot_row + channel * p.snapshot_channel;
    const int lead = p.state_len - 1;
#pragma unroll
    for (int j = 0; j < T + 3; ++j) {
      const int token = first + j - 3;
      const bool own = j >= 3 ? token < rows : first == 0 && token + lead >= 0;
      if (own)
        store_column<State, V>(to + (token + lead) * p.snapshot_token, launch.snapshot_layout,
                               p.snapshot_channel, x[j]);
    }
  }

  float y[T][V];
  if (p.bias) {
    convolve<V, T, true>(x, weight, bias, y);
    activate<V, T, true>(p.activation, y);
  } else {
    convolve<V, T, false>(x, weight, bias, y);
    activate<V, T, false>(p.activation, y);
  }

  if ((int64_t)blockIdx.y * FAST_HEAD_DIM < p.qk_channels) {
    float squares[T][V], factor[T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) squares[t][v] = __fmul_rn(y[t][v], y[t][v]);
    }
    head_factors<V, T>(squares, p.l2_eps, partial, factor);
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) y[t][v] = __fmul_rn(y[t][v], factor[t]);
    }
  } else {
    __syncthreads(); /* conv_state may be overwritten from here on */
  }

  Input *output = (Input *)p.output + s.output_offset + first * p.output_token + channel;
#pragma unroll
  for (int t = 0; t < T; ++t) {
    if (first + t < rows) store_pack<Input, V>(output + t * p.output_token, y[t]);
    if (p.write_state && first + t == rows - 1)
      store_window<State, V>((State *)p.state + s.slot * p.state_slot + channel * p.state_channel,
                             launch.state_layout, p.state_channel, p.state_column, p.state_len,
                             x + t);
  }
}

#endif /* GDN_VERIFY_TOKEN_PARALLEL_CUH */
