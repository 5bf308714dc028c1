/* general.cuh - the kernel for every case that token_parallel.cuh does not take: any d_conv,
 * head_dim, dtype, stride, and trees.
 *
 * A block owns one unit of channels (a q or k head, or up to UNIT_CHANNELS others) of one sequence
 * for all its tokens, in two phases. First each warp takes a token at a time: lane i owns channel i
 * of each group of 32, so that the L2 sum needs no other warp, and heads of any size are walked group
 * by group. Then, after a barrier, each thread takes a channel at a time, reads what it needs of the
 * window that the sequence started from, and writes the snapshots and conv_state.
 *
 * Invariant: before the barrier nobody writes a state or a snapshot; after it a channel is read and
 * written by one thread only.
 */
#ifndef GDN_VERIFY_GENERAL_CUH
#define GDN_VERIFY_GENERAL_CUH

#include "device.cuh"

#define GENERAL_THREADS 128
#define UNIT_CHANNELS 128
#define MAX_W GDN_VERIFY_MAX_D_CONV
#define UNIT_GROUPS (UNIT_CHANNELS / GDN_VERIFY_GROUP)

/* Channels [begin, end) of a unit. `norm`: they are a head. */
typedef struct Unit {
  int64_t begin, end;
  bool norm;
} Unit;

static __host__ __device__ __forceinline__ int64_t num_units(const gdn_verify_problem &p) {
  const int64_t others = p.d_inner - p.qk_channels;
  return p.qk_channels / p.head_dim + (others + UNIT_CHANNELS - 1) / UNIT_CHANNELS;
}

static __device__ __forceinline__ Unit unit_of(const gdn_verify_problem &p, int64_t index) {
  const int64_t heads = p.qk_channels / p.head_dim;
  Unit u;
  u.norm = index < heads;
  u.begin = u.norm ? index * p.head_dim : p.qk_channels + (index - heads) * UNIT_CHANNELS;
  u.end = u.begin + (u.norm ? p.head_dim : UNIT_CHANNELS);
  if (u.end > p.d_inner) u.end = p.d_inner;
  return u;
}

/* Where channel 0, column 0 of the window lies that sequence `s` starts from, and its strides in
 * elements. */
struct StartWindow {
  const void *base;
  int64_t channel_stride, column_stride;
};

template <typename State>
static __device__ __forceinline__ StartWindow start_window(const gdn_verify_problem &p,
                                                           const gdn_verify_sequence &s) {
  StartWindow w;
  if (s.start >= 0) {
    w.base = (const State *)p.snapshots + s.row * p.snapshot_row + s.start * p.snapshot_token;
    w.channel_stride = p.snapshot_channel;
    w.column_stride = p.snapshot_column;
  } else {
    w.base = (const State *)p.state + s.slot * p.state_slot;
    w.channel_stride = p.state_channel;
    w.column_stride = p.state_column;
  }
  return w;
}

/* Entry `source` of a sequence at a channel: the input of token `source`, or, below 0, of the window
 * that it starts from (-1 the youngest). `newest` is the input as it came, others as the state's
 * dtype keeps them. */
static __device__ __forceinline__ float load_entry(const gdn_verify_problem &p,
                                                   const gdn_verify_sequence &s,
                                                   const StartWindow &w, int64_t source,
                                                   int64_t channel, bool newest) {
  if (source >= 0) {
    const float x =
        load_element(p.input, s.input_offset + source * p.input_token + channel, p.input_dtype);
    return newest ? x : round_to(x, p.state_dtype);
  }
  return load_element(w.base, channel * w.channel_stride + (p.state_len + source) * w.column_stride,
                      p.state_dtype);
}

/* source[MAX_W - 1 - i] is the entry i steps before token `token`: for a chain token - i, in a tree
 * its i-th ancestor, beyond the root -1, -2 and so on. */
static __device__ __forceinline__ void window_sources(const gdn_verify_problem &p, int64_t seq,
                                                      int64_t token, int64_t (&source)[MAX_W]) {
  int64_t node = token;
#pragma unroll
  for (int i = 0; i < MAX_W; ++i) {
    source[MAX_W - 1 - i] = node;
    if (p.parent && node >= 0 && i < p.d_conv - 1)
      node = p.parent[seq * p.parent_seq + node * p.parent_token];
    else
      node = node - 1;
  }
}

