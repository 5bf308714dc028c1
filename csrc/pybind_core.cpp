// pybind_core.cpp - gdn_verify._core: the C core on NumPy arrays, without torch.
//
// Same names and arguments as the torch operators. float32, float16 and int32 arrays are what they
// are, uint16 holds the bits of bfloat16. Arrays are taken as they lie, with any strides; nothing is
// converted or copied. Wrong arguments raise ValueError, wrong index values IndexError, what this
// build or machine cannot do RuntimeError. The GIL is released while the core runs, which uses
// threads of its own.
#include "gdn_verify.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#ifndef GDN_VERIFY_DECISION /* what the build was for, and why; setup.py says */
#define GDN_VERIFY_DECISION "unknown"
#endif

namespace py = pybind11;

namespace {

using Array = std::optional<py::array>;
using Float32 = py::array_t<float>;

enum Access {
  READ,
  WRITE
};

gdn_verify_dtype dtype_of(const py::dtype &dtype) {
  if (dtype.byteorder() == '>') return GDN_VERIFY_OTHER;
  const char kind = dtype.kind();
  const py::ssize_t size = dtype.itemsize();
  if (kind == 'f' && size == 4) return GDN_VERIFY_FLOAT32;
  if (kind == 'f' && size == 2) return GDN_VERIFY_FLOAT16;
  if (kind == 'u' && size == 2) return GDN_VERIFY_BFLOAT16;
  if (kind == 'i' && size == 4) return GDN_VERIFY_INT32;
  if (kind == 'f' && size == 8) return GDN_VERIFY_FLOAT64;
  if (kind == 'i' && size == 8) return GDN_VERIFY_INT64;
  return GDN_VERIFY_OTHER;
}

gdn_verify_tensor tensor_of(const Array &array, const std::string &name, Access access) {
  gdn_verify_tensor t{};
  if (!array) return t;
  const py::ssize_t size = array->itemsize();
  if (access == WRITE && !array->writeable())
    throw py::value_error(name + " is read-only, but it must be writeable");
  t.data = const_cast<void *>(array->data());
  t.ndim = static_cast<int32_t>(array->ndim());
  t.dtype = dtype_of(array->dtype());
  if (t.dtype == GDN_VERIFY_OTHER) return t;  // refused by its dtype
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size) != 0)
    throw py::value_error(name + " is not aligned to its item size of " + std::to_string(size) +
                          " bytes");
  for (int k = 0; k < t.ndim && k < GDN_VERIFY_MAX_DIMS; ++k) {
    const py::ssize_t bytes = array->strides(k);
    if (bytes % size != 0)
      throw py::value_error(name + " has a stride of " + std::to_string(bytes) +
                            " bytes, but it must be a multiple of its item size of " +
                            std::to_string(size) + " bytes");
    t.shape[k] = array->shape(k);
    t.stride[k] = bytes / size;
  }
  return t;
}

void raise_unless_ok(gdn_verify_status status, const gdn_verify_error &err) {
  if (status == GDN_VERIFY_OK) return;
  if (status == GDN_VERIFY_INVALID) throw py::value_error(err.text);
  if (status == GDN_VERIFY_BAD_INDEX) throw py::index_error(err.text);
  throw std::runtime_error(err.text);
}

gdn_verify_activation activation_of(const std::string &name) {
  if (name == "silu") return GDN_VERIFY_SILU;
  if (name == "none") return GDN_VERIFY_NO_ACTIVATION;
  throw py::value_error("activation is \"" + name + "\", but it must be \"silu\" or \"none\"");
}

int64_t max_num_tokens_of(std::optional<int64_t> max_num_tokens) {
  if (max_num_tokens && *max_num_tokens < 0)
    throw py::value_error("max_num_tokens is " + std::to_string(*max_num_tokens) +
                          ", but it must not be negative");
  return max_num_tokens.value_or(-1);
}

// The arguments that all three operators have; the others absent.
gdn_verify_params make_params(gdn_verify_op op, const Array &conv_state, const py::array &new_input,
                              const py::array &weight, const py::array &output, int64_t qk_channels,
                              int64_t head_dim, double l2_eps, const Array &bias,
                              const std::string &activation) {
  gdn_verify_params params{};
  params.op = op;
  params.conv_state = tensor_of(conv_state, "conv_state", WRITE);
  params.new_input = tensor_of(new_input, "new_input", READ);
  params.weight = tensor_of(weight, "weight", READ);
  params.output = tensor_of(output, "output", WRITE);
  params.bias = tensor_of(bias, "bias", READ);
  params.qk_channels = qk_channels;
  params.head_dim = head_dim;
  params.l2_eps = l2_eps;
  params.activation = activation_of(activation);
  params.update_state = 1;
  params.pad_slot_id = -1;
  params.max_num_tokens = -1;
  params.config = -1;
  return params;
}

