/* test_core.c - the C ABI from C, for the sanitizers: no Python, no torch.
 *
 * Draws calls at random (shapes, dtypes, layouts, options; seeded, so every run is the same), gives
 * every tensor memory of exactly its size, and compares bytes: the batched operator against one
 * single-sequence call per sequence, whatever the threads. Then commit, calls that must fail, and the
 * tuned table, which is replaced while others look into it.
 *
 *   test_core [calls]     prints one line, exits with 1 on the first difference
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/gdn_verify.h"

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: call %d: not %s\n", __FILE__, __LINE__, g_call, #condition); \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

static int g_call; /* for messages */

/* ---- random tensors -------------------------------------------------------------------------- */

typedef struct source {
  uint64_t state;
} source;

static int32_t draw(source *random, int32_t count) { /* 0 .. count - 1 */
  random->state = random->state * 6364136223846793005u + 1442695040888963407u;
  return (int32_t)((random->state >> 33) % (uint64_t)count);
}

static size_t element_size(int32_t dtype) {
  return dtype == GDN_VERIFY_FLOAT32 || dtype == GDN_VERIFY_INT32 ? 4 : 2;
}

static size_t byte_size(const gdn_verify_tensor *t) { /* from element 0 to the last one */
  int64_t last = 0;
  for (int32_t i = 0; i < t->ndim; ++i) {
    if (t->shape[i] == 0) return 0;
    last += (t->shape[i] - 1) * t->stride[i];
  }
  return (size_t)(last + 1) * element_size(t->dtype);
}

static void fill(source *random, gdn_verify_tensor *t) { /* finite values around 1 */
  const size_t count = byte_size(t) / element_size(t->dtype);
  for (size_t i = 0; i < count; ++i) {
    const float value = (float)(draw(random, 4001) - 2000) / 512.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (t->dtype == GDN_VERIFY_FLOAT32) {
      memcpy((float *)t->data + i, &value, sizeof value);
    } else if (t->dtype == GDN_VERIFY_BFLOAT16) {
      ((uint16_t *)t->data)[i] = (uint16_t)(bits >> 16);
    } else if (t->dtype == GDN_VERIFY_FLOAT16) {
      ((uint16_t *)t->data)[i] =
          (uint16_t)(0x2C00 + draw(random, 0x1400) + 0x8000 * draw(random, 2));
    }
  }
}

/* Contiguous but for `gap` elements between rows; exactly as much memory as is used, all zero. */
static gdn_verify_tensor make(int32_t dtype, int32_t ndim, const int64_t *shape, int64_t gap) {
  gdn_verify_tensor t;
  memset(&t, 0, sizeof t);
  t.ndim = ndim;
  t.dtype = dtype;
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride = stride * shape[i] + (i == ndim - 1 ? gap : 0);
  }
  const size_t bytes = byte_size(&t);
  t.data = calloc(1, bytes ? bytes : 1);
  CHECK(t.data != NULL);
  return t;
}

/* [.., D, S] kept as [.., S, D] in memory. */
static void make_token_major(gdn_verify_tensor *t) {
  t->stride[t->ndim - 2] = 1;
  t->stride[t->ndim - 1] = t->shape[t->ndim - 2];
}

static gdn_verify_tensor copy(const gdn_verify_tensor *t) {
  gdn_verify_tensor made = *t;
  if (t->ndim == 0) return made;
  const size_t bytes = byte_size(t);
  made.data = calloc(1, bytes ? bytes : 1);
  CHECK(made.data != NULL);
  memcpy(made.data, t->data, bytes);
  return made;
}

static void *element(const gdn_verify_tensor *t, int64_t offset) {
  return (char *)t->data + offset * (int64_t)element_size(t->dtype);
}

/* Entry `index` of the first dimension. */
static gdn_verify_tensor entry(const gdn_verify_tensor *t, int64_t index) {
  gdn_verify_tensor made = *t;
  if (t->ndim == 0) return made;
  made.data = element(t, index * t->stride[0]);
  made.ndim = t->ndim - 1;
  for (int32_t i = 0; i < made.ndim; ++i) {
    made.shape[i] = t->shape[i + 1];
    made.stride[i] = t->stride[i + 1];
  }
  return made;
}

/* Entries begin .. begin + count - 1 of the first dimension. */
static gdn_verify_tensor range(const gdn_verify_tensor *t, int64_t begin, int64_t count) {
  gdn_verify_tensor made = *t;
  if (t->ndim == 0) return made;
  made.data = element(t, begin * t->stride[0]);
  made.shape[0] = count;
  return made;
}

static int32_t *ints(const gdn_verify_tensor *t) { return (int32_t *)t->data; }

