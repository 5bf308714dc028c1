/* params.c - validation of the arguments, and the problem that the backends get.
 *
 * In this order: what is present, dimensions, dtypes and shapes; then numbers; strides; shared
 * memory. Nothing is read from a tensor and nothing is written. The shapes of the single operator
 * are those of the batched one without the first dimension, so each is written down once.
 */
#include "check.h"

#include <float.h>
#include <inttypes.h>
#include <string.h>

typedef struct validation {
  const gdn_verify_params *p;
  gdn_verify_problem *q; /* filled along the way */
  gdn_verify_error *err;
  int single; /* 1: no first dimension */
  int ragged;
} validation;

/* "K, D" of "n_seq, K, D" for the single operator. */
static const char *dims_of(const validation *v, const char *dims) {
  return v->single ? strstr(dims, ", ") + 2 : dims;
}

/* A tensor with one entry for each sequence in its first dimension. */
static gdn_verify_status check_per_sequence(const validation *v, const char *name,
                                            const gdn_verify_tensor *t, gdn_verify_expected e) {
  if (v->single) {
    e.dims = dims_of(v, e.dims);
    e.ndim--;
    for (int k = 0; k < e.ndim; k++) e.size[k] = e.size[k + 1];
  }
  return gdn_verify_check_tensor(v->err, name, t, &e);
}

