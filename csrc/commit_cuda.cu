/* commit_cuda.cu - gdn_verify_commit_cuda: every layer's conv_state becomes the accepted snapshot.
 *
 * A copy: one launch for up to GDN_VERIFY_COMMIT_LAYERS layers. Where state and snapshot have the
 * same dense layout, 16 bytes a thread and step; otherwise a thread moves the S entries of a channel.
 */
#include "cuda_host.h"
#include "device.cuh"

#define COMMIT_THREADS 256
#define COMMIT_CHUNK (4 * COMMIT_THREADS) /* 16-byte pieces, or channels, of a block */

typedef struct CommitLaunch {
  gdn_verify_commit_problem p;
  int64_t pieces; /* of one slot: 16 bytes each where `dense`, else channels */
  int64_t chunks; /* blocks of one slot */
  void *state[GDN_VERIFY_COMMIT_LAYERS];
  const void *snapshot[GDN_VERIFY_COMMIT_LAYERS];
} CommitLaunch;

/* Grid: x shares the (sequence, chunk) pairs, y is the layer. */
template <typename Element, bool DENSE>
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
#pragma unroll
    for (int step = 0; step < COMMIT_CHUNK / COMMIT_THREADS; ++step) {
      const int64_t piece = chunk * COMMIT_CHUNK + step * COMMIT_THREADS + threadIdx.x;
      if (piece >= launch.pieces) break;
      if (DENSE) {
        ((uint4 *)to)[piece] = ((const uint4 *)from)[piece];
      } else {
        for (int column = 0; column < p.state_len; ++column)
          to[piece * p.state_channel + column * p.state_column] =
              from[piece * p.snapshot_channel + column * p.snapshot_column];
      }
    }
  }
}

/* Whether slots and snapshots are dense pieces of the same layout, aligned for 16-byte moves. */
static bool is_dense(const gdn_verify_commit_problem *p) {
  const int64_t per_piece = 16 / p->element_size;
  const bool channel_major = p->state_channel == p->state_len && p->state_column == 1;
  const bool token_major = p->state_channel == 1 && p->state_column == p->d_inner;
  if (!(channel_major || token_major) || p->snapshot_channel != p->state_channel ||
      p->snapshot_column != p->state_column || p->d_inner * p->state_len % per_piece != 0 ||
      p->state_slot % per_piece != 0 || p->snapshot_row % per_piece != 0 ||
      p->snapshot_token % per_piece != 0)
    return false;
  for (int64_t i = 0; i < p->n_layers; ++i)
    if ((uintptr_t)p->conv_states[i].data % 16 != 0 || (uintptr_t)p->snapshots[i].data % 16 != 0)
      return false;
  return true;
}

static cudaError_t launch_layers(CommitLaunch *launch, int64_t first, bool dense,
                                 cudaStream_t stream) {
  const gdn_verify_commit_problem *p = &launch->p;
  int64_t layers = p->n_layers - first;
  if (layers > GDN_VERIFY_COMMIT_LAYERS) layers = GDN_VERIFY_COMMIT_LAYERS;
  for (int64_t i = 0; i < layers; ++i) {
    launch->state[i] = p->conv_states[first + i].data;
    launch->snapshot[i] = p->snapshots[first + i].data;
  }
  const int64_t most = 1 << 20;
  const int64_t pairs = p->n_seq > most / launch->chunks ? most : p->n_seq * launch->chunks;
  const dim3 grid((unsigned)pairs, (unsigned)layers);
  if (p->element_size == 4) {
    if (dense)
      commit_kernel<uint32_t, true><<<grid, COMMIT_THREADS, 0, stream>>>(*launch);
    else
      commit_kernel<uint32_t, false><<<grid, COMMIT_THREADS, 0, stream>>>(*launch);
  } else {
    if (dense)
      commit_kernel<uint16_t, true><<<grid, COMMIT_THREADS, 0, stream>>>(*launch);
    else
      commit_kernel<uint16_t, false><<<grid, COMMIT_THREADS, 0, stream>>>(*launch);
  }
  return cudaGetLastError();
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
  const bool dense = is_dense(&launch.p);
  const int64_t bytes = launch.p.d_inner * launch.p.state_len * launch.p.element_size;
  launch.pieces = dense ? bytes / 16 : launch.p.d_inner;
  launch.chunks = (launch.pieces + COMMIT_CHUNK - 1) / COMMIT_CHUNK;
  for (int64_t first = 0; first < launch.p.n_layers; first += GDN_VERIFY_COMMIT_LAYERS) {
    const cudaError_t error = launch_layers(&launch, first, dense, (cudaStream_t)stream);
    if (error != cudaSuccess) return gdn_verify_fail_cuda(err, "the launch", error);
  }
  return GDN_VERIFY_OK;
}
