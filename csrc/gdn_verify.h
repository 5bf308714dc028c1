/* gdn_verify.h - the C ABI of gdn-verify, and its manual.
 *
 * Gated DeltaNet layers run a short depthwise causal convolution, SiLU and an L2 norm of every q
 * and k head over the projected q|k|v channels. Speculative decoding pushes K draft tokens of C
 * sequences through it at once and keeps the convolution window as it stood after each token.
 * These functions do that for all sequences and tokens in one call (one kernel launch on CUDA).
 *
 * How to call: fill a gdn_verify_params (zero it first), then call gdn_verify_conv_cpu or
 * gdn_verify_conv_cuda. Both validate everything that the struct tells before anything is written.
 * On a non-zero status, err.text holds one sentence that names the argument, what it is and what it
 * must be. Nothing here prints, exits, allocates memory on the device or keeps a pointer. All
 * functions may be called from any number of threads at once.
 *
 * Sizes are counted in elements, strides too. Names: n_seq (C) sequences, num_tokens (K) draft
 * positions of each, d_inner (D) channels (q, k, v in this order), d_conv (W) convolution width,
 * S = W or W - 1 columns of conv_state. A window is the last inputs of a channel, oldest first.
 *
 * The arithmetic is defined in numerics.h. The same call gives the same bytes on every device, in
 * every batch, layout and launch configuration; only the payload of a NaN is free.
 */
#ifndef GDN_VERIFY_H
#define GDN_VERIFY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GDN_VERIFY_VERSION "0.1.0"

#define GDN_VERIFY_MIN_D_CONV 2
#define GDN_VERIFY_MAX_D_CONV 8
#define GDN_VERIFY_MAX_DIMS 4
#define GDN_VERIFY_ERROR_LEN 512
/* Layers that one launch of gdn_verify_commit_cuda takes; more layers take more launches. */
#define GDN_VERIFY_COMMIT_LAYERS 64

/* ---- status ---------------------------------------------------------------------------------- */

typedef enum gdn_verify_status {
  GDN_VERIFY_OK = 0,
  GDN_VERIFY_INVALID = 1,     /* an argument is wrong; nothing was written */
  GDN_VERIFY_BAD_INDEX = 2,   /* an index tensor holds a wrong value */
  GDN_VERIFY_UNSUPPORTED = 3, /* this build or device cannot do it; nothing was written */
  GDN_VERIFY_CUDA_ERROR = 4   /* the CUDA runtime reported an error */
} gdn_verify_status;

typedef struct gdn_verify_error {
  char text[GDN_VERIFY_ERROR_LEN]; /* zero-terminated; empty after GDN_VERIFY_OK */
} gdn_verify_error;

/* ---- tensors --------------------------------------------------------------------------------- */

typedef enum gdn_verify_dtype {
  GDN_VERIFY_FLOAT32 = 0,
  GDN_VERIFY_BFLOAT16 = 1,
  GDN_VERIFY_FLOAT16 = 2,
  GDN_VERIFY_INT32 = 3,
  GDN_VERIFY_OTHER = 4, /* any other dtype; validation names the argument that has it */
  GDN_VERIFY_INT64 = 5, /* refused as well, but by name */
  GDN_VERIFY_FLOAT64 = 6
} gdn_verify_dtype;

/* A strided view. No dimensions and no data mean that the argument is absent. */
typedef struct gdn_verify_tensor {
  void *data;                          /* element 0; may be null where the tensor is empty */
  int64_t shape[GDN_VERIFY_MAX_DIMS];  /* elements */
  int64_t stride[GDN_VERIFY_MAX_DIMS]; /* elements; any value, zero and negative included */
  int32_t ndim;                        /* dimensions; more than GDN_VERIFY_MAX_DIMS is refused */
  int32_t dtype;                       /* gdn_verify_dtype */
} gdn_verify_tensor;

/* ---- the operator ---------------------------------------------------------------------------- */

typedef enum gdn_verify_op {
  GDN_VERIFY_OP_BATCHED = 0, /* verify_fused_conv_kn_batched: shapes as written below */
  GDN_VERIFY_OP_SINGLE = 1,  /* verify_fused_conv_kn: the same without the first dimension */
  GDN_VERIFY_OP_UPDATE = 2   /* conv1d_update_l2norm: one token each, input and output [n_seq, D] */
} gdn_verify_op;

typedef enum gdn_verify_activation {
  GDN_VERIFY_SILU = 0,
  GDN_VERIFY_NO_ACTIVATION = 1
} gdn_verify_activation;

/* Runs body(context, begin, end) over disjoint ranges that cover [0, count), from any threads, and
 * returns when all are done. `grain` is the smallest range worth a thread. */
