/* cpu_levels.c - the kernels of the CPU backend, built once for each SIMD level, and the choice
 * among them.
 *
 * cpu_kernel.h is included once per level under another target attribute; the level is chosen once
 * per process, by what the CPU has. All levels perform the same float32 operations on each element
 * in the same order, so they give the same bytes.
 *
 * Flags: -O3 for the vectoriser; -ffp-contract=off, or products and sums fuse and the bits are
 * wrong; -fno-math-errno -fno-trapping-math let square roots and selects vectorise and change no
 * value. Without hardware FMA, gdn_verify_fma is libm's fmaf: right, slow, and it needs -lm.
 */
#include "cpu_internal.h"

#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#if defined(__FAST_MATH__)
#error "gdn-verify needs IEEE arithmetic: build without -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "gdn-verify needs float32 arithmetic without excess precision (on x86: SSE, not x87)"
#endif

/* ---- scratch of a unit ----------------------------------------------------------------------- */

typedef struct row {
  float *value; /* [GDN_VERIFY_CHUNK] */
  void *stored; /* the same in conv_state's dtype; equal to value where that is float32 */
} row;

typedef struct work {
  float weight[GDN_VERIFY_MAX_D_CONV][GDN_VERIFY_CHUNK]; /* [W][n] */
  float bias[GDN_VERIFY_CHUNK];
  float y[GDN_VERIFY_CHUNK];
  row ring[GDN_VERIFY_MAX_D_CONV];  /* the window at hand; W rows */
  row rows[GDN_VERIFY_MAX_D_CONV];  /* the memory of a tree's ancestors; W - 1 rows */
  row start[GDN_VERIFY_MAX_D_CONV]; /* the window that the sequence starts from; W - 1 rows */
  row spare;                        /* the newest row */
  float values[2 * GDN_VERIFY_MAX_D_CONV][GDN_VERIFY_CHUNK];
  uint16_t halves[2 * GDN_VERIFY_MAX_D_CONV][GDN_VERIFY_CHUNK];
} work;

static void bind_rows(work *w, int32_t d_conv, int half) {
  row all[2 * GDN_VERIFY_MAX_D_CONV];
  for (int i = 0; i < 2 * GDN_VERIFY_MAX_D_CONV; ++i) {
    all[i].value = w->values[i];
    all[i].stored = half ? (void *)w->halves[i] : (void *)w->values[i];
  }
  w->spare = all[0];
  for (int32_t k = 0; k < d_conv - 1; ++k) {
    w->start[k] = all[1 + k];
    w->rows[k] = all[GDN_VERIFY_MAX_D_CONV + k];
    w->ring[k] = w->start[k];
  }
  w->ring[d_conv - 1] = w->spare;
}

/* ---- pieces that every level inlines --------------------------------------------------------- */

/* Where an argument is called `half`, `taps` or `columns` below, it is a constant after inlining
 * where it matters. No sum of floats here or in cpu_kernel.h may be reordered or fused. */

GDN_VERIFY_INLINE void *element(const void *base, int64_t index, int32_t dtype) {
  return (char *)(uintptr_t)base + index * gdn_verify_dtype_size(dtype);
}

GDN_VERIFY_INLINE void copy_strided(void *restrict to, int64_t to_stride, const void *restrict from,
                                    int64_t from_stride, int64_t n, int half) {
  if (to_stride == 1 && from_stride == 1)
    memcpy(to, from, (size_t)n * (half ? sizeof(uint16_t) : sizeof(float)));
  else
    for (int64_t c = 0; c < n; ++c)
      gdn_verify_copy_element(to, c * to_stride, from, c * from_stride, half);
}

/* Of a chunk of a row that is read soon: it starts in a page that no hardware prefetcher follows
 * into. */
GDN_VERIFY_INLINE void prefetch(const void *from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i);
}

/* The same of one that is written soon. */
GDN_VERIFY_INLINE void prefetch_to_write(const void *to, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)to + i, 1);
}

/* Orders the stores of stream_copy before what other threads are told. */
GDN_VERIFY_INLINE void stream_fence(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/* to[c * columns + j] = rows[j][c] */
GDN_VERIFY_INLINE void scatter_columns(void *restrict to, const void *const *rows, int columns,
                                       int64_t n, int half) {
  const void *r[GDN_VERIFY_MAX_D_CONV];
  for (int j = 0; j < columns; ++j) r[j] = rows[j];
  for (int64_t c = 0; c < n; ++c) {
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) gdn_verify_copy_element(to, c * columns + j, r[j], c, half);
  }
}

