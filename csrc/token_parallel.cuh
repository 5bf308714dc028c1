/* token_parallel.cuh - the fast kernel: d_conv 4, head_dim 128, the input's dtype throughout.
 *
 * There is no recurrence: the window after token t is just the last inputs, so that all (channel,
 * token) pairs are independent. A block owns 128 channels (one q or k head, or as many v channels)
 * of one sequence, for all its tokens or, along blockIdx.z, for some of them. threadIdx.x owns V
 * channels (see channel_of), threadIdx.y a group of T consecutive tokens; every thread loads its
 * T + 3 inputs up front. Large calls are bound by the instructions that a warp issues, so that
 * addresses are one multiplication from a pointer that the compiler cannot take apart (opaque).
 *
 * Invariants
 * - conv_state is read and written by the block of the first tokens alone: it has at least the
 *   three whose windows reach back to it, and what is committed are the last inputs, which nobody
 *   overwrites. The thread that writes has the first T tokens; where others read too (T < 3), a
 *   barrier lies between.
 * - Where a sequence starts from an old snapshot, which this launch overwrites, one block has all
 *   tokens, and a barrier lies between.
 * - The order of the L2 sum depends on neither V nor T: see head_norm.cuh.
 */
#ifndef GDN_VERIFY_TOKEN_PARALLEL_CUH
#define GDN_VERIFY_TOKEN_PARALLEL_CUH

#include "fast_windows.cuh"
#include "head_norm.cuh"

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
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
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
template <int PIECE, int V>
static __device__ __forceinline__ void load_weight(const FastLaunch &launch, int channel,
                                                   float (&weight)[4][V], float (&bias)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int64_t mine = channel + channel_of<V, PIECE>(v);
    const int64_t first = mine * launch.weight_channel;
#pragma unroll
    for (int k = 0; k < FAST_D_CONV; ++k)
      weight[k][v] =
          load_element(launch.weight, first + (int64_t)k * launch.weight_tap, launch.weight_dtype);
    bias[v] = 0.0f;
    if (launch.bias)
      bias[v] = load_element(launch.bias, mine * launch.bias_channel, launch.bias_dtype);
  }
}

/* Sets this block's channels of `count` output rows to zero; `output` is the first of them. */
template <int PIECE, int V, typename Input>
static __device__ __forceinline__ void zero_rows(Input *output, int64_t count, int stride) {
  const float zeros[V] = {};
  const int64_t step = (int64_t)blockDim.y * gridDim.z;
  for (int64_t row = blockIdx.z * blockDim.y + threadIdx.y; row < count; row += step)
    store_entry<PIECE>(at(output, (int)row, stride), zeros);
}

/* gdn_verify_resolve on what it needs; the sequence's offsets are bytes. */
static __device__ __forceinline__ gdn_verify_verdict resolve(const FastLaunch &launch, int seq,
                                                             gdn_verify_sequence *s) {
  gdn_verify_problem p = {};
  p.n_slots = launch.n_slots;
  p.n_rows = launch.n_rows;
  p.snapshot_capacity = launch.snapshot_capacity;
  p.total_rows = launch.total_rows;
  p.pad_slot_id = launch.pad_slot_id;
  p.num_tokens = launch.num_tokens;
  p.input_seq = launch.input_seq;
  p.input_token = launch.input_token;
  p.output_seq = launch.output_seq;
  p.output_token = launch.output_token;
  p.state = launch.state;
  p.snapshots = launch.snapshots;
  p.slot_index = launch.slot_index;
  p.slot_index_stride = launch.slot_index_stride;
  p.row_index = launch.row_index;
  p.row_index_stride = launch.row_index_stride;
  p.accepted = launch.accepted;
  p.accepted_stride = launch.accepted_stride;
  p.cu_seqlens = launch.cu_seqlens;
  p.cu_seqlens_stride = launch.cu_seqlens_stride;
  return gdn_verify_resolve(&p, seq, s);
}

/* Most threads of a block: enough for 17 tokens, fewer where T is small, many more for T = 8. */
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
  return t == 2 ? 2 : 3;
}

/* Channels that move together: all V of a thread, except that of channel-major windows just so many
 * as make 16 bytes, for whole stores side by side. */
static __host__ __device__ constexpr int piece_of(int v, int form, size_t state_size) {
  const int neighbours = state_size == 4 ? 1 : 2;
  return form == FORM_WINDOWS && neighbours < v ? neighbours : v;
}