template <typename Params>
void run(const Params &params, gdn_verify_status (*function)(const Params *, gdn_verify_error *)) {
  gdn_verify_error err{};
  gdn_verify_status status;
  {
    py::gil_scoped_release release;
    status = function(&params, &err);
  }
  raise_unless_ok(status, err);
}

void verify_fused_conv_kn_batched(const Array &conv_state, const py::array &new_input,
                                  const py::array &weight, const py::array &output,
                                  const Array &conv_state_inter, int64_t qk_channels,
                                  int64_t head_dim, double l2_eps, const Array &bias,
                                  const std::string &activation, const Array &conv_state_indices,
                                  int64_t pad_slot_id, const Array &inter_indices,
                                  const Array &num_accepted_tokens, const Array &cu_seqlens,
                                  std::optional<int64_t> max_num_tokens, const Array &parent_index,
                                  bool update_state, int64_t config, bool pdl) {
  gdn_verify_params params = make_params(GDN_VERIFY_OP_BATCHED, conv_state, new_input, weight,
                                         output, qk_channels, head_dim, l2_eps, bias, activation);
  params.conv_state_inter = tensor_of(conv_state_inter, "conv_state_inter", WRITE);
  params.conv_state_indices = tensor_of(conv_state_indices, "conv_state_indices", READ);
  params.inter_indices = tensor_of(inter_indices, "inter_indices", READ);
  params.num_accepted_tokens = tensor_of(num_accepted_tokens, "num_accepted_tokens", READ);
  params.cu_seqlens = tensor_of(cu_seqlens, "cu_seqlens", READ);
  params.parent_index = tensor_of(parent_index, "parent_index", READ);
  params.pad_slot_id = pad_slot_id;
  params.max_num_tokens = max_num_tokens_of(max_num_tokens);
  params.update_state = update_state;
  params.config = config;
  params.pdl = pdl;
  run(params, gdn_verify_conv_cpu);
}

void verify_fused_conv_kn(const Array &conv_state, const py::array &new_input,
                          const py::array &weight, const py::array &output,
                          const Array &conv_state_inter, int64_t qk_channels, int64_t head_dim,
                          double l2_eps, const Array &bias, const std::string &activation,
                          const Array &parent_index, const Array &num_accepted_tokens,
                          bool update_state, int64_t config, bool pdl) {
  gdn_verify_params params = make_params(GDN_VERIFY_OP_SINGLE, conv_state, new_input, weight,
                                         output, qk_channels, head_dim, l2_eps, bias, activation);
  params.conv_state_inter = tensor_of(conv_state_inter, "conv_state_inter", WRITE);
  params.parent_index = tensor_of(parent_index, "parent_index", READ);
  params.num_accepted_tokens = tensor_of(num_accepted_tokens, "num_accepted_tokens", READ);
  params.update_state = update_state;
  params.config = config;
  params.pdl = pdl;
  run(params, gdn_verify_conv_cpu);
}

void conv1d_update_l2norm(const py::array &conv_state, const py::array &new_input,
                          const py::array &weight, const py::array &output, int64_t qk_channels,
                          int64_t head_dim, double l2_eps, const Array &bias,
                          const std::string &activation, const Array &conv_state_indices,
                          int64_t pad_slot_id) {
  gdn_verify_params params = make_params(GDN_VERIFY_OP_UPDATE, conv_state, new_input, weight,
                                         output, qk_channels, head_dim, l2_eps, bias, activation);
  params.conv_state_indices = tensor_of(conv_state_indices, "conv_state_indices", READ);
  params.pad_slot_id = pad_slot_id;
  run(params, gdn_verify_conv_cpu);
}