GDN_VERIFY_INLINE void scatter_packed(void *to, const void *const *rows, int32_t columns, int64_t n,
                                      int half) {
  if (columns == 4)
    scatter_columns(to, rows, 4, n, half);
  else if (columns == 3)
    scatter_columns(to, rows, 3, n, half);
  else if (columns == 2)
    scatter_columns(to, rows, 2, n, half);
  else
    scatter_columns(to, rows, columns, n, half);
}

/* rows[j][c] = from[c * columns + j] */
GDN_VERIFY_INLINE void gather_columns(void *const *rows, const void *restrict from, int columns,
                                      int64_t n, int half) {
  void *r[GDN_VERIFY_MAX_D_CONV];
  for (int j = 0; j < columns; ++j) r[j] = rows[j];
#pragma GCC ivdep
  for (int64_t c = 0; c < n; ++c) {
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) gdn_verify_copy_element(r[j], c, from, c * columns + j, half);
  }
}

GDN_VERIFY_INLINE void gather_packed(void *const *rows, const void *from, int32_t columns,
                                     int64_t n, int half) {
  if (columns == 4)
    gather_columns(rows, from, 4, n, half);
  else if (columns == 3)
    gather_columns(rows, from, 3, n, half);
  else if (columns == 2)
    gather_columns(rows, from, 2, n, half);
  else
    gather_columns(rows, from, columns, n, half);
}

/* GDN_VERIFY_SILU_MOST, unknown to the compiler. */
GDN_VERIFY_INLINE float silu_most(void) {
  float most = GDN_VERIFY_SILU_MOST;
  __asm__("" : "+m"(most));
  return most;
}

/* y[i] = silu(y[i]), of a block in two steps: the whole is one long chain of operations, of which a
 * CPU's scheduler holds too few to keep its units busy. */
#define SILU_BLOCK 64

GDN_VERIFY_INLINE void silu_block(float *y, float most) {
  float p[SILU_BLOCK], rounded[SILU_BLOCK];
  for (int i = 0; i < SILU_BLOCK; ++i)
    p[i] = gdn_verify_exp_reduced(gdn_verify_silu_exponent(y[i], most), GDN_VERIFY_ROUND_HALF,
                                  &rounded[i]);
  for (int i = 0; i < SILU_BLOCK; ++i)
    y[i] = y[i] * gdn_verify_rcp(gdn_verify_one_plus_reduced(p[i], rounded[i]));
}

/* y[c] = bias, then + window[k] * weight[k] for k = 0 .. taps-1, then the activation */
GDN_VERIFY_INLINE void convolve_taps(const work *w, int taps, int64_t n, float *restrict y) {
  const float *x[GDN_VERIFY_MAX_D_CONV];
  for (int k = 0; k < GDN_VERIFY_MAX_D_CONV; ++k) x[k] = k < taps ? w->ring[k].value : NULL;
  for (int64_t c = 0; c < n; ++c) {
    float acc = w->bias[c];
#pragma GCC unroll 8
    for (int k = 0; k < taps; ++k) acc = acc + x[k][c] * w->weight[k][c];
    y[c] = acc;
  }
}

/* Squares of 32 numbers, as a halving tree: i with i + 16, + 8, + 4, + 2, + 1; here of some groups
 * side by side, so that the last steps fill a vector. */
#define SQUARES_GROUPS 4
#define SQUARES_BATCH (SQUARES_GROUPS * GDN_VERIFY_GROUP)

GDN_VERIFY_INLINE void square_groups(const float *y, float *sums) {
  float four[SQUARES_GROUPS][4];
  for (int g = 0; g < SQUARES_GROUPS; ++g, y += GDN_VERIFY_GROUP) {
    float s[GDN_VERIFY_GROUP / 2];
    for (int i = 0; i < 16; ++i) s[i] = y[i] * y[i] + y[i + 16] * y[i + 16];
    for (int i = 0; i < 8; ++i) s[i] = s[i] + s[i + 8];
    for (int i = 0; i < 4; ++i) four[g][i] = s[i] + s[i + 4];
  }
  for (int g = 0; g < SQUARES_GROUPS; ++g)
    sums[g] = (four[g][0] + four[g][2]) + (four[g][1] + four[g][3]);
}

/* ---- the levels ------------------------------------------------------------------------------ */

#define LEVEL_FUNCTION static
#define LEVEL_NAME(name) name##_baseline
#if defined(__x86_64__)
#define LEVEL_STREAM 16
#define LEVEL_STREAM_STORE(to, from) \
  _mm_stream_si128((__m128i *)(to), _mm_loadu_si128((const __m128i *)(from)))
