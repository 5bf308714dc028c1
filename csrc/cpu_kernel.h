/* cpu_kernel.h - what one unit of work computes, for one SIMD level. Has no guard on purpose:
 * cpu_levels.c includes it once for each level, with
 *
 *   LEVEL_TARGET     the function attribute that turns the level's instructions on
 *   LEVEL_NAME(name) the name with the level's suffix
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

/* ---- rows to and from memory ----------------------------------------------------------------- */

LEVEL_TARGET static void LEVEL_NAME(load_row)(float *restrict to, const void *from, int32_t dtype,
                                              int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof *to);
  } else if (dtype == GDN_VERIFY_BFLOAT16) {
    const uint16_t *half = (const uint16_t *)from;
    for (int64_t c = 0; c < n; ++c) to[c] = gdn_verify_from_bfloat16(half[c]);
  } else {
    const uint16_t *half = (const uint16_t *)from;
    for (int64_t c = 0; c < n; ++c) to[c] = gdn_verify_from_float16(half[c]);
  }
}

LEVEL_TARGET static void LEVEL_NAME(store_row)(void *to, const float *restrict from, int32_t dtype,
                                               int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof *from);
  } else if (dtype == GDN_VERIFY_BFLOAT16) {
    uint16_t *restrict half = (uint16_t *)to;
    for (int64_t c = 0; c < n; ++c) half[c] = gdn_verify_to_bfloat16(from[c]);
  } else {
    uint16_t *restrict half = (uint16_t *)to;
    for (int64_t c = 0; c < n; ++c) half[c] = gdn_verify_to_float16(from[c]);
  }
}

