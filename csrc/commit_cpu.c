/* commit_cpu.c - conv_state := snapshot num_accepted - 1, for every layer and sequence, on the CPU.
 *
 * Nothing is computed: elements of 4 or 2 bytes are copied, with all strides free. The unit of work
 * is (layer, sequence); live slots are distinct, so units are independent.
 */
#include "cpu_internal.h"

#define GDN_VERIFY_COMMIT_THREAD_BYTES 262144

typedef struct gdn_verify_copy {
  int64_t rows, columns;
  int64_t to_row, to_column, from_row, from_column; /* elements */
} gdn_verify_copy;

GDN_VERIFY_INLINE void copy_elements(const gdn_verify_copy *c, void *restrict to,
                                     const void *restrict from, int half) {
  if (c->to_column == 1 && c->from_column == 1) {
    for (int64_t i = 0; i < c->rows; ++i)
      for (int64_t j = 0; j < c->columns; ++j)
        gdn_verify_copy_element(to, i * c->to_row + j, from, i * c->from_row + j, half);
  } else {
    for (int64_t i = 0; i < c->rows; ++i)
      for (int64_t j = 0; j < c->columns; ++j)
        gdn_verify_copy_element(to, i * c->to_row + j * c->to_column, from,
                                i * c->from_row + j * c->from_column, half);
  }
}

static gdn_verify_copy transpose(gdn_verify_copy c) {
  gdn_verify_copy t;
  t.rows = c.columns;
  t.columns = c.rows;
  t.to_row = c.to_column;
  t.to_column = c.to_row;
  t.from_row = c.from_column;
  t.from_column = c.from_row;
  return t;
}

/* The [D, S] window of one sequence and layer. */
static void copy_window(const gdn_verify_commit_problem *p, void *to, const void *from) {
  gdn_verify_copy c;
  c.rows = p->d_inner;
  c.columns = p->state_len;
  c.to_row = p->state_channel;
  c.to_column = p->state_column;
  c.from_row = p->snapshot_channel;
  c.from_column = p->snapshot_column;
  /* channels innermost where they lie side by side on either end; one run where they can be */
  if (c.to_row == 1 || (c.from_row == 1 && c.to_column != 1)) {
    c = transpose(c);
  } else if (c.to_column == 1 && c.from_column == 1 && c.to_row == c.columns &&
             c.from_row == c.columns) {
    c.columns *= c.rows;
    c.rows = 1;
  }
  if (p->element_size == 2)
    copy_elements(&c, to, from, 1);
  else
    copy_elements(&c, to, from, 0);
}

static void commit_range(void *context, int64_t begin, int64_t end) {
  const gdn_verify_commit_problem *p = (const gdn_verify_commit_problem *)context;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t layer = i / p->n_seq;
    int64_t slot, row, snapshot;
    if (gdn_verify_resolve_commit(p, i % p->n_seq, &slot, &row, &snapshot) != GDN_VERIFY_RUN)
      continue;
    char *to = (char *)p->conv_states[layer].data + slot * p->state_slot * p->element_size;
    const char *from = (const char *)p->snapshots[layer].data +
                       (row * p->snapshot_row + snapshot * p->snapshot_token) * p->element_size;
    copy_window(p, to, from);
  }
}

gdn_verify_status gdn_verify_commit_cpu(const gdn_verify_commit_params *params,
                                        gdn_verify_error *err) {
  gdn_verify_commit_problem p;
  gdn_verify_status status = gdn_verify_make_commit_problem(params, &p, err);
  if (status != GDN_VERIFY_OK || p.n_layers == 0) return status;
  status = gdn_verify_check_commit_indices(&p, err);
  if (status != GDN_VERIFY_OK) return status;

  const int64_t bytes = 2 * p.d_inner * p.state_len * p.element_size;
  gdn_verify_run_ranges(params->parallel_for, p.n_layers * p.n_seq,
                        GDN_VERIFY_COMMIT_THREAD_BYTES / (bytes + 1) + 1, commit_range, &p);
  return GDN_VERIFY_OK;
}
