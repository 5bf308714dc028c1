/* cpu_kernel.h - what one unit of work computes, for one SIMD level. Has no guard on purpose:
 * cpu_levels.c includes it once for each level, with
 *
 *   LEVEL_FUNCTION   static, with the attribute that turns the level's instructions on
 *   LEVEL_NAME(name) the name with the level's suffix; here each stands under its plain name
 *   LEVEL_STREAM     bytes of LEVEL_STREAM_STORE(to, from), which stores past the caches; or 0
 *   LEVEL_HALVES     float16 numbers that LEVEL_LOAD_HALVES(to, from), to float32, and
 *                    LEVEL_STORE_HALVES(to, from) convert by hardware; or 0
 *
 * A unit keeps, for up to GDN_VERIFY_CHUNK channels, W planar rows: ring[0 .. W-1] is the window of
 * the token at hand, oldest first. Each row stands there twice, as float32 for the arithmetic and in
 * conv_state's dtype for what is stored (one row where that is float32). The newest row is the input
 * as it came while the token is computed and is rounded to conv_state's dtype after it. In a chain
 * the ring turns by one row a token; in a tree it is gathered anew for every token, along its
 * ancestors, so that nothing grows with K.
 *
 * Everything is read of old state and old snapshots before anything is written. The loops over
 * channels are the ones that vectorise; no loop sums over them but the L2 norm's, whose order is
 * written out.
 */

#define load_row LEVEL_NAME(load_row)
#define store_row LEVEL_NAME(store_row)
#define read_columns LEVEL_NAME(read_columns)
#define stream_copy LEVEL_NAME(stream_copy)
#define write_columns LEVEL_NAME(write_columns)
#define load_columns LEVEL_NAME(load_columns)
#define convolve LEVEL_NAME(convolve)
#define silu_row LEVEL_NAME(silu_row)
#define silu_array LEVEL_NAME(silu_array)
#define exp_array LEVEL_NAME(exp_array)
#define add_squares LEVEL_NAME(add_squares)
#define sum_squares_array LEVEL_NAME(sum_squares_array)
#define scale LEVEL_NAME(scale)
#define normalise LEVEL_NAME(normalise)
#define begin_unit LEVEL_NAME(begin_unit)
#define load_token LEVEL_NAME(load_token)
#define round_token LEVEL_NAME(round_token)
#define gather_ancestors LEVEL_NAME(gather_ancestors)
#define write_window LEVEL_NAME(write_window)
#define write_history LEVEL_NAME(write_history)
#define write_snapshot LEVEL_NAME(write_snapshot)
#define run_unit LEVEL_NAME(run_unit)

/* ---- rows to and from memory ----------------------------------------------------------------- */

LEVEL_FUNCTION void load_row(float *restrict to, const void *from, int32_t dtype, int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof *to);
  } else if (dtype == GDN_VERIFY_BFLOAT16) {
    const uint16_t *half = (const uint16_t *)from;
    for (int64_t c = 0; c < n; ++c) to[c] = gdn_verify_from_bfloat16(half[c]);
  } else {
    const uint16_t *half = (const uint16_t *)from;
    int64_t c = 0;
#if LEVEL_HALVES
    for (; c + LEVEL_HALVES <= n; c += LEVEL_HALVES) LEVEL_LOAD_HALVES(to + c, half + c);
#endif
    for (; c < n; ++c) to[c] = gdn_verify_from_float16(half[c]);
  }
}

LEVEL_FUNCTION void store_row(void *to, const float *restrict from, int32_t dtype, int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof *from);
  } else if (dtype == GDN_VERIFY_BFLOAT16) {
    uint16_t *restrict half = (uint16_t *)to;
    for (int64_t c = 0; c < n; ++c) half[c] = gdn_verify_to_bfloat16(from[c]);
  } else {
    uint16_t *restrict half = (uint16_t *)to;
    int64_t c = 0;
#if LEVEL_HALVES
    for (; c + LEVEL_HALVES <= n; c += LEVEL_HALVES) LEVEL_STORE_HALVES(half + c, from + c);
#endif
    for (; c < n; ++c) half[c] = gdn_verify_to_float16(from[c]);
  }
}

