/* overlap.h - whether strided tensors share memory. Internal to the validation.
 *
 * Two tensors overlap where an element of one and an element of the other have a byte in common; a
 * tensor overlaps itself where two of its index tuples name the same element. Both questions are
 * integer equations with bounds. They are answered exactly for every layout that occurs in
 * practice; where the search would take long the answer is 0, "not known to overlap".
 *
 * All functions expect tensors that passed gdn_verify_tensor_memory.
 */
#ifndef GDN_VERIFY_OVERLAP_H
#define GDN_VERIFY_OVERLAP_H

#include "gdn_verify.h"

/* The bytes from `begin` to `end` - 1 hold all elements; begin = end where there are none. */
typedef struct gdn_verify_byte_range {
  int64_t begin, end;
} gdn_verify_byte_range;

typedef enum gdn_verify_memory {
  GDN_VERIFY_MEMORY_OK = 0,
  GDN_VERIFY_TOO_LARGE,  /* more than 2^58 elements, or as far apart */
  GDN_VERIFY_NO_DATA,    /* a null pointer, but elements */
  GDN_VERIFY_NOT_ALIGNED /* the pointer is no multiple of the element's size */
} gdn_verify_memory;

/* Sizes must not be negative. The dtype must be one that has a name. */
gdn_verify_memory gdn_verify_tensor_memory(const gdn_verify_tensor *tensor);

gdn_verify_byte_range gdn_verify_tensor_range(const gdn_verify_tensor *tensor);

int gdn_verify_tensor_overlaps_itself(const gdn_verify_tensor *tensor);

int gdn_verify_tensors_overlap(const gdn_verify_tensor *a, const gdn_verify_tensor *b);

/* Whether some a[i] overlaps some b[j], and the first such pair; only i < j where a == b. There are
 * `count` of each; all of `a` have the shape, strides and dtype of a[0], all of `b` of b[0]. */
int gdn_verify_lists_overlap(const gdn_verify_tensor *a, const gdn_verify_tensor *b, int64_t count,
                             int64_t *i, int64_t *j);

#endif /* GDN_VERIFY_OVERLAP_H */
