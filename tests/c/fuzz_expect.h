/* fuzz_expect.h - what the memory of a call must hold once it passed, for fuzz_core.c.
 *
 * Worked out in the pieces' `expected`, from what they held before the call: the operator sequence
 * by sequence on contiguous copies, a commit by copying.
 */
#ifndef FUZZ_EXPECT_H
#define FUZZ_EXPECT_H

#include "fuzz_memory.h"

enum { /* the operator's arguments, in this order */
  STATE,
  INPUT,
  WEIGHT,
  OUTPUT,
  INTER,
  BIAS,
  SLOTS,
  ROWS,
  ACCEPTED,
  BOUNDS,
  PARENT,
  N_ARGUMENTS
};

/* Entries begin .. begin + count - 1 of the first dimension; count -1: entry begin without it. */
static gdn_verify_tensor view(const gdn_verify_tensor *t, int64_t begin, int64_t count) {
  gdn_verify_tensor made = *t;
  if (t->ndim == 0) return made;
  if (!is_empty(t)) made.data = (char *)t->data + begin * t->stride[0] * element_size(t->dtype);
  if (count < 0)
    drop_first(&made);
  else
    made.shape[0] = count;
  return made;
}

/* A contiguous copy of a view of argument `a` as it was before the call. */
UNCOUNTED static gdn_verify_tensor packed(const call *c, const argument *a,
                                          const gdn_verify_tensor *t) {
  gdn_verify_tensor made = *t;
  int64_t stride = 1, index[MAX_DIMS] = {0}, position = 0;
  if (t->ndim == 0) return made;
  const int64_t size = element_size(t->dtype);
  for (int k = t->ndim - 1; k >= 0; --k) {
    made.stride[k] = stride;
    stride *= t->shape[k];
  }
  made.data = malloc((size_t)(stride * size));
  if (is_empty(t)) return made;
  const piece *p = &c->pieces[a->piece];
  const unsigned char *from = p->before + ((unsigned char *)t->data - p->now);
  do memcpy((char *)made.data + position++ * size, from + offset_of(t, index), (size_t)size);
  while (advance(t, index));
  return made;
}

/* The copy back into a view, of what is expected. Frees it. */
UNCOUNTED static void unpack(call *c, const argument *a, const gdn_verify_tensor *t,
                             gdn_verify_tensor *copy) {
  int64_t index[MAX_DIMS] = {0}, position = 0;
  if (t->ndim && !is_empty(t)) {
    const piece *p = &c->pieces[a->piece];
    const int64_t size = element_size(t->dtype);
    unsigned char *to = p->expected + ((unsigned char *)t->data - p->now);
    do memcpy(to + offset_of(t, index), (char *)copy->data + position++ * size, (size_t)size);
    while (advance(t, index));
  }
  if (t->ndim) free(copy->data);
}

static void expect_zeros(call *c, const argument *a) {
  gdn_verify_tensor zeros = packed(c, a, a->t);
  int64_t first;
  memset(zeros.data, 0, (size_t)(span(&zeros, &first) * element_size(zeros.dtype)));
  unpack(c, a, a->t, &zeros);
}

/* An index as it was before the call, `offset` elements from the first; `otherwise` where its
 * tensor is absent. */
static int64_t index_at(const call *c, int which, int64_t offset, int64_t otherwise) {
  const argument *a = &c->arguments[which];
  int32_t value;
  if (a->t->ndim == 0) return otherwise;
  const piece *p = &c->pieces[a->piece];
  memcpy(&value, p->before + ((unsigned char *)a->t->data - p->now) + 4 * offset, sizeof value);
  return value;
}

static int64_t index_of(const call *c, int which, int64_t i, int64_t otherwise) {
  if (c->arguments[which].t->ndim == 0) return otherwise; /* its strides may be wild */
  return index_at(c, which, i * c->arguments[which].t->stride[0], otherwise);
}

/* What a call that passed may not hold. */
static void check_indices(const call *c, const gdn_verify_params *p, int64_t i, int64_t rows) {
  const int alone = p->op == GDN_VERIFY_OP_SINGLE;
  const gdn_verify_tensor *inter = &p->conv_state_inter, *state = &p->conv_state;
  const int64_t slot = index_of(c, SLOTS, i, i), row = index_of(c, ROWS, i, i);
  int64_t held = inter->shape[1 - alone];
  if (inter->ndim == 3 - alone)
    held -= (state->ndim ? state->shape[2 - alone] : p->weight.shape[1] - 1) - 1;
  CHECK(!state->ndim || alone || (slot >= 0 && slot < state->shape[0]));
  CHECK(!inter->ndim || alone || (row >= 0 && row < inter->shape[0]));
  CHECK(!inter->ndim || p->op == GDN_VERIFY_OP_UPDATE || rows <= held || alone);
  CHECK(!p->num_accepted_tokens.ndim || index_of(c, ACCEPTED, i, 0) >= !state->ndim);
  CHECK(!p->num_accepted_tokens.ndim || index_of(c, ACCEPTED, i, 0) <= held);
  const int64_t *stride = p->parent_index.stride;
  for (int64_t t = 0; t < rows && !alone && p->parent_index.ndim; ++t) {
    const int64_t parent = index_at(c, PARENT, i * stride[0] + t * stride[1], -1);
    CHECK(parent >= -1 && parent < t);
  }
}

