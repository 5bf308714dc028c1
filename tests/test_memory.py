"""Where tensors may lie: any alignment, odd strides, beyond 2^31 and 2^32 elements.

The large tensors are spread out: a call touches little of them, so that on the CPU they take
address space and no memory. On CUDA they take what they say, and are marked `large` to run alone.
"""

from __future__ import annotations

from typing import Any

import cases
import compare
import numpy as np
import pytest
import torch
from calls import Mirror
from small_calls import view

import gdn_verify.ops  # noqa: F401
from gdn_verify.compare import first_difference

KINDS = {
    "windows": {},
    "windows, bfloat16": {"state_dtype": "bfloat16"},
    "windows, token-major": {"state_layout": "transposed", "snapshot_layout": "transposed"},
    "history, S = W - 1": {"snapshots": "history", "state": "W-1", "state_dtype": "bfloat16"},
    "other heads": {"head_dim": 33, "input_dtype": "float32"},
}  # fmt: skip
NAMES = ("conv_state", "new_input", "weight", "output", "conv_state_inter", "bias")


def kind_of(name: str, n_seq: int = 3, num_tokens: int = 5, **chosen: Any) -> cases.Case:
    chosen = {"head_dim": 128, "bias": "input", **KINDS[name], **chosen}
    width = 256 if chosen["head_dim"] == 128 else None
    return cases.make_case(n_seq, num_tokens, width, **chosen)


def moved(x: np.ndarray, first: int, gap: int) -> np.ndarray:
    """x at element `first` of a buffer, with `gap` elements more between rows of its outer
    dimension, in the order of dimensions that it has."""
    order = sorted(range(x.ndim), key=lambda k: -x.strides[k])
    strides = [0] * x.ndim
    step = 1
    for k in reversed(order):
        strides[k] = step
        step = step * x.shape[k] + (gap if k != order[-1] else 0)
    buffer = cases.filled((first + step + 8,), x.dtype.type)
    result = view(buffer, x.shape, tuple(strides), first)
    result[...] = x
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_misaligned_bases_and_odd_strides(built: str, kind: str, name: str) -> None:
    """Each argument at every offset of a 16-byte word, with strides that keep no row aligned."""
    plain = kind_of(kind)
    expected = cases.run("reference", plain)
    for first, gap in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 3), (6, 2), (7, 5), (8, 7), (0, 1)):
        case = kind_of(kind)
        for each in NAMES if name == "all" else (name,):
            where = case.options if each == "bias" else case.args
            where[each] = moved(where[each], first, gap)
        done = cases.run(built, case)
        for each, x in expected.arrays().items():
            compare.assert_same(done.arrays()[each], x, f"{name} at {first}, gap {gap}: {each}")
        compare.assert_same_around(done, case)


# ---- beyond 2^31 and 2^32 elements ---------------------------------------------------------------


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.large])]
BEYOND = 2**32 + 2**20  # elements


def call(given: dict[str, Any]) -> None:
    torch.ops.gdn.verify_fused_conv_kn_batched(**given)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    text = first_difference(actual, expected)
    assert text is None, f"{what}: {text}"


