"""Small legal calls, and a table of what is wrong with changed ones.

Every rule of csrc/params.c and csrc/commit_params.c has a row: how to build the call, and the
beginning of the sentence that it must fail with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import numpy as np
from cases import Case

F32, BF16, F16, I32 = np.float32, np.uint16, np.float16, np.int32
N, K, D, W = 3, 4, 64, 4


# ---- small legal calls -------------------------------------------------------------------------


def new(*shape: int, dtype: Any = F32) -> np.ndarray:
    """Zeros in int32, random values in the other dtypes."""
    if dtype in (F32, BF16, F16):
        return cases.normal(np.random.default_rng(sum(shape)), shape, dtype)
    return np.zeros(shape, dtype)


def int32(*values: int) -> np.ndarray:
    return np.array(values, I32)


def view(buffer: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0):
    """A view of a contiguous buffer with any strides, in elements."""
    size = buffer.itemsize
    return np.ndarray(shape, buffer.dtype, buffer, start * size, tuple(s * size for s in strides))


def make(op: str, args: dict[str, Any], changes: dict[str, Any]) -> Case:
    options = {name: value for name, value in changes.items() if name not in args}
    return Case(op, {name: changes.get(name, value) for name, value in args.items()}, options)


def batched(**changes: Any) -> Case:
    args = {
        "conv_state": new(N, D, W),
        "new_input": new(N, K, D, dtype=BF16),
        "weight": new(D, W, dtype=BF16),
        "output": new(N, K, D, dtype=BF16),
        "conv_state_inter": new(N, K, D, W),
        "qk_channels": 32,
        "head_dim": 16,
        "l2_eps": 1e-6,
    }
    return make("verify_fused_conv_kn_batched", args, changes)


def ragged(**changes: Any) -> Case:
    packed = {
        "new_input": new(7, D, dtype=BF16),
        "output": new(7, D, dtype=BF16),
        "cu_seqlens": int32(0, 4, 4, 7),
    }
    return batched(**{**packed, **changes})


def stateless(**changes: Any) -> Case:
    history = {
        "conv_state": None,
        "conv_state_inter": new(N, W - 2 + K, D),
        "num_accepted_tokens": int32(1, 2, 4),
    }
    return batched(**{**history, **changes})


def single(**changes: Any) -> Case:
    args = {name: x[0] if isinstance(x, np.ndarray) and name != "weight" else x
            for name, x in batched().args.items()}  # fmt: skip
    return make("verify_fused_conv_kn", args, changes)


def update(**changes: Any) -> Case:
    args = {name: x for name, x in batched().args.items() if name != "conv_state_inter"}
    rows = {"new_input": new(N, D, dtype=BF16), "output": new(N, D, dtype=BF16)}
    return make("conv1d_update_l2norm", {**args, **rows}, changes)


def commit(**changes: Any) -> Case:
    args = {
        "conv_states": [new(N, D, W) for _ in range(3)],
        "snapshots": [new(N, K, D, W) for _ in range(3)],
        "num_accepted": int32(1, 4, 0),
    }
    return make("commit_conv_state", args, changes)


def with_last(count: int, last: np.ndarray) -> list[np.ndarray]:
    """`count` layers, the last of which is another one."""
    return [new(*last.shape[:1], D, W) for _ in range(count - 1)] + [last]


def input_and_output_shared(shift: int) -> dict[str, np.ndarray]:
    """Input and output in one row buffer, the output `shift` columns after the input."""
    rows = new(N, K, 2 * D, dtype=BF16)
    return {"new_input": rows[..., :D], "output": rows[..., shift : shift + D]}


def state_and_snapshots_shared(first: int) -> dict[str, np.ndarray]:
    """Windows of one pool: the state is window 1, the snapshots start at window `first`."""
    pool = new(N, 2 + K, D, W)
    return {"conv_state": pool[:, 1], "conv_state_inter": pool[:, first : first + K]}


def layers_shared(window: int, count: int) -> list[np.ndarray]:
    """Layers of `window` channels out of a pool, each D channels after the one before it."""
    pool = new(N, (count + 1) * D, W)
    return [pool[:, i * D : i * D + window] for i in range(count)]


TREE = np.tile(np.arange(-1, K - 1, dtype=I32), (N, 1))


# ---- the table ---------------------------------------------------------------------------------

SHAPES: list[tuple[Callable[[], Case], str]] = [
    (lambda: batched(new_input=new(N, D, dtype=BF16)),
     "new_input must be [n_seq, K, D] with 3 dimensions, but has 2"),
    (lambda: batched(new_input=new(1, N, K, D, 1, dtype=BF16)),
     "new_input must be [n_seq, K, D] with 3 dimensions, but has 5"),
    (lambda: batched(weight=new(D, 1, dtype=BF16)),
     "weight must be [D, W] with W from 2 to 8, but its W is 1"),
    (lambda: batched(weight=new(D, 9, dtype=BF16)),
     "weight must be [D, W] with W from 2 to 8, but its W is 9"),
    (lambda: batched(weight=new(D + 1, W, dtype=BF16)),
     "weight must be [D, W] = [64, any], but is [65, 4]"),
    (lambda: batched(weight=new(D, 1, W, dtype=BF16)),
     "weight must be [D, W] with 2 dimensions, but has 3"),
    (lambda: batched(output=new(N, K, D - 1, dtype=BF16)),
     "output must be [n_seq, K, D] = [3, 4, 64], but is [3, 4, 63]"),
    (lambda: batched(output=new(N, K + 1, D, dtype=BF16)),
     "output must be [n_seq, K, D] = [3, 4, 64], but is [3, 5, 64]"),
    (lambda: batched(bias=new(D + 1, dtype=BF16)), "bias must be [D] = [64], but is [65]"),
    (lambda: batched(bias=np.array(1, F32)), "bias must be [D] with 1 dimension, but has 0"),
    (lambda: batched(conv_state=new(N, D + 1, W)),
     "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [3, 65, 4]"),
    (lambda: batched(conv_state=new(D, W)),
     "conv_state must be [n_slots, D, S] with 3 dimensions, but has 2"),
    (lambda: batched(conv_state=new(N, D, W + 1)),
     "conv_state must be [n_slots, D, S] with S = W or W - 1 = 4 or 3, but its S is 5"),
    (lambda: batched(conv_state=new(N, D, W - 2)),
     "conv_state must be [n_slots, D, S] with S = W or W - 1 = 4 or 3, but its S is 2"),
    (lambda: batched(conv_state=new(N - 1, D, W)),
     "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [2, 64, 4]"),
    (lambda: batched(conv_state=None),
     "conv_state must be given unless conv_state_inter is a history and num_accepted_tokens is "
     "given, but is absent"),
    (lambda: stateless(num_accepted_tokens=None),
     "conv_state must be given unless conv_state_inter is a history and num_accepted_tokens is "
     "given, but is absent"),
    (lambda: stateless(conv_state_inter=new(N, K, D, W)),
     "conv_state must be given unless conv_state_inter is a history and num_accepted_tokens is "
     "given, but is absent"),
    (lambda: stateless(conv_state_indices=int32(0, 1, 2)),
     "conv_state_indices must be absent without conv_state, but is given"),
    (lambda: stateless(conv_state_inter=new(N, W - 3 + K, D)),
     "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=6, 64], but is [3, 5, 64]"),
    (lambda: batched(conv_state_inter=new(N, D)),
     "conv_state_inter must be windows [n_rows, >=K, D, S] or a history [n_rows, >=S-1+K, D], but "
     "has 2 dimensions"),
    (lambda: batched(conv_state_inter=new(N, K - 1, D, W)),
     "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [3, 3, 64, 4]"),
    (lambda: batched(conv_state_inter=new(N, K, D, W - 1)),
     "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [3, 4, 64, 3]"),
    (lambda: batched(conv_state_inter=new(N - 1, K, D, W)),
     "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [2, 4, 64, 4]"),
    (lambda: batched(conv_state_inter=new(N, W - 2 + K, D)),
     "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=7, 64], but is [3, 6, 64]"),
    (lambda: batched(conv_state_inter=None, inter_indices=int32(0, 1, 2)),
     "inter_indices must be absent without conv_state_inter, but is given"),
    (lambda: batched(conv_state_inter=None, num_accepted_tokens=int32(0, 0, 0)),
     "num_accepted_tokens must be absent without conv_state_inter, but is given"),
    (lambda: batched(conv_state_indices=int32(0, 1)),
     "conv_state_indices must be [n_seq] = [3], but is [2]"),
    (lambda: batched(inter_indices=int32(0, 1, 2, 3)),
     "inter_indices must be [n_seq] = [3], but is [4]"),
    (lambda: batched(num_accepted_tokens=new(N, 1, dtype=I32)),
     "num_accepted_tokens must be [n_seq] with 1 dimension, but has 2"),
    (lambda: batched(parent_index=TREE[:, 1:]),
     "parent_index must be [n_seq, K] = [3, 4], but is [3, 3]"),
    (lambda: batched(parent_index=TREE[0]),
     "parent_index must be [n_seq, K] with 2 dimensions, but has 1"),
    (lambda: batched(conv_state_inter=new(N, W - 1 + K, D), parent_index=TREE),
     "parent_index must be absent where conv_state_inter is a history (a tree needs windows), but "
     "is given"),
    # ragged
    (lambda: ragged(new_input=new(N, K, D, dtype=BF16)),
     "new_input must be [total, D] with 2 dimensions, but has 3"),
    (lambda: ragged(output=new(8, D, dtype=BF16)),
     "output must be [total, D] = [7, 64], but is [8, 64]"),
    (lambda: ragged(cu_seqlens=int32()), "cu_seqlens must be [n_seq + 1] = [>=1], but is [0]"),
    (lambda: ragged(cu_seqlens=int32(0, 4, 4, 6, 7)),
     "conv_state must be [n_slots, D, S] = [>=4, 64, any], but is [3, 64, 4]"),
    (lambda: ragged(conv_state_inter=new(N - 1, K, D, W)),
     "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, any, 64, 4], but is [2, 4, 64, 4]"),
    (lambda: ragged(conv_state_inter=new(N, W - 2, D)),
     "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=3, 64], but is [3, 2, 64]"),
    (lambda: ragged(conv_state_inter=None),
     "max_num_tokens must be given with cu_seqlens where there is no conv_state_inter, but is "
     "absent"),
    (lambda: ragged(max_num_tokens=K + 1),
     "max_num_tokens must be at most 4, the positions that conv_state_inter holds, but is 5"),
    (lambda: batched(max_num_tokens=K),
     "max_num_tokens must be absent without cu_seqlens, but is 4"),
    (lambda: ragged(parent_index=TREE[:, :3]),
     "parent_index must be [n_seq, max_num_tokens] = [3, 4], but is [3, 3]"),
    (lambda: ragged(parent_index=TREE, max_num_tokens=3),
     "parent_index must be [n_seq, max_num_tokens] = [3, 3], but is [3, 4]"),
    # one sequence
    (lambda: single(new_input=new(1, K, D, dtype=BF16)),
     "new_input must be [K, D] with 2 dimensions, but has 3"),
    (lambda: single(output=new(K, D + 1, dtype=BF16)),
     "output must be [K, D] = [4, 64], but is [4, 65]"),
    (lambda: single(conv_state=new(1, D, W)),
     "conv_state must be [D, S] with 2 dimensions, but has 3"),
    (lambda: single(conv_state=new(D - 1, W)),
     "conv_state must be [D, S] = [64, any], but is [63, 4]"),
    (lambda: single(conv_state=new(D, W + 1)),
     "conv_state must be [D, S] with S = W or W - 1 = 4 or 3, but its S is 5"),
    (lambda: single(conv_state_inter=new(1, K, D, W)),
     "conv_state_inter must be windows [>=K, D, S] or a history [>=S-1+K, D], but has 4 "
     "dimensions"),
    (lambda: single(conv_state_inter=new(K - 1, D, W)),
     "conv_state_inter must be [>=K, D, S] = [>=4, 64, 4], but is [3, 64, 4]"),
    (lambda: single(conv_state_inter=new(W - 2 + K, D)),
     "conv_state_inter must be [>=S-1+K, D] = [>=7, 64], but is [6, 64]"),
    (lambda: single(parent_index=TREE), "parent_index must be [K] with 1 dimension, but has 2"),
    (lambda: single(parent_index=TREE[0, 1:]), "parent_index must be [K] = [4], but is [3]"),
    (lambda: single(num_accepted_tokens=int32(0, 0)),
     "num_accepted_tokens must be [n_seq] = [1], but is [2]"),
    # one token
    (lambda: update(new_input=new(N, 1, D, dtype=BF16)),
     "new_input must be [n_seq, D] with 2 dimensions, but has 3"),
    (lambda: update(output=new(N + 1, D, dtype=BF16)),
     "output must be [n_seq, D] = [3, 64], but is [4, 64]"),
    (lambda: update(conv_state=new(N - 1, D, W)),
     "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [2, 64, 4]"),
    (lambda: update(conv_state_indices=int32(0)),
     "conv_state_indices must be [n_seq] = [3], but is [1]"),
    # commit
    (lambda: commit(num_accepted=new(N, 1, dtype=I32)),
     "num_accepted must be [n_seq] with 1 dimension, but has 2"),
    (lambda: commit(num_accepted=int32(1, 1, 1, 1)),
     "conv_states[0] must be [n_slots, D, S] = [>=4, any, any], but is [3, 64, 4]"),
    (lambda: commit(conv_states=[new(N, D)] * 3),
     "conv_states[0] must be [n_slots, D, S] with 3 dimensions, but has 2"),
    (lambda: commit(conv_states=[new(N, D, 9) for _ in range(3)]),
     "conv_states[0] must be [n_slots, D, S] with S from 1 to 8, but its S is 9"),
    (lambda: commit(conv_states=with_last(3, new(N, D, W - 1))),
     "conv_states[2] must be [n_slots, D, S] = [3, 64, 4], but is [3, 64, 3]"),
    (lambda: commit(conv_states=with_last(3, new(N, W, D).swapaxes(1, 2))),
     "conv_states[2] must have the strides of conv_states[0], but has others"),
    (lambda: commit(snapshots=[new(N, D)] * 3),
     "snapshots[0] must be windows [n_rows, tokens, D, S] or a history [n_rows, >=S-1, D], but has "
     "2 dimensions"),
    (lambda: commit(snapshots=[new(N, K, D, W - 1)] * 3),
     "snapshots[0] must be [n_rows, tokens, D, S] = [>=3, any, 64, 4], but is [3, 4, 64, 3]"),
    (lambda: commit(snapshots=[new(N - 1, K, D, W)] * 3),
     "snapshots[0] must be [n_rows, tokens, D, S] = [>=3, any, 64, 4], but is [2, 4, 64, 4]"),
    (lambda: commit(snapshots=[new(N, W - 2, D)] * 3),
     "snapshots[0] must be [n_rows, >=S-1, D] = [>=3, >=3, 64], but is [3, 2, 64]"),
    (lambda: commit(snapshots=[new(N, K, D, W), new(N, K, D, W), new(N, K + 1, D, W)]),
     "snapshots[2] must be [n_rows, tokens, D, S] = [3, 4, 64, 4], but is [3, 5, 64, 4]"),
    (lambda: commit(conv_state_indices=int32(0, 1)),
     "conv_state_indices must be [n_seq] = [3], but is [2]"),
    (lambda: commit(inter_indices=int32(0, 1)),
     "inter_indices must be [n_seq] = [3], but is [2]"),
]  # fmt: skip

DTYPES: list[tuple[Callable[[], Case], str]] = [
    (lambda: batched(new_input=new(N, K, D, dtype=np.float64)),
     "new_input must be float32 or bfloat16 or float16, but is float64"),
    (lambda: batched(new_input=new(N, K, D, dtype=np.int8)),
     "new_input must be float32 or bfloat16 or float16, but is of another dtype"),
    (lambda: batched(weight=new(D, W, dtype=F16)),
     "weight must be float32 or bfloat16, but is float16"),
    (lambda: batched(output=new(N, K, D, dtype=F16)),
     "output must be float32 or bfloat16, but is float16"),
    (lambda: batched(new_input=new(N, K, D)), "output must be float32, but is bfloat16"),
    (lambda: batched(bias=new(D, dtype=F16)),
     "bias must be float32 or bfloat16, but is float16"),
    (lambda: batched(conv_state=new(N, D, W, dtype=I32)),
     "conv_state must be float32 or bfloat16 or float16, but is int32"),
    (lambda: batched(conv_state_inter=new(N, K, D, W, dtype=BF16)),
     "conv_state_inter must be float32, but is bfloat16"),
    (lambda: stateless(conv_state_inter=new(N, W - 2 + K, D, dtype=np.float64)),
     "conv_state_inter must be float32 or bfloat16 or float16, but is float64"),
    (lambda: ragged(cu_seqlens=new(N + 1, dtype=np.int64)),
     "cu_seqlens must be int32, but is int64"),
    (lambda: batched(conv_state_indices=np.arange(N)),
     "conv_state_indices must be int32, but is int64"),
    (lambda: batched(inter_indices=np.arange(N)), "inter_indices must be int32, but is int64"),
    (lambda: batched(num_accepted_tokens=new(N)),
     "num_accepted_tokens must be int32, but is float32"),
    (lambda: batched(parent_index=TREE.astype(np.int64)),
     "parent_index must be int32, but is int64"),
    (lambda: update(conv_state=new(N, D, W, dtype=np.float64)),
     "conv_state must be float32 or bfloat16 or float16, but is float64"),
    (lambda: commit(num_accepted=np.ones(N, np.int64)), "num_accepted must be int32, but is int64"),
    (lambda: commit(conv_states=with_last(3, new(N, D, W, dtype=F16))),
     "conv_states[2] must be float32, but is float16"),
    (lambda: commit(snapshots=[new(N, K, D, W, dtype=BF16)] * 3),
     "snapshots[0] must be float32, but is bfloat16"),
]  # fmt: skip

NUMBERS: list[tuple[Callable[[], Case], str]] = [
    (lambda: batched(qk_channels=-16), "qk_channels must be between 0 and D = 64, but is -16"),
    (lambda: batched(qk_channels=80), "qk_channels must be between 0 and D = 64, but is 80"),
    (lambda: batched(head_dim=0), "head_dim must be 1 or more, but is 0"),
    (lambda: batched(head_dim=0, qk_channels=0), "head_dim must be 1 or more, but is 0"),
    (lambda: batched(head_dim=-16), "head_dim must be 1 or more, but is -16"),
    (lambda: batched(head_dim=24),
     "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
    (lambda: batched(head_dim=64),
     "head_dim must divide qk_channels, but head_dim is 64 and qk_channels is 32"),
    (lambda: batched(l2_eps=-1e-30),
     "l2_eps must be a float32 that is finite and not negative, but is -1e-30"),
    (lambda: batched(l2_eps=float("nan")),
     "l2_eps must be a float32 that is finite and not negative, but is nan"),
    (lambda: batched(l2_eps=float("inf")),
     "l2_eps must be a float32 that is finite and not negative, but is inf"),
    (lambda: batched(l2_eps=1e39),
     "l2_eps must be a float32 that is finite and not negative, but is 1e+39"),
    (lambda: single(head_dim=24),
     "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
    (lambda: update(head_dim=24),
     "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
    (lambda: ragged(max_num_tokens=-1), "max_num_tokens is -1, but it must not be negative"),
    (lambda: batched(activation="relu"), 'activation is "relu"'),
    (lambda: update(activation="SiLU"), 'activation is "SiLU"'),
    (lambda: batched(config=-2), "config must be -1 or one of the "),
    (lambda: single(config=-2), "config must be -1 or one of the "),
]  # fmt: skip

STRIDES: list[tuple[Callable[[], Case], str]] = [
    (lambda: batched(new_input=new(N, K, 2 * D, dtype=BF16)[..., ::2]),
     "new_input must have stride 1 in its last dimension, but has 2"),
    (lambda: batched(output=new(N, D, K, dtype=BF16).swapaxes(1, 2)),
     "output must have stride 1 in its last dimension, but has 4"),
    (lambda: single(new_input=new(D, K, dtype=BF16).T),
     "new_input must have stride 1 in its last dimension, but has 4"),
    (lambda: update(output=new(N, 2 * D, dtype=BF16)[:, ::2]),
     "output must have stride 1 in its last dimension, but has 2"),
    (lambda: batched(new_input=view(new(N, K, 1, dtype=BF16), (N, K, D), (K, 1, 0))),
     "new_input must have stride 1 in its last dimension, but has 0"),
]  # fmt: skip


def shared(op: Callable[..., Case], state: np.ndarray, **others: Any) -> Case:
    """Float32 everywhere, with `others` that may be views of the state's buffer."""
    case = op(conv_state=state, **others)
    for name in ("new_input", "weight", "output"):
        if name not in others:
            case.args[name] = new(*case.args[name].shape)
    return case


