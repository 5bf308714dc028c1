/* verify_cuda.cu - the launcher of the CUDA backend: which kernel, which shape, one launch.
 *
 * token_parallel.cuh takes the shapes of shipped models (d_conv 4, head_dim 128, bfloat16 or
 * float16); general.cuh takes everything else. Both give the same bits. A launch configuration is
 * (V, T): V adjacent channels a thread, T consecutive tokens a thread.
 */
#include "cuda_host.h"
#include "general.cuh"
#include "token_parallel.cuh"
#include "tuned.h"

#ifndef GDN_VERIFY_CUDA_ARCHS
#define GDN_VERIFY_CUDA_ARCHS "unknown"
#endif

/* ---- configurations -------------------------------------------------------------------------- */

/* Every (V, T) that is compiled; `config` is the index. */
#define FOR_EACH_CONFIG(X) \
  X(1, 1)                  \
  X(1, 2) X(1, 3) X(1, 4) X(2, 1) X(2, 2) X(2, 3) X(2, 4) X(2, 6) X(2, 8) X(4, 1) X(4, 2) X(4, 3)

typedef struct Config {
  int v, t;
} Config;

static const Config configs[] = {
#define X(v, t) {v, t},
    FOR_EACH_CONFIG(X)
#undef X
};
#define NUM_CONFIGS ((int)(sizeof configs / sizeof configs[0]))

/* Whether a block of this configuration holds all the tokens of a sequence. */
static bool config_fits(int config, int64_t num_tokens) {
  const int64_t groups = (num_tokens + configs[config].t - 1) / configs[config].t;
  return groups * (FAST_HEAD_DIM / configs[config].v) <=
         max_threads(configs[config].v, configs[config].t);
}

/* -1 where there is none. */
static int find_config(int v, int t) {
  for (int i = 0; i < NUM_CONFIGS; ++i)
    if (configs[i].v == v && configs[i].t == t) return i;
  return -1;
}

/* Without a tuned table. Float32 windows want whole 16-byte stores side by side, one channel a
 * thread; 16-bit ones two; where a token brings few bytes, four as long as all blocks are on the SMs
 * at the same time. More tokens a thread the more there are in all. */
static int choose_config(const gdn_verify_problem *p) {
  const bool windows = p->snapshot_kind == GDN_VERIFY_WINDOWS;
  const bool wide = p->state_dtype == GDN_VERIFY_FLOAT32;
  const int64_t work = p->n_seq * p->num_tokens * p->d_inner / 8192;
  int v = windows && wide ? 1 : windows ? 2 : work < 8 ? 2 : 4;
  int t = work <= 4 ? 1 : work <= 16 ? 2 : 4;
  if (v == 2) t = work <= 32 ? 1 : work <= 64 ? 3 : 6;
  if (v == 4) t = work <= 32 ? 1 : work <= 96 ? 2 : 3;
  for (; t <= 8; ++t) {
    const int config = find_config(v, t);
    if (config >= 0 && config_fits(config, p->num_tokens)) return config;
  }
  const int many = find_config(2, 8);
  return config_fits(many, p->num_tokens) ? many : -1;
}

/* ---- the fast kernel ------------------------------------------------------------------------- */

static bool aligned(const void *pointer, int64_t bytes) {
  return (uintptr_t)pointer % (uint64_t)bytes == 0;
}

/* The layout of windows at `base` with the given strides, as far as packs of V channels can use it. */
static WindowLayout layout_of(const void *base, int64_t size, int v, int64_t columns,
                              const int64_t *outer, int n_outer, int64_t channel, int64_t column) {
  int64_t piece = 0; /* elements that move together */
  WindowLayout layout = LAYOUT_STRIDED;
  if (columns == 4 && channel == 4 && column == 1) {
    layout = LAYOUT_CHANNEL_MAJOR;
    piece = 4 * v;
  } else if (channel == 1) {
    layout = LAYOUT_TOKEN_MAJOR;
    piece = v;
    if (column % piece != 0) return LAYOUT_STRIDED;
  } else {
    return LAYOUT_STRIDED;
  }
  if (piece * size > 16) piece = 16 / size;
  for (int i = 0; i < n_outer; ++i)
    if (outer[i] % piece != 0) return LAYOUT_STRIDED;
  return aligned(base, piece * size) ? layout : LAYOUT_STRIDED;
}

/* Whether input and output can be moved in packs of V channels. */
static bool rows_fit(const gdn_verify_problem *p, int v) {
  const int64_t size = 2; /* bytes of a 16-bit element */
  return aligned(p->input, v * size) && aligned(p->output, v * size) && p->input_seq % v == 0 &&
         p->input_token % v == 0 && p->output_seq % v == 0 && p->output_token % v == 0;
}

