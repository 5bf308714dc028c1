/* verify_cuda.cu - the launcher of the CUDA backend: which kernel, which shape, one launch.
 *
 * token_parallel.cuh takes the shapes of shipped models (d_conv 4, head_dim 128, bfloat16 or
 * float16); general.cuh takes everything else. Both give the same bits. A launch configuration is
 * (V, T, G): V channels a thread, T consecutive tokens a thread, G groups of T a block.
 */
#include "cuda_host.h"
#include "general.cuh"
#include "token_parallel.cuh"
#include "tuned.h"

#ifndef GDN_VERIFY_CUDA_ARCHS
#define GDN_VERIFY_CUDA_ARCHS "unknown"
#endif

/* ---- configurations -------------------------------------------------------------------------- */

/* Every configuration (V, T, G); `config` is the index. A block has G groups of T tokens, or as
 * many as hold all tokens where G is 0. */
// clang-format off
#define FOR_EACH_CONFIG(X)                                                                    \
  X(1, 2, 2) X(1, 3, 0) X(1, 3, 1) X(1, 6, 0)                                                 \
  X(2, 1, 0) X(2, 1, 3) X(2, 2, 0) X(2, 2, 2) X(2, 4, 0) X(2, 6, 0) X(2, 8, 0)                \
  X(4, 1, 0) X(4, 1, 3) X(4, 2, 0) X(4, 2, 2) X(4, 3, 0) X(4, 4, 0)
// clang-format on

typedef struct Config {
  int v, t, groups;
} Config;

static const Config configs[] = {
#define X(v, t, g) {v, t, g},
    FOR_EACH_CONFIG(X)
#undef X
};
#define NUM_CONFIGS ((int)(sizeof configs / sizeof configs[0]))

/* Only the first block may read conv_state, which it then overwrites: it must have the tokens whose
 * windows reach back that far. */
#define X(v, t, g) static_assert(g == 0 || g * t >= FAST_D_CONV - 1, "tokens of the first block");
FOR_EACH_CONFIG(X)
#undef X

/* Groups of tokens that a block has. Those that start from old snapshots must have all. */
static int64_t groups_of(const gdn_verify_problem *p, int config) {
  const int64_t all = (p->num_tokens + configs[config].t - 1) / configs[config].t;
  const int64_t some = configs[config].groups;
  return some == 0 || some > all || p->accepted ? all : some;
}

static bool config_fits(const gdn_verify_problem *p, int config) {
  const int v = configs[config].v;
  return groups_of(p, config) * (FAST_HEAD_DIM / v) <= max_threads(v, configs[config].t);
}

/* -1 where there is none. */
static int find_config(int v, int t, int groups) {
  for (int i = 0; i < NUM_CONFIGS; ++i)
    if (configs[i].v == v && configs[i].t == t && configs[i].groups == groups) return i;
  return -1;
}

/* The first configuration from index `from` on with V channels a thread that fits; -1: none. */
static int first_fit(const gdn_verify_problem *p, int v, int from) {
  for (int i = from; i < NUM_CONFIGS; ++i)
    if (configs[i].v == v && config_fits(p, i)) return i;
  return -1;
}

/* Whether the blocks are just more than there is room for at a time: the SMs that get one more then
 * work alone at the end. */
static bool just_above(int64_t blocks, int64_t room) {
  return blocks > room && 2 * blocks <= 3 * room;
}

/* Whether blocks of (1, 6, 0) are so on an H200. Of a dependent launch half the room is the next
 * kernel's. */
static bool leaves_a_tail(const gdn_verify_problem *p, bool pdl) {
  const int64_t groups = (p->num_tokens + 5) / 6, sms = 132, groups_per_sm = 9;
  const int64_t blocks = p->n_seq * (p->d_inner / FAST_HEAD_DIM);
  const int64_t wave = sms * (groups_per_sm / groups);
  return just_above(blocks, wave) || (pdl && just_above(2 * blocks, wave));
}

/* Without a tuned table: what was best on an H200, by snapshots, tokens and the work in all (of
 * 8192 channels and a token). Small calls want one or two tokens a thread, and several blocks for
 * many tokens; large ones more tokens, or more channels where those make whole 16-byte stores. */
static int choose_config(const gdn_verify_problem *p, bool pdl) {
  const int64_t work = p->total_rows * p->d_inner / 8192, tokens = p->num_tokens;
  Config best;
  if (p->snapshot_kind == GDN_VERIFY_WINDOWS && p->state_dtype == GDN_VERIFY_FLOAT32)
    best = tokens < 4 && work <= 24   ? Config{2, 1, 0}
           : pdl && work <= 17        ? Config{2, 2, 0}
           : pdl && work <= 40        ? Config{4, 2, 0}
           : tokens > 8 && work <= 9  ? Config{2, 2, 2}
           : tokens < 6 || work <= 12 ? Config{2, 2, 0}
           : tokens > 18              ? Config{1, 3, 1}
           : leaves_a_tail(p, pdl)    ? Config{2, 6, 0}
                                      : Config{1, 6, 0};
  else
    best = tokens < 4 && work <= 8            ? Config{2, 1, 0}
           : !pdl && tokens > 8 && work <= 40 ? Config{2, 2, 2}
           : work <= (pdl ? 20 : 48)          ? Config{2, 2, 0}
           : tokens <= 8 || work <= 102       ? Config{4, 2, 0}
                                              : Config{4, 3, 0};
  const int config = first_fit(p, best.v, find_config(best.v, best.t, best.groups));
  if (config >= 0) return config;
  const int many = find_config(2, 8, 0);
  return config_fits(p, many) ? many : first_fit(p, 4, find_config(4, 2, 2));
}

