/* fuzz_core.c - the C ABI under a fuzzer: LLVMFuzzerTestOneInput, for libFuzzer or fuzz_main.c.
 *
 * The bytes decide on a legal call of an operator (sizes, dtypes, layouts, options, index values),
 * then on damage to it: sizes, strides, dimensions, dtypes, pointers, numbers, index values, and
 * tensors in each other's memory. Every tensor has memory of exactly its size (fuzz_memory.h), so
 * that AddressSanitizer sees each access beside it. Checked:
 *
 *   - an error has a text and leaves every byte as it was; a call that passes leaves every byte but
 *     the written elements as it was;
 *   - the operator gives the bits of one call for each sequence on contiguous copies, at another
 *     SIMD level and without threads; a commit those of a plain copy;
 *   - the array functions give the same bits at every level.
 */
#include "fuzz_expect.h"

int LLVMFuzzerTestOneInput(const uint8_t *byte, size_t size);

static const char *const level_names[] = {"baseline", "avx2", "avx512", "none"};

/* ---- calls of which nothing is wrong yet ----------------------------------------------------- */

typedef struct sizes {
  int64_t n_seq, tokens, d_inner, d_conv, state_len, n_slots, n_rows;
} sizes;

/* Strides in an order, with gaps and signs that the bytes choose; `rows`: the last one stays 1. */
static gdn_verify_tensor make(source *in, int32_t dtype, int32_t ndim, const int64_t *shape,
                              int rows) {
  const int style = next(in);
  int order[MAX_DIMS] = {0, 1, 2, 3}; /* outermost first */
  gdn_verify_tensor t;
  memset(&t, 0, sizeof t);
  t.ndim = ndim;
  t.dtype = dtype;
  memcpy(t.shape, shape, (size_t)ndim * sizeof *shape);
  if (style & 1 && ndim > 1 && !rows) {
    order[ndim - 1] = ndim - 2;
    order[ndim - 2] = ndim - 1;
  }
  if (style & 2 && ndim > 2) {
    const int first = order[0];
    order[0] = order[1];
    order[1] = first;
  }
  int64_t stride = style & 128 && !rows ? 2 : 1;
  for (int k = ndim - 1; k >= 0; --k) {
    t.stride[order[k]] = stride;
    stride = stride * shape[order[k]] + (k == ndim - 1 ? style >> 2 & 3 : 0);
  }
  for (int k = 0; k < ndim - rows; ++k)
    if (style >> 4 & (1 << k) & 7) t.stride[k] = -t.stride[k];
  return t;
}

static gdn_verify_tensor make4(source *in, int32_t dtype, int32_t ndim, int64_t a, int64_t b,
                               int64_t c, int64_t d) {
  const int64_t shape[MAX_DIMS] = {a, b, c, d};
  return make(in, dtype, ndim, shape, 0);
}

static sizes draw_sizes(source *in, gdn_verify_params *p) {
  static const int64_t head_dims[] = {8, 1, 5, 32, 33, 64, 128, 300};
  sizes s;
  p->op = (gdn_verify_op)below(in, 3);
  s.n_seq = p->op == GDN_VERIFY_OP_SINGLE ? 1 : (below(in, 5) + 2) % 5;
  s.tokens = p->op == GDN_VERIFY_OP_UPDATE ? 1 : (below(in, 6) + 2) % 6;
  s.d_conv = 2 + below(in, 7);
  s.state_len = s.d_conv - below(in, 2);
  p->head_dim = head_dims[below(in, 8)];
  p->qk_channels = p->head_dim * below(in, p->head_dim > 40 ? 2 : 4);
  s.d_inner = p->qk_channels + next(in) % 40;
  s.n_slots = s.n_seq + below(in, 3);
  s.n_rows = s.n_seq + below(in, 3);
  return s;
}