void commit_conv_state(const std::vector<py::array> &conv_states,
                       const std::vector<py::array> &snapshots, const py::array &num_accepted,
                       const Array &conv_state_indices, const Array &inter_indices,
                       int64_t pad_slot_id) {
  if (conv_states.size() != snapshots.size())
    throw py::value_error("snapshots has " + std::to_string(snapshots.size()) +
                          " layers, but conv_states has " + std::to_string(conv_states.size()) +
                          ": there must be one of each a layer");
  std::vector<gdn_verify_tensor> states, sources;
  for (const py::array &state : conv_states)
    states.push_back(tensor_of(state, "conv_states[" + std::to_string(states.size()) + "]", WRITE));
  for (const py::array &source : snapshots)
    sources.push_back(tensor_of(source, "snapshots[" + std::to_string(sources.size()) + "]", READ));
  gdn_verify_commit_params params{};
  params.conv_states = states.data();
  params.snapshots = sources.data();
  params.n_layers = static_cast<int64_t>(states.size());
  params.num_accepted = tensor_of(num_accepted, "num_accepted", READ);
  params.conv_state_indices = tensor_of(conv_state_indices, "conv_state_indices", READ);
  params.inter_indices = tensor_of(inter_indices, "inter_indices", READ);
  params.pad_slot_id = pad_slot_id;
  run(params, gdn_verify_commit_cpu);
}

// ---- a call that is only checked ---------------------------------------------------------------

// A tensor of any library: address, shape, strides in elements, gdn_verify_dtype.
using Description = std::tuple<uintptr_t, std::vector<int64_t>, std::vector<int64_t>, int32_t>;

gdn_verify_tensor tensor_of(const Description &description) {
  const auto &[address, shape, strides, dtype] = description;
  gdn_verify_tensor t{};
  t.data = reinterpret_cast<void *>(address);
  t.ndim = static_cast<int32_t>(shape.size());
  t.dtype = dtype;
  for (size_t k = 0; k < shape.size() && k < GDN_VERIFY_MAX_DIMS; ++k) {
    t.shape[k] = shape[k];
    t.stride[k] = strides.at(k);
  }
  return t;
}

// Raises as verify_fused_conv_kn_batched would for what can be told without reading a tensor.
void check_batched(const std::map<std::string, Description> &tensors, int64_t qk_channels,
                   int64_t head_dim, double l2_eps, const std::string &activation,
                   int64_t pad_slot_id, std::optional<int64_t> max_num_tokens, bool update_state,
                   int64_t config, bool pdl) {
  gdn_verify_params params{};
  const std::map<std::string, gdn_verify_tensor *> views = {
      {"conv_state", &params.conv_state},
      {"new_input", &params.new_input},
      {"weight", &params.weight},
      {"output", &params.output},
      {"conv_state_inter", &params.conv_state_inter},
      {"bias", &params.bias},
      {"conv_state_indices", &params.conv_state_indices},
      {"inter_indices", &params.inter_indices},
      {"num_accepted_tokens", &params.num_accepted_tokens},
      {"cu_seqlens", &params.cu_seqlens},
      {"parent_index", &params.parent_index}};
  for (const auto &[name, description] : tensors) *views.at(name) = tensor_of(description);
  params.op = GDN_VERIFY_OP_BATCHED;
  params.qk_channels = qk_channels;
  params.head_dim = head_dim;
  params.l2_eps = l2_eps;
  params.activation = activation_of(activation);
  params.pad_slot_id = pad_slot_id;
  params.max_num_tokens = max_num_tokens_of(max_num_tokens);
  params.update_state = update_state;
  params.config = config;
  params.pdl = pdl;
  gdn_verify_error err{};
  raise_unless_ok(gdn_verify_check_params(&params, &err), err);
}

// ---- the arithmetic on arrays -------------------------------------------------------------------

void require_float32(const py::array &x) {
  if (tensor_of(x, "x", READ).dtype != GDN_VERIFY_FLOAT32 || !(x.flags() & py::array::c_style))
    throw py::value_error("x must be a C-contiguous float32 array");
}

