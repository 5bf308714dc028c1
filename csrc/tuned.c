/* tuned.c - the tuned table: which launch configuration measured best for a call, by its shape.
 *
 * A table is a hash table with open addressing, at most half full, so a lookup is one or two
 * comparisons. It never changes once it is published through `current`. Launches read that pointer
 * and take no lock; loading builds a new table and swaps the pointer. A launch may still be reading
 * the table that was replaced, so replaced tables are never freed: they stay chained behind the
 * current one, some 100 bytes an entry and load. Programs load once, and again after tuning.
 */
#include "tuned.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

/* More than anyone measures; keeps sizes far from overflow. */
#define MAX_ENTRIES ((int64_t)1 << 24)

typedef struct tuned_table {
  struct tuned_table *replaced; /* only to keep it reachable; nobody follows it */
  int64_t count;                /* entries given */
  uint64_t mask;                /* slots - 1, a power of two minus 1 */
  gdn_verify_tuned slots[];     /* config -1: free */
} tuned_table;

static _Atomic(tuned_table *) current;

/* ---- the hash table -------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, int64_t value) {
  return (hash ^ (uint64_t)value) * UINT64_C(0x9E3779B97F4A7C15);
}

static uint64_t hash_of(const gdn_verify_tuned *key) {
  const int32_t small[] = {key->device,    key->snapshots,   key->input_dtype, key->state_dtype,
                           key->state_len, key->token_major, key->rollback,    key->pdl};
  uint64_t packed = 0; /* each is small, and a clash is only a comparison more */
  for (size_t i = 0; i < sizeof small / sizeof small[0]; ++i)
    packed = packed * 16 + (uint64_t)small[i];
  uint64_t hash = mix(0, (int64_t)packed);
  hash = mix(hash, key->d_inner);
  hash = mix(hash, key->qk_channels);
  hash = mix(hash, key->n_seq);
  hash = mix(hash, key->num_tokens);
  return hash ^ hash >> 32;
}

static int same_key(const gdn_verify_tuned *a, const gdn_verify_tuned *b) {
  return a->num_tokens == b->num_tokens && a->n_seq == b->n_seq && a->d_inner == b->d_inner &&
         a->qk_channels == b->qk_channels && a->device == b->device &&
         a->snapshots == b->snapshots && a->input_dtype == b->input_dtype &&
         a->state_dtype == b->state_dtype && a->state_len == b->state_len &&
         a->token_major == b->token_major && a->rollback == b->rollback && a->pdl == b->pdl;
}

/* The slot that holds the key, or the free one where it belongs. */
static size_t slot_of(const tuned_table *table, const gdn_verify_tuned *key) {
  uint64_t i = hash_of(key) & table->mask;
  while (table->slots[i].config >= 0 && !same_key(&table->slots[i], key)) i = (i + 1) & table->mask;
  return (size_t)i;
}

static tuned_table *make_table(const gdn_verify_tuned *entries, int64_t n) {
  uint64_t slots = 2;
  while (slots < 2 * (uint64_t)n) slots *= 2;
  tuned_table *table =
      (tuned_table *)calloc(1, sizeof *table + (size_t)slots * sizeof table->slots[0]);
  if (!table) return NULL;
  table->count = n;
  table->mask = slots - 1;
  for (uint64_t i = 0; i < slots; ++i) table->slots[i].config = -1;
  for (int64_t i = 0; i < n; ++i) table->slots[slot_of(table, &entries[i])] = entries[i];
  return table;
}

/* ---- the interface --------------------------------------------------------------------------- */

gdn_verify_status gdn_verify_load_tuned(const gdn_verify_tuned *entries, int64_t n,
                                        gdn_verify_error *err) {
  if (n < 0 || n > MAX_ENTRIES)
    return gdn_verify_fail(err, GDN_VERIFY_INVALID,
                           "n must be from 0 to %" PRId64 ", but is %" PRId64, MAX_ENTRIES, n);
  if (n > 0 && !entries)
    return gdn_verify_fail(err, GDN_VERIFY_INVALID, "entries must be given, but is a null pointer");
  for (int64_t i = 0; i < n; ++i)
    if (entries[i].config < 0)
      return gdn_verify_fail(err, GDN_VERIFY_INVALID,
                             "entries[%" PRId64 "].config must be 0 or more, but is %" PRId32, i,
                             entries[i].config);
  tuned_table *table = make_table(entries, n);
  if (!table)
    return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                           "there is no memory for a tuned table of %" PRId64 " entries", n);
  table->replaced = atomic_exchange_explicit(&current, table, memory_order_acq_rel);
  if (err) err->text[0] = '\0';
  return GDN_VERIFY_OK;
}

int gdn_verify_has_tuned(void) {
  const tuned_table *table = atomic_load_explicit(&current, memory_order_acquire);
  return table && table->count > 0;
}

int gdn_verify_find_tuned(const gdn_verify_problem *problem, int device, int pdl) {
  const tuned_table *table = atomic_load_explicit(&current, memory_order_acquire);
  if (!table || table->count == 0) return -1;
  const int windows = problem->snapshot_kind == GDN_VERIFY_WINDOWS;
  gdn_verify_tuned key;
  key.device = device;
  key.snapshots = problem->snapshot_kind;
  key.input_dtype = problem->input_dtype;
  key.state_dtype = problem->state_dtype;
  key.state_len = problem->state_len;
  key.token_major = windows          ? problem->snapshot_channel == 1
                    : problem->state ? problem->state_channel == 1
                                     : 1;
  key.rollback = problem->accepted != NULL;
  key.pdl = pdl != 0;
  key.d_inner = problem->d_inner;
  key.qk_channels = problem->qk_channels;
  key.n_seq = problem->n_seq;
  key.num_tokens = problem->num_tokens;
  return table->slots[slot_of(table, &key)].config;
}

int gdn_verify_tuned_config(const gdn_verify_params *params, int device) {
  gdn_verify_problem problem;
  if (gdn_verify_make_problem(params, &problem, NULL) != GDN_VERIFY_OK || problem.n_seq == 0)
    return -1;
  return gdn_verify_find_tuned(&problem, device, params->pdl);
}