static sizes draw_call(source *in, gdn_verify_params *p) {
  memset(p, 0, sizeof *p);
  const sizes s = draw_sizes(in, p);
  const int options = next(in) | next(in) << 8;
  const int32_t input = below(in, 3), state = below(in, 3);
  const int batched = p->op == GDN_VERIFY_OP_BATCHED, update = p->op == GDN_VERIFY_OP_UPDATE;
  const int ragged = batched && options & 1;
  const int history = options >> 1 & 1;
  const int snapshots = !update && options & 12;
  const int64_t packed[] = {s.n_seq * s.tokens, s.d_inner};
  const int64_t rows[] = {s.n_seq, s.tokens, s.d_inner}, update_rows[] = {s.n_seq, s.d_inner};
  const int32_t output = options & 16 ? GDN_VERIFY_FLOAT32 : input;

  for (int i = 0; i < 2; ++i)
    *(i ? &p->output : &p->new_input) = make(in, i ? output : input, ragged || update ? 2 : 3,
                                             ragged   ? packed
                                             : update ? update_rows
                                                      : rows,
                                             1);
  p->weight = make4(in, options & 32 ? GDN_VERIFY_FLOAT32 : input, 2, s.d_inner, s.d_conv, 0, 0);
  if (options & 64) p->bias = make4(in, input, 1, s.d_inner, 0, 0, 0);
  p->conv_state = make4(in, state, 3, s.n_slots, s.d_inner, s.state_len, 0);
  if (snapshots && history)
    p->conv_state_inter = make4(in, state, 3, s.n_rows, s.state_len - 1 + s.tokens, s.d_inner, 0);
  else if (snapshots)
    p->conv_state_inter = make4(in, state, 4, s.n_rows, s.tokens, s.d_inner, s.state_len);
  if (snapshots && options & 128)
    p->num_accepted_tokens = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  if (!(snapshots && history) && !update && options & 256)
    p->parent_index = make4(in, GDN_VERIFY_INT32, 2, s.n_seq, s.tokens, 0, 0);
  if (ragged) p->cu_seqlens = make4(in, GDN_VERIFY_INT32, 1, s.n_seq + 1, 0, 0, 0);
  if (snapshots && batched && options & 512)
    p->inter_indices = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  if (p->op != GDN_VERIFY_OP_SINGLE && options & 1024)
    p->conv_state_indices = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  if (snapshots && history && options & 128 && s.state_len == s.d_conv - 1 && options & 2048) {
    memset(&p->conv_state, 0, sizeof p->conv_state);
    memset(&p->conv_state_indices, 0, sizeof p->conv_state_indices);
  }
  if (p->op == GDN_VERIFY_OP_SINGLE) {
    drop_first(&p->new_input);
    drop_first(&p->output);
    drop_first(&p->conv_state);
    drop_first(&p->conv_state_inter);
    drop_first(&p->parent_index);
  }
  p->l2_eps = 1e-6;
  p->pad_slot_id = options & 4096 ? 0 : -1;
  p->max_num_tokens = ragged && (!snapshots || options & 8192) ? s.tokens : -1;
  p->activation = options & 16384 ? GDN_VERIFY_NO_ACTIVATION : GDN_VERIFY_SILU;
  p->update_state = !(options & 32768);
  p->config = -1;
  return s;
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void damage(source *in, argument *a) {
  gdn_verify_tensor *t = a->t;
  const int k = below(in, MAX_DIMS), other = below(in, MAX_DIMS);
  int64_t swap;
  uint64_t factor;
  switch (below(in, 10)) {
  case 0:
    t->shape[k] = wild(in);
    break;
  case 1:
    t->stride[k] = wild(in);
    break;
  case 2:
    t->ndim = (int32_t)wild(in);
    break;
  case 3:
    t->dtype = (int32_t)wild(in);
    break;
  case 4:
    memset(t, 0, sizeof *t);
    break;
  case 5:
    swap = t->stride[k];
    t->stride[k] = t->stride[other];
    t->stride[other] = swap;
    break;
  case 6:
    factor = (uint64_t)(1 + below(in, 3)); /* unsigned, since it may be wild already */
    t->stride[k] = (int64_t)((uint64_t)t->stride[k] * factor + (uint64_t)(below(in, 3) - 1));
    break;
  case 7:
    t->shape[k] = (int64_t)((uint64_t)t->shape[k] + (uint64_t)(below(in, 5) - 2));
    break;
  default:
    a->mode = (data_mode)below(in, WILD_POINTER + 1);
    break;
  }
}

static void damage_number(source *in, gdn_verify_params *p) {
  const uint64_t bits = (uint64_t)wild(in);
  const int64_t number = (int64_t)bits;
  switch (below(in, 9)) {
  case 0:
    p->op = (gdn_verify_op)(uint32_t)bits;
    break;
  case 1:
    p->qk_channels = number;
    break;
  case 2:
    p->head_dim = number;
    break;
  case 3:
    memcpy(&p->l2_eps, &bits, sizeof bits);
    break;
  case 4:
    p->pad_slot_id = number;
    break;
  case 5:
    p->max_num_tokens = number;
    break;
  case 6:
    p->activation = (gdn_verify_activation)(uint32_t)bits;
    break;
  case 7:
    p->update_state = (int32_t)number;
    break;
  default:
    p->config = number;
    break;
  }
}

/* Places and fills all tensors of a call. */
static void place_all(call *c, source *in) {
  for (int i = 0; i < c->n; ++i) place(c, in, &c->arguments[i]);
  fill_pieces(c, next(in));
}

/* Writes legal values into an index tensor, but perhaps one that is just beyond them or wild. */
static void write_indices(source *in, const argument *a, int kind, const sizes *s, int least) {
  const gdn_verify_tensor *t = a->t;
  int64_t index[MAX_DIMS] = {0}, first;
  if (a->piece < 0 || t->dtype != GDN_VERIFY_INT32 || span(t, &first) <= 0 ||
      a->mode == ODD_POINTER)
    return;
  const int shift = next(in), wild_at = rarely(in) ? below(in, 8) : -1;
  int32_t bound = 0;
  int count = 0;
  do {
    int32_t value = 0, beyond = (int32_t)s->tokens + 1;
    if (kind == SLOTS && s->n_slots > 0) {
      value = shift % 5 == 4 && count == shift % 3 ? -1 : (int32_t)((shift + count) % s->n_slots);
      beyond = (int32_t)s->n_slots;
    } else if (kind == ROWS && s->n_rows > 0) {
      value = (int32_t)((shift + count) % s->n_rows);
      beyond = (int32_t)s->n_rows;
    } else if (kind == ACCEPTED) {
      value = least + below(in, (int32_t)s->tokens + 1 - (s->tokens ? least : 0));
    } else if (kind == BOUNDS) {
      value = bound += count ? below(in, (int32_t)s->tokens + 1) : 0;
      beyond = (int32_t)(s->tokens * s->n_seq) + 1;
    } else if (kind == PARENT) {
      beyond = (int32_t)(index[t->ndim - 1] % 250);
      value = below(in, beyond + 1) - 1;
    }
    if (count++ == wild_at) value = shift & 64 ? beyond : (int32_t)wild(in);
    memcpy((char *)t->data + offset_of(t, index), &value, sizeof value);
  } while (advance(t, index));
}

/* ---- the calls ------------------------------------------------------------------------------- */

static int64_t piece_of_work; /* for backwards: so many units at once */

/* A parallel_for that begins with the last range. */
static void backwards(int64_t count, int64_t grain, gdn_verify_range_fn body, void *context) {
  (void)grain;
  for (int64_t end = count; end > 0; end -= piece_of_work)
    body(context, end > piece_of_work ? end - piece_of_work : 0, end);
}

static void set_level(source *in) { (void)gdn_verify_set_cpu_level(level_names[below(in, 4)]); }

static void check_status(gdn_verify_status status, const gdn_verify_error *err) {
  CHECK(memchr(err->text, 0, sizeof err->text) != NULL);
  CHECK((status == GDN_VERIFY_OK) == (err->text[0] == 0));
}

static void fuzz_operator(source *in) {
  gdn_verify_params p;
  call c = {.runnable = 1};
  const sizes s = draw_call(in, &p);
  gdn_verify_tensor *const tensors[N_ARGUMENTS] = {&p.conv_state,
                                                   &p.new_input,
                                                   &p.weight,
                                                   &p.output,
                                                   &p.conv_state_inter,
                                                   &p.bias,
                                                   &p.conv_state_indices,
                                                   &p.inter_indices,
                                                   &p.num_accepted_tokens,
                                                   &p.cu_seqlens,
                                                   &p.parent_index};
  for (c.n = 0; c.n < N_ARGUMENTS; ++c.n) c.arguments[c.n].t = tensors[c.n];
  for (int n = below(in, 4); n > 0; --n) {
    const int which = below(in, N_ARGUMENTS + 2);
    if (which < N_ARGUMENTS)
      damage(in, &c.arguments[which]);
    else
      damage_number(in, &p);
  }
  p.parallel_for = backwards;
  piece_of_work = 1 + below(in, 9);
  place_all(&c, in);
  for (int k = SLOTS; k < N_ARGUMENTS; ++k)
    write_indices(in, &c.arguments[k], k, &s, !p.conv_state.ndim);
  remember(&c);
  set_level(in);

  gdn_verify_error err, checked;
  const gdn_verify_status valid = gdn_verify_check_params(&p, &checked);
  check_status(valid, &checked);
  if (c.runnable) {
    const argument *written[] = {&c.arguments[STATE], &c.arguments[INTER], &c.arguments[OUTPUT]};
    const gdn_verify_status status = gdn_verify_conv_cpu(&p, &err);
    check_status(status, &err);
    CHECK(valid == GDN_VERIFY_OK || (status == valid && strcmp(err.text, checked.text) == 0));
    CHECK(status == valid || status == GDN_VERIFY_BAD_INDEX);
    if (status == GDN_VERIFY_OK) {
      set_level(in);
      expect_call(&c, &p);
    }
    check_pieces(&c, written, status == GDN_VERIFY_OK ? 3 : 0);
    if (status != GDN_VERIFY_OK) CHECK(gdn_verify_conv_cpu(&p, NULL) == status);
  }
  release(&c);
}

enum {
  MAX_LAYERS = 3
};

static void fuzz_commit(source *in) {
  gdn_verify_commit_params p;
  gdn_verify_params shapes; /* of a call that would have left these snapshots */
  gdn_verify_tensor states[MAX_LAYERS], snapshots[MAX_LAYERS], absent;
  call c = {.runnable = 1};
  memset(&p, 0, sizeof p);
  memset(&absent, 0, sizeof absent);
  const sizes s = draw_sizes(in, &shapes);
  const int layers = 1 + below(in, MAX_LAYERS), options = next(in);
  const int32_t dtype = below(in, 3);
  /* the index tensors have the places that they have in the operator */
  for (c.n = 0; c.n < MAX_TENSORS; ++c.n) c.arguments[c.n].t = &absent;
  const source layout = *in;
  for (int i = 0; i < layers; ++i) {
    *in = layout; /* that of the first */
    states[i] = make4(in, dtype, 3, s.n_slots, s.d_inner, s.state_len, 0);
    snapshots[i] = options & 1
                       ? make4(in, dtype, 3, s.n_rows, s.state_len - 1 + s.tokens, s.d_inner, 0)
                       : make4(in, dtype, 4, s.n_rows, s.tokens, s.d_inner, s.state_len);
    c.arguments[2 * i].t = &states[i];
    c.arguments[2 * i + 1].t = &snapshots[i];
  }
  p.num_accepted = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  if (options & 2) p.conv_state_indices = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  if (options & 4) p.inter_indices = make4(in, GDN_VERIFY_INT32, 1, s.n_seq, 0, 0, 0);
  c.arguments[SLOTS].t = &p.conv_state_indices;
  c.arguments[ROWS].t = &p.inter_indices;
  c.arguments[ACCEPTED].t = &p.num_accepted;
  for (int n = below(in, 4); n > 0; --n) damage(in, &c.arguments[below(in, ACCEPTED + 1)]);
  memset(&absent, 0, sizeof absent);
  p.conv_states = states;
  p.snapshots = snapshots;
  p.n_layers = options & 8 && rarely(in) ? (int64_t)below(in, 2) - 1 : layers;
  p.pad_slot_id = options & 16 ? 0 : -1;
  p.parallel_for = backwards;
  piece_of_work = 1 + below(in, 9);
  place_all(&c, in);
  for (int k = SLOTS; k <= ACCEPTED; ++k) write_indices(in, &c.arguments[k], k, &s, 0);
  remember(&c);

  gdn_verify_error err;
  if (c.runnable) {
    const gdn_verify_status status = gdn_verify_commit_cpu(&p, &err);
    const argument *written[MAX_LAYERS] = {&c.arguments[0], &c.arguments[2], &c.arguments[4]};
    check_status(status, &err);
    for (int64_t i = 0; status == GDN_VERIFY_OK && i < p.n_layers * p.num_accepted.shape[0]; ++i) {
      const argument *state = &c.arguments[2 * (i % p.n_layers)];
      if (!is_empty(state->t)) expect_commit(&c, &p, state, state + 1, i / p.n_layers);
    }
    check_pieces(&c, written, status == GDN_VERIFY_OK ? (int)p.n_layers : 0);
  }
  release(&c);
}

/* Any numbers, the same bits at every level. */
static void fuzz_arrays(source *in) {
  const int64_t rows = 1 + below(in, 3), n = (int64_t)(in->left / 4) / rows, count = rows * n;
  const size_t size = (size_t)count * sizeof(float);
  float *x = (float *)exact_copy(in->byte, size), *out[2];
  for (int which = 0; which < 3; ++which) {
    for (int level = 0; level < 3; ++level) {
      float *to = out[level > 0] =
          (float *)malloc(which == 2 ? (size_t)rows * sizeof(float) : size);
      if (gdn_verify_set_cpu_level(level_names[level]) == 0) {
        if (which == 0) gdn_verify_exp_array(x, to, count);
        if (which == 1) gdn_verify_silu_array(x, to, count);
        if (which == 2) gdn_verify_sum_squares_array(x, to, rows, n);
        for (int64_t i = 0; level && i < (which == 2 ? rows : count); ++i)
          CHECK(memcmp(&to[i], &out[0][i], sizeof *to) == 0 ||
                (is_nan(&to[i], GDN_VERIFY_FLOAT32) && is_nan(&out[0][i], GDN_VERIFY_FLOAT32)));
      }
      if (level) free(to);
    }
    free(out[0]);
  }
  free(x);
}

int LLVMFuzzerTestOneInput(const uint8_t *byte, size_t size) {
  source in = {byte, size};
  const int kind = below(&in, 16);
  if (kind == 15)
    fuzz_arrays(&in);
  else if (kind >= 11)
    fuzz_commit(&in);
  else
    fuzz_operator(&in);
  return 0;
}
