/* torch_ops.cpp - the operators gdn::* of PyTorch: schemas, and tensors turned into params.
 *
 * Knows PyTorch and nothing about convolutions. Each kernel fills a zeroed params struct of
 * gdn_verify.h, sees that all tensors lie on one device, calls the backend of that device and raises
 * the backend's sentence as it stands (RuntimeError in Python), behind "CUDA error: " where the CUDA
 * runtime failed. Everything else is checked there.
 *
 * LibTorch's stable ABI only, as of 2.10: one build loads under that version and every later one.
 * One library serves builds of torch with and without CUDA: the one symbol that only the former
 * have is referred to weakly.
 */
#define TORCH_TARGET_VERSION 0x020a000000000000

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gdn_verify.h"

extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void **ret_stream);

namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

[[noreturn]] void fail(const std::string &sentence) { throw std::runtime_error(sentence); }

/* For calls that fail only if torch itself is broken. */
void must(AOTITorchError status, const char *what) {
  if (status != AOTI_TORCH_SUCCESS) fail(std::string("torch could not tell ") + what);
}

/* ---- tensors --------------------------------------------------------------------------------- */

struct Device {
  int32_t type = 0;
  int32_t index = -1; /* -1 on the CPU */

  bool operator==(const Device &other) const { return type == other.type && index == other.index; }
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }

  std::string name() const {
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    const std::string number = std::to_string(index);
    return is_cuda() ? "cuda:" + number : "another kind of device (index " + number + ")";
  }
};

Device device_of(const Tensor &tensor) {
  Device device;
  must(aoti_torch_get_device_type(tensor.get(), &device.type), "a tensor's device");
  if (device.type != aoti_torch_device_type_cpu()) device.index = tensor.get_device_index();
  return device;
}

int32_t dtype_of(const Tensor &tensor) {
  struct Pair {
    int32_t torch, ours;
  };
  static const Pair pairs[] = {
      {aoti_torch_dtype_float32(), GDN_VERIFY_FLOAT32},
      {aoti_torch_dtype_bfloat16(), GDN_VERIFY_BFLOAT16},
      {aoti_torch_dtype_int32(), GDN_VERIFY_INT32},
      {aoti_torch_dtype_float16(), GDN_VERIFY_FLOAT16},
      {aoti_torch_dtype_int64(), GDN_VERIFY_INT64},
      {aoti_torch_dtype_float64(), GDN_VERIFY_FLOAT64},
  };
  int32_t dtype = 0;
  must(aoti_torch_get_dtype(tensor.get(), &dtype), "a tensor's dtype");
  for (const Pair &pair : pairs)
    if (dtype == pair.torch) return pair.ours;
  return GDN_VERIFY_OTHER;
}

/* Makes the views of one call; all its tensors must lie on the device of the first. */
class Views {
 public:
  Views(const char *first_name, const Tensor &first)
      : first_name_(first_name), device_(device_of(first)) {}

  const Device &device() const { return device_; }

  gdn_verify_tensor read(const char *name, const Tensor &tensor) const {
    gdn_verify_tensor result = view(name, tensor);
    /* const access leaves a copy-on-write tensor shared */
    result.data = const_cast<void *>(tensor.const_data_ptr());
    return result;
  }

  gdn_verify_tensor write(const char *name, const Tensor &tensor) const {
    gdn_verify_tensor result = view(name, tensor);
    result.data = tensor.mutable_data_ptr();
    return result;
  }

  gdn_verify_tensor read(const char *name, const MaybeTensor &tensor) const {
    return tensor ? read(name, *tensor) : gdn_verify_tensor{};
  }

  gdn_verify_tensor write(const char *name, const MaybeTensor &tensor) const {
    return tensor ? write(name, *tensor) : gdn_verify_tensor{};
  }

 private:
  gdn_verify_tensor view(const char *name, const Tensor &tensor) const {
    const Device device = device_of(tensor);
    if (!(device == device_))
      fail(std::string(name) + " is on " + device.name() + ", but " + first_name_ + " is on " +
           device_.name() + ": all tensors must be on one device");
    gdn_verify_tensor result{};
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    result.ndim = static_cast<int32_t>(sizes.size());
    const size_t dims = std::min<size_t>(sizes.size(), GDN_VERIFY_MAX_DIMS);
    for (size_t i = 0; i < dims; i++) {
      result.shape[i] = sizes[i];
      result.stride[i] = strides[i];
    }
    result.dtype = dtype_of(tensor);
    return result;
  }