#else
#define LEVEL_STREAM 0
#endif
#define LEVEL_HALVES 0
#include "cpu_kernel.h"

#if defined(__x86_64__)
/* Of the conversions to float16, which give the bits of numerics.h but for a NaN's payload. */
#define NEAREST_EVEN (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

#define LEVEL_FUNCTION static __attribute__((target("avx2,fma,f16c")))
#define LEVEL_NAME(name) name##_avx2
#define LEVEL_STREAM 32
#define LEVEL_STREAM_STORE(to, from) \
  _mm256_stream_si256((__m256i *)(to), _mm256_loadu_si256((const __m256i *)(from)))
#define LEVEL_HALVES 8
#define LEVEL_LOAD_HALVES(to, from) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from))))
#define LEVEL_STORE_HALVES(to, from) \
  _mm_storeu_si128((__m128i *)(void *)(to), _mm256_cvtps_ph(_mm256_loadu_ps(from), NEAREST_EVEN))
#include "cpu_kernel.h"

#define LEVEL_FUNCTION static __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define LEVEL_NAME(name) name##_avx512
#define LEVEL_STREAM 64
#define LEVEL_STREAM_STORE(to, from) _mm512_stream_si512((__m512i *)(to), _mm512_loadu_si512(from))
#define LEVEL_HALVES 16
#define LEVEL_LOAD_HALVES(to, from) \
  _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(from))))
#define LEVEL_STORE_HALVES(to, from) \
  _mm256_storeu_si256((__m256i *)(void *)(to), _mm512_cvtps_ph(_mm512_loadu_ps(from), NEAREST_EVEN))
#include "cpu_kernel.h"
#endif

#define LEVEL_KERNELS(suffix) \
  {#suffix, run_unit_##suffix, exp_array_##suffix, silu_array_##suffix, sum_squares_array_##suffix}

/* Lowest first. */
static const gdn_verify_cpu_kernels levels[] = {
    LEVEL_KERNELS(baseline),
#if defined(__x86_64__)
    LEVEL_KERNELS(avx2),
    LEVEL_KERNELS(avx512),
#endif
};

#define GDN_VERIFY_N_LEVELS ((int)(sizeof levels / sizeof levels[0]))

static int level_runs_here(int level) {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx = 0, edx;
  __builtin_cpu_init();
  const int f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  if (level == 1) return avx2;
  if (level == 2)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return level == 0;
}

/* Its number, or -1 where this CPU lacks it. */
static int find_level(const char *name) {
  for (int level = 0; level < GDN_VERIFY_N_LEVELS; ++level)
    if (name && strcmp(name, levels[level].name) == 0) return level_runs_here(level) ? level : -1;
  return -1;
}

static _Atomic int current_level = -1; /* -1: not chosen yet */

const gdn_verify_cpu_kernels *gdn_verify_current_kernels(void) {
  int level = atomic_load(&current_level);
  if (level < 0) {
    int chosen = find_level(getenv("GDN_VERIFY_CPU_LEVEL"));
    for (int i = GDN_VERIFY_N_LEVELS - 1; chosen < 0; --i)
      if (level_runs_here(i)) chosen = i;
    /* a choice that another thread made meanwhile stands */
    if (atomic_compare_exchange_strong(&current_level, &level, chosen)) level = chosen;
  }
  return &levels[level];
}

const char *gdn_verify_cpu_level(void) { return gdn_verify_current_kernels()->name; }

int gdn_verify_has_cpu_level(const char *name) { return find_level(name) >= 0; }

int gdn_verify_set_cpu_level(const char *name) {
  const int level = find_level(name);
  if (level < 0) return -1;
  atomic_store(&current_level, level);
  return 0;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

void gdn_verify_exp_array(const float *x, float *out, int64_t n) {
  const uint64_t saved = gdn_verify_enter_fp();
  gdn_verify_current_kernels()->exp_array(x, out, n);
  gdn_verify_leave_fp(saved);
}

void gdn_verify_silu_array(const float *x, float *out, int64_t n) {
  const uint64_t saved = gdn_verify_enter_fp();
  gdn_verify_current_kernels()->silu_array(x, out, n);
  gdn_verify_leave_fp(saved);
}

void gdn_verify_sum_squares_array(const float *x, float *out, int64_t rows, int64_t n) {
  const uint64_t saved = gdn_verify_enter_fp();
  gdn_verify_current_kernels()->sum_squares_array(x, out, rows, n);
  gdn_verify_leave_fp(saved);
}