typedef void (*gdn_verify_range_fn)(void *context, int64_t begin, int64_t end);
typedef void (*gdn_verify_parallel_for)(int64_t count, int64_t grain, gdn_verify_range_fn body,
                                        void *context);

typedef struct gdn_verify_params {
  gdn_verify_op op;

  /* float = float32, bfloat16 or float16. "state dtype" is that of conv_state. */
  gdn_verify_tensor conv_state; /* [n_slots, D, S], state dtype; read and written; may be absent */
  gdn_verify_tensor new_input;  /* [n_seq, K, D] or packed [total, D], float; last stride 1 */
  gdn_verify_tensor weight;     /* [D, W], the input's dtype or float32 */
  gdn_verify_tensor output;     /* like new_input, its dtype or float32; written; last stride 1 */
  /* windows [n_rows, >=K, D, S] or history [n_rows, >=S-1+K, D], state dtype; written; may be absent */
  gdn_verify_tensor conv_state_inter;
  gdn_verify_tensor bias;                /* [D], the input's dtype or float32; may be absent */
  gdn_verify_tensor conv_state_indices;  /* [n_seq] int32, slot of a sequence; may be absent */
  gdn_verify_tensor inter_indices;       /* [n_seq] int32, row of a sequence; may be absent */
  gdn_verify_tensor num_accepted_tokens; /* [n_seq] int32: a > 0 starts from snapshot a - 1 of the
                                             sequence's row, 0 from conv_state; may be absent */
  gdn_verify_tensor cu_seqlens;          /* [n_seq + 1] int32, packed rows; may be absent */
  gdn_verify_tensor parent_index;        /* [n_seq, K] int32, tree verify; may be absent */

  int64_t qk_channels;    /* channels that are L2-normalised, from channel 0 */
  int64_t head_dim;       /* channels of one L2 group; divides qk_channels */
  double l2_eps;          /* rounded once to float32; finite, not negative */
  int64_t pad_slot_id;    /* a slot that is negative or equals this is padding */
  int64_t max_num_tokens; /* with cu_seqlens: most rows of a sequence; < 0: what snapshots hold;
                             without: 0 or less */
  gdn_verify_activation activation;
  int32_t update_state; /* 0 leaves conv_state as it was */

  int64_t config; /* CUDA: launch configuration, -1 chooses; see gdn_verify_num_configs */
  int32_t pdl;    /* CUDA: launch as a programmatic dependent; the caller promises that the kernel
                     before this one on the stream writes neither weight nor bias */
  int32_t check;  /* CUDA: 1 synchronises and reports bad index values (not during capture) */

  /* CPU: null runs on threads of this library (pthreads), as many as the machine has cores. */
  gdn_verify_parallel_for parallel_for;
} gdn_verify_params;

/* Checks everything that can be told without reading the tensors: dtypes, shapes, strides, overlap.
 * Returns GDN_VERIFY_OK or GDN_VERIFY_INVALID. */
gdn_verify_status gdn_verify_check_params(const gdn_verify_params *params, gdn_verify_error *err);

/* Runs the operator on the CPU. All pointers are host pointers. Validates first, the index values
 * too (GDN_VERIFY_BAD_INDEX); on any error nothing was written. */
gdn_verify_status gdn_verify_conv_cpu(const gdn_verify_params *params, gdn_verify_error *err);

/* Launches the operator on `stream` (a cudaStream_t) of the current device: one kernel, or none for
 * an empty batch. All pointers are device pointers. A bad index value makes the sequence padding.
 * Safe during stream capture. GDN_VERIFY_UNSUPPORTED in a build without CUDA. */
gdn_verify_status gdn_verify_conv_cuda(const gdn_verify_params *params, void *stream,
                                       gdn_verify_error *err);

/* ---- commit ---------------------------------------------------------------------------------- */

/* Sets every layer's conv_state to snapshot num_accepted - 1, windows or history. All conv_states
 * have the shape, strides and dtype of the first, and so have all snapshots. */
typedef struct gdn_verify_commit_params {
  const gdn_verify_tensor *conv_states; /* n_layers of [n_slots, D, S], state dtype; written */
  const gdn_verify_tensor *snapshots;   /* n_layers of conv_state_inter's shapes, same dtype */
  int64_t n_layers;
  gdn_verify_tensor num_accepted;       /* [n_seq] int32; 0 leaves the slot as it was */
  gdn_verify_tensor conv_state_indices; /* [n_seq] int32; may be absent */
  gdn_verify_tensor inter_indices;      /* [n_seq] int32; may be absent */
  int64_t pad_slot_id;
  int32_t check; /* as in gdn_verify_params */
  gdn_verify_parallel_for parallel_for;
} gdn_verify_commit_params;