/* Conv and activation of one token at one channel. */
static __device__ __forceinline__ float convolve_general(const gdn_verify_problem &p,
                                                         const gdn_verify_sequence &s,
                                                         const StartWindow &w,
                                                         const int64_t (&source)[MAX_W],
                                                         int64_t channel) {
  float acc = p.bias ? load_element(p.bias, channel * p.bias_channel, p.bias_dtype) : 0.0f;
#pragma unroll
  for (int i = 0; i < MAX_W; ++i) {
    const int k = i - (MAX_W - p.d_conv);
    if (k < 0) continue;
    const float x = load_entry(p, s, w, source[i], channel, i == MAX_W - 1);
    const float weight =
        load_element(p.weight, channel * p.weight_channel + k * p.weight_tap, p.weight_dtype);
    acc = __fadd_rn(acc, __fmul_rn(x, weight));
  }
  return p.activation == GDN_VERIFY_SILU ? gdn_verify_silu(acc) : acc;
}

static __device__ __forceinline__ float sum_group(float square) {
#pragma unroll
  for (int offset = GDN_VERIFY_GROUP / 2; offset > 0; offset /= 2)
    square = square + __shfl_xor_sync(0xFFFFFFFFu, square, offset);
  return square;
}

/* y of this lane's channels, at most UNIT_GROUPS groups from `begin` on. */
static __device__ __forceinline__ void compute_groups(const gdn_verify_problem &p,
                                                      const gdn_verify_sequence &s,
                                                      const StartWindow &w,
                                                      const int64_t (&source)[MAX_W], int64_t begin,
                                                      int64_t end, float (&y)[UNIT_GROUPS]) {
#pragma unroll
  for (int g = 0; g < UNIT_GROUPS; ++g) {
    const int64_t channel = begin + g * GDN_VERIFY_GROUP + (threadIdx.x & 31u);
    y[g] = channel < end ? convolve_general(p, s, w, source, channel) : 0.0f;
  }
}

/* Phase one: the output row of one token, by one warp. */
static __device__ __forceinline__ void compute_token(const gdn_verify_problem &p,
                                                     const gdn_verify_sequence &s,
                                                     const StartWindow &w, const Unit &u,
                                                     int64_t seq, int64_t token) {
  int64_t source[MAX_W];
  window_sources(p, seq, token, source);
  float y[UNIT_GROUPS];
  float factor = 1.0f;
  if (u.norm) {
    float total = 0.0f; /* the squares' sums are never -0: adding the first to 0 changes no bit */
    for (int64_t begin = u.begin; begin < u.end; begin += UNIT_CHANNELS) {
      compute_groups(p, s, w, source, begin, u.end, y);
#pragma unroll
      for (int g = 0; g < UNIT_GROUPS; ++g) {
        if (begin + g * GDN_VERIFY_GROUP < u.end) total = total + sum_group(__fmul_rn(y[g], y[g]));
      }
    }
    factor = gdn_verify_l2_scale(total, p.l2_eps);
  }
  const bool kept = u.norm && u.end - u.begin <= UNIT_CHANNELS; /* y holds the whole unit already */
  for (int64_t begin = u.begin; begin < u.end; begin += UNIT_CHANNELS) {
    if (!kept) compute_groups(p, s, w, source, begin, u.end, y);
#pragma unroll
    for (int g = 0; g < UNIT_GROUPS; ++g) {
      const int64_t channel = begin + g * GDN_VERIFY_GROUP + (threadIdx.x & 31u);
      if (channel < u.end)
        store_element(p.output, s.output_offset + token * p.output_token + channel, p.output_dtype,
                      u.norm ? __fmul_rn(y[g], factor) : y[g]);
    }
  }
}

