/* token_parallel.cuh - the fast kernel: d_conv 4, head_dim 128, the input's dtype throughout.
 *
 * There is no recurrence: the window after token t is just the last inputs, so that all (channel,
 * token) pairs are independent. A block owns 128 channels (one q or k head, or as many v channels)
 * of one sequence, for all its tokens or, along blockIdx.z, for some of them. threadIdx.x owns V
 * adjacent channels, threadIdx.y a group of T consecutive tokens; every thread loads its T + 3 inputs
 * up front.
 *
 * Invariants
 * - conv_state is read and written by the block of the first tokens alone: it has at least the three
 *   whose windows reach back to it, and what is committed are the last inputs, which nobody
 *   overwrites. A barrier lies between its reads and its write.
 * - Where a sequence starts from an old snapshot, which this launch overwrites, one block has all
 *   tokens, and a barrier lies between.
 * - The order of the L2 sum depends on neither V nor T: see head_factors.
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

/* What every call reads comes first and is small, strides in 32 bits: parameters reach a kernel line
 * by line through a cache that is cold at every launch. */
typedef struct FastLaunch {
  const void *weight;
  const void *input;
  uint8_t plain;           /* no index tensor: sequence i is row i of everything */
  uint8_t packed_weight;   /* [D, 4] contiguous in the input's dtype, and no bias */
  uint8_t write_state;     /* as in the problem, like those that follow */
  uint8_t snapshot_kind;   /* gdn_verify_snapshot_kind */
  uint8_t snapshot_layout; /* WindowLayout; of a history LAYOUT_TOKEN_MAJOR or LAYOUT_STRIDED */
  uint8_t state_layout;    /* WindowLayout */
  uint8_t state_len;
  uint8_t activation; /* gdn_verify_activation */
  int32_t num_tokens;
  int32_t input_seq, input_token;
  int32_t qk_channels;
  void *state;
  void *snapshots;
  void *output;
  int32_t output_seq, output_token;
  int32_t state_slot, state_channel, state_column;
  int32_t snapshot_row, snapshot_token, snapshot_channel, snapshot_column;
  float l2_eps;
  gdn_verify_problem p; /* for what only some calls have: index tensors, bias, other weights */
} FastLaunch;

/* Offset of `count` (at most MAX_STEPS) tokens. Unsigned, so that the compiler keeps to 32 bits; the
 * launcher has seen that they suffice. */
#define MAX_STEPS 16
static __device__ __forceinline__ int steps(int count, int stride) {
  return (int)((unsigned)count * (unsigned)stride);
}

/* ---- windows: x[column][channel], the last `columns` of 4 ------------------------------------- */

/* Loads what a start window contributes to x of a thread whose first token is `first`: x[j] is the
 * entry of token first + j - 3, as far as that is below 0. The window has `columns` columns. */
template <typename State, int V>
static __device__ __forceinline__ void load_columns(const State *from, int layout,
                                                    int channel_stride, int column_stride,
                                                    int columns, int first, float (*x)[V]) {
  if (first == 0 && layout == LAYOUT_CHANNEL_MAJOR) {
    Raw<State, 4> window[V];
#pragma unroll
    for (int v = 0; v < V; ++v) window[v] = load_raw<State, 4>(from + 4 * v);
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < 3; ++j) x[j][v] = raw_to_float(window[v], j + 1);
    }
    return;
  }
  from += (columns - 3 + first) * column_stride;
  if (layout == LAYOUT_TOKEN_MAJOR) {
    Raw<State, V> column[3] = {};
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (first + j < 3) column[j] = load_raw<State, V>(from + j * column_stride);
#pragma unroll
    for (int j = 0; j < 3; ++j) convert(column[j], x[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (first + j < 3) x[j][v] = to_float(from[v * channel_stride + j * column_stride]);
  }
}

/* Stores N columns x[0 .. N - 1], of which the first `skip` are left out. */
template <typename State, int LAYOUT, int V, int N>
static __device__ __forceinline__ void store_columns(State *to, int channel_stride,
                                                     int column_stride, int skip,
                                                     const float (*x)[V]) {
  if constexpr (LAYOUT == LAYOUT_CHANNEL_MAJOR) {
    static_assert(N == FAST_D_CONV, "a whole window");
    float windows[4 * V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) windows[4 * v + j] = x[j][v];
    }
    store_pack<State, 4 * V>(to, windows);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < skip) continue;
      if constexpr (LAYOUT == LAYOUT_TOKEN_MAJOR) {
        store_pack<State, V>(to, x[j]);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) to[v * channel_stride] = from_float<State>(x[j][v]);
      }
      to += column_stride;
    }
  }
}

