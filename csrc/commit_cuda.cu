/* commit_cuda.cu - gdn_verify_commit_cuda: every layer's conv_state becomes the accepted snapshot.
 *
 * A copy: one launch for up to GDN_VERIFY_COMMIT_LAYERS layers. Where state and snapshot have the
 * same dense layout, 16 bytes a thread and step; of 16-bit rows (a history) that become channel-major
 * windows, two channels; otherwise the S entries of a channel.
 */
#include "cuda_host.h"
#include "device.cuh"

#define COMMIT_THREADS 256
#define COMMIT_STEPS 4 /* pieces of a thread */
#define COMMIT_CHUNK (COMMIT_STEPS * COMMIT_THREADS)

/* What a thread moves at a time. */
typedef enum CommitMove {
  MOVE_DENSE,
  MOVE_PAIRS,
  MOVE_CHANNELS
} CommitMove;

typedef struct CommitLaunch {
  gdn_verify_commit_problem p;
  int64_t pieces;        /* of one slot, of the size that a thread moves at a time */
  int64_t chunks;        /* blocks of one slot */
  int32_t packed_window; /* conv_state is [D, 4] contiguous and aligned: a window is one store */
  void *state[GDN_VERIFY_COMMIT_LAYERS];
  const void *snapshot[GDN_VERIFY_COMMIT_LAYERS];
} CommitLaunch;

/* Both copy pieces first + 0, 1, .. * COMMIT_THREADS; all loads come before the first store. */
static __device__ __forceinline__ void copy_dense(const CommitLaunch &launch, uint4 *to,
                                                  const uint4 *from, int64_t first) {
  uint4 x[COMMIT_STEPS];
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i)
    if (first + i * COMMIT_THREADS < launch.pieces) x[i] = from[first + i * COMMIT_THREADS];
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i)
    if (first + i * COMMIT_THREADS < launch.pieces) to[first + i * COMMIT_THREADS] = x[i];
}

/* Two channels of four 16-bit columns each, from rows of adjacent channels to adjacent windows. */
static __device__ __forceinline__ void copy_pairs(const CommitLaunch &launch, uint16_t *to,
                                                  const uint16_t *from, int64_t first) {
  uint32_t x[COMMIT_STEPS][4];
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i) {
    const int64_t pair = first + i * COMMIT_THREADS;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (pair < launch.pieces)
        x[i][c] = *(const uint32_t *)(from + 2 * pair + c * launch.p.snapshot_column);
  }
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i) {
    const int64_t pair = first + i * COMMIT_THREADS;
    if (pair < launch.pieces) {
      const uint32_t *r = x[i];
      *(uint4 *)(to + 8 * pair) =
          make_uint4(__byte_perm(r[0], r[1], 0x5410), __byte_perm(r[2], r[3], 0x5410),
                     __byte_perm(r[0], r[1], 0x7632), __byte_perm(r[2], r[3], 0x7632));
    }
  }
}

template <typename Element>
static __device__ __forceinline__ void copy_channels(const CommitLaunch &launch, Element *to,
                                                     const Element *from, int64_t first) {
  const gdn_verify_commit_problem &p = launch.p;
  Element x[COMMIT_STEPS][GDN_VERIFY_MAX_D_CONV];
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i) {
    const int64_t channel = first + i * COMMIT_THREADS;
#pragma unroll
    for (int c = 0; c < GDN_VERIFY_MAX_D_CONV; ++c)
      if (channel < launch.pieces && c < p.state_len)
        x[i][c] = from[channel * p.snapshot_channel + c * p.snapshot_column];
  }
#pragma unroll
  for (int i = 0; i < COMMIT_STEPS; ++i) {
    const int64_t channel = first + i * COMMIT_THREADS;
    if (channel >= launch.pieces) return;
    if (launch.packed_window) {
      Pack<Element, 4> window;
#pragma unroll
      for (int c = 0; c < 4; ++c) window.element[c] = x[i][c];
      *(Pack<Element, 4> *)(to + 4 * channel) = window;
      continue;
    }
#pragma unroll
    for (int c = 0; c < GDN_VERIFY_MAX_D_CONV; ++c)
      if (c < p.state_len) to[channel * p.state_channel + c * p.state_column] = x[i][c];
  }
}

/* Grid: x shares the (sequence, chunk) pairs, y is the layer. */
template <typename Element, CommitMove MOVE>
static __global__ void __launch_bounds__(COMMIT_THREADS)
    commit_kernel(const __grid_constant__ CommitLaunch launch) {
  const gdn_verify_commit_problem &p = launch.p;
  for (int64_t i = blockIdx.x; i < p.n_seq * launch.chunks; i += gridDim.x) {
    const int64_t seq = i / launch.chunks, chunk = i % launch.chunks;
    int64_t slot, row, snapshot;
    if (gdn_verify_resolve_commit(&p, seq, &slot, &row, &snapshot) != GDN_VERIFY_RUN) continue;
    Element *to = (Element *)launch.state[blockIdx.y] + slot * p.state_slot;
    const Element *from = (const Element *)launch.snapshot[blockIdx.y] + row * p.snapshot_row +
                          snapshot * p.snapshot_token;
    const int64_t first = chunk * COMMIT_CHUNK + threadIdx.x;
    if constexpr (MOVE == MOVE_DENSE)
      copy_dense(launch, (uint4 *)to, (const uint4 *)from, first);
    else if constexpr (MOVE == MOVE_PAIRS)
      copy_pairs(launch, to, from, first);
    else
      copy_channels(launch, to, from, first);
  }
}

