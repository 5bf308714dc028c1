/* overlap.c - whether strided tensors share memory.
 *
 * Tensors a and b share a byte where
 *
 *     sum i_k * stride_a[k] + p - sum j_k * stride_b[k] - q = address_b - address_a
 *
 * has a solution with every index inside its size and the bytes p, q inside an element. Each index
 * is a variable with bounds and a coefficient. Variables are brought to positive coefficients,
 * sorted, and joined where the values of the sum have no gaps, which loses no solution: what is
 * left of contiguous tensors is one variable. The rest is searched depth first from the largest
 * coefficient, where the reach of the smaller ones leaves few values to try.
 *
 * For a tensor and itself the variables are differences of two indices, and one must not be 0.
 */
#include "overlap.h"

#include "problem.h"

#define MAX_ELEMENTS ((int64_t)1 << 58)
/* Bytes beyond which two tensors cannot meet: the elements that both span, of 4 bytes each. */
#define MAX_DISTANCE (8 * MAX_ELEMENTS)
#define MAX_TERMS (2 * GDN_VERIFY_MAX_DIMS + 1)
/* Values tried before a search gives up. */
#define SEARCH_BUDGET 4096

/* coefficient * x with low <= x <= high. */
typedef struct term {
  int64_t coefficient; /* not negative */
  int64_t low, high;
} term;

typedef struct equation {
  int n;
  term terms[MAX_TERMS]; /* by coefficient, ascending */
} equation;

static int64_t element_size(const gdn_verify_tensor *tensor) {
  return gdn_verify_dtype_size(tensor->dtype);
}

/* Then its strides may be any numbers, and nothing may be computed from them. */
static int is_empty(const gdn_verify_tensor *tensor) {
  int empty = 0;
  for (int k = 0; k < tensor->ndim; k++) empty |= tensor->shape[k] == 0;
  return empty;
}

static int64_t address(const gdn_verify_tensor *tensor) { return (int64_t)(intptr_t)tensor->data; }