/* Status, index values, devices and capture as in gdn_verify_conv_cpu and gdn_verify_conv_cuda. */
gdn_verify_status gdn_verify_commit_cpu(const gdn_verify_commit_params *params,
                                        gdn_verify_error *err);
gdn_verify_status gdn_verify_commit_cuda(const gdn_verify_commit_params *params, void *stream,
                                         gdn_verify_error *err);

/* ---- the tuned table ------------------------------------------------------------------------- */

/* What gdn_verify_conv_cuda launches with config -1: the table's configuration of the call, where
 * it has one, and a heuristic's where not. The table is empty until it is loaded and belongs to the
 * process. Only calls that have a choice are looked up: d_conv 4, head_dim 128, bfloat16 or float16,
 * no tree; the others run the one kernel there is. */

typedef enum gdn_verify_snapshot_kind {
  GDN_VERIFY_NO_SNAPSHOTS = 0,
  GDN_VERIFY_WINDOWS = 1,
  GDN_VERIFY_HISTORY = 2
} gdn_verify_snapshot_kind;

/* Everything but config is the key, and must be equal for the entry to be taken. */
typedef struct gdn_verify_tuned {
  /* token_major: adjacent channels are neighbours in memory: those of the windows; without windows
   * those of conv_state; without that too it is 1. */
  int32_t device;      /* CUDA device, as the runtime of this process counts them */
  int32_t snapshots;   /* gdn_verify_snapshot_kind */
  int32_t input_dtype; /* gdn_verify_dtype */
  int32_t state_dtype; /* gdn_verify_dtype */
  int32_t state_len;   /* S */
  int32_t token_major; /* 0 or 1 */
  int32_t rollback;    /* 1 where num_accepted_tokens is given */
  int32_t pdl;         /* 0 or 1 */
  int32_t config;      /* 0 or more; one that cannot run the call gives way to the heuristic */
  int64_t d_inner;
  int64_t qk_channels;
  int64_t n_seq;
  int64_t num_tokens; /* with cu_seqlens the most rows of a sequence */
} gdn_verify_tuned;

/* Replaces the whole table by n entries, which are copied; the later of two with one key counts, and
 * n = 0 empties it. May run at any time beside launches, which never wait: tables that were replaced
 * stay in memory for good, some 100 bytes an entry. GDN_VERIFY_INVALID where an entry is wrong. */
gdn_verify_status gdn_verify_load_tuned(const gdn_verify_tuned *entries, int64_t n,
                                        gdn_verify_error *err);

/* The table's configuration of this call on CUDA device `device`; -1 where it has none, and for
 * params that are wrong or have nothing to do. In every build. */
int gdn_verify_tuned_config(const gdn_verify_params *params, int device);

/* The configuration that gdn_verify_conv_cuda launches this call with on the current device; -1 where
 * the call has no choice, is wrong or has nothing to do, and in a build without CUDA. */
int gdn_verify_chosen_config(const gdn_verify_params *params);

/* ---- about this build ------------------------------------------------------------------------ */

/* 1 where the CUDA backend was compiled in. */
int gdn_verify_has_cuda(void);

/* Architectures that the CUDA backend was compiled for, "8.0 9.0+PTX" say; "" without CUDA. */
const char *gdn_verify_cuda_archs(void);

/* Launch configurations of the CUDA backend: config takes -1 .. this - 1. 0 without CUDA. */
int gdn_verify_num_configs(void);

/* Their names in order, separated by blanks; "" without CUDA. A table that was measured with another
 * list means other configurations. */
const char *gdn_verify_configs(void);

/* SIMD level of the CPU backend: "baseline", "avx2", "avx512" on x86-64; "baseline" elsewhere.
 * gdn_verify_set_cpu_level chooses one by name for the whole process and returns 0, or -1 where
 * this CPU lacks it. The environment variable GDN_VERIFY_CPU_LEVEL does so at the first call. */
const char *gdn_verify_cpu_level(void);
int gdn_verify_has_cpu_level(const char *name); /* 1 where it is known and this CPU has it */
int gdn_verify_set_cpu_level(const char *name);

/* The arithmetic of numerics.h on arrays of n float32, at the current SIMD level. */
void gdn_verify_exp_array(const float *x, float *out, int64_t n);
void gdn_verify_silu_array(const float *x, float *out, int64_t n);
/* out[i] = sum of squares of row i of x [rows, n], in the order of the operator. */
void gdn_verify_sum_squares_array(const float *x, float *out, int64_t rows, int64_t n);

#ifdef __cplusplus
}
#endif

#endif /* GDN_VERIFY_H */