static int same(const gdn_verify_tensor *a, const gdn_verify_tensor *b) {
  return a->ndim == 0 || memcmp(a->data, b->data, byte_size(a)) == 0;
}

/* ---- one drawn call -------------------------------------------------------------------------- */

static void one_range(int64_t count, int64_t grain, gdn_verify_range_fn body, void *context) {
  (void)grain;
  if (count > 0) body(context, 0, count);
}

/* make() with random contents; up to four sizes. */
static gdn_verify_tensor drawn(source *random, int32_t dtype, int32_t ndim, int64_t a, int64_t b,
                               int64_t c, int64_t d, int64_t gap) {
  const int64_t shape[GDN_VERIFY_MAX_DIMS] = {a, b, c, d};
  gdn_verify_tensor t = make(dtype, ndim, shape, gap);
  fill(random, &t);
  return t;
}

/* The snapshots, and what may be drawn only with them. Returns how many tokens they hold. */
static void draw_snapshots(source *random, gdn_verify_params *p, int64_t n_seq, int64_t tokens,
                           int64_t d_inner, int64_t state_len, int32_t dtype) {
  const int64_t n_rows = n_seq + 1, extra = draw(random, 3);
  const int history = draw(random, 2);
  if (history) {
    p->conv_state_inter =
        drawn(random, dtype, 3, n_rows, state_len - 1 + tokens + extra, d_inner, 0, 0);
  } else {
    p->conv_state_inter = drawn(random, dtype, 4, n_rows, tokens + extra, d_inner, state_len, 0);
    if (draw(random, 2)) make_token_major(&p->conv_state_inter);
  }
  if (draw(random, 2)) {
    p->inter_indices = drawn(random, GDN_VERIFY_INT32, 1, n_seq, 0, 0, 0, 0);
    for (int64_t i = 0; i < n_seq; ++i) ints(&p->inter_indices)[i] = (int32_t)(n_seq - i);
  }
  if (draw(random, 2)) {
    p->num_accepted_tokens = drawn(random, GDN_VERIFY_INT32, 1, n_seq, 0, 0, 0, 0);
    for (int64_t i = 0; i < n_seq; ++i) {
      ints(&p->num_accepted_tokens)[i] = draw(random, (int32_t)tokens + 1);
    }
  }
}

static gdn_verify_params draw_call(source *random) {
  static const int64_t head_dims[] = {1, 5, 8, 32, 33, 64, 128};
  gdn_verify_params p;
  memset(&p, 0, sizeof p);
  const int64_t n_seq = 1 + draw(random, 5), tokens = 1 + draw(random, 7);
  const int64_t d_conv = 2 + draw(random, 7);
  const int64_t state_len = d_conv - draw(random, 2);
  p.head_dim = head_dims[draw(random, 7)];
  p.qk_channels = p.head_dim * draw(random, 4);
  const int64_t d_inner = p.qk_channels + draw(random, 70);
  const int32_t input = draw(random, 3), state = draw(random, 3);
  const int32_t output = draw(random, 2) ? input : GDN_VERIFY_FLOAT32;
  const int64_t gap = draw(random, 2) * 3;

  const int ragged = draw(random, 3) == 0;
  int64_t total = 0;
  if (ragged) {
    p.cu_seqlens = drawn(random, GDN_VERIFY_INT32, 1, n_seq + 1, 0, 0, 0, 0);
    for (int64_t i = 0; i < n_seq; ++i) {
      total += draw(random, (int32_t)tokens + 1);
      ints(&p.cu_seqlens)[i + 1] = (int32_t)total;
    }
    total += draw(random, 3); /* rows of nobody */
    p.new_input = drawn(random, input, 2, total, d_inner, 0, 0, gap);
    p.output = drawn(random, output, 2, total, d_inner, 0, 0, gap);
  } else {
    p.new_input = drawn(random, input, 3, n_seq, tokens, d_inner, 0, gap);
    p.output = drawn(random, output, 3, n_seq, tokens, d_inner, 0, gap);
  }
  p.weight = drawn(random, draw(random, 2) ? input : GDN_VERIFY_FLOAT32, 2, d_inner, d_conv, 0, 0,
                   draw(random, 2));
  if (draw(random, 2)) p.bias = drawn(random, input, 1, d_inner, 0, 0, 0, 0);
  p.conv_state = drawn(random, state, 3, n_seq + 2, d_inner, state_len, 0, 0);
  if (draw(random, 2)) make_token_major(&p.conv_state);
  if (draw(random, 3)) draw_snapshots(random, &p, n_seq, tokens, d_inner, state_len, state);
  if (draw(random, 2)) {
    p.conv_state_indices = drawn(random, GDN_VERIFY_INT32, 1, n_seq, 0, 0, 0, 0);
    for (int64_t i = 0; i < n_seq; ++i) {
      ints(&p.conv_state_indices)[i] = i == 1 ? -draw(random, 2) : (int32_t)(n_seq + 1 - i);
    }
  }
  if (p.conv_state_inter.ndim != 3 && draw(random, 3) == 0) {
    p.parent_index = drawn(random, GDN_VERIFY_INT32, 2, n_seq, tokens, 0, 0, 0);
    for (int64_t i = 0; i < n_seq * tokens; ++i) {
      ints(&p.parent_index)[i] = draw(random, (int32_t)(i % tokens) + 1) - 1;
    }
  }
  p.l2_eps = 1e-6;
  p.pad_slot_id = 0;
  p.max_num_tokens = ragged ? tokens : -1;
  p.activation = draw(random, 4) ? GDN_VERIFY_SILU : GDN_VERIFY_NO_ACTIVATION;
  p.update_state = draw(random, 4) != 0;
  p.config = -1;
  p.parallel_for = draw(random, 2) ? one_range : NULL;
  return p;
}

