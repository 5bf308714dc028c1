/* fast_windows.cuh - what the fast kernel is told (FastLaunch), and how it reads start windows and
 * writes snapshots and states of every layout.
 *
 * In registers a window is x[column][channel], oldest column first.
 */
#ifndef GDN_VERIFY_FAST_WINDOWS_CUH
#define GDN_VERIFY_FAST_WINDOWS_CUH

#include "device.cuh"

#define FAST_D_CONV 4

/* How the columns of a window lie in memory. */
typedef enum WindowLayout {
  LAYOUT_STRIDED = 0,       /* any strides: element by element */
  LAYOUT_CHANNEL_MAJOR = 1, /* [D, 4] contiguous: the V windows of a thread are one piece */
  LAYOUT_TOKEN_MAJOR = 2    /* channel stride 1: the V channels of a column are one piece */
} WindowLayout;

/* What is known of a call when its kernel is compiled. WINDOWS and HISTORY are what models do: 4
 * columns, channel-major state, silu, packed weight without a bias, and snapshots that are
 * channel-major windows or token-major history. ANY decides all of it at run time. */
typedef enum Form {
  FORM_ANY,
  FORM_WINDOWS,
  FORM_HISTORY
} Form;

/* The parameters of a launch. They are few and narrow, in the order of their use, because a launch
 * copies them and a kernel reads them line by line through a cache that is cold at every launch.
 * Strides and offsets are bytes. */
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
  int32_t state_slot;
  int32_t snapshot_row, snapshot_token;
  float l2_eps;
  /* other layouts */
  int32_t state_channel, state_column;
  int32_t snapshot_channel, snapshot_column;
  /* index tensors, with strides in elements */
  int32_t n_seq, n_slots, n_rows, snapshot_capacity, total_rows, pad_slot_id;
  const int32_t *slot_index, *row_index, *accepted, *cu_seqlens;
  int32_t slot_index_stride, row_index_stride, accepted_stride, cu_seqlens_stride;
  /* other weights */
  int32_t weight_channel, weight_tap; /* elements, like the next */
  const void *bias;
  int32_t bias_channel;
  uint8_t weight_dtype, bias_dtype;
} FastLaunch;

/* The address `count` strides behind p. One instruction, where the product of 32-bit factors is
 * taken in 64 bits. */
template <typename Element>
static __device__ __forceinline__ Element *at(Element *p, int count, int stride) {
  typedef typename std::conditional<std::is_const<Element>::value, const char, char>::type Byte;
  return (Element *)((Byte *)p + (int64_t)count * stride);
}

/* ---- a thread's channels --------------------------------------------------------------------- */

/* The V channels of a thread are pieces of PIECE neighbours, which move together. The pieces lie
 * evenly apart in a group of 32 channels, so that a warp's stores of one piece are side by side. */
template <int V, int PIECE>
static __host__ __device__ __forceinline__ constexpr int channel_of(int v) {
  return v / PIECE * (GDN_VERIFY_GROUP / (V / PIECE)) + v % PIECE;
}

/* An entry of them as it was loaded. */
template <typename Element, int V, int PIECE>
struct Entry {
  Raw<Element, PIECE> piece[V / PIECE];
};

template <int V, int PIECE, typename Element>
static __device__ __forceinline__ Entry<Element, V, PIECE> load_entry(const Element *from) {
  Entry<Element, V, PIECE> entry;
#pragma unroll
  for (int v = 0; v < V; v += PIECE)
    entry.piece[v / PIECE] = load_raw<Element, PIECE>(from + channel_of<V, PIECE>(v));
  return entry;
}

template <typename Element, int V, int PIECE>
static __device__ __forceinline__ void convert(const Entry<Element, V, PIECE> &entry,
                                               float (&x)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) x[v] = raw_to_float(entry.piece[v / PIECE], v % PIECE);
}

template <typename Element, int V, int PIECE>
static __device__ __forceinline__ void pin(Entry<Element, V, PIECE> &entry) {
#pragma unroll
  for (int p = 0; p < V / PIECE; ++p) pin(entry.piece[p]);
}

/* Stores one as it was loaded, or x. */
template <typename Element, int V, int PIECE>
static __device__ __forceinline__ void store_entry(Element *to,
                                                   const Entry<Element, V, PIECE> &entry) {
#pragma unroll
  for (int v = 0; v < V; v += PIECE)
    store_raw(to + channel_of<V, PIECE>(v), entry.piece[v / PIECE]);
}

template <int PIECE, typename Element, int V>
static __device__ __forceinline__ void store_entry(Element *to, const float (&x)[V]) {
#pragma unroll
  for (int v = 0; v < V; v += PIECE) {
    float piece[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) piece[i] = x[v + i];
    store_pack<Element, PIECE>(to + channel_of<V, PIECE>(v), piece);
  }
}

/* ---- start windows --------------------------------------------------------------------------- */

/* Loads what a start window contributes to x of a thread whose first token is `first`: x[j] is the
 * entry of token first + j - 3, as far as that is below 0. The window has `columns` columns. */