  const char *first_name_;
  Device device_;
};

/* ---- the rest of a call ---------------------------------------------------------------------- */

/* Kernels take their string argument as the handle that torch passes and that they then own: the
 * headers' conversion to std::string leaks it at every call. */
gdn_verify_activation take_activation(StringHandle handle) {
  const char *text = nullptr;
  size_t length = 0;
  must(torch_string_c_str(handle, &text), "activation");
  must(torch_string_length(handle, &length), "activation");
  const std::string name(text, length);
  must(torch_delete_string(handle), "activation");
  if (name == "silu") return GDN_VERIFY_SILU;
  if (name == "none") return GDN_VERIFY_NO_ACTIVATION;
  fail("activation is \"" + name + "\", but it must be \"silu\" or \"none\"");
}

int32_t read_check() {
  const char *value = std::getenv("GDN_VERIFY_CHECK");
  return value && *value && std::strcmp(value, "0") != 0;
}

/* GDN_VERIFY_CHECK, read when the library is loaded. */
const int32_t check_indices = read_check();

struct Range {
  gdn_verify_range_fn body;
  void *context;
};

/* gdn_verify_parallel_for on torch's threads. The bodies are C and cannot throw, so this cannot
 * fail either. */
void parallel_for(int64_t count, int64_t grain, gdn_verify_range_fn body, void *context) {
  Range range{body, context};
  const ParallelFunc run = [](int64_t begin, int64_t end, void *opaque) {
    const Range *r = static_cast<const Range *>(opaque);
    r->body(r->context, begin, end);
  };
  (void)torch_parallel_for(0, count, grain, run, &range);
}

/* In a child of fork torch's threads are gone, but OpenMP, which runs them, waits for them for ever:
 * there the core's own threads do it, unless the child wants one alone. */
std::atomic<bool> forked{false};
const int told_of_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

gdn_verify_parallel_for threads_of_torch() {
  uint32_t threads = 0;
  if (forked && (torch_get_num_threads(&threads) != AOTI_TORCH_SUCCESS || threads > 1))
    return nullptr;
  return parallel_for;
}

void *current_stream(int32_t device_index) {
  if (!aoti_torch_get_current_cuda_stream)
    fail("this build of torch has no CUDA, so its current stream cannot be told");
  void *stream = nullptr;
  must(aoti_torch_get_current_cuda_stream(device_index, &stream), "the current CUDA stream");
  return stream;
}