/* rows[j][c] = from[c * channel + j * column], without a change of dtype. */
LEVEL_FUNCTION void read_columns(void *const *rows, const void *from, int64_t channel,
                                 int64_t column, int32_t columns, int64_t n, int half) {
  if (column == 1 && channel == columns) {
    if (half)
      gather_packed(rows, from, columns, n, 1);
    else
      gather_packed(rows, from, columns, n, 0);
    return;
  }
  for (int32_t j = 0; j < columns; ++j) {
    if (half)
      copy_strided(rows[j], 1, (const uint16_t *)from + j * column, channel, n, 1);
    else
      copy_strided(rows[j], 1, (const float *)from + j * column, channel, n, 0);
  }
}

/* memcpy past the caches: stores that fetch no line, half the traffic where nothing reads it soon. */
LEVEL_FUNCTION void stream_copy(void *restrict to, const void *restrict from, size_t bytes) {
#if LEVEL_STREAM
  char *target = (char *)to;
  const char *source = (const char *)from;
  size_t i = (size_t)(0 - (uintptr_t)target) & 63; /* to the next cache line */
  if (i > bytes) i = bytes;
  memcpy(target, source, i);
  for (; i + 64 <= bytes; i += 64)
    for (size_t k = i; k < i + 64; k += LEVEL_STREAM)
      LEVEL_STREAM_STORE((void *)(target + k), (const void *)(source + k));
  memcpy(target + i, source + i, bytes - i);
#else
  memcpy(to, from, bytes);
#endif
}

/* to[c * channel + j * column] = rows[j][c]; `stream` keeps it out of the caches. */
LEVEL_FUNCTION void write_columns(void *to, const void *const *rows, int64_t channel,
                                  int64_t column, int32_t columns, int64_t n, int half,
                                  int stream) {
  const size_t size = half ? sizeof(uint16_t) : sizeof(float);
  if (column == 1 && channel == columns) {
    float packed[GDN_VERIFY_MAX_D_CONV * GDN_VERIFY_CHUNK];
    void *near = stream ? (void *)packed : to;
    if (half)
      scatter_packed(near, rows, columns, n, 1);
    else
      scatter_packed(near, rows, columns, n, 0);
    if (stream) stream_copy(to, packed, (size_t)(columns * n) * size);
    return;
  }
  for (int32_t j = 0; j < columns; ++j) {
    if (stream && channel == 1) {
      stream_copy((char *)to + j * column * (int64_t)size, rows[j], (size_t)n * size);
      continue;
    }
    if (half)
      copy_strided((uint16_t *)to + j * column, channel, rows[j], 1, n, 1);
    else
      copy_strided((float *)to + j * column, channel, rows[j], 1, n, 0);
  }
}

/* Columns of a tensor of any float dtype as float32 rows. */
LEVEL_FUNCTION void load_columns(float (*rows)[GDN_VERIFY_CHUNK], const void *from, int32_t dtype,
                                 int64_t channel, int64_t column, int32_t columns, int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    void *to[GDN_VERIFY_MAX_D_CONV] = {NULL};
    for (int32_t j = 0; j < columns; ++j) to[j] = rows[j];
    read_columns(to, from, channel, column, columns, n, 0);
  } else {
    uint16_t half[GDN_VERIFY_MAX_D_CONV][GDN_VERIFY_CHUNK];
    void *to[GDN_VERIFY_MAX_D_CONV] = {NULL};
    for (int32_t j = 0; j < columns; ++j) to[j] = half[j];
    read_columns(to, from, channel, column, columns, n, 1);
    for (int32_t j = 0; j < columns; ++j) load_row(rows[j], half[j], dtype, n);
  }
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