/* The snapshots of this thread's tokens: windows, or rows of the history. x as in the kernel. */
template <typename State, int LAYOUT, int V, int T>
static __device__ __forceinline__ void store_snapshots(const FastLaunch &launch, int64_t row,
                                                       int channel, int first, int rows,
                                                       const float (&x)[T + 3][V]) {
  State *to = (State *)launch.snapshots + row * launch.snapshot_row +
              (int64_t)channel * launch.snapshot_channel;
  if (LAYOUT == LAYOUT_CHANNEL_MAJOR || launch.snapshot_kind == GDN_VERIFY_WINDOWS) {
    to += (int64_t)first * launch.snapshot_token;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (first + t < rows)
        store_columns<State, LAYOUT, V, FAST_D_CONV>(
            to + steps(t, launch.snapshot_token), launch.snapshot_channel, launch.snapshot_column,
            FAST_D_CONV - launch.state_len, x + t);
    }
  } else {
    /* row i holds the entry that token i - (S - 1) brought */
    constexpr int HISTORY_LAYOUT =
        LAYOUT == LAYOUT_TOKEN_MAJOR ? LAYOUT_TOKEN_MAJOR : LAYOUT_STRIDED;
    const int lead = launch.state_len - 1;
    if (first == 0)
      store_columns<State, HISTORY_LAYOUT, V, 3>(to, launch.snapshot_channel, launch.snapshot_token,
                                                 3 - lead, x);
    to += (int64_t)(first + lead) * launch.snapshot_token;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (first + t < rows)
        store_columns<State, HISTORY_LAYOUT, V, 1>(to + steps(t, launch.snapshot_token),
                                                   launch.snapshot_channel, 0, 0, x + t + 3);
    }
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
    __syncthreads(); /* conv_state has been read */
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

/* ---- the kernel ------------------------------------------------------------------------------ */

/* y[t] = conv of the window x[t .. t + 3], for all T tokens of the thread. BIAS: there may be one.
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
  if (__builtin_expect(largest <= 80.0f, 1)) {
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

/* Weight and bias of this thread's channels, of any dtype and strides. */
template <int V>
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
  const int64_t step = (int64_t)blockDim.y * gridDim.z;
  for (int64_t row = blockIdx.z * blockDim.y + threadIdx.y; row < count; row += step)
    store_pack<Input, V>((Input *)p.output + offset + row * p.output_token + channel, zeros);
}

/* Most threads of a block: enough for 17 tokens, fewer where T is small, many more where it is 8. */
static constexpr int max_threads(int v, int t) {
  const int lanes = FAST_HEAD_DIM / v;
  if (t == 1) return 8 * lanes;
  if (t == 2) return v == 1 ? 768 : 9 * lanes;
  return t == 8 ? 512 : (17 + t - 1) / t * lanes;
}

/* Blocks that an SM should hold at the same time, which bounds the registers: as many as go without
 * spilling any. Later architectures' code needs a few registers more. */
static constexpr int min_blocks(int v, int t) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;
#endif
  if (t == 8) return 1;
  if (v == 1) return 2;
  if (v == 2) return t <= 2 ? 2 : t == 6 ? 4 : 3;
  return 3;
}

