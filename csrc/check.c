/* check.c - one tensor against what it must be, and the error texts. */
#include "check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

/* ---- messages -------------------------------------------------------------------------------- */

gdn_verify_status gdn_verify_fail(gdn_verify_error *err, gdn_verify_status status,
                                  const char *format, ...) {
  if (err) {
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
  }
  return status;
}

gdn_verify_status gdn_verify_fail_index(gdn_verify_error *err, int64_t seq, int32_t verdict) {
  const char *rule = "every index must be in range";
  switch (verdict) {
  case GDN_VERIFY_BAD_CU_SEQLENS:
    rule =
        "cu_seqlens must start with 0, never decrease, stay within the rows of new_input and "
        "give a sequence at most max_num_tokens rows";
    break;
  case GDN_VERIFY_BAD_SLOT:
    rule = "conv_state_indices must be a slot of conv_state or padding";
    break;
  case GDN_VERIFY_BAD_ROW:
    rule = "inter_indices must be a row of the snapshots";
    break;
  case GDN_VERIFY_BAD_ACCEPTED:
    rule =
        "num_accepted_tokens (of a commit: num_accepted) must be at least 0 (1 without "
        "conv_state) and at most the snapshots that a row holds";
    break;
  case GDN_VERIFY_BAD_PARENT:
    rule = "parent_index must be an earlier position of the sequence, or -1";
    break;
  case GDN_VERIFY_SHARED_SLOT:
    rule = "conv_state_indices must give each sequence that is written a slot of its own";
    break;
  case GDN_VERIFY_SHARED_ROW:
    rule = "inter_indices must give each sequence a row of conv_state_inter of its own";
    break;
  default:
    break;
  }
  return gdn_verify_fail(err, GDN_VERIFY_BAD_INDEX, "%s, but is not at sequence %" PRId64, rule,
                         seq);
}

static const char *dtype_name(int32_t dtype) {
  switch (dtype) {
  case GDN_VERIFY_FLOAT32:
    return "float32";
  case GDN_VERIFY_BFLOAT16:
    return "bfloat16";
  case GDN_VERIFY_FLOAT16:
    return "float16";
  case GDN_VERIFY_INT32:
    return "int32";
  case GDN_VERIFY_INT64:
    return "int64";
  case GDN_VERIFY_FLOAT64:
    return "float64";
  default:
    return "of another dtype";
  }
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* Writes "[3, 4, 1024]"; with `open`, a number below 0 is AT_LEAST of one. Four numbers fit. */
static const char *format(char (*text)[128], const int64_t *number, int count, int open) {
  size_t used = 0;
  for (int k = 0; k < count; k++) {
    char *end = *text + used;
    const size_t left = sizeof *text - used;
    const char *separator = k ? ", " : "[";
    int length;
    if (open && number[k] == ANY)
      length = snprintf(end, left, "%sany", separator);
    else if (open && number[k] < 0)
      length = snprintf(end, left, "%s>=%" PRId64, separator, ~number[k]);
    else
      length = snprintf(end, left, "%s%" PRId64, separator, number[k]);
    used += (size_t)length;
  }
  snprintf(*text + used, sizeof *text - used, "]");
  return *text;
}

static gdn_verify_status fail_dtype(gdn_verify_error *err, const char *name,
                                    const gdn_verify_tensor *t, unsigned dtypes) {
  char allowed[64];
  size_t used = 0;
  for (int dtype = 0; dtype <= GDN_VERIFY_INT32; dtype++) {
    if (!(dtypes & DTYPE(dtype))) continue;
    used += (size_t)snprintf(allowed + used, sizeof allowed - used, "%s%s", used ? " or " : "",
                             dtype_name(dtype));
  }
  return INVALID(err, "%s must be %s, but is %s", name, allowed, dtype_name(t->dtype));
}

static gdn_verify_status fail_shape(gdn_verify_error *err, const char *name,
                                    const gdn_verify_tensor *t, const gdn_verify_expected *e) {
  char wanted[128], found[128];
  for (int k = 0; k < e->ndim; k++)
    if (t->shape[k] < 0)
      return INVALID(err, "%s must have sizes of 0 or more, but has %" PRId64, name, t->shape[k]);
  return INVALID(err, "%s must be [%s] = %s, but is %s", name, e->dims,
                 format(&wanted, e->size, e->ndim, 1), format(&found, t->shape, e->ndim, 0));
}

gdn_verify_status gdn_verify_check_tensor(gdn_verify_error *err, const char *name,
                                          const gdn_verify_tensor *t,
                                          const gdn_verify_expected *e) {
  if (!gdn_verify_is_present(t))
    return INVALID(err, "%s must be [%s], but is absent", name, e->dims);
  if (t->ndim != e->ndim)
    return INVALID(err, "%s must be [%s] with %d dimension%s, but has %d", name, e->dims, e->ndim,
                   e->ndim == 1 ? "" : "s", (int)t->ndim);
  if (t->dtype < 0 || t->dtype > GDN_VERIFY_INT32 || !(e->dtypes & DTYPE(t->dtype)))
    return fail_dtype(err, name, t, e->dtypes);
  for (int k = 0; k < e->ndim; k++) {
    const int64_t wanted = e->size[k];
    if (wanted >= 0 ? t->shape[k] != wanted : t->shape[k] < ~wanted)
      return fail_shape(err, name, t, e);
  }
  switch (gdn_verify_tensor_memory(t)) {
  case GDN_VERIFY_TOO_LARGE:
    return INVALID(err,
                   "%s must hold and span at most 2^58 elements, but its shape or its strides "
                   "exceed that",
                   name);
  case GDN_VERIFY_NO_DATA:
    return INVALID(err, "%s must have data, but its pointer is null", name);
  case GDN_VERIFY_NOT_ALIGNED:
    return INVALID(err, "%s must start at a multiple of its element's size, but starts at %p", name,
                   t->data);
  default:
    return GDN_VERIFY_OK;
  }
}

gdn_verify_status gdn_verify_check_optional(gdn_verify_error *err, const char *name,
                                            const gdn_verify_tensor *t,
                                            const gdn_verify_expected *e) {
  return gdn_verify_is_present(t) ? gdn_verify_check_tensor(err, name, t, e) : GDN_VERIFY_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

void *gdn_verify_data_of(const gdn_verify_tensor *t) {
  static char nothing;
  return t->data ? t->data : &nothing;
}

const int32_t *gdn_verify_index_data(const gdn_verify_tensor *t) {
  return gdn_verify_is_present(t) ? (const int32_t *)gdn_verify_data_of(t) : NULL;
}

gdn_verify_status gdn_verify_fail_shared(gdn_verify_error *err, const char *name,
                                         const char *other) {
  return INVALID(err, "%s must share no memory with %s, but an element of one is in the other",
                 name, other);
}

gdn_verify_status gdn_verify_check_distinct(gdn_verify_error *err, const char *name,
                                            const gdn_verify_tensor *t) {
  char sizes[128], strides[128];
  if (!gdn_verify_tensor_overlaps_itself(t)) return GDN_VERIFY_OK;
  return INVALID(err,
                 "%s must not overlap itself, but with shape %s and strides %s several of its "
                 "elements are one",
                 name, format(&sizes, t->shape, t->ndim, 0),
                 format(&strides, t->stride, t->ndim, 0));
}