LEVEL_FUNCTION void convolve(const work *w, int32_t d_conv, int64_t n, float *restrict y) {
  switch (d_conv) {
  case 2:
    convolve_taps(w, 2, n, y);
    break;
  case 3:
    convolve_taps(w, 3, n, y);
    break;
  case 4:
    convolve_taps(w, 4, n, y);
    break;
  case 5:
    convolve_taps(w, 5, n, y);
    break;
  case 6:
    convolve_taps(w, 6, n, y);
    break;
  case 7:
    convolve_taps(w, 7, n, y);
    break;
  default:
    convolve_taps(w, 8, n, y);
    break;
  }
}

LEVEL_FUNCTION void silu_row(float *y, int64_t n) {
  const float most = silu_most();
  int64_t c = 0;
  for (; c + SILU_BLOCK <= n; c += SILU_BLOCK) silu_block(y + c, most);
  if (c < n) {
    float last[SILU_BLOCK] = {0.0f};
    memcpy(last, y + c, (size_t)(n - c) * sizeof *y);
    silu_block(last, most);
    memcpy(y + c, last, (size_t)(n - c) * sizeof *y);
  }
}

LEVEL_FUNCTION void silu_array(const float *x, float *out, int64_t n) {
  memmove(out, x, (size_t)n * sizeof *x);
  silu_row(out, n);
}

LEVEL_FUNCTION void exp_array(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gdn_verify_exp(x[i]);
}

/* total + the squares of y[0 .. n-1]: whole batches of groups, then the rest padded with +0. */
LEVEL_FUNCTION float add_squares(float total, const float *y, int64_t n) {
  float sums[SQUARES_GROUPS];
  int64_t c = 0;
  for (; c + SQUARES_BATCH <= n; c += SQUARES_BATCH) {
    square_groups(y + c, sums);
    for (int g = 0; g < SQUARES_GROUPS; ++g) total = total + sums[g];
  }
  if (c < n) {
    float last[SQUARES_BATCH] = {0.0f};
    memcpy(last, y + c, (size_t)(n - c) * sizeof *y);
    square_groups(last, sums);
    for (int g = 0; g * GDN_VERIFY_GROUP < n - c; ++g) total = total + sums[g];
  }
  return total;
}

LEVEL_FUNCTION void sum_squares_array(const float *x, float *out, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) out[i] = add_squares(0.0f, x + i * n, n);
}

LEVEL_FUNCTION void scale(float *y, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] = y[c] * factor;
}

/* The L2 norm of token `token`, as the unit asks. */
LEVEL_FUNCTION void normalise(const gdn_verify_problem *p, const gdn_verify_unit *unit,
                              int64_t token, float *y) {
  if (unit->norm == GDN_VERIFY_NORM_HEADS) {
    for (int64_t c = 0; c < unit->count; c += p->head_dim) {
      const float total = add_squares(0.0f, y + c, p->head_dim);
      scale(y + c, gdn_verify_l2_scale(total, p->l2_eps), p->head_dim);
    }
  } else if (unit->norm != GDN_VERIFY_NORM_NONE) {
    float *total = unit->totals + token * unit->totals_stride;
    if (unit->norm == GDN_VERIFY_NORM_SUM)
      *total = add_squares(*total, y, unit->count);
    else
      scale(y, gdn_verify_l2_scale(*total, p->l2_eps), unit->count);
  }
}

/* ---- the ring -------------------------------------------------------------------------------- */