/* Runs the backend of `device` and raises its sentence. */
template <typename Params>
void run(Params &params, const Device &device,
         gdn_verify_status (*cpu)(const Params *, gdn_verify_error *),
         gdn_verify_status (*cuda)(const Params *, void *, gdn_verify_error *)) {
  gdn_verify_error error;
  gdn_verify_status status;
  params.check = check_indices;
  params.parallel_for = threads_of_torch();
  if (device.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    status = cuda(&params, current_stream(device.index), &error);
  } else {
    status = cpu(&params, &error);
  }
  if (status == GDN_VERIFY_CUDA_ERROR) fail(std::string("CUDA error: ") + error.text);
  if (status != GDN_VERIFY_OK) fail(error.text);
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* The arguments that all three operators have; the others absent. */
gdn_verify_params make_params(gdn_verify_op op, const Views &views, const MaybeTensor &conv_state,
                              const Tensor &new_input, const Tensor &weight, const Tensor &output,
                              int64_t qk_channels, int64_t head_dim, double l2_eps,
                              const MaybeTensor &bias, StringHandle activation) {
  gdn_verify_params params{};
  params.op = op;
  params.activation = take_activation(activation);
  params.conv_state = views.write("conv_state", conv_state);
  params.new_input = views.read("new_input", new_input);
  params.weight = views.read("weight", weight);
  params.output = views.write("output", output);
  params.bias = views.read("bias", bias);
  params.qk_channels = qk_channels;
  params.head_dim = head_dim;
  params.l2_eps = l2_eps;
  params.update_state = 1;
  params.pad_slot_id = -1;
  params.max_num_tokens = -1;
  params.config = -1;
  return params;
}

void verify_fused_conv_kn_batched(
    const MaybeTensor &conv_state, const Tensor &new_input, const Tensor &weight,
    const Tensor &output, const MaybeTensor &conv_state_inter, int64_t qk_channels,
    int64_t head_dim, double l2_eps, const MaybeTensor &bias, StringHandle activation,
    const MaybeTensor &conv_state_indices, int64_t pad_slot_id, const MaybeTensor &inter_indices,
    const MaybeTensor &num_accepted_tokens, const MaybeTensor &cu_seqlens,
    std::optional<int64_t> max_num_tokens, const MaybeTensor &parent_index, bool update_state,
    int64_t config, bool pdl) {
  const Views views("new_input", new_input);
  gdn_verify_params params =
      make_params(GDN_VERIFY_OP_BATCHED, views, conv_state, new_input, weight, output, qk_channels,
                  head_dim, l2_eps, bias, activation);
  params.conv_state_inter = views.write("conv_state_inter", conv_state_inter);
  params.conv_state_indices = views.read("conv_state_indices", conv_state_indices);
  params.inter_indices = views.read("inter_indices", inter_indices);
  params.num_accepted_tokens = views.read("num_accepted_tokens", num_accepted_tokens);
  params.cu_seqlens = views.read("cu_seqlens", cu_seqlens);
  params.parent_index = views.read("parent_index", parent_index);
  params.pad_slot_id = pad_slot_id;
  if (max_num_tokens && *max_num_tokens < 0)
    fail("max_num_tokens is " + std::to_string(*max_num_tokens) + ", but it must not be negative");
  params.max_num_tokens = max_num_tokens.value_or(-1);
  params.update_state = update_state;
  params.config = config;
  params.pdl = pdl;
  run(params, views.device(), gdn_verify_conv_cpu, gdn_verify_conv_cuda);
}

void verify_fused_conv_kn(const MaybeTensor &conv_state, const Tensor &new_input,
                          const Tensor &weight, const Tensor &output,
                          const MaybeTensor &conv_state_inter, int64_t qk_channels,
                          int64_t head_dim, double l2_eps, const MaybeTensor &bias,
                          StringHandle activation, const MaybeTensor &parent_index,
                          const MaybeTensor &num_accepted_tokens, bool update_state, int64_t config,
                          bool pdl) {
  const Views views("new_input", new_input);
  gdn_verify_params params = make_params(GDN_VERIFY_OP_SINGLE, views, conv_state, new_input, weight,
                                         output, qk_channels, head_dim, l2_eps, bias, activation);
  params.conv_state_inter = views.write("conv_state_inter", conv_state_inter);
  params.parent_index = views.read("parent_index", parent_index);
  params.num_accepted_tokens = views.read("num_accepted_tokens", num_accepted_tokens);
  params.update_state = update_state;
  params.config = config;
  params.pdl = pdl;
  run(params, views.device(), gdn_verify_conv_cpu, gdn_verify_conv_cuda);
}

void conv1d_update_l2norm(const Tensor &conv_state, const Tensor &new_input, const Tensor &weight,
                          const Tensor &output, int64_t qk_channels, int64_t head_dim,
                          double l2_eps, const MaybeTensor &bias, StringHandle activation,
                          const MaybeTensor &conv_state_indices, int64_t pad_slot_id) {
  const Views views("new_input", new_input);
  gdn_verify_params params = make_params(GDN_VERIFY_OP_UPDATE, views, conv_state, new_input, weight,
                                         output, qk_channels, head_dim, l2_eps, bias, activation);
  params.conv_state_indices = views.read("conv_state_indices", conv_state_indices);
  params.pad_slot_id = pad_slot_id;
  run(params, views.device(), gdn_verify_conv_cpu, gdn_verify_conv_cuda);
}

void commit_conv_state(const std::vector<Tensor> &conv_states, const std::vector<Tensor> &snapshots,
                       const Tensor &num_accepted, const MaybeTensor &conv_state_indices,
                       const MaybeTensor &inter_indices, int64_t pad_slot_id) {
  if (conv_states.size() != snapshots.size())
    fail("snapshots has " + std::to_string(snapshots.size()) + " layers, but conv_states has " +
         std::to_string(conv_states.size()) + ": there must be one of each a layer");
  const Views views("num_accepted", num_accepted);
  std::vector<gdn_verify_tensor> state_views, snapshot_views;
  state_views.reserve(conv_states.size());
  snapshot_views.reserve(snapshots.size());
  for (const Tensor &tensor : conv_states)
    state_views.push_back(views.write("conv_states", tensor));
  for (const Tensor &tensor : snapshots) snapshot_views.push_back(views.read("snapshots", tensor));
  gdn_verify_commit_params params{};
  params.conv_states = state_views.data();
  params.snapshots = snapshot_views.data();
  params.n_layers = static_cast<int64_t>(conv_states.size());
  params.num_accepted = views.read("num_accepted", num_accepted);
  params.conv_state_indices = views.read("conv_state_indices", conv_state_indices);
  params.inter_indices = views.read("inter_indices", inter_indices);
  params.pad_slot_id = pad_slot_id;
  run(params, views.device(), gdn_verify_commit_cpu, gdn_verify_commit_cuda);
}

}  // namespace

