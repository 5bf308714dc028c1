/* check.h - one tensor against what it must be, and the error texts. Internal to the validation.
 *
 * Every function that fails leaves one sentence in err->text: the argument's name, what it must be,
 * what it is. Nothing is formatted otherwise.
 */
#ifndef GDN_VERIFY_CHECK_H
#define GDN_VERIFY_CHECK_H

#include "gdn_verify.h"
#include "overlap.h"
#include "problem.h"

#define TRY(check)                                \
  do {                                            \
    const gdn_verify_status status_ = (check);    \
    if (status_ != GDN_VERIFY_OK) return status_; \
  } while (0)

#define INVALID(err, ...) gdn_verify_fail(err, GDN_VERIFY_INVALID, __VA_ARGS__)

#define DTYPE(dtype) (1u << (dtype))
#define ANY_FLOAT \
  (DTYPE(GDN_VERIFY_FLOAT32) | DTYPE(GDN_VERIFY_BFLOAT16) | DTYPE(GDN_VERIFY_FLOAT16))

/* A size of `least` or more. */
#define AT_LEAST(least) (~(int64_t)(least))
#define ANY AT_LEAST(0)

typedef struct gdn_verify_expected {
  const char *dims; /* their names, "n_seq, K, D" */
  unsigned dtypes;  /* bits DTYPE(..) */
  int ndim;
  int64_t size[GDN_VERIFY_MAX_DIMS]; /* exact, or AT_LEAST */
} gdn_verify_expected;

/* A tensor without dimensions is not an absent one. */
static inline int gdn_verify_is_present(const gdn_verify_tensor *t) {
  return t->ndim != 0 || t->data;
}

/* Presence, dimensions, dtype, shape, extent and pointer. */
gdn_verify_status gdn_verify_check_tensor(gdn_verify_error *err, const char *name,
                                          const gdn_verify_tensor *t, const gdn_verify_expected *e);

/* The same of a tensor that may be absent. */
gdn_verify_status gdn_verify_check_optional(gdn_verify_error *err, const char *name,
                                            const gdn_verify_tensor *t,
                                            const gdn_verify_expected *e);

/* That no two elements of `t` are one. */
gdn_verify_status gdn_verify_check_distinct(gdn_verify_error *err, const char *name,
                                            const gdn_verify_tensor *t);

/* The failure of `name`, which shares memory with `other`. */
gdn_verify_status gdn_verify_fail_shared(gdn_verify_error *err, const char *name,
                                         const char *other);

/* The data pointer; of a tensor with nothing in it some pointer that is not null, since null stands
 * for an absent argument in a problem. */
void *gdn_verify_data_of(const gdn_verify_tensor *t);

/* That of an index tensor; null where it is absent. */
const int32_t *gdn_verify_index_data(const gdn_verify_tensor *t);

#endif /* GDN_VERIFY_CHECK_H */
