/* example.c - one verify step through the C ABI, without Python or PyTorch. C11, and C++ as it is.
 *
 * C sequences, K draft tokens of each, D channels. The step is computed three times, and all bytes
 * must be equal: token by token (K calls, and K copies of the windows), in one call on the CPU, and
 * in one call on CUDA where the library and the machine have it. Then a commit: the first sequence
 * accepts three tokens, the second one. All tensors are float32 and contiguous.
 *
 * Prints what it does; exits with 1 where bytes differ or a call fails.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdn_verify.h"
#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum {
  C = 2,
  K = 4,
  D = 512,
  W = 4,
  S = W,
  QK_CHANNELS = 256,
  HEAD_DIM = 128
};
enum {
  ROWS = C * K * D,
  STATE = C * D * S,
  SNAPSHOTS = C * K * D * S
};

static gdn_verify_error g_error;

static void require(gdn_verify_status status, const char *what) {
  if (status == GDN_VERIFY_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", what, (int)status, g_error.text);
  exit(1);
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* Contiguous; `ndim` of the sizes count. */
static gdn_verify_tensor view(void *data, int32_t dtype, int32_t ndim, const int64_t *shape) {
  gdn_verify_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.ndim = ndim;
  t.dtype = dtype;
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

/* What one way of computing the step reads and writes. */
typedef struct buffers {
  float *state;     /* [C, D, S]: the windows before the step, afterwards those after it */
  float *input;     /* [C, K, D]: q | k | v of every draft token */
  float *weight;    /* [D, W] */
  float *output;    /* [C, K, D] */
  float *snapshots; /* [C, K, D, S]: the windows after every token */
} buffers;

static float *floats(size_t count) {
  float *x = (float *)calloc(count, sizeof(float));
  if (!x) exit(1);
  return x;
}

static void fill(float *x, int count, uint32_t seed) { /* numbers in [-1, 1), always the same */
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(int32_t)seed / 2147483648.0f;
  }
}

static buffers make_buffers(void) {
  buffers b;
  b.state = floats(STATE);
  b.input = floats(ROWS);
  b.weight = floats(D * W);
  b.output = floats(ROWS);
  b.snapshots = floats(SNAPSHOTS);
  fill(b.state, STATE, 1);
  fill(b.input, ROWS, 2);
  fill(b.weight, D * W, 3);
  return b;
}

static void free_buffers(buffers b) {
  free(b.state);
  free(b.input);
  free(b.weight);
  free(b.output);
  free(b.snapshots);
}

/* ---- the two ways ---------------------------------------------------------------------------- */

/* What both have in common. Whatever is left zero is absent. */
static gdn_verify_params common_params(gdn_verify_op op, buffers b) {
  const int64_t state[] = {C, D, S}, weight[] = {D, W};
  gdn_verify_params p;
  memset(&p, 0, sizeof p);
  p.op = op;
  p.conv_state = view(b.state, GDN_VERIFY_FLOAT32, 3, state);
  p.weight = view(b.weight, GDN_VERIFY_FLOAT32, 2, weight);
  p.qk_channels = QK_CHANNELS;
  p.head_dim = HEAD_DIM;
  p.l2_eps = 1e-6;
  p.pad_slot_id = -1;
  p.max_num_tokens = -1;
  p.activation = GDN_VERIFY_SILU;
  p.update_state = 1;
  p.config = -1;
  return p;
}

/* All tokens of all sequences in one call. */
static gdn_verify_params step_params(buffers b) {
  const int64_t rows[] = {C, K, D}, snapshots[] = {C, K, D, S};
  gdn_verify_params p = common_params(GDN_VERIFY_OP_BATCHED, b);
  p.new_input = view(b.input, GDN_VERIFY_FLOAT32, 3, rows);
  p.output = view(b.output, GDN_VERIFY_FLOAT32, 3, rows);
  p.conv_state_inter = view(b.snapshots, GDN_VERIFY_FLOAT32, 4, snapshots);
  return p;
}

/* One call for each token, and a copy of each sequence's window after it. */
static void run_token_by_token(buffers b) {
  const int64_t row[] = {C, D};
  for (int t = 0; t < K; ++t) {
    gdn_verify_params p = common_params(GDN_VERIFY_OP_UPDATE, b);
    p.new_input = view(b.input + t * D, GDN_VERIFY_FLOAT32, 2, row);
    p.output = view(b.output + t * D, GDN_VERIFY_FLOAT32, 2, row);
    p.new_input.stride[0] = p.output.stride[0] = K * D; /* row t of every sequence */
    require(gdn_verify_conv_cpu(&p, &g_error), "one token on the CPU");
    for (int i = 0; i < C; ++i)
      memcpy(b.snapshots + (i * K + t) * D * S, b.state + i * D * S, sizeof(float[D * S]));
  }
}

