"""The C ABI by itself, through ctypes: what neither NumPy nor PyTorch can pass."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdn_verify

N, K, D, W = 3, 4, 64, 4
BATCHED, SINGLE, UPDATE = range(3)
OK, INVALID = 0, 1
DTYPE = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.int32): 3}
OTHER = 4


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("stride", c_int64 * 4),
        ("ndim", c_int32),
        ("dtype", c_int32),
    ]


TENSORS = (
    "conv_state",
    "new_input",
    "weight",
    "output",
    "conv_state_inter",
    "bias",
    "conv_state_indices",
    "inter_indices",
    "num_accepted_tokens",
    "cu_seqlens",
    "parent_index",
)


class Params(ctypes.Structure):
    _fields_ = [
        ("op", c_int),
        *((name, Tensor) for name in TENSORS),
        ("qk_channels", c_int64),
        ("head_dim", c_int64),
        ("l2_eps", c_double),
        ("pad_slot_id", c_int64),
        ("max_num_tokens", c_int64),
        ("activation", c_int),
        ("update_state", c_int32),
        ("config", c_int64),
        ("pdl", c_int32),
        ("check", c_int32),
        ("parallel_for", c_void_p),
    ]


class CommitParams(ctypes.Structure):
    _fields_ = [
        ("conv_states", ctypes.POINTER(Tensor)),
        ("snapshots", ctypes.POINTER(Tensor)),
        ("n_layers", c_int64),
        ("num_accepted", Tensor),
        ("conv_state_indices", Tensor),
        ("inter_indices", Tensor),
        ("pad_slot_id", c_int64),
        ("check", c_int32),
        ("parallel_for", c_void_p),
    ]


LIBRARY = ctypes.CDLL(str(Path(gdn_verify.__file__).with_name("libgdn_verify.so")))
KEEP: list[np.ndarray] = []  # the memory of all tensors


def tensor(*shape: int, dtype: Any = np.float32) -> Tensor:
    x = np.ones(shape, dtype)
    KEEP.append(x)
    strides = [s // x.itemsize for s in x.strides]
    return Tensor(
        x.ctypes.data, (c_int64 * 4)(*shape), (c_int64 * 4)(*strides), x.ndim, DTYPE[x.dtype]
    )


def int32(*shape: int) -> Tensor:
    return tensor(*shape, dtype=np.int32)


def legal(op: int) -> Params:
    rows = {BATCHED: (N, K, D), SINGLE: (K, D), UPDATE: (N, D)}[op]
    p = Params(op=op, qk_channels=32, head_dim=16, l2_eps=1e-6, pad_slot_id=-1, update_state=1)
    p.max_num_tokens = p.config = -1
    p.new_input, p.weight, p.output = tensor(*rows), tensor(D, W), tensor(*rows)
    p.conv_state = tensor(D, W) if op == SINGLE else tensor(N, D, W)
    return p


def check(p: Params) -> tuple[int, str]:
    text = (c_char * 512)(*b"something old")
    assert LIBRARY.gdn_verify_check_params(ctypes.byref(p), None) in (OK, INVALID)
    return LIBRARY.gdn_verify_check_params(ctypes.byref(p), text), text.value.decode()


@pytest.mark.parametrize("op", [BATCHED, SINGLE, UPDATE])
def test_legal(op):
    assert check(legal(op)) == (OK, "")


@pytest.mark.parametrize(
    ("op", "name", "given"),
    [
        (SINGLE, "conv_state_indices", int32(1)),
        (SINGLE, "inter_indices", int32(1)),
        (SINGLE, "cu_seqlens", int32(2)),
        (UPDATE, "conv_state_inter", tensor(N, 1, D, W)),
        (UPDATE, "inter_indices", int32(N)),
        (UPDATE, "num_accepted_tokens", int32(N)),
        (UPDATE, "cu_seqlens", int32(N + 1)),
        (UPDATE, "parent_index", int32(N, 1)),
    ],
)
def test_arguments_that_an_operator_lacks(op, name, given):
    p = legal(op)
    setattr(p, name, given)
    operator = {SINGLE: "for one sequence", UPDATE: "for an update by one token"}[op]
    assert check(p) == (INVALID, f"{name} must be absent {operator}, but is given")


@pytest.mark.parametrize(
    ("op", "name", "dims"),
    [
        (BATCHED, "new_input", "n_seq, K, D"),
        (BATCHED, "weight", "D, W"),
        (BATCHED, "output", "n_seq, K, D"),
        (SINGLE, "new_input", "K, D"),
        (SINGLE, "output", "K, D"),
        (UPDATE, "output", "n_seq, D"),
        (UPDATE, "conv_state", "n_slots, D, S"),
    ],
)
def test_absent_arguments(op, name, dims):
    p = legal(op)
    setattr(p, name, Tensor())
    assert check(p) == (INVALID, f"{name} must be [{dims}], but is absent")


def test_absent_state():
    for op in (BATCHED, SINGLE):
        p = legal(op)
        p.conv_state = Tensor()
        assert check(p)[1].startswith("conv_state must be given unless conv_state_inter is a hist")


def test_state_of_an_operation_on_the_history_alone():
    p = legal(SINGLE)
    p.conv_state = Tensor()
    p.conv_state_inter, p.num_accepted_tokens = tensor(W - 2 + K, D), int32(1)
    assert check(p) == (OK, "")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("op", 3, "op must be one of gdn_verify_op, but is 3"),
        ("op", -1, "op must be one of gdn_verify_op, but is -1"),
        ("activation", 2, "activation must be silu (0) or none (1), but is 2"),
        ("activation", -1, "activation must be silu (0) or none (1), but is -1"),
        ("config", -(2**63), "config must be -1 or one of the"),
    ],
)
def test_values_of_fields(field, value, text):
    p = legal(BATCHED)
    setattr(p, field, value)
    status, found = check(p)
    assert status == INVALID
    assert found.startswith(text)


def change(t: Tensor, **fields: Any) -> None:
    for name, value in fields.items():
        if name in ("shape", "stride"):
            value = (c_int64 * 4)(*value)
        setattr(t, name, value)


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("weight", {"dtype": OTHER}, "weight must be float32, but is of another dtype"),
        ("weight", {"dtype": -1}, "weight must be float32, but is of another dtype"),
        ("weight", {"dtype": 99}, "weight must be float32, but is of another dtype"),
        ("weight", {"data": None}, "weight must have data, but its pointer is null"),
        ("output", {"ndim": 2**31 - 1}, "output must be [n_seq, K, D] with 3 dimensions, but has "),
        ("output", {"ndim": -1}, "output must be [n_seq, K, D] with 3 dimensions, but has -1"),
        ("new_input", {"shape": (-1, K, D)}, "new_input must have sizes of 0 or more, but has -1"),
        ("new_input", {"shape": (2**62, K, D)}, "new_input must hold and span at most 2^58 elem"),
        ("new_input", {"shape": (2**63 - 1, 0, D)}, "new_input must hold and span at most 2^58"),
        (
            "new_input",
            {"shape": (2**40, 2**40, D), "stride": (0, 0, 1)},
            "new_input must hold and span at most 2^58 elem",
        ),
        ("conv_state", {"stride": (2**63 - 1, W, 1)}, "conv_state must hold and span at most 2^58"),
        ("conv_state", {"stride": (-(2**63), W, 1)}, "conv_state must hold and span at most 2^58"),
    ],
)
def test_broken_tensors(name, fields, text):
    p = legal(BATCHED)
    change(getattr(p, name), **fields)
    status, found = check(p)
    assert status == INVALID
    assert found.startswith(text)


def test_misaligned_pointer():
    p = legal(BATCHED)
    p.weight.data += 2
    status, found = check(p)
    assert status == INVALID
    assert found.startswith("weight must start at a multiple of its element's size, but starts at ")


def test_strides_of_one_element_do_not_matter():
    p = legal(BATCHED)
    p.new_input, p.output = tensor(1, 1, D), tensor(1, 1, D)
    for t in (p.new_input, p.output):
        change(t, stride=(2**63 - 1, -(2**63), 1))
    assert check(p) == (OK, "")


def test_negative_strides():
    p = legal(BATCHED)
    backwards = p.conv_state
    backwards.data += 4 * (N - 1) * D * W
    change(backwards, stride=(-D * W, W, 1))
    assert check(p) == (OK, "")
    p.bias = Tensor(backwards.data - 8 * D * W + 4, (D,), (1,), 1, 0)  # in slot 2
    assert check(p)[1].startswith("conv_state must share no memory with bias")
    p.bias.data += 4 * (N * D * W - 1)  # behind slot 0
    assert check(p) == (OK, "")


def test_a_long_search_is_given_up():
    """Whether a * 1000003 = b * 1000033 for any a, b < 5000 is not told cheaply: accepted."""
    p = legal(BATCHED)
    p.new_input, p.output = tensor(1, 1, 5000), tensor(1, 1, 5000)
    p.weight, p.conv_state = tensor(5000, W), tensor(1, 1, 1)
    change(p.conv_state, shape=(5000, 5000, W), stride=(1000003, 1000033, 2**40))
    p.conv_state.data = 2**60  # nothing is read, and no other tensor lies there
    assert check(p) == (OK, "")


def test_commit_of_negative_layers():
    p = CommitParams(n_layers=-1, num_accepted=int32(N))
    text = (c_char * 512)()
    assert LIBRARY.gdn_verify_commit_cpu(ctypes.byref(p), text) == INVALID
    assert text.value == b"n_layers must be 0 or more, but is -1"


def test_commit_of_no_layer():
    p = CommitParams(num_accepted=int32(N))
    text = (c_char * 512)(*b"something old")
    assert LIBRARY.gdn_verify_commit_cpu(ctypes.byref(p), text) == OK
    assert text.value == b""