template <int PIECE, typename State, int V>
static __device__ __forceinline__ void load_columns(const State *from, int layout,
                                                    int channel_stride, int column_stride,
                                                    int columns, int first, float (*x)[V]) {
  if (first == 0 && layout == LAYOUT_CHANNEL_MAJOR) {
    Raw<State, 4> window[V];
#pragma unroll
    for (int v = 0; v < V; ++v) window[v] = load_raw<State, 4>(from + 4 * channel_of<V, PIECE>(v));
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int j = 0; j < 3; ++j) x[j][v] = raw_to_float(window[v], j + 1);
    }
    return;
  }
  from = at(from, columns - 3 + first, column_stride);
  if (layout == LAYOUT_TOKEN_MAJOR) {
    Entry<State, V, PIECE> column[3] = {};
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (first + j < 3) column[j] = load_entry<V, PIECE>(at(from, j, column_stride));
#pragma unroll
    for (int j = 0; j < 3; ++j) convert(column[j], x[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (first + j < 3)
        x[j][v] =
            to_float(*at(at(from, j, column_stride), channel_of<V, PIECE>(v), channel_stride));
  }
}

/* ---- states and snapshots -------------------------------------------------------------------- */

/* Stores N columns x[0 .. N - 1], of which the first `skip` are left out. STREAM: nobody reads them
 * soon. */
template <typename State, int LAYOUT, int V, int PIECE, int N, bool STREAM = false>
static __device__ __forceinline__ void store_columns(State *to, int channel_stride,
                                                     int column_stride, int skip,
                                                     const float (*x)[V]) {
  if constexpr (LAYOUT == LAYOUT_CHANNEL_MAJOR) {
    static_assert(N == FAST_D_CONV, "a whole window");
#pragma unroll
    for (int v = 0; v < V; v += PIECE) {
      float windows[4 * PIECE];
#pragma unroll
      for (int i = 0; i < PIECE; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) windows[4 * i + j] = x[j][v + i];
      }
      store_pack<State, 4 * PIECE, STREAM>(to + 4 * channel_of<V, PIECE>(v), windows);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < skip) continue;
      if constexpr (LAYOUT == LAYOUT_TOKEN_MAJOR) {
        store_entry<PIECE>(to, x[j]);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v)
          *at(to, channel_of<V, PIECE>(v), channel_stride) = from_float<State>(x[j][v]);
      }
      to = at(to, 1, column_stride);
    }
  }
}

/* Stores x, what `entry` holds, as a row of the history: as it came where the dtypes agree. */
template <typename State, typename Input, int LAYOUT, int V, int PIECE>
static __device__ __forceinline__ void store_row(State *to, int channel_stride,
                                                 const Entry<Input, V, PIECE> &entry,
                                                 const float (*x)[V]) {
  if constexpr (LAYOUT == LAYOUT_TOKEN_MAJOR && std::is_same<State, Input>::value)
    store_entry(to, entry);
  else
    store_columns<State, LAYOUT, V, PIECE, 1>(to, channel_stride, 0, 0, x);
}

/* The snapshots of this thread's tokens: windows, or rows of the history. entry and x as in the
 * kernel; `to` is snapshot or row 0 of this thread's channels. */
template <typename State, typename Input, int LAYOUT, int V, int PIECE, int T>
static __device__ __forceinline__ void store_snapshots(State *to, int kind, int state_len,
                                                       const FastLaunch &launch, int first,
                                                       int rows,
                                                       const Entry<Input, V, PIECE> (&entry)[T + 3],
                                                       const float (&x)[T + 3][V]) {
  if (LAYOUT == LAYOUT_CHANNEL_MAJOR || kind == GDN_VERIFY_WINDOWS) {
    to = opaque(at(to, first, launch.snapshot_token));
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (t < rows - first)
        store_columns<State, LAYOUT, V, PIECE, FAST_D_CONV, true>(
            at(to, t, launch.snapshot_token), launch.snapshot_channel, launch.snapshot_column,
            FAST_D_CONV - state_len, x + t);
    }
  } else {
    /* row i holds the entry that token i - (S - 1) brought */
    constexpr int ROW_LAYOUT = LAYOUT == LAYOUT_TOKEN_MAJOR ? LAYOUT_TOKEN_MAJOR : LAYOUT_STRIDED;
    const int lead = state_len - 1;
    if (first == 0)
      store_columns<State, ROW_LAYOUT, V, PIECE, 3>(to, launch.snapshot_channel,
                                                    launch.snapshot_token, 3 - lead, x);
    to = opaque(at(to, first + lead, launch.snapshot_token));
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (t < rows - first)
        store_row<State, Input, ROW_LAYOUT, V, PIECE>(
            at(to, t, launch.snapshot_token), launch.snapshot_channel, entry[t + 3], x + t + 3);
    }
  }
}

#endif /* GDN_VERIFY_FAST_WINDOWS_CUH */