/* What sequence i says, run alone. */
static void expect_sequence(call *c, const gdn_verify_params *p, int64_t i) {
  const argument *a = c->arguments;
  const int alone = p->op == GDN_VERIFY_OP_SINGLE;
  const int64_t slot = index_of(c, SLOTS, i, i), row = index_of(c, ROWS, i, i);
  const int64_t begin = index_of(c, BOUNDS, i, i), end = index_of(c, BOUNDS, i + 1, i + 1);
  const int ragged = p->cu_seqlens.ndim != 0;
  if (begin == end) return;
  if (p->conv_state_indices.ndim && (slot < 0 || slot == p->pad_slot_id)) return;
  if (!p->conv_state.ndim && p->inter_indices.ndim && (row < 0 || row == p->pad_slot_id)) return;
  check_indices(c, p, i, end - begin);

  gdn_verify_params single = *p;
  gdn_verify_tensor part[N_ARGUMENTS];
  gdn_verify_tensor *const to[N_ARGUMENTS] = {&single.conv_state,
                                              &single.new_input,
                                              &single.weight,
                                              &single.output,
                                              &single.conv_state_inter,
                                              &single.bias,
                                              &single.conv_state_indices,
                                              &single.inter_indices,
                                              &single.num_accepted_tokens,
                                              &single.cu_seqlens,
                                              &single.parent_index};
  for (int k = 0; k < N_ARGUMENTS; ++k) part[k] = *a[k].t;
  for (int k = INPUT; k <= OUTPUT; k += OUTPUT - INPUT)
    if (!alone) part[k] = view(a[k].t, begin, part[k].ndim == 2 ? end - begin : -1);
  if (!alone) {
    part[STATE] = view(&p->conv_state, slot, -1);
    part[INTER] = view(&p->conv_state_inter, row, -1);
    part[ACCEPTED] = view(&p->num_accepted_tokens, i, 1);
    part[PARENT] = view(&p->parent_index, i, -1);
  }
  if (ragged && p->parent_index.ndim) part[PARENT].shape[0] = end - begin;
  memset(&part[SLOTS], 0, sizeof part[SLOTS]);
  memset(&part[ROWS], 0, sizeof part[ROWS]);
  memset(&part[BOUNDS], 0, sizeof part[BOUNDS]);
  single.op = GDN_VERIFY_OP_SINGLE;
  single.max_num_tokens = single.pad_slot_id = -1;
  single.parallel_for = NULL;
  for (int k = 0; k < N_ARGUMENTS; ++k) *to[k] = packed(c, &a[k], &part[k]);
  gdn_verify_error err;
  const gdn_verify_status status = gdn_verify_conv_cpu(&single, &err);
  if (status != GDN_VERIFY_OK) fprintf(stderr, "%s\n", err.text);
  CHECK(status == GDN_VERIFY_OK);
  for (int k = 0; k < N_ARGUMENTS; ++k) {
    if (k == STATE || k == OUTPUT || k == INTER)
      unpack(c, &a[k], &part[k], to[k]);
    else if (to[k]->ndim)
      free(to[k]->data);
  }
}

static void expect_call(call *c, const gdn_verify_params *p) {
  int64_t n_seq = p->op == GDN_VERIFY_OP_SINGLE ? 1 : p->new_input.shape[0];
  if (is_empty(&p->new_input)) return;
  if (p->cu_seqlens.ndim) {
    int64_t most = p->max_num_tokens;
    if (most < 0) most = p->conv_state_inter.shape[1];
    if (p->max_num_tokens < 0 && p->conv_state_inter.ndim == 3)
      most -= (p->conv_state.ndim ? p->conv_state.shape[2] : p->weight.shape[1] - 1) - 1;
    n_seq = p->cu_seqlens.shape[0] - 1;
    if (n_seq == 0 || most == 0) return; /* nothing to do, so nothing is zeroed either */
  }
  expect_zeros(c, &c->arguments[OUTPUT]);
  for (int64_t i = 0; i < n_seq; ++i) expect_sequence(c, p, i);
}

/* One sequence of one layer of a commit that passed. */
static void expect_commit(call *c, const gdn_verify_commit_params *p, const argument *state,
                          const argument *snapshots, int64_t i) {
  const gdn_verify_tensor *from = snapshots->t;
  const int64_t slot = index_of(c, SLOTS, i, i), row = index_of(c, ROWS, i, i);
  const int64_t snapshot = index_of(c, ACCEPTED, i, 0) - 1;
  if (snapshot < 0 || (p->conv_state_indices.ndim && (slot < 0 || slot == p->pad_slot_id))) return;
  gdn_verify_tensor target = view(state->t, slot, -1), rows = view(from, row, -1);
  const int windows = from->ndim == 4;
  rows = view(&rows, snapshot, windows ? -1 : target.shape[1]);
  if (!windows) { /* [S, D] to [D, S] */
    const int64_t stride = rows.stride[0], length = rows.shape[0];
    rows.stride[0] = rows.stride[1];
    rows.shape[0] = rows.shape[1];
    rows.stride[1] = stride;
    rows.shape[1] = length;
  }
  gdn_verify_tensor copy = packed(c, snapshots, &rows);
  unpack(c, state, &target, &copy);
}

#endif /* FUZZ_EXPECT_H */
