/* indices.c - checks the values of index tensors that are in host memory, shared slots and rows too.
 *
 * What one sequence's values mean is said by gdn_verify_resolve (problem.h); here are the loop over
 * the sequences and the memory of what they claimed: a list for a few sequences, else a bitmap over
 * the slots or rows, freed again.
 */
#include "problem.h"

#include <stdlib.h>

#define GDN_VERIFY_FEW 64

typedef struct claims {
  int64_t few[GDN_VERIFY_FEW];
  int64_t n_few;
  unsigned char *bits; /* null where the list is used */
} claims;

/* For at most `count` claims of values in [0, range). 0, or -1 where memory is short. */
static int init_claims(claims *c, int64_t count, int64_t range) {
  c->n_few = 0;
  c->bits = NULL;
  if (count <= GDN_VERIFY_FEW) return 0;
  c->bits = (unsigned char *)calloc((size_t)(range / 8 + 1), 1);
  return c->bits ? 0 : -1;
}

/* Claims `value`; 1 where it was claimed before. */
static int claim(claims *c, int64_t value) {
  if (c->bits) {
    const unsigned char bit = (unsigned char)(1u << (value & 7));
    const int taken = (c->bits[value >> 3] & bit) != 0;
    c->bits[value >> 3] |= bit;
    return taken;
  }
  for (int64_t i = 0; i < c->n_few; ++i)
    if (c->few[i] == value) return 1;
  c->few[c->n_few++] = value;
  return 0;
}

static gdn_verify_status out_of_memory(gdn_verify_error *err, int64_t n_seq) {
  return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                         "not enough memory to check the indices of %lld sequences",
                         (long long)n_seq);
}

/* Shared slots matter where they are written, shared rows always. */
static gdn_verify_status check_sequences(const gdn_verify_problem *p, claims *slots, claims *rows,
                                         gdn_verify_error *err) {
  for (int64_t seq = 0; seq < p->n_seq; ++seq) {
    gdn_verify_sequence s;
    const gdn_verify_verdict verdict = gdn_verify_resolve(p, seq, &s);
    if (verdict == GDN_VERIFY_EMPTY || verdict == GDN_VERIFY_PADDING) continue;
    if (verdict != GDN_VERIFY_RUN) return gdn_verify_fail_index(err, seq, verdict);
    for (int64_t token = 0; p->parent && token < s.num_rows; ++token)
      if (!gdn_verify_parent_ok(p, seq, token))
        return gdn_verify_fail_index(err, seq, GDN_VERIFY_BAD_PARENT);
    if (p->slot_index && p->write_state && claim(slots, s.slot))
      return gdn_verify_fail_index(err, seq, GDN_VERIFY_SHARED_SLOT);
    if (p->row_index && p->snapshots && claim(rows, s.row))
      return gdn_verify_fail_index(err, seq, GDN_VERIFY_SHARED_ROW);
  }
  return GDN_VERIFY_OK;
}

gdn_verify_status gdn_verify_check_indices(const gdn_verify_problem *p, gdn_verify_error *err) {
  claims slots, rows;
  const int no_slots = init_claims(&slots, p->slot_index ? p->n_seq : 0, p->n_slots);
  const int no_rows = init_claims(&rows, p->row_index ? p->n_seq : 0, p->n_rows);
  const gdn_verify_status status =
      no_slots || no_rows ? out_of_memory(err, p->n_seq) : check_sequences(p, &slots, &rows, err);
  free(slots.bits);
  free(rows.bits);
  return status;
}

gdn_verify_status gdn_verify_check_commit_indices(const gdn_verify_commit_problem *p,
                                                  gdn_verify_error *err) {
  claims slots;
  if (init_claims(&slots, p->slot_index ? p->n_seq : 0, p->n_slots))
    return out_of_memory(err, p->n_seq);
  gdn_verify_status status = GDN_VERIFY_OK;
  for (int64_t seq = 0; seq < p->n_seq && status == GDN_VERIFY_OK; ++seq) {
    int64_t slot, row, snapshot;
    const gdn_verify_verdict verdict = gdn_verify_resolve_commit(p, seq, &slot, &row, &snapshot);
    if (verdict == GDN_VERIFY_EMPTY || verdict == GDN_VERIFY_PADDING) continue;
    if (verdict != GDN_VERIFY_RUN)
      status = gdn_verify_fail_index(err, seq, verdict);
    else if (p->slot_index && claim(&slots, slot))
      status = gdn_verify_fail_index(err, seq, GDN_VERIFY_SHARED_SLOT);
  }
  free(slots.bits);
  return status;
}