static void release(gdn_verify_params *p) {
  gdn_verify_tensor *all[] = {&p->conv_state,
                              &p->new_input,
                              &p->weight,
                              &p->output,
                              &p->conv_state_inter,
                              &p->bias,
                              &p->conv_state_indices,
                              &p->inter_indices,
                              &p->cu_seqlens,
                              &p->num_accepted_tokens,
                              &p->parent_index};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]->data);
}

/* Sequence by sequence what the batched call `p` says, into p's tensors. */
static void run_singles(const gdn_verify_params *p, int64_t n_seq) {
  const gdn_verify_tensor absent = {0};
  memset(p->output.data, 0, byte_size(&p->output)); /* padding, rows of nobody */
  for (int64_t i = 0; i < n_seq; ++i) {
    const int64_t slot = p->conv_state_indices.ndim ? ints(&p->conv_state_indices)[i] : i;
    const int64_t row = p->inter_indices.ndim ? ints(&p->inter_indices)[i] : i;
    const int padding = p->conv_state_indices.ndim && (slot < 0 || slot == p->pad_slot_id);
    gdn_verify_params single = *p;
    single.op = GDN_VERIFY_OP_SINGLE;
    single.cu_seqlens = single.conv_state_indices = single.inter_indices = absent;
    single.max_num_tokens = -1;
    single.pad_slot_id = -1;
    if (p->cu_seqlens.ndim) {
      const int64_t begin = ints(&p->cu_seqlens)[i];
      const int64_t count = ints(&p->cu_seqlens)[i + 1] - begin;
      single.new_input = range(&p->new_input, begin, count);
      single.output = range(&p->output, begin, count);
    } else {
      single.new_input = entry(&p->new_input, i);
      single.output = entry(&p->output, i);
    }
    if (padding || single.new_input.shape[0] == 0) continue;
    single.conv_state = entry(&p->conv_state, slot);
    single.conv_state_inter = entry(&p->conv_state_inter, row);
    single.num_accepted_tokens = range(&p->num_accepted_tokens, i, 1);
    single.parent_index = entry(&p->parent_index, i);
    if (p->parent_index.ndim) single.parent_index.shape[0] = single.new_input.shape[0];
    gdn_verify_error err;
    const gdn_verify_status status = gdn_verify_conv_cpu(&single, &err);
    if (status != GDN_VERIFY_OK) fprintf(stderr, "%s\n", err.text);
    CHECK(status == GDN_VERIFY_OK);
  }
}

/* Gaps between rows of the output belong to nobody: both runs start from the same bytes there. */
static void check_call(source *random) {
  gdn_verify_params p = draw_call(random);
  const int64_t n_seq = p.cu_seqlens.ndim ? p.cu_seqlens.shape[0] - 1 : p.new_input.shape[0];
  memset(p.output.data, 0, byte_size(&p.output));
  gdn_verify_params q = p;
  q.conv_state = copy(&p.conv_state);
  q.output = copy(&p.output);
  q.conv_state_inter = copy(&p.conv_state_inter);
  gdn_verify_error err;
  const gdn_verify_status status = gdn_verify_conv_cpu(&p, &err);
  if (status != GDN_VERIFY_OK) fprintf(stderr, "%s\n", err.text);
  CHECK(status == GDN_VERIFY_OK && err.text[0] == 0);
  run_singles(&q, n_seq);
  CHECK(same(&p.output, &q.output));
  CHECK(same(&p.conv_state_inter, &q.conv_state_inter));
  CHECK(same(&p.conv_state, &q.conv_state));
  free(q.conv_state.data);
  free(q.output.data);
  free(q.conv_state_inter.data);
  release(&p);
}