template <typename Input, typename State, int FORM, int V, int T>
__global__ void __launch_bounds__(max_threads(V, T), min_blocks(V, T))
    token_parallel_kernel(const __grid_constant__ FastLaunch launch) {
  extern __shared__ __align__(16) float partial[][FAST_GROUPS]; /* [blockDim.y * T] */
  constexpr bool KNOWN = FORM != FORM_ANY;
  const bool packed_weight = KNOWN || launch.packed_weight;
  const int activation = KNOWN ? (int)GDN_VERIFY_SILU : launch.activation;
  const int state_len = KNOWN ? FAST_D_CONV : launch.state_len;
  const int state_layout = KNOWN ? (int)LAYOUT_CHANNEL_MAJOR : launch.state_layout;
  const int snapshot_kind = FORM == FORM_WINDOWS   ? (int)GDN_VERIFY_WINDOWS
                            : FORM == FORM_HISTORY ? (int)GDN_VERIFY_HISTORY
                                                   : launch.snapshot_kind;
  const int snapshot_layout = FORM == FORM_WINDOWS   ? (int)LAYOUT_CHANNEL_MAJOR
                              : FORM == FORM_HISTORY ? (int)LAYOUT_TOKEN_MAJOR
                                                     : launch.snapshot_layout;
  constexpr int PIECE = piece_of(V, FORM, sizeof(State));
  constexpr unsigned LANES = LANES_OF_GROUP(V);
  const int channel = (int)(blockIdx.y * FAST_HEAD_DIM + threadIdx.x * PIECE +
                            threadIdx.x / LANES * (GDN_VERIFY_GROUP - LANES * PIECE));
  const int first = (int)(blockIdx.z * blockDim.y + threadIdx.y) * T;
  const int seq = (int)blockIdx.x;

  /* constants first, while the kernel before this one may still run */
  Raw<Input, 4 * PIECE> raw_weight[V / PIECE] = {};
  if (packed_weight) {
#pragma unroll
    for (int v = 0; v < V; v += PIECE)
      raw_weight[v / PIECE] = load_raw<Input, 4 * PIECE>((const Input *)launch.weight +
                                                         4 * (channel + channel_of<V, PIECE>(v)));
  }
  wait_for_predecessor();
  release_successor();

  const Input *input = (const Input *)launch.input + channel;
  Input *output = (Input *)launch.output + channel;
  int rows, slot, row, start; /* as in gdn_verify_sequence */
  if (__builtin_expect(launch.plain, 1)) {
    input = at(input, seq, launch.input_seq);
    output = at(output, seq, launch.output_seq);
    rows = launch.num_tokens;
    slot = row = seq;
    start = -1;
  } else if (seq == launch.n_seq) { /* with cu_seqlens: the rows that no sequence owns */
    int owned = launch.cu_seqlens[(int64_t)launch.n_seq * launch.cu_seqlens_stride];
    owned = owned < 0 ? 0 : owned;
    zero_rows<PIECE, V>(at(output, owned, launch.output_token), (int64_t)launch.total_rows - owned,
                        launch.output_token);
    return;
  } else {
    gdn_verify_sequence s;
    const gdn_verify_verdict verdict = resolve(launch, seq, &s);
    input = (const Input *)((const char *)input + s.input_offset);
    output = (Input *)((char *)output + s.output_offset);
    if (verdict != GDN_VERIFY_RUN) {
      if (verdict != GDN_VERIFY_EMPTY) zero_rows<PIECE, V>(output, s.num_rows, launch.output_token);
      return;
    }
    rows = (int)s.num_rows, slot = (int)s.slot, row = (int)s.row, start = (int)s.start;
  }
  if (blockIdx.z > 0 && (int)(blockIdx.z * blockDim.y) * T >= rows) return;
  input = opaque(input);

  /* Everything that is read is asked for before anything is used. Tokens that there are not, before
   * the first or after the last, are read as the last one, which nobody uses. */
  Entry<Input, V, PIECE> entry[T + 3];
#pragma unroll
  for (int j = 0; j < T + 3; ++j) {
    const unsigned token = min((unsigned)(first + j - 3), (unsigned)(rows - 1));
    entry[j] = load_entry<V, PIECE>(at(input, (int)token, launch.input_token));
  }
  /* x[j] is the input of token first + j - 3, or what the start window holds there */
  float x[T + 3][V];
  float weight[4][V], bias[V];
  State *state = at((State *)launch.state, slot, launch.state_slot);
  State *snapshots = at((State *)launch.snapshots, row, launch.snapshot_row);
  state = KNOWN ? state + 4 * channel : at(state, channel, launch.state_channel);
  snapshots = FORM == FORM_WINDOWS   ? snapshots + 4 * channel
              : FORM == FORM_HISTORY ? snapshots + channel
                                     : at(snapshots, channel, launch.snapshot_channel);
  const bool from_state = start < 0;
  const State *from =
      opaque<const State>(from_state ? state : at(snapshots, start, launch.snapshot_token));
  if (first < 3)
    load_columns<PIECE>(from, from_state ? state_layout : snapshot_layout,
                        from_state ? launch.state_channel : launch.snapshot_channel,
                        from_state ? launch.state_column : launch.snapshot_column, state_len,
                        T >= 3 ? 0 : first, x);
#pragma unroll
  for (int j = 0; j < T + 3; ++j)
    if (j >= 3 || (T >= 3 ? first > 0 : first + j >= 3)) convert(entry[j], x[j]);
  if (__builtin_expect(packed_weight, 1)) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int k = 0; k < FAST_D_CONV; ++k)
        weight[k][v] = raw_to_float(raw_weight[v / PIECE], 4 * (v % PIECE) + k);
    }
  } else {
    load_weight<PIECE>(launch, channel, weight, bias);
  }
  if (start >= 0) __syncthreads(); /* the old snapshots have been read */

  /* snapshots go out first: they are most of the traffic */
  if (snapshot_kind != GDN_VERIFY_NO_SNAPSHOTS) {
    if (snapshot_layout == LAYOUT_CHANNEL_MAJOR)
      store_snapshots<State, Input, LAYOUT_CHANNEL_MAJOR, V, PIECE, T>(
          snapshots, snapshot_kind, state_len, launch, first, rows, entry, x);
    else if (snapshot_layout == LAYOUT_TOKEN_MAJOR)
      store_snapshots<State, Input, LAYOUT_TOKEN_MAJOR, V, PIECE, T>(
          snapshots, snapshot_kind, state_len, launch, first, rows, entry, x);
    else
      store_snapshots<State, Input, LAYOUT_STRIDED, V, PIECE, T>(
          snapshots, snapshot_kind, state_len, launch, first, rows, entry, x);
  }

  /* In known forms the flag is set too: asking all the same keeps the compiler from moving the
   * convolution to before the stores. */
  float y[T][V] = {};
  if (__builtin_expect(launch.packed_weight, 1)) {
    convolve<V, T, false>(x, weight, bias, y);
    activate<V, T, false>(activation, y);
  } else if (!KNOWN) {
    convolve<V, T, true>(x, weight, bias, y);
    activate<V, T, true>(activation, y);
  }

  /* the inputs that are committed, as far as the tokens reach: last[j] of token rows - 4 + j. Asked
   * for here, where x is no longer needed, and used after the sum. */
  const bool commits = launch.write_state && first == 0;
  Entry<Input, V, PIECE> last[FAST_D_CONV] = {};
  if (commits) {
#pragma unroll
    for (int j = 0; j < FAST_D_CONV; ++j)
      last[j] = load_entry<V, PIECE>(at(input, max(rows - FAST_D_CONV + j, 0), launch.input_token));
  }
  if (channel < launch.qk_channels) {
    float squares[T][V], factor[T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) squares[t][v] = __fmul_rn(y[t][v], y[t][v]);
    }
    head_factors<V, PIECE, T>(squares, launch.l2_eps, partial, factor);
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int v = 0; v < V; ++v) y[t][v] = __fmul_rn(y[t][v], factor[t]);
    }
  } else if (T < 3) {
    __syncthreads(); /* conv_state has been read */
  }

  output = opaque(at(output, first, launch.output_token));
  const int left = opaque(rows - first); /* compared again, so that no T predicates are kept */
