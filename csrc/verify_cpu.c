/* verify_cpu.c - the CPU backend of the operator: cuts the work into units and runs them.
 *
 * A unit is a range of channels of one sequence with all of its tokens: whole heads, a chunk of a
 * head that is larger than GDN_VERIFY_CHUNK, or a chunk of the v part. It alone touches its channels
 * of the sequence's output, state and snapshots, and reads what it needs of old state and old
 * snapshots before it writes any (cpu_kernel.h). So units run in any order, on any thread.
 *
 * Heads larger than a chunk take two rounds: the first sums the squares of every token and head and
 * writes nothing but these totals, the second computes again and scales. The work of a sequence
 * beyond the last is to zero the packed output rows that no sequence owns.
 *
 * Flags: those of cpu_levels.c, which says why.
 */
#include "cpu_internal.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of input, output and snapshots that are worth a thread. */
#define GDN_VERIFY_THREAD_BYTES 262144
/* Bytes of snapshots beyond which they are written past the caches: nothing reads them before the
 * next verify, and those of a model's dozens of layers would drive out what is read. */
#ifndef GDN_VERIFY_STREAM_BYTES /* the fuzzer sets it low */
#define GDN_VERIFY_STREAM_BYTES 2097152
#endif

typedef struct gdn_verify_plan {
  const gdn_verify_problem *p;
  const gdn_verify_cpu_kernels *kernels;
  int64_t heads;           /* L2 groups */
  int64_t heads_per_unit;  /* 0 where a head is larger than a chunk */
  int64_t chunks_per_head; /* 1 where it is not */
  int64_t qk_units;        /* the first units of a sequence, of its q and k heads */
  int64_t units;           /* of a sequence */
  int stream;
  float *totals; /* [rows of all sequences, heads]; null where no head is cut */
} gdn_verify_plan;

static int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Of a channel and token. */
static int64_t snapshot_bytes(const gdn_verify_problem *p) {
  if (p->snapshot_kind == GDN_VERIFY_NO_SNAPSHOTS) return 0;
  return gdn_verify_dtype_size(p->state_dtype) *
         (p->snapshot_kind == GDN_VERIFY_WINDOWS ? p->state_len : 1);
}

/* ---- units ----------------------------------------------------------------------------------- */

static void make_plan(const gdn_verify_problem *p, gdn_verify_plan *plan) {
  plan->p = p;
  plan->kernels = gdn_verify_current_kernels();
  plan->heads = p->qk_channels / p->head_dim;
  plan->heads_per_unit = GDN_VERIFY_CHUNK / p->head_dim;
  plan->chunks_per_head = divide_up(p->head_dim, GDN_VERIFY_CHUNK);
  plan->qk_units = plan->heads_per_unit ? divide_up(plan->heads, plan->heads_per_unit)
                                        : plan->heads * plan->chunks_per_head;
  plan->units = plan->qk_units + divide_up(p->d_inner - p->qk_channels, GDN_VERIFY_CHUNK);
  plan->stream =
      snapshot_bytes(p) * p->num_tokens * p->d_inner >= GDN_VERIFY_STREAM_BYTES / p->n_seq;
  plan->totals = NULL;
}

/* Row of plan->totals of token 0 of a sequence. */
static int64_t first_row(const gdn_verify_problem *p, int64_t seq) {
  return p->cu_seqlens ? p->cu_seqlens[seq * p->cu_seqlens_stride] : seq * p->num_tokens;
}

static gdn_verify_unit chunk_of_head(const gdn_verify_plan *plan, int64_t seq, int64_t head,
                                     int64_t chunk, gdn_verify_norm norm) {
  const gdn_verify_problem *p = plan->p;
  const int64_t offset = chunk * GDN_VERIFY_CHUNK;
  gdn_verify_unit unit;
  unit.channel = head * p->head_dim + offset;
  unit.count = min_int64(GDN_VERIFY_CHUNK, p->head_dim - offset);
  unit.norm = norm;
  unit.totals = plan->totals + first_row(p, seq) * plan->heads + head;
  unit.totals_stride = plan->heads;
  unit.stream = plan->stream;
  return unit;
}

static gdn_verify_unit unit_at(const gdn_verify_plan *plan, int64_t seq, int64_t index) {
  const gdn_verify_problem *p = plan->p;
  if (index < plan->qk_units && !plan->heads_per_unit)
    return chunk_of_head(plan, seq, index / plan->chunks_per_head, index % plan->chunks_per_head,
                         GDN_VERIFY_NORM_SCALE);
  gdn_verify_unit unit;
  unit.totals = NULL;
  unit.totals_stride = 0;
  unit.stream = plan->stream;
  if (index < plan->qk_units) {
    const int64_t channels = plan->heads_per_unit * p->head_dim;
    unit.channel = index * channels;
    unit.count = min_int64(channels, p->qk_channels - unit.channel);
    unit.norm = GDN_VERIFY_NORM_HEADS;
  } else {
    unit.channel = p->qk_channels + (index - plan->qk_units) * GDN_VERIFY_CHUNK;
    unit.count = min_int64(GDN_VERIFY_CHUNK, p->d_inner - unit.channel);
    unit.norm = GDN_VERIFY_NORM_NONE;
  }
  return unit;
}

