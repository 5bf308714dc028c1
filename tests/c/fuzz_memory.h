/* fuzz_memory.h - what fuzz_core.c needs below the operators: numbers from the fuzzer's bytes,
 * and tensors whose memory is exactly as large as what they span.
 *
 * A call has up to MAX_TENSORS tensors. place() gives each of them a piece of memory of its own, or
 * lets it lie in the piece of an earlier one; where its shape and strides span more than MAX_SPAN,
 * its pointer is worth nothing, and the call may be validated but not run.
 */
#ifndef FUZZ_MEMORY_H
#define FUZZ_MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/gdn_verify.h"

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                            \
    }                                                                     \
  } while (0)

enum {
  MAX_TENSORS = 12,
  MAX_SPAN = 1 << 16, /* elements */
  MAX_DIMS = GDN_VERIFY_MAX_DIMS
};

/* Nothing that the fuzzer should follow: it need not count every element. */
#if defined(__clang__)
#define UNCOUNTED __attribute__((noinline, no_sanitize("coverage")))
#else
#define UNCOUNTED
#endif

/* ---- numbers --------------------------------------------------------------------------------- */

typedef struct source {
  const uint8_t *byte;
  size_t left;
} source;

static uint8_t next(source *in) { /* 0 where the bytes are used up */
  if (in->left == 0) return 0;
  in->left--;
  return *in->byte++;
}

static int32_t below(source *in, int32_t count) { return next(in) % count; }

/* One in eight, and none where the bytes are used up. */
static int rarely(source *in) { return next(in) % 8 == 1; }

static int64_t wild(source *in) {
  static const int64_t edges[] = {
      INT64_MIN,     INT64_MAX,       INT32_MIN,    INT32_MAX,    1LL << 58,
      -(1LL << 58),  (1LL << 58) + 1, 1LL << 62,    -(1LL << 62), 1LL << 61,
      1LL << 57,     1LL << 32,       -(1LL << 32), 1LL << 31,    65536,
      INT64_MAX - 1, INT64_MIN + 1,   1LL << 16,    -1,           0};
  const int kind = below(in, 4);
  if (kind == 0) return (int8_t)next(in);
  if (kind == 1) return edges[below(in, (int32_t)(sizeof edges / sizeof *edges))];
  uint64_t bits = 0;
  for (int i = 0; i < (kind == 2 ? 2 : 8); ++i) bits = bits << 8 | next(in);
  return kind == 2 ? (int16_t)bits : (int64_t)bits;
}

/* ---- tensors in memory ----------------------------------------------------------------------- */

typedef struct piece {
  unsigned char *now, *before, *expected; /* the memory, a copy of it, and what it must become */
  size_t size;
} piece;

typedef enum data_mode {
  OWN_MEMORY = 0,
  SHARED_MEMORY, /* in the piece of an earlier tensor */
  NULL_POINTER,
  ODD_POINTER, /* not a multiple of the element's size */
  WILD_POINTER /* anything; the call is not run */
} data_mode;

typedef struct argument {
  gdn_verify_tensor *t;
  data_mode mode;
  int piece;
} argument;

typedef struct call {
  argument arguments[MAX_TENSORS];
  piece pieces[MAX_TENSORS];
  int n, n_pieces;
  int runnable;
} call;

static int64_t element_size(int32_t dtype) {
  if (dtype == GDN_VERIFY_BFLOAT16 || dtype == GDN_VERIFY_FLOAT16) return 2;
  return dtype == GDN_VERIFY_FLOAT32 || dtype == GDN_VERIFY_INT32 ? 4 : 8;
}

/* The elements from the lowest to the highest; 0 without any, -1 where they are too many or too far
 * apart. *first is where element 0 lies among them. */
static int64_t span(const gdn_verify_tensor *t, int64_t *first) {
  __int128 low = 0, high = 0, count = 1;
  *first = 0;
  if (t->ndim < 0 || t->ndim > MAX_DIMS) return 0; /* must be refused before it is looked at */
  for (int k = 0; k < t->ndim; ++k)
    if (t->shape[k] <= 0) return 0; /* below 0: the same */
  for (int k = 0; k < t->ndim; ++k) {
    const __int128 distance = (__int128)(t->shape[k] - 1) * t->stride[k];
    count *= t->shape[k];
    if (count > MAX_SPAN || distance > MAX_SPAN || distance < -MAX_SPAN) return -1;
    if (distance < 0)
      low += distance;
    else
      high += distance;
  }
  if (high - low + 1 > MAX_SPAN) return -1;
  *first = (int64_t)-low;
  return (int64_t)(high - low + 1);
}

static unsigned char *exact_copy(const unsigned char *from, size_t size) {
  unsigned char *made = (unsigned char *)malloc(size);
  CHECK(made || size == 0);
  if (size) memcpy(made, from, size);
  return made;
}

static piece *new_piece(call *c, argument *a, size_t size) {
  a->piece = c->n_pieces++;
  piece *p = &c->pieces[a->piece];
  memset(p, 0, sizeof *p);
  p->size = size;
  p->now = (unsigned char *)calloc(1, size ? size : 1);
  CHECK(p->now);
  if (size == 0) { /* of no size, so that every access is seen */
    free(p->now);
    p->now = (unsigned char *)malloc(0);
  }
  return p;
}