static bool fits_int32(int64_t x) { return x >= INT32_MIN && x <= INT32_MAX; }

/* Strides are 32 bits wide in the fast kernel. */
static bool strides_fit(const gdn_verify_problem *p) {
  const int64_t strides[] = {
      p->input_seq,      p->input_token,      p->output_seq,      p->output_token,
      p->state_slot,     p->state_channel,    p->state_column,    p->snapshot_row,
      p->snapshot_token, p->snapshot_channel, p->snapshot_column,
  };
  for (size_t i = 0; i < sizeof strides / sizeof strides[0]; ++i)
    if (!fits_int32(strides[i])) return false;
  return true;
}

static bool fast_shape(const gdn_verify_problem *p) {
  return strides_fit(p) && p->d_conv == FAST_D_CONV && p->head_dim == FAST_HEAD_DIM &&
         p->d_inner % FAST_HEAD_DIM == 0 && p->d_inner <= 65535 * FAST_HEAD_DIM &&
         p->n_seq < INT32_MAX && !p->parent && p->output_dtype == p->input_dtype &&
         (p->input_dtype == GDN_VERIFY_BFLOAT16 || p->input_dtype == GDN_VERIFY_FLOAT16) &&
         (p->state_dtype == p->input_dtype || p->state_dtype == GDN_VERIFY_FLOAT32);
}

typedef void (*FastKernel)(const FastLaunch);

template <typename Input, typename State>
static FastKernel fast_kernel(int config) {
  static const FastKernel kernels[] = {
#define X(v, t) token_parallel_kernel<Input, State, v, t>,
      FOR_EACH_CONFIG(X)
#undef X
  };
  return kernels[config];
}

static FastKernel pick_fast_kernel(const gdn_verify_problem *p, int config) {
  const bool wide = p->state_dtype == GDN_VERIFY_FLOAT32;
  if (p->input_dtype == GDN_VERIFY_BFLOAT16)
    return wide ? fast_kernel<__nv_bfloat16, float>(config)
                : fast_kernel<__nv_bfloat16, __nv_bfloat16>(config);
  return wide ? fast_kernel<__half, float>(config) : fast_kernel<__half, __half>(config);
}

/* ---- launching ------------------------------------------------------------------------------- */

static cudaError_t launch_kernel(const void *kernel, dim3 grid, dim3 block, size_t shared, bool pdl,
                                 void *stream, void *argument) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid;
  launch.blockDim = block;
  launch.dynamicSmemBytes = shared;
  launch.stream = (cudaStream_t)stream;
  launch.attrs = &attribute;
  launch.numAttrs = pdl ? 1 : 0;
  void *arguments[] = {argument};
  return cudaLaunchKernelExC(&launch, kernel, arguments);
}

static FastLaunch fast_launch(const gdn_verify_problem *p, int v) {
  const int64_t size = p->state_dtype == GDN_VERIFY_FLOAT32 ? 4 : 2;
  const int64_t snapshot_outer[] = {p->snapshot_row, p->snapshot_token};
  FastLaunch launch;
  launch.weight = p->weight;
  launch.input = p->input;
  launch.plain = !p->slot_index && !p->row_index && !p->accepted && !p->cu_seqlens;
  launch.packed_weight = p->weight_dtype == p->input_dtype && !p->bias && p->weight_tap == 1 &&
                         p->weight_channel == FAST_D_CONV &&
                         aligned(p->weight, 8 * v < 16 ? 8 * v : 16);
  launch.write_state = (uint8_t)p->write_state;
  launch.snapshot_kind = (uint8_t)p->snapshot_kind;
  launch.snapshot_layout = (uint8_t)layout_of(
      p->snapshots, size, v, p->snapshot_kind == GDN_VERIFY_WINDOWS ? p->state_len : 0,
      snapshot_outer, 2, p->snapshot_channel, p->snapshot_column);
  launch.state_layout = (uint8_t)layout_of(p->state, size, v, p->state_len, &p->state_slot, 1,
                                           p->state_channel, p->state_column);
  launch.state_len = (uint8_t)p->state_len;
  launch.activation = (uint8_t)p->activation;
  launch.num_tokens = (int32_t)p->num_tokens;
  launch.input_seq = (int32_t)p->input_seq;
  launch.input_token = (int32_t)p->input_token;
  launch.qk_channels = (int32_t)p->qk_channels;
  launch.state = p->state;
  launch.snapshots = p->snapshots;
  launch.output = p->output;
  launch.output_seq = (int32_t)p->output_seq;
  launch.output_token = (int32_t)p->output_token;
  launch.state_slot = (int32_t)p->state_slot;
  launch.state_channel = (int32_t)p->state_channel;
  launch.state_column = (int32_t)p->state_column;
  launch.snapshot_row = (int32_t)p->snapshot_row;
  launch.snapshot_token = (int32_t)p->snapshot_token;
  launch.snapshot_channel = (int32_t)p->snapshot_channel;
  launch.snapshot_column = (int32_t)p->snapshot_column;
  launch.l2_eps = p->l2_eps;
  launch.p = *p;
  return launch;
}