/* Whether all of `tensors`, one a layer, start where `bytes` can be moved at once. */
static bool all_aligned(const gdn_verify_commit_problem *p, const gdn_verify_tensor *tensors,
                        int64_t bytes) {
  for (int64_t i = 0; i < p->n_layers; ++i)
    if (!aligned(tensors[i].data, bytes)) return false;
  return true;
}

/* Whether slots and snapshots are dense pieces of the same layout, aligned for 16-byte moves. */
static bool is_dense(const gdn_verify_commit_problem *p) {
  const int64_t per_piece = 16 / p->element_size;
  const bool channel_major = p->state_channel == p->state_len && p->state_column == 1;
  const bool token_major = p->state_channel == 1 && p->state_column == p->d_inner;
  return (channel_major || token_major) && p->snapshot_channel == p->state_channel &&
         p->snapshot_column == p->state_column && p->d_inner * p->state_len % per_piece == 0 &&
         p->state_slot % per_piece == 0 && p->snapshot_row % per_piece == 0 &&
         p->snapshot_token % per_piece == 0 && all_aligned(p, p->conv_states, 16) &&
         all_aligned(p, p->snapshots, 16);
}

/* Whether conv_state is [D, 4] contiguous, and `windows` of them can be stored at once. */
static bool has_packed_windows(const gdn_verify_commit_problem *p, int windows) {
  return p->state_len == 4 && p->state_channel == 4 && p->state_column == 1 &&
         p->state_slot % (4 * windows) == 0 &&
         all_aligned(p, p->conv_states, 4 * windows * p->element_size);
}

/* Whether copy_pairs can do it. */
static bool is_pairs(const gdn_verify_commit_problem *p) {
  return p->element_size == 2 && has_packed_windows(p, 2) && p->snapshot_channel == 1 &&
         p->d_inner % 2 == 0 && p->snapshot_column % 2 == 0 && p->snapshot_row % 2 == 0 &&
         p->snapshot_token % 2 == 0 && all_aligned(p, p->snapshots, 4);
}

static cudaError_t launch_layers(CommitLaunch *launch, int64_t first, CommitMove move,
                                 void *stream) {
  const gdn_verify_commit_problem *p = &launch->p;
  int64_t layers = p->n_layers - first;
  if (layers > GDN_VERIFY_COMMIT_LAYERS) layers = GDN_VERIFY_COMMIT_LAYERS;
  for (int64_t i = 0; i < layers; ++i) {
    launch->state[i] = p->conv_states[first + i].data;
    launch->snapshot[i] = p->snapshots[first + i].data;
  }
  const int64_t most = 1 << 20;
  const int64_t blocks = p->n_seq > most / launch->chunks ? most : p->n_seq * launch->chunks;
  const bool wide = p->element_size == 4;
  void (*const kernel)(const CommitLaunch) =
      move == MOVE_PAIRS ? commit_kernel<uint16_t, MOVE_PAIRS>
      : move == MOVE_DENSE
          ? (wide ? commit_kernel<uint32_t, MOVE_DENSE> : commit_kernel<uint16_t, MOVE_DENSE>)
      : wide ? commit_kernel<uint32_t, MOVE_CHANNELS>
             : commit_kernel<uint16_t, MOVE_CHANNELS>;
  return gdn_verify_launch(kernel, dim3((unsigned)blocks, (unsigned)layers), dim3(COMMIT_THREADS),
                           0, false, stream, *launch);
}

extern "C" gdn_verify_status gdn_verify_commit_cuda(const gdn_verify_commit_params *params,
                                                    void *stream, gdn_verify_error *err) {
  CommitLaunch launch;
  gdn_verify_status status = gdn_verify_make_commit_problem(params, &launch.p, err);
  if (status != GDN_VERIFY_OK || launch.p.n_layers == 0 || launch.p.n_seq == 0) return status;
  if (params->check) {
    status = gdn_verify_check_device_commit(&launch.p, stream, err);
    if (status != GDN_VERIFY_OK) return status;
  }
  const CommitMove move = is_dense(&launch.p)   ? MOVE_DENSE
                          : is_pairs(&launch.p) ? MOVE_PAIRS
                                                : MOVE_CHANNELS;
  const int64_t bytes = launch.p.d_inner * launch.p.state_len * launch.p.element_size;
  launch.packed_window = has_packed_windows(&launch.p, 1);
  launch.pieces = move == MOVE_CHANNELS ? launch.p.d_inner : bytes / 16;
  launch.chunks = (launch.pieces + COMMIT_CHUNK - 1) / COMMIT_CHUNK;
  for (int64_t first = 0; first < launch.p.n_layers; first += GDN_VERIFY_COMMIT_LAYERS) {
    const cudaError_t error = launch_layers(&launch, first, move, stream);
    if (error != cudaSuccess) return gdn_verify_fail_cuda(err, "the launch", error);
  }
  return GDN_VERIFY_OK;
}
