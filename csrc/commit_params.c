/* commit_params.c - validation of a commit, and the problem that the backends get.
 *
 * All layers have the dtype, shape and strides of the first, so that what holds for the first need
 * not be asked of each, and one set of strides serves a whole launch.
 */
#include "check.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int same_layout(const gdn_verify_tensor *t, const gdn_verify_tensor *first) {
  if (t->ndim != first->ndim || t->dtype != first->dtype) return 0;
  for (int k = 0; k < t->ndim; k++) {
    if (t->shape[k] != first->shape[k]) return 0;
    if (t->shape[k] > 1 && t->stride[k] != first->stride[k]) return 0;
  }
  return 1;
}

/* Checks that the layers from the second on are like the first, which passed. */
static gdn_verify_status check_layers(gdn_verify_error *err, const char *name, const char *dims,
                                      const gdn_verify_tensor *layers, int64_t n_layers) {
  char text[64];
  gdn_verify_expected e = {dims, DTYPE(layers[0].dtype), layers[0].ndim, {0}};
  memcpy(e.size, layers[0].shape, sizeof e.size);
  for (int64_t i = 1; i < n_layers; i++) {
    if (same_layout(&layers[i], &layers[0]) &&
        gdn_verify_tensor_memory(&layers[i]) == GDN_VERIFY_MEMORY_OK)
      continue;
    snprintf(text, sizeof text, "%s[%" PRId64 "]", name, i);
    TRY(gdn_verify_check_tensor(err, text, &layers[i], &e));
    return INVALID(err, "%s must have the strides of %s[0], but has others", text, name);
  }
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_tensors(const gdn_verify_commit_params *p,
                                       gdn_verify_commit_problem *q, gdn_verify_error *err) {
  const gdn_verify_tensor *state = p->conv_states, *snapshots = p->snapshots;
  const int64_t rows = gdn_verify_is_present(&p->inter_indices) ? ANY : AT_LEAST(q->n_seq);
  gdn_verify_expected e = {"n_slots, D, S", ANY_FLOAT, 3, {ANY, ANY, ANY}};
  if (!gdn_verify_is_present(&p->conv_state_indices)) e.size[0] = AT_LEAST(q->n_seq);
  TRY(gdn_verify_check_tensor(err, "conv_states[0]", state, &e));
  TRY(check_layers(err, "conv_states", "n_slots, D, S", state, p->n_layers));
  const int64_t d_inner = state->shape[1], state_len = state->shape[2];
  if (state_len < GDN_VERIFY_MIN_D_CONV - 1 || state_len > GDN_VERIFY_MAX_D_CONV)
    return INVALID(err,
                   "conv_states[0] must be [n_slots, D, S] with S from %d to %d, but its S is "
                   "%" PRId64,
                   GDN_VERIFY_MIN_D_CONV - 1, GDN_VERIFY_MAX_D_CONV, state_len);

  const unsigned dtypes = DTYPE(state->dtype);
  const gdn_verify_expected windows = {
      "n_rows, tokens, D, S", dtypes, 4, {rows, ANY, d_inner, state_len}};
  const gdn_verify_expected history = {
      "n_rows, >=S-1, D", dtypes, 3, {rows, AT_LEAST(state_len - 1), d_inner}};
  if (snapshots->ndim != 3 && snapshots->ndim != 4)
    return INVALID(err,
                   "snapshots[0] must be windows [%s] or a history [%s], but has %d "
                   "dimension%s",
                   windows.dims, history.dims, (int)snapshots->ndim,
                   snapshots->ndim == 1 ? "" : "s");
  const gdn_verify_expected *kind = snapshots->ndim == 4 ? &windows : &history;
  TRY(gdn_verify_check_tensor(err, "snapshots[0]", snapshots, kind));
  TRY(check_layers(err, "snapshots", kind->dims, snapshots, p->n_layers));

  q->d_inner = d_inner;
  q->state_len = (int32_t)state_len;
  q->element_size = (int32_t)gdn_verify_dtype_size(state->dtype);
  q->n_slots = state->shape[0];
  q->state_slot = state->stride[0];
  q->state_channel = state->stride[1];
  q->state_column = state->stride[2];
  q->n_rows = snapshots->shape[0];
  q->snapshot_capacity = snapshots->shape[1] - (kind == &windows ? 0 : state_len - 1);
  q->snapshot_row = snapshots->stride[0];
  q->snapshot_token = snapshots->stride[1];
  q->snapshot_channel = snapshots->stride[2];
  q->snapshot_column = snapshots->stride[kind == &windows ? 3 : 1];
  return GDN_VERIFY_OK;
}

static gdn_verify_status check_memory(const gdn_verify_commit_params *p, gdn_verify_error *err) {
  const struct {
    const char *name;
    const gdn_verify_tensor *t;
  } indices[] = {
      {"num_accepted", &p->num_accepted},
      {"conv_state_indices", &p->conv_state_indices},
      {"inter_indices", &p->inter_indices},
  };
  char name[64], other[64];
  const gdn_verify_tensor *lists[] = {p->conv_states, p->snapshots};
  int64_t i, k;
  TRY(gdn_verify_check_distinct(err, "conv_states[0]", &p->conv_states[0]));
  for (int list = 0; list < 2; list++) {
    if (!gdn_verify_lists_overlap(p->conv_states, lists[list], p->n_layers, &i, &k)) continue;
    snprintf(name, sizeof name, "conv_states[%" PRId64 "]", i);
    snprintf(other, sizeof other, "%s[%" PRId64 "]", list ? "snapshots" : "conv_states", k);
    return gdn_verify_fail_shared(err, name, other);
  }
  for (int index = 0; index < 3; index++) {
    const gdn_verify_byte_range range = gdn_verify_tensor_range(indices[index].t);
    for (i = 0; i < p->n_layers; i++) {
      const gdn_verify_byte_range state = gdn_verify_tensor_range(&p->conv_states[i]);
      if (state.begin >= range.end || range.begin >= state.end ||
          !gdn_verify_tensors_overlap(&p->conv_states[i], indices[index].t))
        continue;
      snprintf(name, sizeof name, "conv_states[%" PRId64 "]", i);
      return gdn_verify_fail_shared(err, name, indices[index].name);
    }
  }
  return GDN_VERIFY_OK;
}

gdn_verify_status gdn_verify_make_commit_problem(const gdn_verify_commit_params *params,
                                                 gdn_verify_commit_problem *problem,
                                                 gdn_verify_error *err) {
  gdn_verify_expected e = {"n_seq", DTYPE(GDN_VERIFY_INT32), 1, {ANY}};
  if (err) err->text[0] = '\0';
  memset(problem, 0, sizeof *problem);
  TRY(gdn_verify_check_tensor(err, "num_accepted", &params->num_accepted, &e));
  e.size[0] = params->num_accepted.shape[0];
  TRY(gdn_verify_check_optional(err, "conv_state_indices", &params->conv_state_indices, &e));
  TRY(gdn_verify_check_optional(err, "inter_indices", &params->inter_indices, &e));
  problem->slot_index = gdn_verify_index_data(&params->conv_state_indices);
  problem->slot_index_stride = params->conv_state_indices.stride[0];
  problem->row_index = gdn_verify_index_data(&params->inter_indices);
  problem->row_index_stride = params->inter_indices.stride[0];
  problem->accepted = gdn_verify_index_data(&params->num_accepted);
  problem->accepted_stride = params->num_accepted.stride[0];
  problem->n_seq = e.size[0];
  problem->pad_slot_id = params->pad_slot_id;
  if (params->n_layers < 0)
    return INVALID(err, "n_layers must be 0 or more, but is %" PRId64, params->n_layers);
  if (params->n_layers == 0) return GDN_VERIFY_OK;
  TRY(check_tensors(params, problem, err));
  TRY(check_memory(params, err));
  problem->conv_states = params->conv_states;
  problem->snapshots = params->snapshots;
  problem->n_layers = problem->n_seq && problem->d_inner ? params->n_layers : 0;
  return GDN_VERIFY_OK;
}