#ifdef WITH_CUDA
static void cuda(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

static float *to_device(const float *x, size_t count) {
  void *copy = NULL;
  cuda(cudaMalloc(&copy, count * sizeof(float)), "cudaMalloc");
  cuda(cudaMemcpy(copy, x, count * sizeof(float), cudaMemcpyHostToDevice), "copy to the device");
  return (float *)copy;
}

static void to_host(float *x, float *copy, size_t count) {
  cuda(cudaMemcpy(x, copy, count * sizeof(float), cudaMemcpyDeviceToHost), "copy to the host");
  cuda(cudaFree(copy), "cudaFree");
}

/* As on the CPU: the params hold device pointers instead, and there is a stream. */
static void run_on_cuda(buffers host) {
  buffers device;
  cudaStream_t stream;
  device.state = to_device(host.state, STATE);
  device.input = to_device(host.input, ROWS);
  device.weight = to_device(host.weight, D * W);
  device.output = to_device(host.output, ROWS);
  device.snapshots = to_device(host.snapshots, SNAPSHOTS);
  cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  const gdn_verify_params p = step_params(device);
  require(gdn_verify_conv_cuda(&p, stream, &g_error), "one call on CUDA");
  cuda(cudaStreamSynchronize(stream), "the kernel");
  cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  to_host(host.state, device.state, STATE);
  to_host(host.output, device.output, ROWS);
  to_host(host.snapshots, device.snapshots, SNAPSHOTS);
  cuda(cudaFree(device.input), "cudaFree");
  cuda(cudaFree(device.weight), "cudaFree");
}

static int cuda_devices(void) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
#endif

/* ---- what comes out -------------------------------------------------------------------------- */

static void expect_same(const void *actual, const void *expected, size_t size, const char *what) {
  if (memcmp(actual, expected, size) == 0) return;
  fprintf(stderr, "%s: the bytes differ\n", what);
  exit(1);
}

static void compare(buffers actual, buffers expected, const char *name) {
  expect_same(actual.output, expected.output, sizeof(float[ROWS]), "output");
  expect_same(actual.snapshots, expected.snapshots, sizeof(float[SNAPSHOTS]), "snapshots");
  expect_same(actual.state, expected.state, sizeof(float[STATE]), "conv_state");
  printf("%-28s output, snapshots and state have the bytes of the token-by-token calls\n", name);
}

/* The state becomes the window after the last accepted token. */
static void commit(buffers b) {
  const int64_t state[] = {C, D, S}, snapshots[] = {C, K, D, S}, sequences[] = {C};
  const gdn_verify_tensor states = view(b.state, GDN_VERIFY_FLOAT32, 3, state);
  const gdn_verify_tensor windows = view(b.snapshots, GDN_VERIFY_FLOAT32, 4, snapshots);
  int32_t accepted[C] = {3, 1};
  gdn_verify_commit_params p;
  memset(&p, 0, sizeof p);
  p.conv_states = &states; /* an array, one for each layer */
  p.snapshots = &windows;
  p.n_layers = 1;
  p.num_accepted = view(accepted, GDN_VERIFY_INT32, 1, sequences);
  p.pad_slot_id = -1;
  require(gdn_verify_commit_cpu(&p, &g_error), "commit");
  for (int i = 0; i < C; ++i)
    expect_same(b.state + i * D * S, b.snapshots + (i * K + accepted[i] - 1) * D * S,
                sizeof(float[D * S]), "committed state");
  printf("%-28s accepted 3 and 1 of %d tokens, the state is snapshot 2 and snapshot 0\n", "commit",
         (int)K);
}

/* A wrong call writes nothing, and the error says what is wrong in one sentence. */
static void show_an_error(buffers b) {
  gdn_verify_params p = step_params(b);
  p.head_dim = 96;
  const gdn_verify_status status = gdn_verify_conv_cpu(&p, &g_error);
  printf("%-28s status %d: %s\n", "a wrong call", (int)status, g_error.text);
  if (status != GDN_VERIFY_INVALID) exit(1);
}

int main(void) {
  printf("gdn-verify %s, CPU level %s, CUDA architectures: %s\n", GDN_VERIFY_VERSION,
         gdn_verify_cpu_level(), gdn_verify_has_cuda() ? gdn_verify_cuda_archs() : "none");
  printf("C = %d sequences, K = %d tokens, D = %d channels, W = %d\n", (int)C, (int)K, (int)D,
         (int)W);

  buffers golden = make_buffers();
  run_token_by_token(golden);
  double norm = 0;
  for (int i = 0; i < HEAD_DIM; ++i) norm += (double)golden.output[i] * (double)golden.output[i];
  printf("%-28s the first head of q is %.4f %.4f %.4f .., its L2 norm %.4f\n", "token by token",
         (double)golden.output[0], (double)golden.output[1], (double)golden.output[2], sqrt(norm));

  buffers fused = make_buffers();
  const gdn_verify_params p = step_params(fused);
  require(gdn_verify_conv_cpu(&p, &g_error), "one call on the CPU");
  compare(fused, golden, "one call on the CPU");

#ifdef WITH_CUDA
  if (cuda_devices() > 0) {
    buffers other = make_buffers();
    run_on_cuda(other);
    compare(other, golden, "one call on CUDA");
    free_buffers(other);
  } else {
    printf("%-28s there is no device\n", "one call on CUDA");
  }
#endif

  commit(fused);
  show_an_error(fused);
  free_buffers(fused);
  free_buffers(golden);
  return 0;
}
