/* cpu_internal.h - what the files of the CPU backend share. Internal to the core.
 *
 *   verify_cpu.c  cuts the work into units                        -> cpu_levels.c, parallel.c
 *   commit_cpu.c  snapshots back into conv_state                  -> parallel.c
 *   cpu_levels.c  one set of kernels per SIMD level, their choice -> cpu_kernel.h, numerics.h
 *   parallel.c    threads and the floating-point environment
 */
#ifndef GDN_VERIFY_CPU_INTERNAL_H
#define GDN_VERIFY_CPU_INTERNAL_H

#include "problem.h"

/* Most channels that a unit of work covers: what its scratch rows hold. A multiple of
 * GDN_VERIFY_GROUP, so that a head that is cut into chunks is never cut inside a group. */
#define GDN_VERIFY_CHUNK 256

typedef enum gdn_verify_norm {
  GDN_VERIFY_NORM_NONE = 0,
  GDN_VERIFY_NORM_HEADS = 1, /* the unit is whole heads */
  GDN_VERIFY_NORM_SUM = 2,  /* a chunk of a head: adds its squares to totals, writes nothing else */
  GDN_VERIFY_NORM_SCALE = 3 /* a chunk of a head: scales by totals */
} gdn_verify_norm;

/* Channels channel .. channel + count - 1 of one sequence, all of its tokens. */
typedef struct gdn_verify_unit {
  int64_t channel;
  int64_t count; /* 1 .. GDN_VERIFY_CHUNK */
  gdn_verify_norm norm;
  float *totals; /* sum of squares of token t at totals[t * totals_stride] */
  int64_t totals_stride;
  int stream; /* snapshots are written past the caches */
} gdn_verify_unit;

typedef struct gdn_verify_cpu_kernels {
  const char *name;
  void (*run_unit)(const gdn_verify_problem *p, const gdn_verify_sequence *s, int64_t seq,
                   const gdn_verify_unit *unit);
  void (*exp_array)(const float *x, float *out, int64_t n);
  void (*silu_array)(const float *x, float *out, int64_t n);
  void (*sum_squares_array)(const float *x, float *out, int64_t rows, int64_t n);
} gdn_verify_cpu_kernels;

/* to[i] = from[j], of 2 bytes where `half`, else of 4; `half` is a constant after inlining. */
GDN_VERIFY_INLINE void gdn_verify_copy_element(void *to, int64_t i, const void *from, int64_t j,
                                               int half) {
  if (half)
    ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
  else
    ((float *)to)[i] = ((const float *)from)[j];
}

/* The kernels of the level in force. */
const gdn_verify_cpu_kernels *gdn_verify_current_kernels(void);

/* The bits that make arithmetic differ from IEEE's default: saved, set to it, restored. */
uint64_t gdn_verify_enter_fp(void);
void gdn_verify_leave_fp(uint64_t saved);

/* Runs `body` over [0, count) by `parallel_for`, or where that is null on threads of its own; each
 * range in IEEE's default floating-point environment. */
void gdn_verify_run_ranges(gdn_verify_parallel_for parallel_for, int64_t count, int64_t grain,
                           gdn_verify_range_fn body, void *context);

#endif /* GDN_VERIFY_CPU_INTERNAL_H */
