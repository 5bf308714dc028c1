"""The compiled module of csrc/pybind_core.cpp, for type checkers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

_Activation = Literal["silu", "none"]
_Array = NDArray[Any]  # float32, float16, or uint16 with the bits of bfloat16
_Indices = NDArray[np.int32]
_Float32 = NDArray[np.float32]

class BuildInfo(TypedDict):
    version: str
    has_cuda: bool
    cuda_archs: str
    num_configs: int
    configs: str
    cpu_level: str
    compiler: str
    decision: str

def verify_fused_conv_kn_batched(
    conv_state: _Array | None,
    new_input: _Array,
    weight: _Array,
    output: _Array,
    conv_state_inter: _Array | None,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: _Array | None = None,
    activation: _Activation = "silu",
    conv_state_indices: _Indices | None = None,
    pad_slot_id: int = -1,
    inter_indices: _Indices | None = None,
    num_accepted_tokens: _Indices | None = None,
    cu_seqlens: _Indices | None = None,
    max_num_tokens: int | None = None,
    parent_index: _Indices | None = None,
    update_state: bool = True,
    config: int = -1,
    pdl: bool = False,
) -> None: ...
def verify_fused_conv_kn(
    conv_state: _Array | None,
    new_input: _Array,
    weight: _Array,
    output: _Array,
    conv_state_inter: _Array | None,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: _Array | None = None,
    activation: _Activation = "silu",
    parent_index: _Indices | None = None,
    num_accepted_tokens: _Indices | None = None,
    update_state: bool = True,
    config: int = -1,
    pdl: bool = False,
) -> None: ...
def conv1d_update_l2norm(
    conv_state: _Array,
    new_input: _Array,
    weight: _Array,
    output: _Array,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: _Array | None = None,
    activation: _Activation = "silu",
    conv_state_indices: _Indices | None = None,
    pad_slot_id: int = -1,
) -> None: ...
def commit_conv_state(
    conv_states: Sequence[_Array],
    snapshots: Sequence[_Array],
    num_accepted: _Indices,
    *,
    conv_state_indices: _Indices | None = None,
    inter_indices: _Indices | None = None,
    pad_slot_id: int = -1,
) -> None: ...
def check_batched(
    tensors: Mapping[str, tuple[int, Sequence[int], Sequence[int], int]],
    qk_channels: int,
    head_dim: int,
    l2_eps: float,
    activation: str,
    pad_slot_id: int,
    max_num_tokens: int | None,
    update_state: bool,
    config: int,
    pdl: bool,
) -> None: ...
def exp(x: _Float32) -> _Float32: ...
def silu(x: _Float32) -> _Float32: ...
def sum_squares(x: _Float32) -> _Float32: ...
def load_tuned(entries: Sequence[tuple[int, ...]]) -> None: ...
def build_info() -> BuildInfo: ...
def cpu_level() -> str: ...
def cpu_levels() -> list[str]: ...
def set_cpu_level(level: str) -> None: ...