template <typename Input, typename State, int V, int T>
__global__ void __launch_bounds__(max_threads(V, T), min_blocks(V, T))
    token_parallel_kernel(const __grid_constant__ FastLaunch launch) {
  const gdn_verify_problem &p = launch.p;
  extern __shared__ __align__(16) float partial[][FAST_GROUPS]; /* [blockDim.y * T] */
  const int channel = (int)(blockIdx.y * FAST_HEAD_DIM + threadIdx.x * V);
  const int first = (int)(blockIdx.z * blockDim.y + threadIdx.y) * T;
  const int seq = (int)blockIdx.x;

  /* constants first, while the kernel before this one may still run */
  Raw<Input, 4 * V> packed_weight = {};
  if (launch.packed_weight)
    packed_weight = load_raw<Input, 4 * V>((const Input *)launch.weight + 4 * channel);
  wait_for_predecessor();
  release_successor();

  gdn_verify_sequence s;
  if (__builtin_expect(launch.plain, 1)) {
    s.input_offset = (int64_t)seq * launch.input_seq;
    s.output_offset = (int64_t)seq * launch.output_seq;
    s.num_rows = launch.num_tokens;
    s.slot = s.row = seq;
    s.start = -1;
  } else if (seq == p.n_seq) { /* with cu_seqlens: the rows that no sequence owns */
    int64_t owned = p.cu_seqlens[p.n_seq * p.cu_seqlens_stride];
    owned = owned < 0 ? 0 : owned;
    zero_rows<Input, V>(p, owned * p.output_token, p.total_rows - owned, channel);
    return;
  } else {
    const gdn_verify_verdict verdict = gdn_verify_resolve(&p, seq, &s);
    if (verdict != GDN_VERIFY_RUN) {
      if (verdict != GDN_VERIFY_EMPTY) zero_rows<Input, V>(p, s.output_offset, s.num_rows, channel);
      return;
    }
  }
  const int rows = (int)s.num_rows;
  if (blockIdx.z > 0 && (int)(blockIdx.z * blockDim.y) * T >= rows) return;

  /* everything that is read is asked for before anything is used */
  const Input *input = (const Input *)launch.input + s.input_offset + channel;
  const Input *mine = input + (int64_t)(first - 3) * launch.input_token;
  Raw<Input, V> entry[T + 3];
#pragma unroll
  for (int j = 0; j < T + 3; ++j) {
    const int token = first + j - 3;
    entry[j] = {};
    if ((j >= 3 || token >= 0) && token < rows)
      entry[j] = load_raw<Input, V>(mine + steps(j, launch.input_token));
  }
  /* x[j] is the input of token first + j - 3, or what the start window holds there */
  float x[T + 3][V];
  float weight[4][V], bias[V];
  if (first < 3) {
    const bool from_state = s.start < 0;
    const State *from = from_state ? (const State *)launch.state + s.slot * launch.state_slot
                                   : (const State *)launch.snapshots + s.row * launch.snapshot_row +
                                         s.start * launch.snapshot_token;
    const int channel_stride = from_state ? launch.state_channel : launch.snapshot_channel;
    load_columns<State, V>(from + (int64_t)channel * channel_stride,
                           from_state ? launch.state_layout : launch.snapshot_layout,
                           channel_stride,
                           from_state ? launch.state_column : launch.snapshot_column,
                           launch.state_len, T >= 3 ? 0 : first, x);
  }
#pragma unroll
  for (int j = 0; j < T + 3; ++j)
    if (j >= 3 || first + j >= 3) convert(entry[j], x[j]);
  if (__builtin_expect(launch.packed_weight, 1)) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int k = 0; k < FAST_D_CONV; ++k) weight[k][v] = raw_to_float(packed_weight, 4 * v + k);
    }
  } else {
    load_weight<V>(p, channel, weight, bias);
  }
  if (s.start >= 0) __syncthreads(); /* the old snapshots have been read */

  /* snapshots go out first: they are most of the traffic */
  if (launch.snapshot_kind != GDN_VERIFY_NO_SNAPSHOTS) {
    if (launch.snapshot_layout == LAYOUT_CHANNEL_MAJOR)
      store_snapshots<State, LAYOUT_CHANNEL_MAJOR, V, T>(launch, s.row, channel, first, rows, x);
    else if (launch.snapshot_layout == LAYOUT_TOKEN_MAJOR)
      store_snapshots<State, LAYOUT_TOKEN_MAJOR, V, T>(launch, s.row, channel, first, rows, x);
    else
      store_snapshots<State, LAYOUT_STRIDED, V, T>(launch, s.row, channel, first, rows, x);
  }

  float y[T][V];
  if (__builtin_expect(launch.packed_weight, 1)) {
    convolve<V, T, false>(x, weight, bias, y);
    activate<V, T, false>(launch.activation, y);
  } else {
    convolve<V, T, true>(x, weight, bias, y);
    activate<V, T, true>(launch.activation, y);
  }

  /* the inputs that are committed, as far as the tokens reach: last[j] of token rows - 4 + j. Asked
   * for here, where x is no longer needed, and used after the sum. */
  const bool commits = launch.write_state && first == 0;
  Raw<Input, V> last[FAST_D_CONV] = {};
  if (commits) {
    const Input *newest = input + (int64_t)(rows - FAST_D_CONV) * launch.input_token;
#pragma unroll
    for (int j = 0; j < FAST_D_CONV; ++j)
      if (rows + j >= FAST_D_CONV)
        last[j] = load_raw<Input, V>(newest + steps(j, launch.input_token));
  }
  if (channel < launch.qk_channels) {
    float squares[T][V], factor[T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) squares[t][v] = __fmul_rn(y[t][v], y[t][v]);
    }
    head_factors<V, T>(squares, launch.l2_eps, partial, factor);
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) y[t][v] = __fmul_rn(y[t][v], factor[t]);
    }
  } else {
    __syncthreads(); /* conv_state has been read */
  }

  Input *output =
      (Input *)launch.output + s.output_offset + (int64_t)first * launch.output_token + channel;