static cudaError_t launch_fast(const gdn_verify_problem *p, int config, bool pdl, void *stream) {
  const int v = configs[config].v, t = configs[config].t;
  FastLaunch launch = fast_launch(p, v);
  const unsigned groups = (unsigned)((p->num_tokens + t - 1) / t);
  const dim3 block((unsigned)(FAST_HEAD_DIM / v), groups);
  const dim3 grid((unsigned)(p->n_seq + (p->cu_seqlens ? 1 : 0)),
                  (unsigned)(p->d_inner / FAST_HEAD_DIM));
  const size_t shared = (size_t)groups * (size_t)t * sizeof(float[FAST_GROUPS]);
  return launch_kernel((const void *)pick_fast_kernel(p, config), grid, block, shared, pdl, stream,
                       &launch);
}

static cudaError_t launch_general(const gdn_verify_problem *p, bool pdl, void *stream) {
  const int64_t others = p->d_inner - p->qk_channels;
  const int64_t units = p->qk_channels / p->head_dim + (others + UNIT_CHANNELS - 1) / UNIT_CHANNELS;
  const int64_t most = 1 << 20;
  const int64_t pairs = (p->n_seq + 1) > most / units ? most : (p->n_seq + 1) * units;
  gdn_verify_problem argument = *p;
  return launch_kernel((const void *)general_kernel, dim3((unsigned)pairs), dim3(GENERAL_THREADS),
                       0, pdl, stream, &argument);
}

/* What the tuned table has for this call, -1 where it has nothing. */
static int tuned_config(const gdn_verify_problem *p, bool pdl) {
  int device = 0;
  if (!gdn_verify_has_tuned() || cudaGetDevice(&device) != cudaSuccess) return -1;
  const int config = gdn_verify_find_tuned(p, device, pdl);
  return config < NUM_CONFIGS ? config : -1;
}

/* The caller's choice, or the table's, or the heuristic's; a configuration that cannot run this call
 * gives way to the heuristic's. -1: the general kernel. */
static int fast_config(const gdn_verify_problem *p, int64_t asked, bool pdl) {
  if (!fast_shape(p)) return -1;
  if (asked < 0) asked = tuned_config(p, pdl);
  const int config =
      asked >= 0 && config_fits((int)asked, p->num_tokens) ? (int)asked : choose_config(p);
  if (config < 0 || rows_fit(p, configs[config].v)) return config;
  for (int i = 0; i < NUM_CONFIGS; ++i)
    if (configs[i].v == 1 && config_fits(i, p->num_tokens)) return i;
  return -1;
}

extern "C" gdn_verify_status gdn_verify_conv_cuda(const gdn_verify_params *params, void *stream,
                                                  gdn_verify_error *err) {
  gdn_verify_problem problem;
  gdn_verify_status status = gdn_verify_make_problem(params, &problem, err);
  if (status != GDN_VERIFY_OK || problem.n_seq == 0) return status;
  if (params->check) {
    status = gdn_verify_check_device_indices(&problem, stream, err);
    if (status != GDN_VERIFY_OK) return status;
  }
  const bool pdl = params->pdl != 0;
  const int config = fast_config(&problem, params->config, pdl);
  const cudaError_t error = config >= 0 ? launch_fast(&problem, config, pdl, stream)
                                        : launch_general(&problem, pdl, stream);
  return error == cudaSuccess ? GDN_VERIFY_OK : gdn_verify_fail_cuda(err, "the launch", error);
}

extern "C" int gdn_verify_has_cuda(void) { return 1; }
extern "C" const char *gdn_verify_cuda_archs(void) { return GDN_VERIFY_CUDA_ARCHS; }
extern "C" int gdn_verify_num_configs(void) { return NUM_CONFIGS; }

extern "C" const char *gdn_verify_configs(void) {
#define X(v, t) " " #v "x" #t
  static const char names[] = FOR_EACH_CONFIG(X);
#undef X
  return names + 1;
}

extern "C" int gdn_verify_chosen_config(const gdn_verify_params *params) {
  gdn_verify_problem problem;
  if (gdn_verify_make_problem(params, &problem, NULL) != GDN_VERIFY_OK || problem.n_seq == 0)
    return -1;
  return fast_config(&problem, params->config, params->pdl != 0);
}
