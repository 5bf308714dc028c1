"""One call or more of each operator of PyTorch, and a case's arrays as tensors of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import Case, buffer_of, default_case, map_arrays, normal, offset_of
from compare import assert_same

from gdn_verify.arrays import to_array, to_tensor
from gdn_verify.models import Shape

BASE = Shape(d_inner=1024, qk_channels=512)
HEADS: dict[str, Any] = {"qk_channels": BASE.qk_channels, "head_dim": BASE.head_dim}


def operator(op: str) -> Any:
    return getattr(torch.ops.gdn, op)


# ---- calls -------------------------------------------------------------------------------------


def batched(**chosen: Any) -> Case:
    return default_case(BASE, **chosen)


def single(**chosen: Any) -> Case:
    case = batched(n_seq=1, **chosen)
    case.op = "verify_fused_conv_kn"
    case.args = {n: x[0] if np.ndim(x) > 2 else x for n, x in case.args.items()}
    if "parent_index" in case.options:
        case.options["parent_index"] = case.options["parent_index"][0]
    return case


def update(**chosen: Any) -> Case:
    case = batched(**chosen)
    case.op = "conv1d_update_l2norm"
    del case.args["conv_state_inter"]
    for name in ("new_input", "output"):
        case.args[name] = case.args[name][:, 0]
    return case


def commit(**chosen: Any) -> Case:
    layers = [batched(seed=seed, **chosen) for seed in range(3)]
    case = layers[0]
    case.op = "commit_conv_state"
    case.args = {
        "conv_states": [layer.args["conv_state"] for layer in layers],
        "snapshots": [layer.args["conv_state_inter"] for layer in layers],
        "num_accepted": np.int32([0, 2, 4]),
    }
    case.options = {
        "conv_state_indices": np.int32([2, 0, -1]),
        "inter_indices": np.int32([0, 1, 2]),
    }
    return case


CALLS: dict[str, Callable[[], Case]] = {
    "batched": lambda: batched(),
    "batched-pool": lambda: batched(
        slots="padded", rows="permuted", accepted="mixed", spare=2, index_stride=3,
        snapshots="history", bias="input", state_dtype="bfloat16",
    ),
    "batched-ragged": lambda: batched(ragged="max_num_tokens", state_layout="transposed"),
    "batched-tree": lambda: batched(tree=True, activation="none", update_state=False),
    "batched-history-only": lambda: batched(
        state=None, snapshots="history", accepted="mixed", rows="permuted"
    ),
    "single": lambda: single(bias="float32"),
    "update": lambda: update(slots="padded", spare=2),
    "commit": commit,
}  # fmt: skip


def change(case: Case, rng: np.random.Generator) -> None:
    """Other values of the same kind in all arrays, in place; what the index tensors say of one
    sequence moves to another one."""
    names = ("conv_state_indices", "inter_indices", "num_accepted_tokens", "num_accepted",
             "parent_index")  # fmt: skip
    order = None
    for name, x in case.arrays().items():
        if x.dtype != np.int32:
            x[...] = normal(rng, x.shape, x.dtype.type)
        else:
            n_seq = len(x) - (name == "cu_seqlens")
            order = rng.permutation(n_seq) if order is None else order
            if name == "cu_seqlens":
                x[1:] = np.cumsum(np.diff(x)[order])
            elif case.op != "verify_fused_conv_kn":
                assert name in names
                x[...] = x[order]


# ---- tensors -----------------------------------------------------------------------------------


def tensors(case: Case, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
    """Arguments and options of a case as contiguous tensors of their own."""

    def convert(x: np.ndarray) -> torch.Tensor:
        return to_tensor(x.copy()).to(device)

    return [map_arrays(convert, x) for x in case.args.values()], map_arrays(convert, case.options)


def equal(actual: torch.Tensor, expected: torch.Tensor | np.ndarray, label: str = "") -> None:
    expected = to_array(expected) if isinstance(expected, torch.Tensor) else expected
    assert_same(to_array(actual), expected, label)


class Mirror:
    """A case on a device: `given` are the arguments and options by name, views of tensors that stay
    where they are, with the strides of the case's arrays."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = device
        self.buffers: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        self.given: dict[str, Any] = map_arrays(self._view, {**case.args, **case.options})

    def _view(self, x: np.ndarray) -> torch.Tensor:
        owner = buffer_of(x)
        if id(owner) not in self.buffers:
            copy = to_tensor(owner.copy().reshape(-1)).to(self.device)
            self.buffers[id(owner)] = owner, copy
        flat = self.buffers[id(owner)][1]
        if x.size == 0:  # its strides mean nothing to NumPy
            return flat.new_empty(x.shape)
        return flat.as_strided(x.shape, [s // x.itemsize for s in x.strides],
                               offset_of(x) // x.itemsize)  # fmt: skip

    def run(self, **options: Any) -> None:
        operator(self.case.op)(**{**self.given, **options})

    def upload(self, *names: str) -> None:
        """Copies the buffers of these arrays of the case, or all, to the device."""
        arrays = self.case.arrays()
        for name in names or arrays:
            owner, flat = self.buffers[id(buffer_of(arrays[name]))]
            flat.copy_(to_tensor(owner.reshape(-1)))

    def assert_same(self, label: str, expected: Case | None = None) -> None:
        """Every buffer here has the bytes of the case's, or of those of a copy of it."""
        theirs = (expected or self.case).arrays()
        for name, x in self.case.arrays().items():
            flat, wanted = self.buffers[id(buffer_of(x))][1], buffer_of(theirs[name])
            equal(flat.reshape(wanted.shape), wanted, f"{label}: buffer behind {name}")