/* Phase two: snapshots and conv_state of one channel, by one thread. */
static __device__ __forceinline__ void write_channel(const gdn_verify_problem &p,
                                                     const gdn_verify_sequence &s,
                                                     const StartWindow &w, int64_t seq,
                                                     int64_t channel) {
  /* start[MAX_W + e] is entry e < 0 of the window that the sequence starts from */
  float start[MAX_W];
#pragma unroll
  for (int i = 0; i < MAX_W; ++i)
    start[i] = i >= MAX_W - p.state_len ? load_entry(p, s, w, i - MAX_W, channel, false) : 0.0f;
  auto entry = [&](int64_t source) {
    if (source >= 0) return load_entry(p, s, w, source, channel, false);
    float x = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_W; ++i)
      if (source == i - MAX_W) x = start[i];
    return x;
  };
  const int64_t snapshots = s.row * p.snapshot_row + channel * p.snapshot_channel;
  if (p.snapshot_kind == GDN_VERIFY_HISTORY) {
    const int64_t lead = p.state_len - 1;
    for (int64_t i = 0; i < lead + s.num_rows; ++i)
      store_element(p.snapshots, snapshots + i * p.snapshot_token, p.state_dtype, entry(i - lead));
  } else if (p.snapshot_kind == GDN_VERIFY_WINDOWS) {
    for (int64_t token = 0; token < s.num_rows; ++token) {
      int64_t source[MAX_W];
      window_sources(p, seq, token, source);
#pragma unroll
      for (int i = 0; i < MAX_W; ++i) {
        const int column = i - (MAX_W - p.state_len);
        if (column >= 0)
          store_element(p.snapshots,
                        snapshots + token * p.snapshot_token + column * p.snapshot_column,
                        p.state_dtype, entry(source[i]));
      }
    }
  }
  if (p.write_state) {
    const int64_t state = s.slot * p.state_slot + channel * p.state_channel;
    for (int column = 0; column < p.state_len; ++column)
      store_element(p.state, state + column * p.state_column, p.state_dtype,
                    entry(s.num_rows - p.state_len + column));
  }
}

static __device__ __forceinline__ StartWindow general_start(const gdn_verify_problem &p,
                                                            const gdn_verify_sequence &s) {
  return p.state_dtype == GDN_VERIFY_FLOAT32 ? start_window<float>(p, s)
                                             : start_window<uint16_t>(p, s);
}

static __device__ __forceinline__ void zero_unit(const gdn_verify_problem &p, const Unit &u,
                                                 int64_t offset, int64_t count) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t channel = u.begin + threadIdx.x; channel < u.end; channel += GENERAL_THREADS)
      store_element(p.output, offset + row * p.output_token + channel, p.output_dtype, 0.0f);
  }
}

static __device__ __forceinline__ void run_unit(const gdn_verify_problem &p, int64_t seq,
                                                const Unit &u) {
  if (seq == p.n_seq) { /* with cu_seqlens: the rows that no sequence owns */
    int64_t owned = p.cu_seqlens[p.n_seq * p.cu_seqlens_stride];
    owned = owned < 0 ? 0 : owned;
    zero_unit(p, u, owned * p.output_token, p.total_rows - owned);
    return;
  }
  gdn_verify_sequence s;
  gdn_verify_verdict verdict = gdn_verify_resolve(&p, seq, &s);
  if (p.parent && verdict == GDN_VERIFY_RUN) {
    int bad = 0;
    for (int64_t token = threadIdx.x; token < s.num_rows; token += GENERAL_THREADS)
      bad |= !gdn_verify_parent_ok(&p, seq, token);
    if (__syncthreads_or(bad)) verdict = GDN_VERIFY_BAD_PARENT;
  }
  if (verdict != GDN_VERIFY_RUN) {
    if (verdict != GDN_VERIFY_EMPTY) zero_unit(p, u, s.output_offset, s.num_rows);
    return;
  }
  const StartWindow w = general_start(p, s);
  for (int64_t token = threadIdx.x / 32; token < s.num_rows; token += GENERAL_THREADS / 32)
    compute_token(p, s, w, u, seq, token);
  __syncthreads();
  for (int64_t channel = u.begin + threadIdx.x; channel < u.end; channel += GENERAL_THREADS)
    write_channel(p, s, w, seq, channel);
}

/* Grid: any number of blocks; they share the (sequence, unit) pairs. */
static __global__ void __launch_bounds__(GENERAL_THREADS, 1)
    general_kernel(const __grid_constant__ gdn_verify_problem p) {
  wait_for_predecessor();
  release_successor();
  const int64_t units = num_units(p);
  const int64_t total = (p.n_seq + (p.cu_seqlens ? 1 : 0)) * units;
  for (int64_t i = blockIdx.x; i < total; i += gridDim.x)
    run_unit(p, i / units, unit_of(p, i % units));
}

#endif /* GDN_VERIFY_GENERAL_CUH */