/* Of addresses, which may be any numbers (a tag in the highest byte, say): modulo 2^64. */
static int64_t add(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static int64_t distance(int64_t from, int64_t to) {
  return (int64_t)((uint64_t)to - (uint64_t)from);
}

gdn_verify_memory gdn_verify_tensor_memory(const gdn_verify_tensor *tensor) {
  int64_t count = 1, reach = 0;
  for (int k = 0; k < tensor->ndim; k++)
    if (tensor->shape[k] > MAX_ELEMENTS) return GDN_VERIFY_TOO_LARGE;
  if (is_empty(tensor)) return GDN_VERIFY_MEMORY_OK;
  for (int k = 0; k < tensor->ndim; k++) {
    int64_t length;
    if (__builtin_mul_overflow(count, tensor->shape[k], &count) || count > MAX_ELEMENTS ||
        __builtin_mul_overflow(tensor->shape[k] - 1, tensor->stride[k], &length) ||
        length > MAX_ELEMENTS || length < -MAX_ELEMENTS)
      return GDN_VERIFY_TOO_LARGE;
    reach += length < 0 ? -length : length;
  }
  if (reach > MAX_ELEMENTS) return GDN_VERIFY_TOO_LARGE;
  if (!tensor->data) return GDN_VERIFY_NO_DATA;
  if ((uintptr_t)tensor->data & (uintptr_t)(element_size(tensor) - 1))
    return GDN_VERIFY_NOT_ALIGNED;
  return GDN_VERIFY_MEMORY_OK;
}

gdn_verify_byte_range gdn_verify_tensor_range(const gdn_verify_tensor *tensor) {
  int64_t low = 0, high = 0;
  gdn_verify_byte_range range = {0, 0};
  if (tensor->ndim == 0 || is_empty(tensor)) return range; /* absent, or nothing in it */
  for (int k = 0; k < tensor->ndim; k++) {
    const int64_t length = (tensor->shape[k] - 1) * tensor->stride[k];
    if (length < 0)
      low += length;
    else
      high += length;
  }
  range.begin = add(address(tensor), low * element_size(tensor));
  range.end = add(address(tensor), (high + 1) * element_size(tensor));
  return range;
}

/* ---- equations ------------------------------------------------------------------------------- */

/* Adds coefficient * x in its place; a negative coefficient turns x round, equal ones are one x. */
static void add_term(equation *e, int64_t coefficient, int64_t low, int64_t high) {
  if (coefficient < 0) {
    const int64_t turned = -high;
    coefficient = -coefficient;
    high = -low;
    low = turned;
  }
  int k = e->n;
  while (k > 0 && e->terms[k - 1].coefficient > coefficient) k--;
  if (k > 0 && e->terms[k - 1].coefficient == coefficient) {
    e->terms[k - 1].low += low;
    e->terms[k - 1].high += high;
    return;
  }
  for (int m = e->n; m > k; m--) e->terms[m] = e->terms[m - 1];
  e->terms[k].coefficient = coefficient;
  e->terms[k].low = low;
  e->terms[k].high = high;
  e->n++;
}

/* Joins c * x and c * m * y to c * (x + m * y) where x takes m consecutive values or more, so that
 * the sum takes every value between its bounds. */
static void join_terms(equation *e) {
  int last = 0;
  for (int k = 1; k < e->n; k++) {
    term *small = &e->terms[last];
    const term *large = &e->terms[k];
    const int64_t multiple = large->coefficient / small->coefficient;
    if (large->coefficient % small->coefficient == 0 && small->high - small->low + 1 >= multiple) {
      small->low += multiple * large->low;
      small->high += multiple * large->high;
    } else {
      e->terms[++last] = *large;
    }
  }
  e->n = last + 1;
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* Whether the first n terms can add up to target. */
static int solvable(const term *terms, int n, int64_t target, int *budget) {
  if (n == 0) return target == 0;
  const term *top = &terms[n - 1];
  int64_t rest_low = 0, rest_high = 0;
  for (int k = 0; k < n - 1; k++) {
    rest_low += terms[k].coefficient * terms[k].low;
    rest_high += terms[k].coefficient * terms[k].high;
  }
  int64_t x = -floor_div(rest_high - target, top->coefficient);
  int64_t end = floor_div(target - rest_low, top->coefficient);
  if (x < top->low) x = top->low;
  if (end > top->high) end = top->high;
  for (; x <= end; x++) {
    if (--*budget < 0) return 0;
    if (solvable(terms, n - 1, target - top->coefficient * x, budget)) return 1;
  }
  return 0;
}

/* Whether each stride exceeds the reach of the dimensions after it, as in most tensors. */
static int is_nested(const gdn_verify_tensor *tensor) {
  int64_t reach = 0;
  for (int d = tensor->ndim - 1; d >= 0; d--) {
    if (tensor->shape[d] <= 1) continue;
    const int64_t stride = tensor->stride[d] < 0 ? -tensor->stride[d] : tensor->stride[d];
    if (stride <= reach) return 0;
    reach += stride * (tensor->shape[d] - 1);
  }
  return 1;
}

int gdn_verify_tensor_overlaps_itself(const gdn_verify_tensor *tensor) {
  if (is_empty(tensor) || is_nested(tensor)) return 0;
  term terms[GDN_VERIFY_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < tensor->ndim; d++) {
    if (tensor->shape[d] == 1) continue;
    const int64_t stride = tensor->stride[d] < 0 ? -tensor->stride[d] : tensor->stride[d];
    int k = n++;
    for (; k > 0 && terms[k - 1].coefficient > stride; k--) terms[k] = terms[k - 1];
    terms[k].coefficient = stride;
    terms[k].low = 1 - tensor->shape[d];
    terms[k].high = tensor->shape[d] - 1;
  }
  /* x is the difference along the largest stride whose difference is not 0; by symmetry positive */
  int64_t reach = 0; /* of the smaller strides */
  int budget = SEARCH_BUDGET;
  for (int k = 0; k < n; k++) {
    const int64_t stride = terms[k].coefficient;
    for (int64_t x = 1; x <= terms[k].high && x * stride <= reach; x++) {
      if (--budget < 0) return 0;
      if (solvable(terms, k, x * stride, &budget)) return 1;
    }
    reach += stride * terms[k].high;
  }
  return 0;
}

/* The indices of a tensor, with `sign` times its strides in bytes. */
static void add_indices(equation *e, const gdn_verify_tensor *tensor, int64_t sign) {
  const int64_t size = sign * element_size(tensor);
  for (int k = 0; k < tensor->ndim; k++)
    if (tensor->shape[k] > 1 && tensor->stride[k])
      add_term(e, tensor->stride[k] * size, 0, tensor->shape[k] - 1);
}

/* The equation of a and b; 0 where one has no element. */
static int make_equation(equation *e, const gdn_verify_tensor *a, const gdn_verify_tensor *b) {
  if (is_empty(a) || is_empty(b)) return 0;
  e->n = 1;
  e->terms[0].coefficient = 1;
  e->terms[0].low = 1 - element_size(b);
  e->terms[0].high = element_size(a) - 1;
  add_indices(e, a, 1);
  add_indices(e, b, -1);
  join_terms(e);
  return 1;
}

int gdn_verify_tensors_overlap(const gdn_verify_tensor *a, const gdn_verify_tensor *b) {
  equation e;
  int budget = SEARCH_BUDGET;
  const int64_t target = distance(address(a), address(b));
  if (target > MAX_DISTANCE || target < -MAX_DISTANCE) return 0;
  return make_equation(&e, a, b) && solvable(e.terms, e.n, target, &budget);
}

int gdn_verify_lists_overlap(const gdn_verify_tensor *a, const gdn_verify_tensor *b, int64_t count,
                             int64_t *i, int64_t *j) {
  equation e;
  if (count == 0 || !make_equation(&e, a, b)) return 0;
  const gdn_verify_byte_range range_a = gdn_verify_tensor_range(a);
  const gdn_verify_byte_range range_b = gdn_verify_tensor_range(b);
  /* the ranges of a[i] and b[j] meet where low < their addresses' difference < high */
  const int64_t low = distance(address(a), range_a.begin) - distance(address(b), range_b.end);
  const int64_t high = distance(address(a), range_a.end) - distance(address(b), range_b.begin);
  for (int64_t m = 0; m < count; m++) {
    const int64_t base = address(&a[m]);
    int budget = SEARCH_BUDGET;
    for (int64_t k = a == b ? m + 1 : 0; k < count; k++) {
      const int64_t delta = distance(base, address(&b[k]));
      if (delta > low && delta < high && solvable(e.terms, e.n, delta, &budget)) {
        *i = m;
        *j = k;
        return 1;
      }
    }
  }
  return 0;
}