def spread(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x with a stride of `dim` that takes its last entry beyond 2^32 elements."""
    strides = list(x.stride())
    strides[dim] = BEYOND // (x.shape[dim] - 1) // 8 * 8 + 8
    needed = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    try:
        buffer = torch.empty(needed, dtype=x.dtype, device=x.device)
    except RuntimeError as error:
        pytest.skip(f"no {needed * x.element_size() >> 30} GiB of address space: {error}")
    result = buffer.as_strided(x.shape, strides)
    result.copy_(x)
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize(
    ("name", "dim", "chosen"),
    [
        ("conv_state", 0, {}),
        ("new_input", 0, {}),
        ("new_input", 1, {}),
        ("output", 0, {}),
        ("output", 1, {}),
        ("weight", 0, {}),
        ("conv_state_inter", 0, {"accepted": "mixed"}),
        ("conv_state_inter", 1, {}),
        ("conv_state_inter", 1, {"snapshots": "history", "accepted": "mixed"}),
        ("new_input", 0, {"ragged": True}),
        ("output", 0, {"ragged": True}),
        ("parent_index", 0, {"tree": True}),
    ],
)
def test_strides_beyond_32_bits(
    device: str, head_dim: int, name: str, dim: int, chosen: dict[str, Any]
) -> None:
    case = cases.make_case(4, 5, 256, head_dim=head_dim, state_dtype="bfloat16", **chosen)
    expected, given = Mirror(case, device).given, Mirror(case, device).given
    given[name] = spread(given[name], dim)
    call(expected)
    call(given)
    for each in ("output", "conv_state", "conv_state_inter"):
        assert_equal(given[each], expected[each], f"{each} with a large {name}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("name", ["conv_state", "conv_state_inter", "history"])
def test_pools_beyond_32_bits(device: str, head_dim: int, name: str) -> None:
    """Slots and rows from the whole of a pool of more than 2^32 elements, neighbours untouched."""
    chosen: dict[str, Any] = {"snapshots": "history"} if name == "history" else {}
    case = cases.make_case(
        4, 5, 256, head_dim=head_dim, slots="permuted", rows="permuted", accepted="mixed",
        state_dtype="bfloat16", **chosen,
    )  # fmt: skip
    argument = "conv_state" if name == "conv_state" else "conv_state_inter"
    index = "conv_state_indices" if name == "conv_state" else "inter_indices"
    expected, given = Mirror(case, device).given, Mirror(case, device).given
    small = given[argument]
    count = BEYOND // small[0].numel() + 3
    try:
        pool = torch.empty(count, *small.shape[1:], dtype=small.dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for the pool: {error}")
    places = [1, 2**31 // small[0].numel() + 1, 2**32 // small[0].numel() + 1, count - 2]
    for place, x in zip(places, small, strict=True):
        pool[place - 1 : place + 2] = float("nan")
        pool[place] = x
    given[argument] = pool
    given[index] = torch.tensor(
        [places[i] for i in expected[index].tolist()], dtype=torch.int32, device=device
    )
    call(expected)
    call(given)
    for each in ("output", "conv_state", "conv_state_inter"):
        actual = pool[places] if each == argument else given[each]
        assert_equal(actual, expected[each], each)
    for place in places:
        assert pool[place - 1].isnan().all()
        assert pool[place + 1].isnan().all()


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("snapshots", ["none", "windows", "history"])
def test_dense_calls_beyond_32_bits(head_dim: int, snapshots: str) -> None:
    """Input and output, or snapshots, of more than 2^32 elements, all of them compared with calls
    of few sequences."""
    d_inner, num_tokens, state_len = 8192, 4, 3
    per_sequence = num_tokens * d_inner
    if snapshots == "windows":
        per_sequence *= state_len
    if snapshots == "history":
        per_sequence += (state_len - 1) * d_inner
    n_seq = BEYOND // per_sequence + 1

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

    new_input = numbers(n_seq, num_tokens, d_inner)
    output = torch.empty_like(new_input)
    weight, state = numbers(d_inner, 4), numbers(n_seq, d_inner, state_len)
    before = state.clone()
    inter = None
    if snapshots == "windows":
        inter = torch.empty(n_seq, num_tokens, d_inner, state_len, dtype=state.dtype, device="cuda")
    elif snapshots == "history":
        inter = state.new_empty(n_seq, state_len - 1 + num_tokens, d_inner)
    heads = (d_inner // 2, head_dim)
    op = torch.ops.gdn.verify_fused_conv_kn_batched
    op(state, new_input, weight, output, inter, *heads)
    for i in range(0, n_seq, 4096):
        part = slice(i, i + 4096)
        small_output = torch.empty_like(new_input[part])
        small_inter = None if inter is None else torch.empty_like(inter[part])
        op(before[part], new_input[part], weight, small_output, small_inter, *heads)
        assert torch.equal(output[part].view(torch.int16), small_output.view(torch.int16)), i
        assert torch.equal(state[part].view(torch.int16), before[part].view(torch.int16)), i
        if inter is not None:
            assert torch.equal(inter[part].view(torch.int16), small_inter.view(torch.int16)), i