/* rows[j][c] = from[c * channel + j * column], without a change of dtype. */
LEVEL_TARGET static void LEVEL_NAME(read_columns)(void *const *rows, const void *from,
                                                  int64_t channel, int64_t column, int32_t columns,
                                                  int64_t n, int half) {
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

/* to[c * channel + j * column] = rows[j][c]. */
LEVEL_TARGET static void LEVEL_NAME(write_columns)(void *to, const void *const *rows,
                                                   int64_t channel, int64_t column,
                                                   int32_t columns, int64_t n, int half) {
  if (column == 1 && channel == columns) {
    if (half)
      scatter_packed(to, rows, columns, n, 1);
    else
      scatter_packed(to, rows, columns, n, 0);
    return;
  }
  for (int32_t j = 0; j < columns; ++j) {
    if (half)
      copy_strided((uint16_t *)to + j * column, channel, rows[j], 1, n, 1);
    else
      copy_strided((float *)to + j * column, channel, rows[j], 1, n, 0);
  }
}

/* Columns of a tensor of any float dtype as float32 rows. */
LEVEL_TARGET static void LEVEL_NAME(load_columns)(float (*rows)[GDN_VERIFY_CHUNK], const void *from,
                                                  int32_t dtype, int64_t channel, int64_t column,
                                                  int32_t columns, int64_t n) {
  if (dtype == GDN_VERIFY_FLOAT32) {
    void *to[GDN_VERIFY_MAX_D_CONV];
    for (int32_t j = 0; j < columns; ++j) to[j] = rows[j];
    LEVEL_NAME(read_columns)(to, from, channel, column, columns, n, 0);
  } else {
    uint16_t half[GDN_VERIFY_MAX_D_CONV][GDN_VERIFY_CHUNK];
    void *to[GDN_VERIFY_MAX_D_CONV];
    for (int32_t j = 0; j < columns; ++j) to[j] = half[j];
    LEVEL_NAME(read_columns)(to, from, channel, column, columns, n, 1);
    for (int32_t j = 0; j < columns; ++j) LEVEL_NAME(load_row)(rows[j], half[j], dtype, n);
  }
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

LEVEL_TARGET static void LEVEL_NAME(convolve)(const work *w, int32_t d_conv, int64_t n,
                                              float *restrict y) {
  switch (d_conv) {
    case 2: convolve_taps(w, 2, n, y); break;
    case 3: convolve_taps(w, 3, n, y); break;
    case 4: convolve_taps(w, 4, n, y); break;
    case 5: convolve_taps(w, 5, n, y); break;
    case 6: convolve_taps(w, 6, n, y); break;
    case 7: convolve_taps(w, 7, n, y); break;
    default: convolve_taps(w, 8, n, y); break;
  }
}

LEVEL_TARGET static void LEVEL_NAME(silu_array)(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gdn_verify_silu(x[i]);
}

LEVEL_TARGET static void LEVEL_NAME(exp_array)(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gdn_verify_exp(x[i]);
}

/* total + the squares of y[0 .. n-1]. */
LEVEL_TARGET static float LEVEL_NAME(add_squares)(float total, const float *y, int64_t n) {
  int64_t c = 0;
  for (; c + GDN_VERIFY_GROUP <= n; c += GDN_VERIFY_GROUP) total = total + group_squares(y + c);
  if (c < n) {
    float last[GDN_VERIFY_GROUP] = {0.0f};
    memcpy(last, y + c, (size_t)(n - c) * sizeof *y);
    total = total + group_squares(last);
  }
  return total;
}

LEVEL_TARGET static void LEVEL_NAME(sum_squares_array)(const float *x, float *out, int64_t rows,
                                                       int64_t n) {
  for (int64_t i = 0; i < rows; ++i) out[i] = LEVEL_NAME(add_squares)(0.0f, x + i * n, n);
}

LEVEL_TARGET static void LEVEL_NAME(scale)(float *y, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] = y[c] * factor;
}

/* The L2 norm of token `token`, as the unit asks. */
LEVEL_TARGET static void LEVEL_NAME(normalise)(const gdn_verify_problem *p,
                                               const gdn_verify_unit *unit, int64_t token,
                                               float *y) {
  if (unit->norm == GDN_VERIFY_NORM_HEADS) {
    for (int64_t c = 0; c < unit->count; c += p->head_dim) {
      const float total = LEVEL_NAME(add_squares)(0.0f, y + c, p->head_dim);
      LEVEL_NAME(scale)(y + c, gdn_verify_l2_scale(total, p->l2_eps), p->head_dim);
    }
  } else if (unit->norm != GDN_VERIFY_NORM_NONE) {
    float *total = unit->totals + token * unit->totals_stride;
    if (unit->norm == GDN_VERIFY_NORM_SUM)
      *total = LEVEL_NAME(add_squares)(*total, y, unit->count);
    else
      LEVEL_NAME(scale)(y, gdn_verify_l2_scale(*total, p->l2_eps), unit->count);
  }
}

/* ---- the ring -------------------------------------------------------------------------------- */

/* Weight and bias as float32 rows; the window that the sequence starts from into w->start. */
LEVEL_TARGET static void LEVEL_NAME(begin_unit)(work *w, const gdn_verify_problem *p,
                                                const gdn_verify_sequence *s,
                                                const gdn_verify_unit *unit) {
  const int64_t n = unit->count, channel = unit->channel;
  LEVEL_NAME(load_columns)
  (w->weight, element(p->weight, channel * p->weight_channel, p->weight_dtype), p->weight_dtype,
   p->weight_channel, p->weight_tap, p->d_conv, n);
  if (p->bias)
    LEVEL_NAME(load_columns)
    (&w->bias, element(p->bias, channel * p->bias_channel, p->bias_dtype), p->bias_dtype,
     p->bias_channel, 0, 1, n);
  else
    memset(w->bias, 0, sizeof w->bias);

  const void *from;
  int64_t channel_stride, column_stride;
  if (s->start < 0) {
    from = element(p->state, s->slot * p->state_slot + channel * p->state_channel, p->state_dtype);
    channel_stride = p->state_channel;
    column_stride = p->state_column;
  } else {
    from = element(p->snapshots,
                   s->row * p->snapshot_row + s->start * p->snapshot_token +
                       channel * p->snapshot_channel,
                   p->state_dtype);
    channel_stride = p->snapshot_channel;
    column_stride = p->snapshot_column;
  }
  /* all S columns, the last of them into start[W-2]; with S = W the first one is dropped again, into
   * the row that the first token overwrites */
  void *rows[GDN_VERIFY_MAX_D_CONV];
  const int32_t dropped = p->state_len - (p->d_conv - 1);
  for (int32_t j = 0; j < p->state_len; ++j)
    rows[j] = j < dropped ? w->spare.stored : w->start[j - dropped].stored;
  const int half = p->state_dtype != GDN_VERIFY_FLOAT32;
  LEVEL_NAME(read_columns)(rows, from, channel_stride, column_stride, p->state_len, n, half);
  for (int32_t j = 0; half && j < p->d_conv - 1; ++j)
    LEVEL_NAME(load_row)(w->start[j].value, w->start[j].stored, p->state_dtype, n);
}

/* The input of a token as it came, with the same in conv_state's dtype beside it where that is the
 * input's own. */
LEVEL_TARGET static void LEVEL_NAME(load_token)(const row *r, const gdn_verify_problem *p,
                                                const void *input, int64_t n) {
  LEVEL_NAME(load_row)(r->value, input, p->input_dtype, n);
  if (p->state_dtype != GDN_VERIFY_FLOAT32 && p->state_dtype == p->input_dtype)
    memcpy(r->stored, input, (size_t)n * sizeof(uint16_t));
}

/* Rounds it to conv_state's dtype. */
LEVEL_TARGET static void LEVEL_NAME(round_token)(const row *r, const gdn_verify_problem *p,
                                                 int64_t n) {
  if (p->state_dtype == GDN_VERIFY_FLOAT32 || p->state_dtype == p->input_dtype) return;
  LEVEL_NAME(store_row)(r->stored, r->value, p->state_dtype, n);
  LEVEL_NAME(load_row)(r->value, r->stored, p->state_dtype, n);
}

/* The window of a tree's node but its newest entry: ancestors, then the start window. */
LEVEL_TARGET static void LEVEL_NAME(gather_ancestors)(work *w, const gdn_verify_problem *p,
                                                      int64_t seq, int64_t token,
                                                      const void *input, int64_t n) {
  const int32_t *parent = p->parent + seq * p->parent_seq;
  int32_t k = p->d_conv - 2;
  for (int64_t node = parent[token * p->parent_token]; node >= 0 && k >= 0; --k) {
    w->ring[k] = w->rows[k];
    LEVEL_NAME(load_token)
    (&w->ring[k], p, element(input, node * p->input_token, p->input_dtype), n);
    LEVEL_NAME(round_token)(&w->ring[k], p, n);
    node = parent[node * p->parent_token];
  }
  for (int32_t j = p->d_conv - 2; k >= 0; --k, --j) w->ring[k] = w->start[j];
}

/* ---- snapshots and state --------------------------------------------------------------------- */

/* The last S entries of the ring. */
LEVEL_TARGET static void LEVEL_NAME(write_window)(const work *w, const gdn_verify_problem *p,
                                                  void *to, int64_t channel, int64_t column,
                                                  int64_t n) {
  const void *rows[GDN_VERIFY_MAX_D_CONV];
  for (int32_t j = 0; j < p->state_len; ++j)
    rows[j] = w->ring[p->d_conv - p->state_len + j].stored;
  LEVEL_NAME(write_columns)
  (to, rows, channel, column, p->state_len, n, p->state_dtype != GDN_VERIFY_FLOAT32);
}

/* Entries of the ring from `first` on, as consecutive rows of the history. */
LEVEL_TARGET static void LEVEL_NAME(write_history)(const work *w, const gdn_verify_problem *p,
                                                   void *to, int32_t first, int32_t count,
                                                   int64_t n) {
  const void *rows[GDN_VERIFY_MAX_D_CONV];
  for (int32_t j = 0; j < count; ++j) rows[j] = w->ring[first + j].stored;
  LEVEL_NAME(write_columns)
  (to, rows, p->snapshot_channel, p->snapshot_token, count, n,
   p->state_dtype != GDN_VERIFY_FLOAT32);
}

LEVEL_TARGET static void LEVEL_NAME(write_snapshot)(const work *w, const gdn_verify_problem *p,
                                                    void *snapshots, int64_t token, int64_t n) {
  if (p->snapshot_kind == GDN_VERIFY_WINDOWS) {
    LEVEL_NAME(write_window)
    (w, p, element(snapshots, token * p->snapshot_token, p->state_dtype), p->snapshot_channel,
     p->snapshot_column, n);
  } else if (p->snapshot_kind == GDN_VERIFY_HISTORY) {
    const int32_t before = p->state_len - 1; /* entries of the start window */
    if (token == 0)
      LEVEL_NAME(write_history)(w, p, snapshots, p->d_conv - 1 - before, before, n);
    LEVEL_NAME(write_history)
    (w, p, element(snapshots, (before + token) * p->snapshot_token, p->state_dtype), p->d_conv - 1,
     1, n);
  }
}

/* ---- a unit ---------------------------------------------------------------------------------- */

LEVEL_TARGET static void LEVEL_NAME(run_unit)(const gdn_verify_problem *p,
                                              const gdn_verify_sequence *s, int64_t seq,
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
  LEVEL_NAME(begin_unit)(&w, p, s, unit);

  for (int64_t token = 0; token < s->num_rows; ++token) {
    if (p->parent) {
      LEVEL_NAME(gather_ancestors)(&w, p, seq, token, input, n);
    } else if (token > 0) {
      const row oldest = w.ring[0];
      for (int32_t k = 0; k < newest; ++k) w.ring[k] = w.ring[k + 1];
      w.ring[newest] = oldest;
    }
    LEVEL_NAME(load_token)
    (&w.ring[newest], p, element(input, token * p->input_token, p->input_dtype), n);
    LEVEL_NAME(convolve)(&w, p->d_conv, n, w.y);
    if (p->activation == GDN_VERIFY_SILU) LEVEL_NAME(silu_array)(w.y, w.y, n);
    LEVEL_NAME(normalise)(p, unit, token, w.y);
    LEVEL_NAME(round_token)(&w.ring[newest], p, n);
    if (!writes) continue;
    LEVEL_NAME(store_row)
    (element(output, token * p->output_token, p->output_dtype), w.y, p->output_dtype, n);
    LEVEL_NAME(write_snapshot)(&w, p, snapshots, token, n);
  }
  if (writes && p->write_state)
    LEVEL_NAME(write_window)
    (&w, p, element(p->state, s->slot * p->state_slot + channel * p->state_channel, p->state_dtype),
     p->state_channel, p->state_column, n);
}