template <void (*function)(const float *, float *, int64_t)>
Float32 map_array(const py::array &x) {
  require_float32(x);
  Float32 out(std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
  const float *from = static_cast<const float *>(x.data());
  float *to = out.mutable_data();
  const int64_t n = x.size();
  py::gil_scoped_release release;
  function(from, to, n);
  return out;
}

Float32 sum_squares(const py::array &x) {
  require_float32(x);
  if (x.ndim() != 2) throw py::value_error("x must have 2 dimensions");
  Float32 out(std::vector<py::ssize_t>{x.shape(0)});
  gdn_verify_sum_squares_array(static_cast<const float *>(x.data()), out.mutable_data(), x.shape(0),
                               x.shape(1));
  return out;
}

// ---- the tuned table ----------------------------------------------------------------------------

// In the order of gdn_verify_tuned's fields.
using TunedEntry = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t,
                              int32_t, int32_t, int64_t, int64_t, int64_t, int64_t>;

void load_tuned(const std::vector<TunedEntry> &entries) {
  std::vector<gdn_verify_tuned> table;
  for (const TunedEntry &entry : entries)
    table.push_back(std::apply([](auto... fields) { return gdn_verify_tuned{fields...}; }, entry));
  gdn_verify_error err{};
  raise_unless_ok(gdn_verify_load_tuned(table.data(), static_cast<int64_t>(table.size()), &err),
                  err);
}

// ---- about this build ---------------------------------------------------------------------------

py::list cpu_levels() {
  py::list names;
  for (const char *name : {"baseline", "avx2", "avx512"})
    if (gdn_verify_has_cpu_level(name)) names.append(name);
  return names;
}

void set_cpu_level(const std::string &name) {
  if (gdn_verify_set_cpu_level(name.c_str()) != 0)
    throw py::value_error("level is \"" + name + "\", but on this CPU it must be one of " +
                          py::repr(cpu_levels()).cast<std::string>());
}

py::dict build_info() {
  py::dict info;
  info["version"] = GDN_VERIFY_VERSION;
  info["has_cuda"] = gdn_verify_has_cuda() != 0;
  info["cuda_archs"] = gdn_verify_cuda_archs();
  info["num_configs"] = gdn_verify_num_configs();
  info["configs"] = gdn_verify_configs();
  info["cpu_level"] = gdn_verify_cpu_level();
  info["compiler"] = __VERSION__;
  info["decision"] = GDN_VERIFY_DECISION;
  return info;
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  m.doc() = "The C core of gdn-verify on NumPy arrays (bfloat16 as uint16); runs on the CPU.";
  const py::arg_v l2_eps = py::arg("l2_eps") = 1e-6;
  const py::arg_v bias = py::arg("bias") = py::none();
  const py::arg_v activation = py::arg("activation") = "silu";
  const py::arg_v slots = py::arg("conv_state_indices") = py::none();
  const py::arg_v pad_slot_id = py::arg("pad_slot_id") = -1;
  const py::arg_v rows = py::arg("inter_indices") = py::none();
  const py::arg_v accepted = py::arg("num_accepted_tokens") = py::none();
  const py::arg_v parent_index = py::arg("parent_index") = py::none();
  const py::arg_v update_state = py::arg("update_state") = true;
  const py::arg_v config = py::arg("config") = -1;
  const py::arg_v pdl = py::arg("pdl") = false;

  m.def("verify_fused_conv_kn_batched", &verify_fused_conv_kn_batched, py::arg("conv_state"),
        py::arg("new_input"), py::arg("weight"), py::arg("output"), py::arg("conv_state_inter"),
        py::arg("qk_channels"), py::arg("head_dim"), l2_eps, py::kw_only(), bias, activation, slots,
        pad_slot_id, rows, accepted, py::arg("cu_seqlens") = py::none(),
        py::arg("max_num_tokens") = py::none(), parent_index, update_state, config, pdl);
  m.def("verify_fused_conv_kn", &verify_fused_conv_kn, py::arg("conv_state"), py::arg("new_input"),
        py::arg("weight"), py::arg("output"), py::arg("conv_state_inter"), py::arg("qk_channels"),
        py::arg("head_dim"), l2_eps, py::kw_only(), bias, activation, parent_index, accepted,
        update_state, config, pdl);
  m.def("conv1d_update_l2norm", &conv1d_update_l2norm, py::arg("conv_state"), py::arg("new_input"),
        py::arg("weight"), py::arg("output"), py::arg("qk_channels"), py::arg("head_dim"), l2_eps,
        py::kw_only(), bias, activation, slots, pad_slot_id);
  m.def("commit_conv_state", &commit_conv_state, py::arg("conv_states"), py::arg("snapshots"),
        py::arg("num_accepted"), py::kw_only(), slots, rows, pad_slot_id);

  m.def("check_batched", &check_batched, py::arg("tensors"), py::arg("qk_channels"),
        py::arg("head_dim"), py::arg("l2_eps"), py::arg("activation"), py::arg("pad_slot_id"),
        py::arg("max_num_tokens"), py::arg("update_state"), py::arg("config"), py::arg("pdl"));

  m.def("exp", &map_array<gdn_verify_exp_array>, py::arg("x"));
  m.def("silu", &map_array<gdn_verify_silu_array>, py::arg("x"));
  m.def("sum_squares", &sum_squares, py::arg("x"));

  m.def("load_tuned", &load_tuned, py::arg("entries"));

  m.def("build_info", &build_info);
  m.def("cpu_level", &gdn_verify_cpu_level);
  m.def("cpu_levels", &cpu_levels);
  m.def("set_cpu_level", &set_cpu_level, py::arg("level"));
}
