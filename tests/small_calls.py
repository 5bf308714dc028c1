"""Small legal calls that take any change, and those that share memory: what wrong calls and legal
ones that look like them are made of."""

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


# ---- calls that share memory -------------------------------------------------------------------


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