#pragma unroll
  for (int t = 0; t < T; ++t) {
    if (t < left) store_entry<PIECE>(at(output, t, launch.output_token), y[t]);
  }
  if (commits) {
    float window[FAST_D_CONV][V];
#pragma unroll
    for (int j = 0; j < FAST_D_CONV; ++j) {
      pin(last[j]);
      convert(last[j], window[j]);
    }
    if (rows < FAST_D_CONV) { /* the older columns are what the start window held */
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (rows == 1) window[0][v] = x[0][v], window[1][v] = x[1][v], window[2][v] = x[2][v];
        if (rows == 2) window[0][v] = x[1][v], window[1][v] = x[2][v];
        if (rows == 3) window[0][v] = x[2][v];
      }
    }
    const int skip = FAST_D_CONV - state_len;
    if (state_layout == LAYOUT_CHANNEL_MAJOR)
      store_columns<State, LAYOUT_CHANNEL_MAJOR, V, PIECE, FAST_D_CONV>(state, 0, 0, 0, window);
    else if (state_layout == LAYOUT_TOKEN_MAJOR)
      store_columns<State, LAYOUT_TOKEN_MAJOR, V, PIECE, FAST_D_CONV>(state, 0, launch.state_column,
                                                                      skip, window);
    else
      store_columns<State, LAYOUT_STRIDED, V, PIECE, FAST_D_CONV>(
          state, launch.state_channel, launch.state_column, skip, window);
  }
}

#endif /* GDN_VERIFY_TOKEN_PARALLEL_CUH */