/* ---- commit, and calls that must fail -------------------------------------------------------- */

static void check_commit(source *random) {
  enum {
    LAYERS = 3,
    N = 4,
    K = 5,
    D = 37,
    S = 4
  };
  for (int history = 0; history < 2; ++history) {
    gdn_verify_tensor states[LAYERS], snapshots[LAYERS], before[LAYERS];
    gdn_verify_commit_params p;
    memset(&p, 0, sizeof p);
    for (int layer = 0; layer < LAYERS; ++layer) {
      states[layer] = drawn(random, GDN_VERIFY_BFLOAT16, 3, N, D, S, 0, 0);
      before[layer] = copy(&states[layer]);
      snapshots[layer] = history ? drawn(random, GDN_VERIFY_BFLOAT16, 3, N, S - 1 + K, D, 0, 0)
                                 : drawn(random, GDN_VERIFY_BFLOAT16, 4, N, K, D, S, 0);
    }
    p.conv_states = states;
    p.snapshots = snapshots;
    p.n_layers = LAYERS;
    p.pad_slot_id = -1;
    p.num_accepted = drawn(random, GDN_VERIFY_INT32, 1, N, 0, 0, 0, 0);
    for (int i = 0; i < N; ++i) ints(&p.num_accepted)[i] = i == 0 ? 0 : 1 + draw(random, K);
    gdn_verify_error err;
    CHECK(gdn_verify_commit_cpu(&p, &err) == GDN_VERIFY_OK);
    for (int64_t e = 0; e < (int64_t)LAYERS * N * D * S; ++e) {
      const int64_t column = e % S, channel = e / S % D, i = e / (S * D) % N, l = e / (S * D * N);
      const int64_t t = ints(&p.num_accepted)[i] - 1;
      const uint16_t *from = (const uint16_t *)snapshots[l].data;
      uint16_t want = ((const uint16_t *)before[l].data)[e % (N * D * S)];
      if (t >= 0 && history) want = from[(i * (S - 1 + K) + t + column) * D + channel];
      if (t >= 0 && !history) want = from[((i * K + t) * D + channel) * S + column];
      CHECK(((const uint16_t *)states[l].data)[e % (N * D * S)] == want);
    }
    for (int layer = 0; layer < LAYERS; ++layer) {
      free(states[layer].data);
      free(before[layer].data);
      free(snapshots[layer].data);
    }
    free(p.num_accepted.data);
  }
}

static void must_fail(const gdn_verify_params *p, gdn_verify_status status, const char *name) {
  gdn_verify_tensor output = copy(&p->output), state = copy(&p->conv_state);
  gdn_verify_error err;
  CHECK(gdn_verify_conv_cpu(p, &err) == status);
  CHECK(strstr(err.text, name) != NULL);
  CHECK(same(&output, &p->output) && same(&state, &p->conv_state)); /* nothing was written */
  free(output.data);
  free(state.data);
}

static void check_errors(source *random) {
  gdn_verify_params p, wrong;
  memset(&p, 0, sizeof p);
  p.new_input = drawn(random, GDN_VERIFY_BFLOAT16, 3, 2, 3, 16, 0, 0);
  p.output = drawn(random, GDN_VERIFY_BFLOAT16, 3, 2, 3, 16, 0, 0);
  p.weight = drawn(random, GDN_VERIFY_BFLOAT16, 2, 16, 4, 0, 0, 0);
  p.conv_state = drawn(random, GDN_VERIFY_FLOAT32, 3, 2, 16, 4, 0, 0);
  p.conv_state_inter = drawn(random, GDN_VERIFY_FLOAT32, 4, 2, 3, 16, 4, 0);
  p.conv_state_indices = drawn(random, GDN_VERIFY_INT32, 1, 2, 0, 0, 0, 0);
  ints(&p.conv_state_indices)[1] = 1;
  p.qk_channels = 8;
  p.head_dim = 4;
  p.l2_eps = 1e-6;
  p.pad_slot_id = p.config = p.max_num_tokens = -1;
  p.update_state = 1;
  gdn_verify_error err;
  CHECK(gdn_verify_check_params(&p, &err) == GDN_VERIFY_OK);

  wrong = p, wrong.head_dim = 3;
  must_fail(&wrong, GDN_VERIFY_INVALID, "head_dim");
  wrong = p, wrong.l2_eps = -1.0;
  must_fail(&wrong, GDN_VERIFY_INVALID, "l2_eps");
  wrong = p, wrong.output = p.new_input;
  must_fail(&wrong, GDN_VERIFY_INVALID, "output");
  wrong = p, wrong.conv_state_inter.shape[1] = 2;
  must_fail(&wrong, GDN_VERIFY_INVALID, "conv_state_inter");
  wrong = p, wrong.weight.shape[1] = 9;
  must_fail(&wrong, GDN_VERIFY_INVALID, "weight");
  ints(&p.conv_state_indices)[1] = 2;
  must_fail(&p, GDN_VERIFY_BAD_INDEX, "conv_state_indices");
  release(&p);
}

