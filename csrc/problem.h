/* problem.h - what a backend gets: the params after validation, resolved to pointers and strides.
 *
 * Internal to the core. gdn_verify_make_problem (params.c) fills a gdn_verify_problem once from a
 * gdn_verify_params; both backends work from nothing else, and kernels take it by value. The three
 * operators become one form here: batched, with a token dimension (K = 1 for the update).
 *
 * Also here, because both backends must agree on it to the letter: what the index tensors say about
 * one sequence (gdn_verify_resolve).
 */
#ifndef GDN_VERIFY_PROBLEM_H
#define GDN_VERIFY_PROBLEM_H

#include "gdn_verify.h"
#include "numerics.h"

/* Strides are in elements of the tensor that they belong to. Absent tensors have a null pointer,
 * and only they have: a problem with nothing to do has n_seq 0. */
typedef struct gdn_verify_problem {
  int64_t n_seq;      /* C */
  int64_t num_tokens; /* K; with cu_seqlens the most rows of a sequence */
  int64_t total_rows; /* rows of input and output over all sequences */
  int64_t d_inner;    /* D */
  int64_t qk_channels;
  int64_t head_dim;
  int64_t n_slots;
  int64_t n_rows;            /* of conv_state_inter */
  int64_t snapshot_capacity; /* snapshots that a row of conv_state_inter holds */
  int64_t pad_slot_id;

  const void *input; /* [n_seq, K, D] or [total_rows, D]; channel stride 1 */
  int64_t input_seq, input_token;
  void *output; /* as input */
  int64_t output_seq, output_token;
  const void *weight; /* [D, W] */
  int64_t weight_channel, weight_tap;
  const void *bias; /* [D] */
  int64_t bias_channel;
  void *state; /* [n_slots, D, S] */
  int64_t state_slot, state_channel, state_column;
  void *snapshots; /* windows [n_rows, tokens, D, S] or history [n_rows, rows, D] */
  int64_t snapshot_row, snapshot_token, snapshot_channel, snapshot_column; /* history: column
                                                                              stride = token's */

  const int32_t *slot_index; /* conv_state_indices [n_seq] */
  int64_t slot_index_stride;
  const int32_t *row_index; /* inter_indices [n_seq] */
  int64_t row_index_stride;
  const int32_t *accepted; /* num_accepted_tokens [n_seq] */
  int64_t accepted_stride;
  const int32_t *cu_seqlens; /* [n_seq + 1] */
  int64_t cu_seqlens_stride;
  const int32_t *parent; /* parent_index [n_seq, K] */
  int64_t parent_seq, parent_token;

  float l2_eps;
  int32_t d_conv;                                                           /* W */
  int32_t state_len;                                                        /* S */
  int32_t input_dtype, weight_dtype, bias_dtype, output_dtype, state_dtype; /* gdn_verify_dtype */
  int32_t snapshot_kind; /* gdn_verify_snapshot_kind */
  int32_t activation;    /* gdn_verify_activation */
  int32_t write_state;   /* update_state, a state, and no tree */
} gdn_verify_problem;

/* gdn_verify_commit_params after validation. All layers have the shapes and strides of the first. */
typedef struct gdn_verify_commit_problem {
  const gdn_verify_tensor *conv_states; /* n_layers; host array of the caller */
  const gdn_verify_tensor *snapshots;   /* n_layers */
  int64_t n_layers;                     /* 0 where there is nothing to do */
  int64_t n_seq;
  int64_t d_inner;
  int64_t n_slots;
  int64_t n_rows;
  int64_t snapshot_capacity;
  int64_t pad_slot_id;
  int64_t state_slot, state_channel, state_column;
  int64_t snapshot_row, snapshot_token, snapshot_channel, snapshot_column; /* history: column
                                                                              stride = token's */
  const int32_t *slot_index;
  int64_t slot_index_stride;
  const int32_t *row_index;
  int64_t row_index_stride;
  const int32_t *accepted;
  int64_t accepted_stride;
  int32_t state_len;    /* S */
  int32_t element_size; /* bytes: 4 or 2 */
} gdn_verify_commit_problem;

#ifdef __cplusplus
extern "C" {
#endif

/* Validate `params` and fill `problem`. n_seq, and n_layers of a commit, is 0 where there is nothing
 * to do. GDN_VERIFY_OK or GDN_VERIFY_INVALID. */
gdn_verify_status gdn_verify_make_problem(const gdn_verify_params *params,
                                          gdn_verify_problem *problem, gdn_verify_error *err);
gdn_verify_status gdn_verify_make_commit_problem(const gdn_verify_commit_params *params,
                                                 gdn_verify_commit_problem *problem,
                                                 gdn_verify_error *err);

/* Check every value of the index tensors, which must be in host memory, shared slots and rows too.
 * GDN_VERIFY_OK or GDN_VERIFY_BAD_INDEX (UNSUPPORTED where memory for the check is lacking). */
gdn_verify_status gdn_verify_check_indices(const gdn_verify_problem *problem,
                                           gdn_verify_error *err);
gdn_verify_status gdn_verify_check_commit_indices(const gdn_verify_commit_problem *problem,
                                                  gdn_verify_error *err);

/* Formats a message into err->text and returns `status`. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
gdn_verify_status gdn_verify_fail(gdn_verify_error *err, gdn_verify_status status,
                                  const char *format, ...);

/* BAD_INDEX with the sentence for sequence `seq` and the gdn_verify_verdict found for it. */
gdn_verify_status gdn_verify_fail_index(gdn_verify_error *err, int64_t seq, int32_t verdict);

#ifdef __cplusplus
}
#endif

/* Bytes of an element of a dtype that an argument may have. */
GDN_VERIFY_INLINE int64_t gdn_verify_dtype_size(int32_t dtype) {
  return dtype == GDN_VERIFY_FLOAT32 || dtype == GDN_VERIFY_INT32 ? 4 : 2;
}