static void zero_rows(const gdn_verify_problem *p, const gdn_verify_sequence *s,
                      const gdn_verify_unit *unit) {
  const int64_t size = gdn_verify_dtype_size(p->output_dtype);
  char *output = (char *)p->output + (s->output_offset + unit->channel) * size;
  for (int64_t token = 0; token < s->num_rows; ++token)
    memset(output + token * p->output_token * size, 0, (size_t)(unit->count * size));
}

/* The rows beyond those of the last sequence, as a sequence of its own. */
static gdn_verify_verdict resolve_unowned(const gdn_verify_problem *p, gdn_verify_sequence *s) {
  const int64_t begin = p->cu_seqlens[p->n_seq * p->cu_seqlens_stride];
  s->num_rows = p->total_rows - begin;
  s->output_offset = begin * p->output_token;
  return GDN_VERIFY_PADDING;
}

/* Units begin .. end - 1 of all sequences, in their order. */
static void run_units(void *context, int64_t begin, int64_t end) {
  const gdn_verify_plan *plan = (const gdn_verify_plan *)context;
  const gdn_verify_problem *p = plan->p;
  gdn_verify_sequence s;
  gdn_verify_verdict verdict = GDN_VERIFY_EMPTY;
  int64_t current = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t seq = i / plan->units;
    if (seq != current) {
      verdict = seq < p->n_seq ? gdn_verify_resolve(p, seq, &s) : resolve_unowned(p, &s);
      current = seq;
    }
    if (verdict == GDN_VERIFY_EMPTY) continue;
    const gdn_verify_unit unit = unit_at(plan, seq, i % plan->units);
    if (verdict == GDN_VERIFY_RUN)
      plan->kernels->run_unit(p, &s, seq, &unit);
    else
      zero_rows(p, &s, &unit);
  }
}

/* First round where heads are cut: (sequence, head) begin .. end - 1. */
static void sum_heads(void *context, int64_t begin, int64_t end) {
  const gdn_verify_plan *plan = (const gdn_verify_plan *)context;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t seq = i / plan->heads;
    gdn_verify_sequence s;
    if (gdn_verify_resolve(plan->p, seq, &s) != GDN_VERIFY_RUN) continue;
    for (int64_t chunk = 0; chunk < plan->chunks_per_head; ++chunk) {
      const gdn_verify_unit unit =
          chunk_of_head(plan, seq, i % plan->heads, chunk, GDN_VERIFY_NORM_SUM);
      plan->kernels->run_unit(plan->p, &s, seq, &unit);
    }
  }
}

/* Bytes that a channel of one sequence moves, about. */
static int64_t bytes_per_channel(const gdn_verify_problem *p) {
  const int64_t state = gdn_verify_dtype_size(p->state_dtype);
  const int64_t token = gdn_verify_dtype_size(p->input_dtype) +
                        gdn_verify_dtype_size(p->output_dtype) + snapshot_bytes(p);
  return p->num_tokens * token + 2 * p->state_len * state +
         p->d_conv * gdn_verify_dtype_size(p->weight_dtype);
}

gdn_verify_status gdn_verify_conv_cpu(const gdn_verify_params *params, gdn_verify_error *err) {
  gdn_verify_problem problem;
  gdn_verify_status status = gdn_verify_make_problem(params, &problem, err);
  if (status != GDN_VERIFY_OK || problem.n_seq == 0) return status;
  status = gdn_verify_check_indices(&problem, err);
  if (status != GDN_VERIFY_OK) return status;

  gdn_verify_plan plan;
  make_plan(&problem, &plan);
  const int64_t bytes = bytes_per_channel(&problem);
  if (plan.heads > 0 && !plan.heads_per_unit) {
    const int64_t rows = problem.total_rows;
    plan.totals = (float *)calloc((size_t)(rows * plan.heads + 1), sizeof *plan.totals);
    if (!plan.totals)
      return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                             "not enough memory for the L2 norm of %lld rows of %lld heads",
                             (long long)rows, (long long)plan.heads);
    gdn_verify_run_ranges(params->parallel_for, problem.n_seq * plan.heads,
                          divide_up(GDN_VERIFY_THREAD_BYTES, bytes * problem.head_dim), sum_heads,
                          &plan);
  }
  const int64_t sequences = problem.n_seq + (problem.cu_seqlens ? 1 : 0);
  const int64_t unit_bytes = bytes * divide_up(problem.d_inner, plan.units);
  gdn_verify_run_ranges(params->parallel_for, sequences * plan.units,
                        divide_up(GDN_VERIFY_THREAD_BYTES, unit_bytes), run_units, &plan);
  free(plan.totals);
  return GDN_VERIFY_OK;
}