/* ---- the tuned table ------------------------------------------------------------------------- */

#define TUNED 64 /* entries: n_seq 1 .. 64, config n_seq */

static void load_tuned(int64_t count) {
  gdn_verify_tuned entries[TUNED];
  gdn_verify_error err;
  memset(entries, 0, sizeof entries);
  for (int32_t i = 0; i < TUNED; ++i) {
    entries[i].snapshots = GDN_VERIFY_NO_SNAPSHOTS;
    entries[i].input_dtype = entries[i].state_dtype = GDN_VERIFY_BFLOAT16;
    entries[i].state_len = 4;
    entries[i].config = i + 1;
    entries[i].d_inner = 16;
    entries[i].qk_channels = 8;
    entries[i].n_seq = i + 1;
    entries[i].num_tokens = 3;
  }
  CHECK(gdn_verify_load_tuned(entries, count, &err) == GDN_VERIFY_OK);
}

static void look_up(source *random, int64_t n_seq, int64_t least) { /* `least` entries at least */
  gdn_verify_params p;
  memset(&p, 0, sizeof p);
  p.new_input = drawn(random, GDN_VERIFY_BFLOAT16, 3, n_seq, 3, 16, 0, 0);
  p.output = drawn(random, GDN_VERIFY_BFLOAT16, 3, n_seq, 3, 16, 0, 0);
  p.weight = drawn(random, GDN_VERIFY_BFLOAT16, 2, 16, 4, 0, 0, 0);
  p.conv_state = drawn(random, GDN_VERIFY_BFLOAT16, 3, n_seq, 16, 4, 0, 0);
  p.qk_channels = 8;
  p.head_dim = 4;
  p.pad_slot_id = p.config = p.max_num_tokens = -1;
  const int config = gdn_verify_tuned_config(&p, 0);
  CHECK(config == n_seq || (config == -1 && n_seq > least));
  CHECK(gdn_verify_tuned_config(&p, 1) == -1);
  p.pdl = 1;
  CHECK(gdn_verify_tuned_config(&p, 0) == -1);
  release(&p);
}

static void *look_up_often(void *seed) {
  source random = {*(const uint64_t *)seed};
  for (int i = 0; i < 500; ++i) look_up(&random, 1 + draw(&random, TUNED + 1), TUNED / 2);
  return NULL;
}

static void check_tuned(source *random) {
  uint64_t seeds[2] = {4, 5};
  pthread_t threads[2];
  look_up(random, 1, 0); /* before any table */
  load_tuned(TUNED);
  for (int i = 0; i < 2; ++i) CHECK(!pthread_create(&threads[i], NULL, look_up_often, &seeds[i]));
  for (int i = 0; i < 50; ++i) load_tuned(i % 2 ? TUNED : TUNED / 2);
  for (int i = 0; i < 2; ++i) CHECK(!pthread_join(threads[i], NULL));
  for (int64_t n_seq = 1; n_seq <= TUNED; ++n_seq) look_up(random, n_seq, TUNED);
  load_tuned(0);
  look_up(random, 1, 0);
}

/* ---- */

static int g_calls = 1000;

static void *check_calls(void *seed) {
  source random = {*(const uint64_t *)seed};
  for (int i = 0; i < g_calls; ++i) check_call(&random);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc > 1) g_calls = atoi(argv[1]);
  uint64_t seeds[2] = {1, 2};
  source random = {3};
  for (; g_call < g_calls; ++g_call) check_call(&random);
  check_commit(&random);
  check_errors(&random);
  check_tuned(&random);
  pthread_t threads[2]; /* all functions may be called from any number of threads at once */
  for (int i = 0; i < 2; ++i) CHECK(!pthread_create(&threads[i], NULL, check_calls, &seeds[i]));
  for (int i = 0; i < 2; ++i) CHECK(!pthread_join(threads[i], NULL));
  printf("test_core: %d calls, level %s: bytes equal\n", 3 * g_calls, gdn_verify_cpu_level());
  return 0;
}