#pragma unroll
  for (int t = 0; t < T; ++t) {
    if (first + t < rows) store_pack<Input, V>(output + steps(t, launch.output_token), y[t]);
  }
  if (commits) {
    float window[FAST_D_CONV][V];
#pragma unroll
    for (int j = 0; j < FAST_D_CONV; ++j) {
      pin(last[j]);
      convert(last[j], window[j]);
    }
    /* with fewer tokens than columns, what the start window held */
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (rows == 1) window[0][v] = x[0][v], window[1][v] = x[1][v], window[2][v] = x[2][v];
      if (rows == 2) window[0][v] = x[1][v], window[1][v] = x[2][v];
      if (rows == 3) window[0][v] = x[2][v];
    }
    State *to = (State *)launch.state + s.slot * launch.state_slot +
                (int64_t)channel * launch.state_channel;
    const int skip = FAST_D_CONV - launch.state_len;
    if (launch.state_layout == LAYOUT_CHANNEL_MAJOR)
      store_columns<State, LAYOUT_CHANNEL_MAJOR, V, FAST_D_CONV>(to, 0, 0, 0, window);
    else if (launch.state_layout == LAYOUT_TOKEN_MAJOR)
      store_columns<State, LAYOUT_TOKEN_MAJOR, V, FAST_D_CONV>(to, 0, launch.state_column, skip,
                                                               window);
    else
      store_columns<State, LAYOUT_STRIDED, V, FAST_D_CONV>(to, launch.state_channel,
                                                           launch.state_column, skip, window);
  }
}

#endif /* GDN_VERIFY_TOKEN_PARALLEL_CUH */