/* Weight and bias as float32 rows; the window that the sequence starts from into w->start. */
LEVEL_FUNCTION void begin_unit(work *w, const gdn_verify_problem *p, const gdn_verify_sequence *s,
                               const gdn_verify_unit *unit) {
  const int64_t n = unit->count, channel = unit->channel;
  load_columns(w->weight, element(p->weight, channel * p->weight_channel, p->weight_dtype),
               p->weight_dtype, p->weight_channel, p->weight_tap, p->d_conv, n);
  if (p->bias)
    load_columns(&w->bias, element(p->bias, channel * p->bias_channel, p->bias_dtype),
                 p->bias_dtype, p->bias_channel, 0, 1, n);
  else
    memset(w->bias, 0, sizeof w->bias);

  const void *from;
  int64_t channel_stride, column_stride;
  if (s->start < 0) {
    from = element(p->state, s->slot * p->state_slot + channel * p->state_channel, p->state_dtype);
    channel_stride = p->state_channel;
    column_stride = p->state_column;
  } else {
    from = element(
        p->snapshots,
        s->row * p->snapshot_row + s->start * p->snapshot_token + channel * p->snapshot_channel,
        p->state_dtype);
    channel_stride = p->snapshot_channel;
    column_stride = p->snapshot_column;
  }
  /* all S columns, the last of them into start[W-2]; with S = W the first one is dropped again, into
   * the row that the first token overwrites */
  void *rows[GDN_VERIFY_MAX_D_CONV] = {NULL};
  const int32_t dropped = p->state_len - (p->d_conv - 1);
  for (int32_t j = 0; j < p->state_len; ++j)
    rows[j] = j < dropped ? w->spare.stored : w->start[j - dropped].stored;
  const int half = p->state_dtype != GDN_VERIFY_FLOAT32;
  read_columns(rows, from, channel_stride, column_stride, p->state_len, n, half);
  for (int32_t j = 0; half && j < p->d_conv - 1; ++j)
    load_row(w->start[j].value, w->start[j].stored, p->state_dtype, n);
}

/* The input of a token as it came, with the same in conv_state's dtype beside it where that is the
 * input's own. */
LEVEL_FUNCTION void load_token(const row *r, const gdn_verify_problem *p, const void *input,
                               int64_t n) {
  load_row(r->value, input, p->input_dtype, n);
  if (p->state_dtype != GDN_VERIFY_FLOAT32 && p->state_dtype == p->input_dtype)
    memcpy(r->stored, input, (size_t)n * sizeof(uint16_t));
}

/* Rounds it to conv_state's dtype. */
LEVEL_FUNCTION void round_token(const row *r, const gdn_verify_problem *p, int64_t n) {
  if (p->state_dtype == GDN_VERIFY_FLOAT32 || p->state_dtype == p->input_dtype) return;
  store_row(r->stored, r->value, p->state_dtype, n);
  load_row(r->value, r->stored, p->state_dtype, n);
}

/* The window of a tree's node but its newest entry: ancestors, then the start window. */
LEVEL_FUNCTION void gather_ancestors(work *w, const gdn_verify_problem *p, int64_t seq,
                                     int64_t token, const void *input, int64_t n) {
  const int32_t *parent = p->parent + seq * p->parent_seq;
  int32_t k = p->d_conv - 2;
  for (int64_t node = parent[token * p->parent_token]; node >= 0 && k >= 0; --k) {
    w->ring[k] = w->rows[k];
    load_token(&w->ring[k], p, element(input, node * p->input_token, p->input_dtype), n);
    round_token(&w->ring[k], p, n);
    node = parent[node * p->parent_token];
  }
  for (int32_t j = p->d_conv - 2; k >= 0; --k, --j) w->ring[k] = w->start[j];
}

/* ---- snapshots and state --------------------------------------------------------------------- */

/* The last S entries of the ring. */
LEVEL_FUNCTION void write_window(const work *w, const gdn_verify_problem *p, void *to,
                                 int64_t channel, int64_t column, int64_t n, int stream) {
  const void *rows[GDN_VERIFY_MAX_D_CONV] = {NULL};
  for (int32_t j = 0; j < p->state_len; ++j) rows[j] = w->ring[p->d_conv - p->state_len + j].stored;
  write_columns(to, rows, channel, column, p->state_len, n, p->state_dtype != GDN_VERIFY_FLOAT32,
                stream);
}

/* Entries of the ring from `first` on, as consecutive rows of the history. */
LEVEL_FUNCTION void write_history(const work *w, const gdn_verify_problem *p, void *to,
                                  int32_t first, int32_t count, int64_t n, int stream) {
  const void *rows[GDN_VERIFY_MAX_D_CONV] = {NULL};
  for (int32_t j = 0; j < count; ++j) rows[j] = w->ring[first + j].stored;
  write_columns(to, rows, p->snapshot_channel, p->snapshot_token, count, n,
                p->state_dtype != GDN_VERIFY_FLOAT32, stream);
}