/* ---- registration ---------------------------------------------------------------------------- */

STABLE_TORCH_LIBRARY_FRAGMENT(gdn, m) {
  m.def(
      "verify_fused_conv_kn_batched(Tensor(a!)? conv_state, Tensor new_input, Tensor weight, "
      "Tensor(b!) output, Tensor(c!)? conv_state_inter, int qk_channels, int head_dim, "
      "float l2_eps=1e-6, *, Tensor? bias=None, str activation=\"silu\", "
      "Tensor? conv_state_indices=None, int pad_slot_id=-1, Tensor? inter_indices=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, SymInt? max_num_tokens=None, "
      "Tensor? parent_index=None, bool update_state=True, int config=-1, bool pdl=False) -> ()");
  m.def(
      "verify_fused_conv_kn(Tensor(a!)? conv_state, Tensor new_input, Tensor weight, "
      "Tensor(b!) output, Tensor(c!)? conv_state_inter, int qk_channels, int head_dim, "
      "float l2_eps=1e-6, *, Tensor? bias=None, str activation=\"silu\", "
      "Tensor? parent_index=None, Tensor? num_accepted_tokens=None, bool update_state=True, "
      "int config=-1, bool pdl=False) -> ()");
  m.def(
      "conv1d_update_l2norm(Tensor(a!) conv_state, Tensor new_input, Tensor weight, "
      "Tensor(b!) output, int qk_channels, int head_dim, float l2_eps=1e-6, *, "
      "Tensor? bias=None, str activation=\"silu\", Tensor? conv_state_indices=None, "
      "int pad_slot_id=-1) -> ()");
  m.def(
      "commit_conv_state(Tensor(a!)[] conv_states, Tensor[] snapshots, Tensor num_accepted, *, "
      "Tensor? conv_state_indices=None, Tensor? inter_indices=None, int pad_slot_id=-1) -> ()");
}

/* The CUDA kernels are registered in builds without CUDA too: there they raise one sentence. */
#define GDN_VERIFY_REGISTER(m)                                                      \
  m.impl("verify_fused_conv_kn_batched", TORCH_BOX(&verify_fused_conv_kn_batched)); \
  m.impl("verify_fused_conv_kn", TORCH_BOX(&verify_fused_conv_kn));                 \
  m.impl("conv1d_update_l2norm", TORCH_BOX(&conv1d_update_l2norm));                 \
  m.impl("commit_conv_state", TORCH_BOX(&commit_conv_state))

STABLE_TORCH_LIBRARY_IMPL(gdn, CPU, m) { GDN_VERIFY_REGISTER(m); }

STABLE_TORCH_LIBRARY_IMPL(gdn, CUDA, m) { GDN_VERIFY_REGISTER(m); }
