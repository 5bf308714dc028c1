/* parallel.c - what the CPU backend needs of the machine: threads and the floating-point
 * environment.
 *
 * Threads are created by the call that uses them and are gone when it returns: no pool, so nothing
 * to shut down and nothing that a fork could leave half alive. A caller with a pool of its own
 * passes parallel_for.
 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* sched_getaffinity */
#endif

#include "cpu_internal.h"

#include <pthread.h>
#include <stddef.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- floating-point environment -------------------------------------------------------------- */

/* x86: nearest even, exceptions masked, neither flush-to-zero nor denormals-are-zero. */
#define GDN_VERIFY_MXCSR_DEFAULT 0x1F80u

uint64_t gdn_verify_enter_fp(void) {
#if defined(__x86_64__)
  const uint64_t saved = _mm_getcsr();
  _mm_setcsr(GDN_VERIFY_MXCSR_DEFAULT);
  return saved;
#elif defined(__aarch64__)
  uint64_t saved;
  const uint64_t ieee = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" : : "r"(ieee));
  return saved;
#else
  return 0;
#endif
}

void gdn_verify_leave_fp(uint64_t saved) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned int)saved);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(saved));
#else
  (void)saved;
#endif
}

/* ---- threads --------------------------------------------------------------------------------- */

#define GDN_VERIFY_MAX_THREADS 256

typedef struct gdn_verify_range {
  gdn_verify_range_fn body;
  void *context;
  int64_t begin, end;
} gdn_verify_range;

static void run_guarded(void *context, int64_t begin, int64_t end) {
  const gdn_verify_range *range = (const gdn_verify_range *)context;
  const uint64_t saved = gdn_verify_enter_fp();
  range->body(range->context, begin, end);
  gdn_verify_leave_fp(saved);
}

static void *thread_main(void *argument) {
  gdn_verify_range *range = (gdn_verify_range *)argument;
  run_guarded(range, range->begin, range->end);
  return NULL;
}

static int64_t usable_cores(void) {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online < 1 ? 1 : (int64_t)online;
}

static void run_on_threads(int64_t count, int64_t grain, gdn_verify_range_fn body, void *context) {
  int64_t n = count / grain;
  if (n > 1) {
    const int64_t cores = usable_cores();
    if (n > cores) n = cores;
  }
  if (n > GDN_VERIFY_MAX_THREADS) n = GDN_VERIFY_MAX_THREADS;
  if (n < 1) n = 1;

  gdn_verify_range ranges[GDN_VERIFY_MAX_THREADS];
  pthread_t threads[GDN_VERIFY_MAX_THREADS];
  int started[GDN_VERIFY_MAX_THREADS];
  const int64_t base = count / n, rest = count % n;
  int64_t begin = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t end = begin + base + (i < rest ? 1 : 0);
    ranges[i].body = body;
    ranges[i].context = context;
    ranges[i].begin = begin;
    ranges[i].end = end;
    begin = end;
  }
  for (int64_t i = 1; i < n; ++i)
    started[i] = pthread_create(&threads[i], NULL, thread_main, &ranges[i]) == 0;
  (void)thread_main(&ranges[0]);
  for (int64_t i = 1; i < n; ++i) {
    if (started[i])
      (void)pthread_join(threads[i], NULL);
    else /* no thread to be had: its share is done here */
      (void)thread_main(&ranges[i]);
  }
}

void gdn_verify_run_ranges(gdn_verify_parallel_for parallel_for, int64_t count, int64_t grain,
                           gdn_verify_range_fn body, void *context) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  if (parallel_for) {
    gdn_verify_range whole;
    whole.body = body;
    whole.context = context;
    whole.begin = 0;
    whole.end = count;
    parallel_for(count, grain, run_guarded, &whole);
  } else {
    run_on_threads(count, grain, body, context);
  }
}