/* ---- the fast kernel ------------------------------------------------------------------------- */

/* How windows at `base` with the given strides lie, as far as packs of V channels can use it. */
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

/* Whether everything that FastLaunch holds in 32 bits fits. */
static bool fits_32_bits(const gdn_verify_problem *p) {
  const int64_t strides[] = {
      /* of elements, which become bytes: of at most 4 */
      p->input_seq,      p->input_token,      p->output_seq,      p->output_token,
      p->state_slot,     p->state_channel,    p->state_column,    p->snapshot_row,
      p->snapshot_token, p->snapshot_channel, p->snapshot_column,
  };
  const int64_t others[] = {
      p->weight_channel,    p->weight_tap,       p->bias_channel,      p->n_seq,
      p->n_slots,           p->n_rows,           p->snapshot_capacity, p->total_rows,
      p->slot_index_stride, p->row_index_stride, p->accepted_stride,   p->cu_seqlens_stride,
  };
  for (size_t i = 0; i < sizeof strides / sizeof strides[0]; ++i)
    if (strides[i] < -INT32_MAX / 4 || strides[i] > INT32_MAX / 4) return false;
  for (size_t i = 0; i < sizeof others / sizeof others[0]; ++i)
    if (others[i] < -INT32_MAX || others[i] > INT32_MAX) return false;
  return true;
}

static bool fast_shape(const gdn_verify_problem *p) {
  return fits_32_bits(p) && p->d_conv == FAST_D_CONV && p->head_dim == FAST_HEAD_DIM &&
         p->d_inner % FAST_HEAD_DIM == 0 && p->d_inner <= 65535 * FAST_HEAD_DIM &&
         p->n_seq < INT32_MAX && p->num_tokens <= 65535 && !p->parent &&
         p->output_dtype == p->input_dtype &&
         (p->input_dtype == GDN_VERIFY_BFLOAT16 || p->input_dtype == GDN_VERIFY_FLOAT16) &&
         (p->state_dtype == p->input_dtype || p->state_dtype == GDN_VERIFY_FLOAT32);
}

typedef void (*FastKernel)(const FastLaunch);

template <typename Input, typename State, int FORM>
static FastKernel fast_kernel(int config) {
  static const FastKernel kernels[] = {
#define X(v, t, g) token_parallel_kernel<Input, State, FORM, v, t>,
      FOR_EACH_CONFIG(X)
#undef X
  };
  return kernels[config];
}

/* The forms that are known when a kernel is compiled are those of shipped models. */
static FastKernel pick_fast_kernel(const gdn_verify_problem *p, const FastLaunch *launch,
                                   int config) {
  const bool wide = p->state_dtype == GDN_VERIFY_FLOAT32;
  if (p->input_dtype == GDN_VERIFY_FLOAT16)
    return wide ? fast_kernel<__half, float, FORM_ANY>(config)
                : fast_kernel<__half, __half, FORM_ANY>(config);
  const bool usual = launch->packed_weight && launch->activation == GDN_VERIFY_SILU &&
                     launch->state_len == FAST_D_CONV &&
                     launch->state_layout == LAYOUT_CHANNEL_MAJOR;
  if (usual && launch->snapshot_kind == GDN_VERIFY_WINDOWS &&
      launch->snapshot_layout == LAYOUT_CHANNEL_MAJOR)
    return wide ? fast_kernel<__nv_bfloat16, float, FORM_WINDOWS>(config)
                : fast_kernel<__nv_bfloat16, __nv_bfloat16, FORM_WINDOWS>(config);
  if (usual && launch->snapshot_kind == GDN_VERIFY_HISTORY && !wide &&
      launch->snapshot_layout == LAYOUT_TOKEN_MAJOR)
    return fast_kernel<__nv_bfloat16, __nv_bfloat16, FORM_HISTORY>(config);
  return wide ? fast_kernel<__nv_bfloat16, float, FORM_ANY>(config)
              : fast_kernel<__nv_bfloat16, __nv_bfloat16, FORM_ANY>(config);
}

/* ---- launching ------------------------------------------------------------------------------- */

