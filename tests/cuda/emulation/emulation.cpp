/* emulation.cpp - runs grids: see emulation.h. */
#include "emulation.h"

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

/* The dynamic shared memory of token_parallel_kernel. */
#define SHARED_BYTES (1 << 16)
#define GROUPS_OF_HEAD 4
alignas(16) float partial[SHARED_BYTES / sizeof(float) / GROUPS_OF_HEAD][GROUPS_OF_HEAD];

static int backwards;
extern "C" __attribute__((visibility("default"))) void gdn_verify_emulate_backwards(int yes) {
  backwards = yes;
}

namespace {

constexpr size_t STACK_BYTES = 1 << 17;
constexpr size_t KERNEL_BYTES = 1 << 12; /* of it, about what a kernel's own variables take */
constexpr int WARP = 32;

enum Wait {
  RUNNING,
  AT_BARRIER,
  AT_SHUFFLE,
  ENDED
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint3 index;
  Wait wait;
  int source;     /* lane of a shuffle */
  uint32_t value; /* given to a barrier or shuffle, then what comes back */
};

std::vector<Thread> threads; /* of the block, by linear index */
ucontext_t scheduler;
int current;
const std::function<void()> *body;

void enter() {
  (*body)();
  threads[(size_t)current].wait = ENDED;
  swapcontext(&threads[(size_t)current].context, &scheduler);
}

void resume(int i) {
  Thread &t = threads[(size_t)i];
  current = i;
  threadIdx = t.index;
  swapcontext(&scheduler, &t.context);
}

void give_way(Wait why) {
  Thread &t = threads[(size_t)current];
  t.wait = why;
  swapcontext(&t.context, &scheduler);
}

/* Lets a warp go on whose lanes are all at a shuffle. */
bool shuffle(int first, int count) {
  uint32_t given[WARP];
  for (int i = 0; i < count; ++i) {
    if (threads[(size_t)(first + i)].wait != AT_SHUFFLE) return false;
    given[i] = threads[(size_t)(first + i)].value;
  }
  for (int i = 0; i < count; ++i) {
    Thread &t = threads[(size_t)(first + i)];
    if (t.source >= count) abort();
    t.value = given[t.source];
    t.wait = RUNNING;
  }
  return true;
}

/* Lets the block go on when all threads that have not ended are at a barrier. */
bool barrier(int count) {
  uint32_t any = 0;
  for (int i = 0; i < count; ++i) {
    if (threads[(size_t)i].wait != AT_BARRIER && threads[(size_t)i].wait != ENDED) return false;
    if (threads[(size_t)i].wait == AT_BARRIER) any |= threads[(size_t)i].value;
  }
  bool some = false;
  for (int i = 0; i < count; ++i) {
    if (threads[(size_t)i].wait != AT_BARRIER) continue;
    threads[(size_t)i].value = any;
    threads[(size_t)i].wait = RUNNING;
    some = true;
  }
  return some;
}

/* As far as it can go without the others: to a barrier or its end. */
void run_warp(int warp, int count) {
  const int first = warp * WARP, lanes = count - first < WARP ? count - first : WARP;
  do {
    for (int i = 0; i < lanes; ++i) {
      const int which = first + (backwards ? lanes - 1 - i : i);
      if (threads[(size_t)which].wait == RUNNING) resume(which);
    }
  } while (shuffle(first, lanes));
}

void run_block(dim3 block) {
  const int count = (int)(block.x * block.y * block.z);
  if (threads.size() < (size_t)count) threads.resize((size_t)count);
  for (int i = 0; i < count; ++i) {
    Thread &t = threads[(size_t)i];
    if (!t.stack) t.stack.reset(new char[STACK_BYTES]);
    t.index = make_uint3((unsigned)i % block.x, (unsigned)i / block.x % block.y,
                         (unsigned)i / (block.x * block.y));
    t.wait = RUNNING;
    /* a variable that nothing was written to is far outside of any buffer, as an offset */
    memset(t.stack.get() + STACK_BYTES - KERNEL_BYTES, 0x80, KERNEL_BYTES);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = STACK_BYTES;
    t.context.uc_link = nullptr;
    makecontext(&t.context, enter, 0);
  }
  const int warps = (count + WARP - 1) / WARP;
  for (;;) {
    for (int w = 0; w < warps; ++w) run_warp(backwards ? warps - 1 - w : w, count);
    if (barrier(count)) continue;
    for (int i = 0; i < count; ++i) {
      if (threads[(size_t)i].wait == ENDED) continue;
      fprintf(stderr, "block %u %u %u: thread %d waits for threads that never come\n", blockIdx.x,
              blockIdx.y, blockIdx.z, i);
      abort();
    }
    return;
  }
}

}  // namespace

int emulate_barrier(int value) {
  threads[(size_t)current].value = (uint32_t)(value != 0);
  give_way(AT_BARRIER);
  return (int)threads[(size_t)current].value;
}

uint32_t emulate_shuffle(uint32_t value, int source_lane) {
  threads[(size_t)current].value = value;
  threads[(size_t)current].source = source_lane;
  give_way(AT_SHUFFLE);
  return threads[(size_t)current].value;
}

int emulate_lane(void) { return current % WARP; }

void emulate_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &thread) {
  const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
  if (shared > SHARED_BYTES || block.x * block.y * block.z > 1024 || blocks == 0) abort();
  gridDim = grid;
  blockDim = block;
  body = &thread;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t which = backwards ? blocks - 1 - i : i;
    blockIdx = make_uint3((unsigned)(which % grid.x), (unsigned)(which / grid.x % grid.y),
                          (unsigned)(which / grid.x / grid.y));
    memset(partial, 0xFF, sizeof partial); /* NaN: what is read was written */
    run_block(block);
  }
}

/* ---- the rest of the backend ----------------------------------------------------------------- */

extern "C" cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

gdn_verify_status gdn_verify_fail_cuda(gdn_verify_error *err, const char *what, cudaError_t error) {
  return gdn_verify_fail(err, GDN_VERIFY_CUDA_ERROR, "%s failed: %d", what, (int)error);
}

gdn_verify_status gdn_verify_check_device_indices(const gdn_verify_problem *problem, void *,
                                                  gdn_verify_error *err) {
  return gdn_verify_check_indices(problem, err);
}

gdn_verify_status gdn_verify_check_device_commit(const gdn_verify_commit_problem *problem, void *,
                                                 gdn_verify_error *err) {
  return gdn_verify_check_commit_indices(problem, err);
}

/* The kernels under the names of the CPU backend, so that the NumPy view runs them. */
extern "C" gdn_verify_status gdn_verify_conv_cpu(const gdn_verify_params *params,
                                                 gdn_verify_error *err) {
  return gdn_verify_conv_cuda(params, nullptr, err);
}

extern "C" gdn_verify_status gdn_verify_commit_cpu(const gdn_verify_commit_params *params,
                                                   gdn_verify_error *err) {
  return gdn_verify_commit_cuda(params, nullptr, err);
}