static gdn_verify_status check_absent(const validation *v, const char *name,
                                      const gdn_verify_tensor *t, const char *where) {
  if (!gdn_verify_is_present(t)) return GDN_VERIFY_OK;
  return INVALID(v->err, "%s must be absent %s, but is given", name, where);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static gdn_verify_status check_op(const validation *v) {
  const gdn_verify_params *p = v->p;
  const char *where = NULL;
  if (p->op == GDN_VERIFY_OP_BATCHED) return GDN_VERIFY_OK;
  if (p->op == GDN_VERIFY_OP_SINGLE) {
    where = "for one sequence";
    TRY(check_absent(v, "conv_state_indices", &p->conv_state_indices, where));
  } else if (p->op == GDN_VERIFY_OP_UPDATE) {
    where = "for an update by one token";
    TRY(check_absent(v, "conv_state_inter", &p->conv_state_inter, where));
    TRY(check_absent(v, "num_accepted_tokens", &p->num_accepted_tokens, where));
    TRY(check_absent(v, "parent_index", &p->parent_index, where));
  } else {
    return INVALID(v->err, "op must be one of gdn_verify_op, but is %d", (int)p->op);
  }
  TRY(check_absent(v, "inter_indices", &p->inter_indices, where));
  return check_absent(v, "cu_seqlens", &p->cu_seqlens, where);
}

/* cu_seqlens, new_input and output: all sizes but K of a ragged batch. */
static gdn_verify_status check_rows(validation *v) {
  const gdn_verify_params *p = v->p;
  gdn_verify_problem *q = v->q;
  gdn_verify_expected e = {"n_seq, K, D", ANY_FLOAT, 3, {ANY, ANY, ANY}};
  if (v->ragged) {
    const gdn_verify_expected bounds = {"n_seq + 1", DTYPE(GDN_VERIFY_INT32), 1, {AT_LEAST(1)}};
    TRY(gdn_verify_check_tensor(v->err, "cu_seqlens", &p->cu_seqlens, &bounds));
  }
  if (v->ragged || p->op != GDN_VERIFY_OP_BATCHED) {
    e.dims = v->ragged ? "total, D" : v->single ? "K, D" : "n_seq, D";
    e.ndim = 2;
  }
  TRY(gdn_verify_check_tensor(v->err, "new_input", &p->new_input, &e));

  const int64_t *shape = p->new_input.shape;
  q->input_dtype = p->new_input.dtype;
  q->d_inner = shape[e.ndim - 1];
  if (v->ragged) {
    q->n_seq = p->cu_seqlens.shape[0] - 1;
    q->total_rows = shape[0];
  } else {
    q->n_seq = v->single ? 1 : shape[0];
    q->num_tokens = p->op == GDN_VERIFY_OP_UPDATE ? 1 : shape[1 - v->single];
    q->total_rows = q->d_inner ? q->n_seq * q->num_tokens : 0; /* fits, since new_input does */
  }
  e.dtypes = DTYPE(q->input_dtype) | DTYPE(GDN_VERIFY_FLOAT32);
  for (int k = 0; k < e.ndim; k++) e.size[k] = shape[k];
  TRY(gdn_verify_check_tensor(v->err, "output", &p->output, &e));
  q->output_dtype = p->output.dtype;
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_weights(validation *v) {
  const gdn_verify_params *p = v->p;
  gdn_verify_problem *q = v->q;
  const unsigned dtypes = DTYPE(q->input_dtype) | DTYPE(GDN_VERIFY_FLOAT32);
  const gdn_verify_expected weight = {"D, W", dtypes, 2, {q->d_inner, ANY}};
  TRY(gdn_verify_check_tensor(v->err, "weight", &p->weight, &weight));
  const int64_t d_conv = p->weight.shape[1];
  if (d_conv < GDN_VERIFY_MIN_D_CONV || d_conv > GDN_VERIFY_MAX_D_CONV)
    return INVALID(v->err, "weight must be [D, W] with W from %d to %d, but its W is %" PRId64,
                   GDN_VERIFY_MIN_D_CONV, GDN_VERIFY_MAX_D_CONV, d_conv);
  q->d_conv = (int32_t)d_conv;
  q->weight_dtype = p->weight.dtype;
  const gdn_verify_expected bias = {"D", dtypes, 1, {q->d_inner}};
  TRY(gdn_verify_check_optional(v->err, "bias", &p->bias, &bias));
  q->bias_dtype = p->bias.dtype;
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_state(validation *v) {
  const gdn_verify_params *p = v->p;
  gdn_verify_problem *q = v->q;
  if (!gdn_verify_is_present(&p->conv_state) && p->op != GDN_VERIFY_OP_UPDATE) {
    if (!gdn_verify_is_present(&p->num_accepted_tokens) ||
        p->conv_state_inter.ndim != 3 - v->single)
      return INVALID(v->err,
                     "conv_state must be given unless conv_state_inter is a history and "
                     "num_accepted_tokens is given, but is absent");
    TRY(check_absent(v, "conv_state_indices", &p->conv_state_indices, "without conv_state"));
    q->state_len = q->d_conv - 1;
    q->state_dtype = p->conv_state_inter.dtype;
    return GDN_VERIFY_OK;
  }
  const int pooled = gdn_verify_is_present(&p->conv_state_indices);
  const gdn_verify_expected e = {
      "n_slots, D, S", ANY_FLOAT, 3, {pooled ? ANY : AT_LEAST(q->n_seq), q->d_inner, ANY}};
  TRY(check_per_sequence(v, "conv_state", &p->conv_state, e));
  const int64_t state_len = p->conv_state.shape[2 - v->single];
  if (state_len != q->d_conv && state_len != q->d_conv - 1)
    return INVALID(v->err,
                   "conv_state must be [%s] with S = W or W - 1 = %d or %d, but its S is "
                   "%" PRId64,
                   dims_of(v, "n_slots, D, S"), (int)q->d_conv, (int)q->d_conv - 1, state_len);
  q->state_len = (int32_t)state_len;
  q->state_dtype = p->conv_state.dtype;
  q->n_slots = v->single ? 1 : p->conv_state.shape[0];
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_snapshots(validation *v) {
  const gdn_verify_params *p = v->p;
  gdn_verify_problem *q = v->q;
  const gdn_verify_tensor *t = &p->conv_state_inter;
  if (!gdn_verify_is_present(t)) {
    const char *where = "without conv_state_inter";
    TRY(check_absent(v, "inter_indices", &p->inter_indices, where));
    return check_absent(v, "num_accepted_tokens", &p->num_accepted_tokens, where);
  }
  const int64_t rows = gdn_verify_is_present(&p->inter_indices) ? ANY : AT_LEAST(q->n_seq);
  const int64_t tokens = v->ragged ? 0 : q->num_tokens;
  const unsigned dtypes = gdn_verify_is_present(&p->conv_state) ? DTYPE(q->state_dtype) : ANY_FLOAT;
  const int64_t lead = q->state_len - 1; /* rows of a history before the first token */
  const gdn_verify_expected windows = {
      "n_rows, >=K, D, S", dtypes, 4, {rows, AT_LEAST(tokens), q->d_inner, q->state_len}};
  const gdn_verify_expected history = {
      "n_rows, >=S-1+K, D", dtypes, 3, {rows, AT_LEAST(lead + tokens), q->d_inner}};
  const int dims = t->ndim + v->single;
  if (dims != 3 && dims != 4)
    return INVALID(v->err,
                   "conv_state_inter must be windows [%s] or a history [%s], but has %d "
                   "dimension%s",
                   dims_of(v, windows.dims), dims_of(v, history.dims), (int)t->ndim,
                   t->ndim == 1 ? "" : "s");
  TRY(check_per_sequence(v, "conv_state_inter", t, dims == 4 ? windows : history));
  q->snapshot_kind = dims == 4 ? GDN_VERIFY_WINDOWS : GDN_VERIFY_HISTORY;
  q->snapshot_capacity = t->shape[1 - v->single] - (dims == 4 ? 0 : lead);
  q->state_dtype = t->dtype;
  q->n_rows = v->single ? 1 : t->shape[0];
  if (dims == 3)
    return check_absent(v, "parent_index", &p->parent_index,
                        "where conv_state_inter is a history (a tree needs windows)");
  return GDN_VERIFY_OK;
}

/* K of a ragged batch. */
static gdn_verify_status check_max_num_tokens(validation *v) {
  gdn_verify_problem *q = v->q;
  const int64_t given = v->p->max_num_tokens;
  if (!v->ragged) {
    if (given > 0)
      return INVALID(v->err, "max_num_tokens must be absent without cu_seqlens, but is %" PRId64,
                     given);
    return GDN_VERIFY_OK;
  }
  if (q->snapshot_kind == GDN_VERIFY_NO_SNAPSHOTS) {
    if (given < 0)
      return INVALID(v->err,
                     "max_num_tokens must be given with cu_seqlens where there is no "
                     "conv_state_inter, but is absent");
  } else if (given > q->snapshot_capacity) {
    return INVALID(v->err,
                   "max_num_tokens must be at most %" PRId64
                   ", the positions that "
                   "conv_state_inter holds, but is %" PRId64,
                   q->snapshot_capacity, given);
  }
  q->num_tokens = given < 0 ? q->snapshot_capacity : given;
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_index_tensors(const validation *v) {
  const gdn_verify_params *p = v->p;
  const gdn_verify_expected one = {"n_seq", DTYPE(GDN_VERIFY_INT32), 1, {v->q->n_seq}};
  TRY(gdn_verify_check_optional(v->err, "conv_state_indices", &p->conv_state_indices, &one));
  TRY(gdn_verify_check_optional(v->err, "inter_indices", &p->inter_indices, &one));
  TRY(gdn_verify_check_optional(v->err, "num_accepted_tokens", &p->num_accepted_tokens, &one));
  if (gdn_verify_is_present(&p->parent_index)) {
    const gdn_verify_expected tree = {v->ragged ? "n_seq, max_num_tokens" : "n_seq, K",
                                      DTYPE(GDN_VERIFY_INT32),
                                      2,
                                      {v->q->n_seq, v->q->num_tokens}};
    TRY(check_per_sequence(v, "parent_index", &p->parent_index, tree));
  }
  return GDN_VERIFY_OK;
}

/* ---- numbers, strides, memory ---------------------------------------------------------------- */

static gdn_verify_status check_numbers(const validation *v) {
  const gdn_verify_params *p = v->p;
  const int num_configs = gdn_verify_num_configs();
  if (p->qk_channels < 0 || p->qk_channels > v->q->d_inner)
    return INVALID(v->err, "qk_channels must be between 0 and D = %" PRId64 ", but is %" PRId64,
                   v->q->d_inner, p->qk_channels);
  if (p->head_dim < 1)
    return INVALID(v->err, "head_dim must be 1 or more, but is %" PRId64, p->head_dim);
  if (p->qk_channels % p->head_dim != 0)
    return INVALID(v->err,
                   "head_dim must divide qk_channels, but head_dim is %" PRId64
                   " and qk_channels is %" PRId64,
                   p->head_dim, p->qk_channels);
  if (!(p->l2_eps >= 0.0 && p->l2_eps <= (double)FLT_MAX)) /* so that NaN fails */
    return INVALID(v->err, "l2_eps must be a float32 that is finite and not negative, but is %g",
                   p->l2_eps);
  if (p->activation != GDN_VERIFY_SILU && p->activation != GDN_VERIFY_NO_ACTIVATION)
    return INVALID(v->err, "activation must be silu (0) or none (1), but is %d",
                   (int)p->activation);
  /* only a build with CUDA knows how many there are */
  if (p->config < -1 || (num_configs > 0 && p->config >= num_configs))
    return INVALID(v->err,
                   "config must be -1 or one of the %d configurations from 0, but is %" PRId64,
                   num_configs, p->config);
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_unit_stride(const validation *v, const char *name,
                                           const gdn_verify_tensor *t) {
  const int last = t->ndim - 1;
  if (t->shape[last] <= 1 || t->stride[last] == 1) return GDN_VERIFY_OK;
  return INVALID(v->err, "%s must have stride 1 in its last dimension, but has %" PRId64, name,
                 t->stride[last]);
}

/* No tensor that is written may share an element with another one, or have one twice. */
static gdn_verify_status check_memory(const validation *v) {
  enum {
    MAX_TENSORS = 11
  };
  const gdn_verify_params *p = v->p;
  const int write_state = v->q->write_state;
  const struct {
    const char *name;
    const gdn_verify_tensor *t;
  } all[MAX_TENSORS] = {
      {"output", &p->output},
      {"conv_state_inter", &p->conv_state_inter},
      {"conv_state", &p->conv_state}, /* the last one that is written, or the first that is not */
      {"new_input", &p->new_input},
      {"weight", &p->weight},
      {"bias", &p->bias},
      {"conv_state_indices", &p->conv_state_indices},
      {"inter_indices", &p->inter_indices},
      {"num_accepted_tokens", &p->num_accepted_tokens},
      {"cu_seqlens", &p->cu_seqlens},
      {"parent_index", &p->parent_index},
  };
  gdn_verify_byte_range range[MAX_TENSORS];
  for (int i = 0; i < MAX_TENSORS; i++)
    range[i] = gdn_verify_tensor_range(all[i].t); /* of an absent one empty */
  for (int i = 0; i < (write_state ? 3 : 2); i++) {
    if (range[i].begin == range[i].end) continue;
    TRY(gdn_verify_check_distinct(v->err, all[i].name, all[i].t));
    for (int k = i + 1; k < MAX_TENSORS; k++)
      if (range[i].begin < range[k].end && range[k].begin < range[i].end &&
          gdn_verify_tensors_overlap(all[i].t, all[k].t))
        return gdn_verify_fail_shared(v->err, all[i].name, all[k].name);
  }
  return GDN_VERIFY_OK;
}

/* ---- the problem ----------------------------------------------------------------------------- */

static void set_rows_strides(const validation *v, const gdn_verify_tensor *t, int64_t *seq,
                             int64_t *token) {
  *seq = v->ragged || v->single ? 0 : t->stride[0];
  *token = v->p->op == GDN_VERIFY_OP_UPDATE ? 0 : t->stride[t->ndim - 2];
}

static void set_pointers(const validation *v) {
  const gdn_verify_params *p = v->p;
  gdn_verify_problem *q = v->q;
  const int first = !v->single; /* dimensions before those of one sequence */

  q->input = gdn_verify_data_of(&p->new_input);
  set_rows_strides(v, &p->new_input, &q->input_seq, &q->input_token);
  q->output = gdn_verify_data_of(&p->output);
  set_rows_strides(v, &p->output, &q->output_seq, &q->output_token);
  q->weight = gdn_verify_data_of(&p->weight);
  q->weight_channel = p->weight.stride[0];
  q->weight_tap = p->weight.stride[1];
  if (gdn_verify_is_present(&p->bias)) {
    q->bias = gdn_verify_data_of(&p->bias);
    q->bias_channel = p->bias.stride[0];
  }
  if (gdn_verify_is_present(&p->conv_state)) {
    const int64_t *stride = p->conv_state.stride;
    q->state = gdn_verify_data_of(&p->conv_state);
    q->state_slot = first ? stride[0] : 0;
    q->state_channel = stride[first];
    q->state_column = stride[first + 1];
  }
  if (q->snapshot_kind != GDN_VERIFY_NO_SNAPSHOTS) {
    const int64_t *stride = p->conv_state_inter.stride;
    q->snapshots = gdn_verify_data_of(&p->conv_state_inter);
    q->snapshot_row = first ? stride[0] : 0;
    q->snapshot_token = stride[first];
    q->snapshot_channel = stride[first + 1];
    q->snapshot_column = stride[q->snapshot_kind == GDN_VERIFY_WINDOWS ? first + 2 : first];
  }

  q->slot_index = gdn_verify_index_data(&p->conv_state_indices);
  q->slot_index_stride = p->conv_state_indices.stride[0];
  q->row_index = gdn_verify_index_data(&p->inter_indices);
  q->row_index_stride = p->inter_indices.stride[0];
  q->accepted = gdn_verify_index_data(&p->num_accepted_tokens);
  q->accepted_stride = p->num_accepted_tokens.stride[0];
  q->cu_seqlens = gdn_verify_index_data(&p->cu_seqlens);
  q->cu_seqlens_stride = p->cu_seqlens.stride[0];
  q->parent = gdn_verify_index_data(&p->parent_index);
  q->parent_seq = first ? p->parent_index.stride[0] : 0;
  q->parent_token = p->parent_index.stride[first];
}

gdn_verify_status gdn_verify_make_problem(const gdn_verify_params *params,
                                          gdn_verify_problem *problem, gdn_verify_error *err) {
  validation v = {params, problem, err, params->op == GDN_VERIFY_OP_SINGLE,
                  gdn_verify_is_present(&params->cu_seqlens)};
  if (err) err->text[0] = '\0';
  memset(problem, 0, sizeof *problem);
  TRY(check_op(&v));
  TRY(check_rows(&v));
  TRY(check_weights(&v));
  TRY(check_state(&v));
  TRY(check_snapshots(&v));
  TRY(check_max_num_tokens(&v));
  TRY(check_index_tensors(&v));
  TRY(check_numbers(&v));
  problem->write_state = params->update_state && gdn_verify_is_present(&params->conv_state) &&
                         !gdn_verify_is_present(&params->parent_index);
  TRY(check_unit_stride(&v, "new_input", &params->new_input));
  TRY(check_unit_stride(&v, "output", &params->output));
  TRY(check_memory(&v));

  set_pointers(&v);
  problem->qk_channels = params->qk_channels;
  problem->head_dim = params->head_dim;
  problem->l2_eps = (float)params->l2_eps;
  problem->activation = (int32_t)params->activation;
  problem->pad_slot_id = params->pad_slot_id;
  /* no sequence has more rows than there are, however large max_num_tokens is */
  if (v.ragged && problem->num_tokens > problem->total_rows)
    problem->num_tokens = problem->total_rows;
  if (problem->num_tokens == 0 || problem->d_inner == 0) problem->n_seq = 0;
  return GDN_VERIFY_OK;
}

gdn_verify_status gdn_verify_check_params(const gdn_verify_params *params, gdn_verify_error *err) {
  gdn_verify_problem problem;
  return gdn_verify_make_problem(params, &problem, err);
}
