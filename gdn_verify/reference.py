"""The operators in NumPy: the readable definition, bit for bit.

Same names, arguments and in-place behaviour as the torch operators, on NumPy arrays. float32 is
np.float32, float16 is np.float16, bfloat16 is np.uint16 that holds the bits; index arrays are
np.int32. Arrays may be strided views. Arguments are taken to be valid; what an operator must refuse
is the business of the C core.

How it works: every sequence becomes one list of inputs, `timeline` [S + K, D], its start window
followed by its K new inputs. The window after token t is S rows of it, named by `window_rows`; for
a chain these are rows t + 1 .. t + S, for a tree the rows of the token's ancestors. So first the
windows of all tokens of all sequences are gathered, then the arithmetic runs on whole arrays.

Arithmetic, all of it float32, rounded to nearest even after each operation, in this order:

    acc  = bias or +0;  for k = 0 .. W-1:  acc = acc + window[k] * weight[k]
    y    = acc * (1 / (1 + exp(-acc)))
    per head of the first qk_channels:  inv = 1 / sqrt(sum_squares(y) + l2_eps);  y = y * inv
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "commit_conv_state",
    "conv1d_update_l2norm",
    "exp",
    "fma",
    "from_float32",
    "history_windows",
    "silu",
    "sum_squares",
    "to_float32",
    "verify_fused_conv_kn",
    "verify_fused_conv_kn_batched",
]

Array = NDArray[np.generic]
Float32 = NDArray[np.float32]

_GROUP = 32  # channels of one summation group of the L2 norm
_BLOCK = 1 << 17  # elements that the arithmetic takes at once: temporaries that fit in a cache

# ---- dtypes ------------------------------------------------------------------------------------


def to_float32(x: Array) -> Float32:
    """float32, float16 or bfloat16 (uint16) -> float32, exact."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)


def from_float32(x: Float32, dtype: np.dtype | type) -> Array:
    """float32 -> `dtype` (np.float32, np.float16, np.uint16 for bfloat16), to nearest even."""
    if dtype == np.uint16:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16
        return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