/* Memory for argument `a` of the call, zeroed. */
static void place(call *c, source *in, argument *a) {
  gdn_verify_tensor *t = a->t;
  int64_t first;
  const int64_t count = span(t, &first), size = element_size(t->dtype);
  a->piece = -1;
  if (a->mode == NULL_POINTER || (t->ndim == 0 && a->mode != WILD_POINTER)) {
    t->data = NULL;
  } else if (count < 0 || a->mode == WILD_POINTER) {
    t->data = (void *)(intptr_t)(a->mode == WILD_POINTER ? wild(in) : 4096);
    c->runnable = 0;
  } else if (a->mode == SHARED_MEMORY && c->n_pieces > 0) {
    const int other = below(in, c->n_pieces);
    const piece *p = &c->pieces[other];
    const int64_t room = (int64_t)p->size / size - count;
    if (room < 0) {
      new_piece(c, a, (size_t)(count * size));
      t->data = c->pieces[a->piece].now + first * size;
    } else {
      a->piece = other;
      t->data = p->now + (first + (next(in) | next(in) << 8) % (room + 1)) * size;
    }
  } else if (a->mode == ODD_POINTER) {
    t->data = new_piece(c, a, (size_t)(count * size + 1))->now + first * size + 1;
  } else {
    t->data = new_piece(c, a, (size_t)(count * size))->now + first * size;
  }
}

/* Fills every piece: numbers around 1, and now and then anything. */
UNCOUNTED static void fill_pieces(call *c, uint8_t seed) {
  uint32_t state = 2463534242u + seed;
  for (int i = 0; i < c->n_pieces; ++i)
    for (size_t k = 0; k + 1 < c->pieces[i].size; k += 2) {
      state ^= state << 13;
      state ^= state >> 17;
      state ^= state << 5;
      const int special = seed % 4 == 3 && (state >> 20) % 16 == 0;
      const uint16_t half = (uint16_t)(special ? state : (0x3E00 ^ (state & 0x81FF)));
      memcpy(c->pieces[i].now + k, &half, sizeof half);
    }
}

static void remember(call *c) {
  for (int i = 0; i < c->n_pieces; ++i) {
    piece *p = &c->pieces[i];
    p->before = exact_copy(p->now, p->size);
    p->expected = exact_copy(p->now, p->size);
  }
}

static void release(call *c) {
  for (int i = 0; i < c->n_pieces; ++i) {
    free(c->pieces[i].now);
    free(c->pieces[i].before);
    free(c->pieces[i].expected);
  }
}

/* ---- elements -------------------------------------------------------------------------------- */

UNCOUNTED static int64_t offset_of(const gdn_verify_tensor *t, const int64_t *index) {
  int64_t offset = 0;
  for (int k = 0; k < t->ndim; ++k) offset += index[k] * t->stride[k];
  return offset * element_size(t->dtype);
}

/* The next index tuple of `t` with the last dimension quickest; 0 after the last one. */
UNCOUNTED static int advance(const gdn_verify_tensor *t, int64_t *index) {
  for (int k = t->ndim - 1; k >= 0; --k) {
    if (++index[k] < t->shape[k]) return 1;
    index[k] = 0;
  }
  return 0;
}

static int is_empty(const gdn_verify_tensor *t) {
  for (int k = 0; k < t->ndim; ++k)
    if (t->shape[k] == 0) return 1;
  return t->ndim == 0;
}

/* Entry 0 of the first dimension. */
static void drop_first(gdn_verify_tensor *t) {
  if (t->ndim == 0) return;
  t->ndim--;
  memmove(t->shape, t->shape + 1, (MAX_DIMS - 1) * sizeof *t->shape);
  memmove(t->stride, t->stride + 1, (MAX_DIMS - 1) * sizeof *t->stride);
}

static int is_nan(const void *at, int32_t dtype) {
  uint32_t bits = 0;
  memcpy(&bits, at, dtype == GDN_VERIFY_FLOAT32 ? 4 : 2);
  if (dtype == GDN_VERIFY_FLOAT32) return (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return (bits & 0x7FFFu) > (dtype == GDN_VERIFY_BFLOAT16 ? 0x7F80u : 0x7C00u);
}

/* Every piece is what it must be; only the payload of a NaN among the elements of `written`, which
 * may be null, is free. */
UNCOUNTED static void check_pieces(call *c, const argument *const *written, int n_written) {
  for (int i = 0; i < n_written; ++i) {
    const gdn_verify_tensor *t = written[i]->t;
    int64_t index[MAX_DIMS] = {0};
    if (is_empty(t)) continue;
    const piece *p = &c->pieces[written[i]->piece];
    do {
      unsigned char *now = (unsigned char *)t->data + offset_of(t, index);
      unsigned char *expected = p->expected + (now - p->now);
      if (is_nan(now, t->dtype) && is_nan(expected, t->dtype))
        memcpy(now, expected, (size_t)element_size(t->dtype));
    } while (advance(t, index));
  }
  for (int i = 0; i < c->n_pieces; ++i)
    CHECK(c->pieces[i].size == 0 ||
          memcmp(c->pieces[i].now, c->pieces[i].expected, c->pieces[i].size) == 0);
}

#endif /* FUZZ_MEMORY_H */