LEVEL_FUNCTION void write_snapshot(const work *w, const gdn_verify_problem *p, void *snapshots,
                                   int64_t token, int64_t n, int stream) {
  if (p->snapshot_kind == GDN_VERIFY_WINDOWS) {
    write_window(w, p, element(snapshots, token * p->snapshot_token, p->state_dtype),
                 p->snapshot_channel, p->snapshot_column, n, stream);
  } else if (p->snapshot_kind == GDN_VERIFY_HISTORY) {
    const int32_t before = p->state_len - 1; /* entries of the start window */
    if (token == 0) write_history(w, p, snapshots, p->d_conv - 1 - before, before, n, stream);
    write_history(w, p, element(snapshots, (before + token) * p->snapshot_token, p->state_dtype),
                  p->d_conv - 1, 1, n, stream);
  }
}

/* ---- a unit ---------------------------------------------------------------------------------- */

LEVEL_FUNCTION void run_unit(const gdn_verify_problem *p, const gdn_verify_sequence *s, int64_t seq,
                             const gdn_verify_unit *unit) {
  const int64_t n = unit->count, channel = unit->channel;
  const int32_t newest = p->d_conv - 1;
  const int writes = unit->norm != GDN_VERIFY_NORM_SUM;
  const void *input = element(p->input, s->input_offset + channel, p->input_dtype);
  void *output = element(p->output, s->output_offset + channel, p->output_dtype);
  void *snapshots =
      p->snapshots ? element(p->snapshots, s->row * p->snapshot_row + channel * p->snapshot_channel,
                             p->state_dtype)
                   : NULL;
  work w;
  bind_rows(&w, p->d_conv, p->state_dtype != GDN_VERIFY_FLOAT32);
  begin_unit(&w, p, s, unit);

  for (int64_t token = 0; token < s->num_rows; ++token) {
    if (token + 1 < s->num_rows)
      prefetch(element(input, (token + 1) * p->input_token, p->input_dtype),
               (size_t)(n * gdn_verify_dtype_size(p->input_dtype)));
    void *result = element(output, token * p->output_token, p->output_dtype);
    if (writes) prefetch_to_write(result, (size_t)(n * gdn_verify_dtype_size(p->output_dtype)));
    if (p->parent) {
      gather_ancestors(&w, p, seq, token, input, n);
    } else if (token > 0) {
      const row oldest = w.ring[0];
      for (int32_t k = 0; k < newest; ++k) w.ring[k] = w.ring[k + 1];
      w.ring[newest] = oldest;
    }
    load_token(&w.ring[newest], p, element(input, token * p->input_token, p->input_dtype), n);
    convolve(&w, p->d_conv, n, w.y);
    if (p->activation == GDN_VERIFY_SILU) silu_row(w.y, n);
    normalise(p, unit, token, w.y);
    round_token(&w.ring[newest], p, n);
    if (!writes) continue;
    store_row(result, w.y, p->output_dtype, n);
    write_snapshot(&w, p, snapshots, token, n, unit->stream);
  }
  if (writes && p->write_state)
    write_window(
        &w, p,
        element(p->state, s->slot * p->state_slot + channel * p->state_channel, p->state_dtype),
        p->state_channel, p->state_column, n, 0);
  if (unit->stream) stream_fence();
}

#undef load_row
#undef store_row
#undef read_columns
#undef stream_copy
#undef write_columns
#undef load_columns
#undef convolve
#undef silu_row
#undef silu_array
#undef exp_array
#undef add_squares
#undef sum_squares_array
#undef scale
#undef normalise
#undef begin_unit
#undef load_token
#undef round_token
#undef gather_ancestors
#undef write_window
#undef write_history
#undef write_snapshot
#undef run_unit
#undef LEVEL_FUNCTION
#undef LEVEL_NAME
#undef LEVEL_STREAM
#undef LEVEL_STREAM_STORE
#undef LEVEL_HALVES
#undef LEVEL_LOAD_HALVES
#undef LEVEL_STORE_HALVES