# ---- arithmetic --------------------------------------------------------------------------------


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Float32:
    """a * b + c of float32, rounded once, as C's fmaf.

    The product is exact in float64. The sum is rounded to odd there: where it is inexact (the error
    is exact, by Knuth's two-sum) and its last bit is 0, it moves one place towards the true value.
    Then rounding to float32 sees the side of every midpoint on which the true value lies.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        addend_part = total - product
        error = (product - (total - addend_part)) + (addend - addend_part)
        bits = total.view(np.int64)
        inexact = (error > 0) | (error < 0)  # not where it is NaN: those sums are inf or NaN
        away_from_zero = (error > 0) == (total > 0)
        odd = bits + np.where(away_from_zero, 1, -1)
        total = np.where(inexact & (bits & 1 == 0), odd, bits).view(np.float64)
        return total.astype(np.float32)


_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, then in the low bits
_LOG2E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HI = np.float32(float.fromhex("0x1.62e430p-1"))  # ln 2 = HI + LO
_LN2_LO = np.float32(float.fromhex("-0x1.05c610p-29"))
_EXP_COEFFICIENTS = [  # of r^6, r^5, .. 1
    np.float32(float.fromhex(c))
    for c in (
        "0x1.69737ep-10",
        "0x1.12372ep-7",
        "0x1.555a04p-5",
        "0x1.555496p-3",
        "0x1.fffffap-2",
        "0x1p+0",
        "0x1p+0",
    )
]


def exp(x: ArrayLike) -> Float32:
    """exp of float32 [...], at most 1 ulp from the true value over all inputs.

    x = n * ln 2 + r, exp(x) = polynomial(r) * 2^n, scaled in two steps of which the first is exact,
    so that a denormal result is rounded once.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        clamped = np.where(x < -104, np.float32(-104), x)
        clamped = np.where(clamped > 89, np.float32(89), clamped)
        shifted = fma(clamped, _LOG2E, _ROUND)
        n = shifted - _ROUND
        r = fma(n, -_LN2_HI, clamped)
        r = fma(n, -_LN2_LO, r)
        p = np.asarray(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            p = fma(p, r, coefficient)
        exponent = np.where(np.isnan(x), 0, n).astype(np.int32)
        half = exponent >> 1
        return p * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(n: NDArray[np.int32]) -> Float32:
    return ((n + np.int32(127)) << np.int32(23)).view(np.float32)


def silu(x: ArrayLike) -> Float32:
    """x * (1 / (1 + exp(-x))) of float32 [...], each operation rounded."""
    x = np.asarray(x, np.float32)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        y: Float32 = x * (one / (one + exp(-x)))
    return y


def sum_squares(x: ArrayLike) -> Float32:
    """Sums of squares of float32 [..., n] -> [...], in the operator's order.

    Groups of 32, the last one padded with +0, each a halving tree (i with i + 16, + 8, + 4, + 2,
    + 1); the groups are added left to right.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        n = x.shape[-1]
        n_groups = max(1, -(-n // _GROUP))
        squares = np.zeros((*x.shape[:-1], n_groups * _GROUP), np.float32)
        np.multiply(x, x, out=squares[..., :n])
        groups = squares.reshape(*x.shape[:-1], n_groups, _GROUP)
        width = _GROUP // 2
        while width:
            groups = groups[..., :width] + groups[..., width:]
            width //= 2
        total = groups[..., 0, 0]
        for g in range(1, n_groups):
            total = total + groups[..., g, 0]
        return total


def _convolve_and_normalise(
    windows: Float32,  # [rows, W, D]
    weight: Float32,  # [D, W]
    bias: Float32 | None,  # [D]
    activation: str,
    qk_channels: int,
    head_dim: int,
    l2_eps: float,
) -> Float32:
    """Steps 1 to 3 of the arithmetic -> [rows, D]."""
    rows, d_conv, d_inner = windows.shape
    with np.errstate(all="ignore"):
        acc = np.zeros((rows, d_inner), np.float32)
        if bias is not None:
            acc[...] = bias  # not +0 + bias, which would turn -0 into +0
        for k in range(d_conv):
            acc = acc + windows[:, k] * weight[:, k]
        y = silu(acc) if activation == "silu" else acc
        if qk_channels:
            heads = y[:, :qk_channels].reshape(rows, -1, head_dim)
            total = sum_squares(heads)[..., None]
            inv = np.float32(1) / np.sqrt(total + np.float32(l2_eps))
            y[:, :qk_channels] = (heads * inv).reshape(rows, qk_channels)
        return y


# ---- windows -----------------------------------------------------------------------------------


def history_windows(history: Array, state_len: int) -> Array:
    """History [n_rows, S-1+K, D] -> its windows [n_rows, K, D, S], a view without a copy."""
    n_rows, length, d_inner = history.shape
    step = history.strides[1]
    return np.lib.stride_tricks.as_strided(
        history,
        (n_rows, length - state_len + 1, d_inner, state_len),
        (history.strides[0], step, history.strides[2], step),
    )


def _snapshot(snapshots: Array, row: int, t: int, state_len: int) -> Array:
    """Snapshot t of a row of windows or history, [S, D]."""
    window: Array
    window = snapshots[row, t].T if snapshots.ndim == 4 else snapshots[row, t : t + state_len]
    return window


def _window_rows(parents: Sequence[int], state_len: int) -> NDArray[np.intp]:
    """[K + 1, S]: rows of the timeline that form the start window, then the window of each token.

    A token's window is that of its parent (-1 is the start window), moved on by its own input.
    """
    rows = np.empty((len(parents) + 1, state_len), np.intp)
    rows[0] = np.arange(state_len)
    for t, parent in enumerate(parents):
        rows[t + 1, :-1] = rows[parent + 1, 1:]
        rows[t + 1, -1] = state_len + t
    return rows


def _is_padding(slot: int, pad_slot_id: int) -> bool:
    return slot < 0 or slot == pad_slot_id


class _Sequence(NamedTuple):
    rows: slice  # of the flattened input and output [rows, D]
    slot: int  # of conv_state
    row: int  # of conv_state_inter
    start: int  # -1: starts from conv_state; t >= 0: from snapshot t
    parents: Sequence[int]  # of each token: an earlier token, or -1


# ---- operators ---------------------------------------------------------------------------------


def verify_fused_conv_kn_batched(
    conv_state: Array | None,
    new_input: Array,
    weight: Array,
    output: Array,
    conv_state_inter: Array | None,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: Array | None = None,
    activation: str = "silu",
    conv_state_indices: Array | None = None,
    pad_slot_id: int = -1,
    inter_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    cu_seqlens: Array | None = None,
    max_num_tokens: int | None = None,
    parent_index: Array | None = None,
    update_state: bool = True,
) -> None:
    """Convolution, activation and L2 norm of K tokens of n_seq sequences, with snapshots.

    conv_state [n_slots, D, S], S = W or W - 1, or None; read and written.
    new_input [n_seq, K, D], with cu_seqlens packed [total, D]. weight [D, W]. bias [D].
    output as new_input; written. conv_state_inter windows [n_rows, >=K, D, S] or history
    [n_rows, >=S-1+K, D], or None; written. Index arrays int32: conv_state_indices, inter_indices,
    num_accepted_tokens [n_seq], cu_seqlens [n_seq + 1], parent_index [n_seq, K].
    """
    d_inner, d_conv = weight.shape
    n_seq = len(cu_seqlens) - 1 if cu_seqlens is not None else new_input.shape[0]
    state_len = d_conv - 1 if conv_state is None else conv_state.shape[-1]
    if cu_seqlens is not None and max_num_tokens is None and conv_state_inter is not None:
        lead = state_len - 1 if conv_state_inter.ndim == 3 else 0
        max_num_tokens = conv_state_inter.shape[1] - lead
    if n_seq == 0 or (cu_seqlens is not None and max_num_tokens == 0):
        return  # otherwise the rows of each sequence say it all
    slot_or_row = conv_state_indices if conv_state is not None else inter_indices

    if cu_seqlens is not None:
        flat_input, flat_output = new_input, output
        bounds = [int(b) for b in cu_seqlens]
        output[bounds[-1] :] = 0  # rows that no sequence owns
    else:
        num_tokens = new_input.shape[1]
        flat_input = new_input.reshape(n_seq * num_tokens, d_inner)
        flat_output = np.empty_like(flat_input, output.dtype)  # output may not flatten as a view
        bounds = [i * num_tokens for i in range(n_seq + 1)]

    sequences = []
    for i in range(n_seq):
        rows = slice(bounds[i], bounds[i + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        if slot_or_row is not None and _is_padding(int(slot_or_row[i]), pad_slot_id):
            flat_output[rows] = 0
            continue
        slot = i if conv_state_indices is None else int(conv_state_indices[i])
        row = i if inter_indices is None else int(inter_indices[i])
        start = -1 if num_accepted_tokens is None else int(num_accepted_tokens[i]) - 1
        chain = range(-1, count - 1)
        parents = chain if parent_index is None else [int(p) for p in parent_index[i, :count]]
        sequences.append(_Sequence(rows, slot, row, start, parents))

    weight32 = to_float32(weight)
    bias32 = None if bias is None else to_float32(bias)
    pending: list[tuple[_Sequence, Float32]] = []
    num_pending = 0
    for s in sequences:
        inputs = to_float32(flat_input[s.rows])
        windows = _advance(s, inputs, conv_state, conv_state_inter, state_len, d_conv,
                           update_state and parent_index is None)  # fmt: skip
        pending.append((s, windows))
        num_pending += windows.size
        if num_pending >= d_conv * _BLOCK or s is sequences[-1]:
            y = _convolve_and_normalise(
                np.concatenate([w for _, w in pending]),
                weight32, bias32, activation, qk_channels, head_dim, l2_eps,
            )  # fmt: skip
            rounded = from_float32(y, output.dtype)
            ends = np.cumsum([len(w) for _, w in pending])
            for (done, w), end in zip(pending, ends, strict=True):
                flat_output[done.rows] = rounded[end - len(w) : end]
            pending, num_pending = [], 0

    if cu_seqlens is None:
        output[...] = flat_output.reshape(output.shape)


def _advance(
    s: _Sequence,
    inputs: Float32,  # [K, D]
    conv_state: Array | None,
    conv_state_inter: Array | None,
    state_len: int,
    d_conv: int,
    write_state: bool,
) -> Float32:
    """Writes snapshots and state of one sequence; returns the windows to convolve, [K, W, D]."""
    # the start window, copied: the row it may come from is overwritten
    if s.start >= 0:
        assert conv_state_inter is not None
        start = _snapshot(conv_state_inter, s.row, s.start, state_len).copy()
    else:
        assert conv_state is not None
        start = conv_state[s.slot].T.copy()
    stored = from_float32(inputs, start.dtype)
    timeline = np.concatenate([start, stored])  # [S + K, D], in conv_state's dtype
    window_rows = _window_rows(s.parents, state_len)

    num_tokens = len(inputs)
    if conv_state_inter is not None and conv_state_inter.ndim == 4:
        conv_state_inter[s.row, :num_tokens] = timeline[window_rows[1:]].transpose(0, 2, 1)
    elif conv_state_inter is not None:
        conv_state_inter[s.row, : state_len - 1 + num_tokens] = timeline[1:]
    if conv_state is not None and write_state:
        conv_state[s.slot] = timeline[window_rows[-1]].T

    # W - 1 entries of the parent's window, then the new input as it came
    parents = np.asarray(s.parents) + 1
    before = to_float32(timeline[window_rows[parents, state_len - (d_conv - 1) :]])
    return np.concatenate([before, inputs[:, None]], axis=1)


def verify_fused_conv_kn(
    conv_state: Array | None,
    new_input: Array,
    weight: Array,
    output: Array,
    conv_state_inter: Array | None,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: Array | None = None,
    activation: str = "silu",
    parent_index: Array | None = None,
    num_accepted_tokens: Array | None = None,
    update_state: bool = True,
) -> None:
    """One sequence: the tensors of verify_fused_conv_kn_batched without the first dimension.

    parent_index is [K], num_accepted_tokens [1].
    """

    def batch(x: Array | None) -> Array | None:
        return None if x is None else x[None]

    verify_fused_conv_kn_batched(
        batch(conv_state), new_input[None], weight, output[None], batch(conv_state_inter),
        qk_channels, head_dim, l2_eps,
        bias=bias, activation=activation, parent_index=batch(parent_index),
        num_accepted_tokens=num_accepted_tokens, update_state=update_state,
    )  # fmt: skip


def conv1d_update_l2norm(
    conv_state: Array,
    new_input: Array,
    weight: Array,
    output: Array,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    *,
    bias: Array | None = None,
    activation: str = "silu",
    conv_state_indices: Array | None = None,
    pad_slot_id: int = -1,
) -> None:
    """One token for each of n sequences: new_input and output [n, D], no snapshots."""
    verify_fused_conv_kn_batched(
        conv_state, new_input[:, None], weight, output[:, None], None,
        qk_channels, head_dim, l2_eps,
        bias=bias, activation=activation,
        conv_state_indices=conv_state_indices, pad_slot_id=pad_slot_id,
    )  # fmt: skip


def commit_conv_state(
    conv_states: Sequence[Array],
    snapshots: Sequence[Array],
    num_accepted: Array,
    *,
    conv_state_indices: Array | None = None,
    inter_indices: Array | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Sets each layer's conv_state [n_slots, D, S] to snapshot num_accepted - 1; 0 leaves it.

    snapshots: per layer windows [n_rows, K, D, S] or history [n_rows, S-1+K, D].
    """
    for conv_state, layer in zip(conv_states, snapshots, strict=True):
        for i, accepted in enumerate(num_accepted):
            slot = i if conv_state_indices is None else int(conv_state_indices[i])
            row = i if inter_indices is None else int(inter_indices[i])
            if conv_state_indices is not None and _is_padding(slot, pad_slot_id):
                continue
            if accepted > 0:
                window = _snapshot(layer, row, int(accepted) - 1, conv_state.shape[-1])
                conv_state[slot] = window.T