static FastLaunch fast_launch(const gdn_verify_problem *p, int v) {
  const int64_t row = 2, state = gdn_verify_dtype_size(p->state_dtype);
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
      p->snapshots, state, v, p->snapshot_kind == GDN_VERIFY_WINDOWS ? p->state_len : 0,
      snapshot_outer, 2, p->snapshot_channel, p->snapshot_column);
  launch.state_layout = (uint8_t)layout_of(p->state, state, v, p->state_len, &p->state_slot, 1,
                                           p->state_channel, p->state_column);
  launch.state_len = (uint8_t)p->state_len;
  launch.activation = (uint8_t)p->activation;
  launch.num_tokens = (int32_t)p->num_tokens;
  launch.input_seq = (int32_t)(p->input_seq * row);
  launch.input_token = (int32_t)(p->input_token * row);
  launch.qk_channels = (int32_t)p->qk_channels;
  launch.state = p->state;
  launch.snapshots = p->snapshots;
  launch.output = p->output;
  launch.output_seq = (int32_t)(p->output_seq * row);
  launch.output_token = (int32_t)(p->output_token * row);
  launch.state_slot = (int32_t)(p->state_slot * state);
  launch.snapshot_row = (int32_t)(p->snapshot_row * state);
  launch.snapshot_token = (int32_t)(p->snapshot_token * state);
  launch.l2_eps = p->l2_eps;
  launch.state_channel = (int32_t)(p->state_channel * state);
  launch.state_column = (int32_t)(p->state_column * state);
  launch.snapshot_channel = (int32_t)(p->snapshot_channel * state);
  launch.snapshot_column = (int32_t)(p->snapshot_column * state);
  launch.n_seq = (int32_t)p->n_seq;
  launch.n_slots = (int32_t)p->n_slots;
  launch.n_rows = (int32_t)p->n_rows;
  launch.snapshot_capacity = (int32_t)p->snapshot_capacity;
  launch.total_rows = (int32_t)p->total_rows;
  /* indices have 32 bits: what does not fit is never met, and negative ones are padding anyway */
  launch.pad_slot_id =
      (int64_t)(int32_t)p->pad_slot_id == p->pad_slot_id ? (int32_t)p->pad_slot_id : -1;
  launch.slot_index = p->slot_index;
  launch.row_index = p->row_index;
  launch.accepted = p->accepted;
  launch.cu_seqlens = p->cu_seqlens;
  launch.slot_index_stride = (int32_t)p->slot_index_stride;
  launch.row_index_stride = (int32_t)p->row_index_stride;
  launch.accepted_stride = (int32_t)p->accepted_stride;
  launch.cu_seqlens_stride = (int32_t)p->cu_seqlens_stride;
  launch.weight_channel = (int32_t)p->weight_channel;
  launch.weight_tap = (int32_t)p->weight_tap;
  launch.bias = p->bias;
  launch.bias_channel = (int32_t)p->bias_channel;
  launch.weight_dtype = (uint8_t)p->weight_dtype;
  launch.bias_dtype = (uint8_t)p->bias_dtype;
  return launch;
}

static cudaError_t launch_fast(const gdn_verify_problem *p, int config, bool pdl, void *stream) {
  const int v = configs[config].v, t = configs[config].t;
  FastLaunch launch = fast_launch(p, v);
  const unsigned groups = (unsigned)groups_of(p, config);
  const int64_t tokens = (int64_t)groups * t; /* of a block */
  const dim3 block((unsigned)(FAST_HEAD_DIM / v), groups);
  const dim3 grid((unsigned)(p->n_seq + (p->cu_seqlens ? 1 : 0)),
                  (unsigned)(p->d_inner / FAST_HEAD_DIM),
                  (unsigned)((p->num_tokens + tokens - 1) / tokens));
  const size_t shared = (size_t)groups * (size_t)t * sizeof(float[FAST_GROUPS]);
  return gdn_verify_launch(pick_fast_kernel(p, &launch, config), grid, block, shared, pdl, stream,
                           launch);
}

static cudaError_t launch_general(const gdn_verify_problem *p, bool pdl, void *stream) {
  const int64_t units = num_units(*p);
  const int64_t most = 1 << 20;
  const int64_t pairs = (p->n_seq + 1) > most / units ? most : (p->n_seq + 1) * units;
  return gdn_verify_launch(general_kernel, dim3((unsigned)pairs), dim3(GENERAL_THREADS), 0, pdl,
                           stream, *p);
}

/* What the tuned table has for this call, -1 where it has nothing. */
static int tuned_config(const gdn_verify_problem *p, bool pdl) {
  int device = 0;
  if (!gdn_verify_has_tuned() || cudaGetDevice(&device) != cudaSuccess) return -1;
  const int config = gdn_verify_find_tuned(p, device, pdl);
  return config < NUM_CONFIGS ? config : -1;
}

/* The caller's choice, or the table's, or the heuristic's; a configuration that cannot run this
 * call gives way to the heuristic's. -1: the general kernel. */
static int fast_config(const gdn_verify_problem *p, int64_t asked, bool pdl) {
  if (!fast_shape(p)) return -1;
  if (asked < 0) asked = tuned_config(p, pdl);
  const int config = asked >= 0 && config_fits(p, (int)asked) ? (int)asked : choose_config(p, pdl);
  if (config < 0 || rows_fit(p, configs[config].v)) return config;
  return first_fit(p, 1, 0);
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
#define X(v, t, g) " " #v "x" #t "x" #g
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