def input_in_state(**options: Any) -> Case:
    pool = new(N, D, W)
    return shared(update, pool, new_input=view(pool, (N, D), (D * W, 1)), **options)


def weight_in_state(**options: Any) -> Case:
    pool = new(N, D, W)
    return shared(batched, pool, weight=pool[1], **options)


def bias_in_state(**options: Any) -> Case:
    pool = new(N, D, W)
    return shared(batched, pool, bias=pool[2, :, 3], **options)


def twice(op: Callable[..., Case], a: str, b: str) -> Case:
    """Argument a also as argument b."""
    case = op()
    case.args[b] = case.args[a]
    return case


def packed_rows(shift: int) -> Case:
    rows = input_and_output_shared(shift)
    packed = {name: view(cases.buffer_of(x), (7, D), (2 * D, 1), shift if name == "output" else 0)
              for name, x in rows.items()}  # fmt: skip
    return ragged(**packed)


def commit_in_pool(first: int) -> Case:
    """Window 1 of a pool is the state, the snapshots start at window `first`."""
    pools = [state_and_snapshots_shared(first) for _ in range(3)]
    return commit(
        conv_states=[pool["conv_state"] for pool in pools],
        snapshots=[pool["conv_state_inter"] for pool in pools],
    )


SHARED: list[tuple[Callable[[], Case], str]] = [
    (lambda: twice(batched, "new_input", "output"),
     "output must share no memory with new_input, but an element of one is in the other"),
    (lambda: twice(single, "new_input", "output"), "output must share no memory with new_input"),
    (lambda: twice(update, "new_input", "output"), "output must share no memory with new_input"),
    (lambda: batched(**input_and_output_shared(D - 1)),
     "output must share no memory with new_input"),
    (lambda: packed_rows(D - 1), "output must share no memory with new_input"),
    (lambda: batched(**state_and_snapshots_shared(1)),
     "conv_state_inter must share no memory with conv_state"),
    (lambda: batched(**state_and_snapshots_shared(0)),
     "conv_state_inter must share no memory with conv_state"),
    (lambda: batched(**state_and_snapshots_shared(0), update_state=False),
     "conv_state_inter must share no memory with conv_state"),
    (lambda: batched(**state_and_snapshots_shared(0), parent_index=TREE),
     "conv_state_inter must share no memory with conv_state"),
    (lambda: input_in_state(), "conv_state must share no memory with new_input"),
    (lambda: weight_in_state(), "conv_state must share no memory with weight"),
    (lambda: bias_in_state(), "conv_state must share no memory with bias"),
    (lambda: batched(output=view(new(K, D, dtype=BF16), (N, K, D), (0, D, 1))),
     "output must not overlap itself, but with shape [3, 4, 64] and strides [0, 64, 1] several of "
     "its elements are one"),
    (lambda: batched(output=view(new(N, K * D, dtype=BF16), (N, K, D), (K * D, D - 1, 1))),
     "output must not overlap itself"),
    (lambda: batched(conv_state=view(new(D, W), (N, D, W), (0, W, 1))),
     "conv_state must not overlap itself"),
    (lambda: batched(conv_state=view(new(N, D + W), (N, D, W), (D + W, 1, 1))),
     "conv_state must not overlap itself"),
    (lambda: single(conv_state=view(new(W), (D, W), (0, 1))), "conv_state must not overlap itself"),
    (lambda: batched(conv_state_inter=view(new(N, K + W, D), (N, K, D, W),
                                           ((K + W) * D, D, 1, D))),  # the windows of a history
     "conv_state_inter must not overlap itself"),
    (lambda: commit(conv_states=[new(N, D, W)] * 3),
     "conv_states[0] must share no memory with conv_states[1]"),
    (lambda: commit(conv_states=layers_shared(D + 1, 3), snapshots=[new(N, K, D + 1, W)] * 3),
     "conv_states[0] must share no memory with conv_states[1]"),
    (lambda: commit(conv_states=[view(new(D, W), (N, D, W), (0, W, 1))] * 3),
     "conv_states[0] must not overlap itself"),
    (lambda: commit_in_pool(1), "conv_states[0] must share no memory with snapshots[0]"),
]  # fmt: skip