/* ---- one sequence ---------------------------------------------------------------------------- */

typedef enum gdn_verify_verdict {
  GDN_VERIFY_RUN = 0,
  GDN_VERIFY_EMPTY,   /* no rows: left alone entirely */
  GDN_VERIFY_PADDING, /* output rows become zero, nothing else is touched */
  /* Wrong values, which the CPU reports and CUDA treats as padding: */
  GDN_VERIFY_BAD_CU_SEQLENS,
  GDN_VERIFY_BAD_SLOT,
  GDN_VERIFY_BAD_ROW,
  GDN_VERIFY_BAD_ACCEPTED,
  GDN_VERIFY_BAD_PARENT,
  /* Found by gdn_verify_check_indices alone, which sees all sequences: */
  GDN_VERIFY_SHARED_SLOT,
  GDN_VERIFY_SHARED_ROW
} gdn_verify_verdict;

typedef struct gdn_verify_sequence {
  int64_t input_offset;  /* elements from problem.input to row 0, channel 0 of this sequence */
  int64_t output_offset; /* the same for the output */
  int64_t num_rows;      /* tokens of this sequence; zeroed where the verdict is not RUN or EMPTY */
  int64_t slot;          /* of conv_state; meaningless where there is none */
  int64_t row;           /* of conv_state_inter; meaningless where there is none */
  int64_t start;         /* -1: starts from conv_state; t >= 0: from snapshot t of its row */
} gdn_verify_sequence;

/* Says what to do with sequence `seq` and where its data lie. Whatever the index tensors hold, a
 * verdict other than RUN leaves nothing to read, and num_rows output rows to zero that are inside
 * the output. parent_index is checked apart, by gdn_verify_parent_ok. */
GDN_VERIFY_INLINE gdn_verify_verdict gdn_verify_resolve(const gdn_verify_problem *p, int64_t seq,
                                                        gdn_verify_sequence *s) {
  s->slot = seq;
  s->row = seq;
  s->start = -1;
  if (p->cu_seqlens) {
    const int64_t begin = p->cu_seqlens[seq * p->cu_seqlens_stride];
    const int64_t end = p->cu_seqlens[(seq + 1) * p->cu_seqlens_stride];
    s->num_rows = s->input_offset = s->output_offset = 0;
    if (begin < 0 || begin > end || end > p->total_rows || (seq == 0 && begin != 0))
      return GDN_VERIFY_BAD_CU_SEQLENS;
    s->num_rows = end - begin;
    s->input_offset = begin * p->input_token;
    s->output_offset = begin * p->output_token;
    if (s->num_rows == 0) return GDN_VERIFY_EMPTY;
    if (s->num_rows > p->num_tokens) return GDN_VERIFY_BAD_CU_SEQLENS;
  } else {
    s->num_rows = p->num_tokens;
    s->input_offset = seq * p->input_seq;
    s->output_offset = seq * p->output_seq;
  }
  if (p->slot_index) s->slot = p->slot_index[seq * p->slot_index_stride];
  if (p->row_index) s->row = p->row_index[seq * p->row_index_stride];
  if (p->state) {
    /* without conv_state_indices sequence i has slot i, which is never padding */
    if (p->slot_index && (s->slot < 0 || s->slot == p->pad_slot_id)) return GDN_VERIFY_PADDING;
    if (s->slot >= p->n_slots) return GDN_VERIFY_BAD_SLOT;
  } else if (p->row_index && (s->row < 0 || s->row == p->pad_slot_id)) {
    return GDN_VERIFY_PADDING;
  }
  if (p->snapshots && (s->row < 0 || s->row >= p->n_rows)) return GDN_VERIFY_BAD_ROW;
  if (p->accepted) {
    const int64_t accepted = p->accepted[seq * p->accepted_stride];
    if (accepted < (p->state ? 0 : 1) || accepted > p->snapshot_capacity)
      return GDN_VERIFY_BAD_ACCEPTED;
    s->start = accepted - 1;
  }
  return GDN_VERIFY_RUN;
}

/* Whether node `token` of sequence `seq` of a tree hangs on an earlier node or on the root. */
GDN_VERIFY_INLINE int gdn_verify_parent_ok(const gdn_verify_problem *p, int64_t seq,
                                           int64_t token) {
  const int64_t parent = p->parent[seq * p->parent_seq + token * p->parent_token];
  return parent >= -1 && parent < token;
}

/* The same for a commit: sets *slot, and *snapshot to num_accepted - 1 of row *row. */
GDN_VERIFY_INLINE gdn_verify_verdict gdn_verify_resolve_commit(const gdn_verify_commit_problem *p,
                                                               int64_t seq, int64_t *slot,
                                                               int64_t *row, int64_t *snapshot) {
  *slot = p->slot_index ? p->slot_index[seq * p->slot_index_stride] : seq;
  *row = p->row_index ? p->row_index[seq * p->row_index_stride] : seq;
  *snapshot = (int64_t)p->accepted[seq * p->accepted_stride] - 1;
  if (p->slot_index && (*slot < 0 || *slot == p->pad_slot_id)) return GDN_VERIFY_PADDING;
  if (*snapshot == -1) return GDN_VERIFY_EMPTY;
  if (*slot >= p->n_slots) return GDN_VERIFY_BAD_SLOT;
  if (*row < 0 || *row >= p->n_rows) return GDN_VERIFY_BAD_ROW;
  if (*snapshot < 0 || *snapshot >= p->snapshot_capacity) return GDN_VERIFY_BAD_ACCEPTED;
  return GDN_VERIFY_RUN;
}

#endif /* GDN_VERIFY_PROBLEM_H */
