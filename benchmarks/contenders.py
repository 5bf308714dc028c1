"""What the benchmark compares: every way to do the step, what it does, and what it has to move.

A `Point` is a shape, C, K and a kind of snapshots. A `Contender` runs on buffers that it makes for
a point; everything of this project runs on `Buffers`, whose rows are a strided view of projections.

Bytes. `required_bytes` counts each input byte read once and each output byte written once: what no
implementation can go below. A contender's `bytes` counts what its own operations read and write,
copies of the snapshots too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import compiled
import torch

import gdn_verify
from gdn_verify.compare import first_difference
from gdn_verify.models import Shape

L2_EPS = 1e-6


class Kind(NamedTuple):
    """What is kept of the windows, and in which dtype state and snapshots are."""

    dtype: torch.dtype
    snapshots: str  # windows, history or none


KINDS = {
    "float32 windows": Kind(torch.float32, "windows"),
    "bfloat16 windows": Kind(torch.bfloat16, "windows"),
    "bfloat16 history": Kind(torch.bfloat16, "history"),
    "float32 none": Kind(torch.float32, "none"),
}
WINDOWS = "float32 windows"  # what the original keeps


class Point(NamedTuple):
    shape: Shape
    c: int
    k: int
    kind: str = WINDOWS


def read_written(point: Point) -> tuple[int, int]:
    """Bytes that must be read and written; rows and weight are bfloat16, W is 4."""
    d, c, k = point.shape.d_inner, point.c, point.k
    size = KINDS[point.kind].dtype.itemsize
    rows = c * k * d * 2
    state = c * d * 4 * size
    kept = {"windows": c * k * d * 4, "history": c * (k + 3) * d, "none": 0}
    weight = d * 4 * 2
    return rows + weight + state, rows + state + kept[KINDS[point.kind].snapshots] * size


def required_bytes(point: Point) -> int:
    return sum(read_written(point))


# ---- buffers -------------------------------------------------------------------------------------


class Buffers(NamedTuple):
    """The operator's tensors. W 4, channel-major state and windows."""

    state: torch.Tensor  # [C, D, 4]
    rows: torch.Tensor  # [C, K, D] bfloat16, further apart than D
    weight: torch.Tensor  # [D, 4] bfloat16
    output: torch.Tensor  # [C, K, D] bfloat16
    inter: torch.Tensor | None  # [C, K, D, 4], [C, K + 3, D] or None

    def clone(self) -> Buffers:
        """A copy that shares only what is read."""
        inter = None if self.inter is None else self.inter.clone()
        return Buffers(self.state.clone(), self.rows, self.weight, self.output.clone(), inter)


def make_buffers(point: Point, sets: int, device: str = "cuda") -> list[Buffers]:
    """`sets` sets of random numbers."""
    shape, c, k, kind = point
    d, (dtype, snapshots) = shape.d_inner, KINDS[kind]

    def numbers(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    state = numbers(sets, c, d, 4, dtype=dtype)
    rows = numbers(sets, c, k, d + shape.qk_channels)[..., :d]  # q | k | v | z
    weight = numbers(sets, d, 4) / 2
    output = torch.zeros(sets, c, k, d, device=device, dtype=torch.bfloat16)
    sizes = {"windows": (c, k, d, 4), "history": (c, k + 3, d)}
    if snapshots == "none":
        return [Buffers(state[i], rows[i], weight[i], output[i], None) for i in range(sets)]
    inter = torch.zeros(sets, *sizes[snapshots], device=device, dtype=dtype)
    return [Buffers(state[i], rows[i], weight[i], output[i], inter[i]) for i in range(sets)]


# ---- what runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """One way to do the step. `operations` are launches and copies of one call."""

    name: str
    does: str
    norm: bool  # whether the L2 norm is inside
    run: Callable[[Any, Shape], None]
    operations: Callable[[Point], int] = lambda point: 1
    bytes: Callable[[Point], int] = required_bytes
    snapshot_bytes: int = 16  # per channel and token
    kinds: tuple[str, ...] = (WINDOWS,)
    pdl: bool = False
    buffers: Callable[[Point, int], list[Any]] = make_buffers
    equal: str | None = "bytes"  # how its results compare with the fused operator's
    slow_to_prepare: bool = False


def run_fused(b: Buffers, shape: Shape, **options: Any) -> None:
    torch.ops.gdn.verify_fused_conv_kn_batched(
        b.state, b.rows, b.weight, b.output, b.inter, shape.qk_channels, shape.head_dim, **options
    )


def run_wrapper(b: Buffers, shape: Shape) -> None:
    gdn_verify.verify_conv(
        b.state, b.rows, b.weight, qk_channels=shape.qk_channels, head_dim=shape.head_dim
    )


def run_fused_each(b: Buffers, shape: Shape) -> None:
    for i in range(b.rows.shape[0]):
        torch.ops.gdn.verify_fused_conv_kn(
            b.state[i], b.rows[i], b.weight, b.output[i], b.inter[i],
            shape.qk_channels, shape.head_dim,
        )  # fmt: skip


def run_per_token_each(b: Buffers, shape: Shape) -> None:
    update = torch.ops.gdn.conv1d_update_l2norm
    qk, head_dim = shape.qk_channels, shape.head_dim
    for i in range(b.rows.shape[0]):
        state = b.state[i : i + 1]
        for t in range(b.rows.shape[1]):
            rows, output = b.rows[i, t : t + 1], b.output[i, t : t + 1]
            update(state, rows, b.weight, output, qk, head_dim)
            b.inter[i, t].copy_(state[0])


def run_per_token_batched(b: Buffers, shape: Shape) -> None:
    update = torch.ops.gdn.conv1d_update_l2norm
    qk, head_dim = shape.qk_channels, shape.head_dim
    for t in range(b.rows.shape[1]):
        update(b.state, b.rows[:, t], b.weight, b.output[:, t], qk, head_dim)
        b.inter[:, t].copy_(b.state)


def per_token_bytes(weights: Callable[[Point], int]) -> Callable[[Point], int]:
    """State read and written, input, output, weight; then the snapshot's copy, read and written."""

    def count(point: Point) -> int:
        state = point.c * point.shape.d_inner * 4 * KINDS[point.kind].dtype.itemsize
        rows = point.c * point.shape.d_inner * 2
        weight = weights(point) * point.shape.d_inner * 4 * 2
        return point.k * (2 * state + 2 * rows + weight + 2 * state)

    return count


def run_serial_walk(b: Buffers, shape: Shape) -> None:
    c, k, d = b.rows.shape
    compiled.check(
        compiled.library("serial_walk.cu").serial_walk_launch(
            compiled.pointer(b.state), compiled.pointer(b.rows),
            ctypes.c_int64(b.rows.stride(0)), ctypes.c_int64(b.rows.stride(1)),
            compiled.pointer(b.weight), compiled.pointer(b.output), compiled.pointer(b.inter),
            c, k, d, shape.qk_channels, ctypes.c_float(L2_EPS), compiled.stream(),
        )
    )  # fmt: skip


def composed(
    state: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    inter: torch.Tensor,
    qk: int,
    head_dim: int,
) -> None:
    """The step as one would write it in PyTorch, all of it in float32."""
    inputs = torch.cat([state[..., 1:], rows.transpose(1, 2).to(state.dtype)], dim=-1)
    windows = inputs.unfold(-1, 4, 1)  # [C, D, K, 4]
    y = torch.nn.functional.silu((windows.float() * weight.float()[:, None]).sum(-1))
    y = y.transpose(1, 2)
    heads = y[..., :qk].unflatten(-1, (-1, head_dim))
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    output.copy_(torch.cat([heads.flatten(-2), y[..., qk:]], dim=-1))
    inter.copy_(windows.transpose(1, 2))
    state.copy_(windows[:, :, -1])


def run_composed(b: Buffers, shape: Shape) -> None:
    composed(*b, shape.qk_channels, shape.head_dim)


# One graph for each shape: a measurement resets what dynamo holds before it compiles the next.
_compiled_composed = torch.compile(composed, fullgraph=True, dynamic=False)


def run_composed_compiled(b: Buffers, shape: Shape) -> None:
    _compiled_composed(*b, shape.qk_channels, shape.head_dim)


SNAPSHOT_BYTES = {
    "float32 windows": 16,
    "bfloat16 windows": 8,
    "bfloat16 history": 2,
    "float32 none": 0,
}


def _fused(kind: str, pdl: bool) -> Contender:
    return Contender(
        name="fused",
        does=f"the operator, one launch, {kind}",
        norm=True,
        run=(lambda b, shape: run_fused(b, shape, pdl=True)) if pdl else run_fused,
        snapshot_bytes=SNAPSHOT_BYTES[kind],
        kinds=(kind,),
        pdl=pdl,
    )


FUSED = {(kind, pdl): _fused(kind, pdl) for kind in KINDS for pdl in (False, True)}
PER_TOKEN = Contender(
    "per-token path",
    "one convolution launch and one copy of the window for each sequence and token",
    True,
    run_per_token_each,
    lambda point: 2 * point.k * point.c,
    per_token_bytes(lambda point: point.c),
)
WRAPPER = Contender(
    "verify_conv",
    "the Python wrapper, which allocates output and snapshots",
    True,
    run_wrapper,
    equal=None,
)
BASELINES = [
    PER_TOKEN,
    Contender(
        "per-token path, batched",
        "one convolution launch and one copy of all windows for each token",
        True,
        run_per_token_batched,
        lambda point: 2 * point.k,
        per_token_bytes(lambda point: 1),
    ),
    Contender(
        "fused, each sequence",
        "the operator called once for each sequence",
        True,
        run_fused_each,
        lambda point: point.c,
        lambda point: point.c * required_bytes(point._replace(c=1)),
    ),
    Contender(
        "serial walk",
        "one launch, a block of 256 channels walks the tokens: the original's design",
        True,
        run_serial_walk,
    ),
    Contender(
        "PyTorch",
        "composed from PyTorch operations; as many launches, intermediate results not counted",
        True,
        run_composed,
        lambda point: 14,  # kernels, as a count for the length of the graph only
        equal="close",
    ),
    Contender(
        "PyTorch, compiled",
        "the same through torch.compile",
        True,
        run_composed_compiled,
        lambda point: 3,
        equal="close",
        slow_to_prepare=True,
    ),
]


# ---- whether it does the same --------------------------------------------------------------------


def compare(contender: Contender, point: Point) -> str | None:
    """None where the results are those of the fused operator, else the first that is not."""
    if contender.equal is None:
        return None
    (mine,) = make_buffers(point, 1)
    theirs = mine.clone()
    run_fused(mine, point.shape)
    contender.run(theirs, point.shape)
    for name in ("output", "inter", "state"):
        wanted, got = getattr(mine, name), getattr(theirs, name)
        if wanted is None:
            continue
        if contender.equal == "bytes":
            difference = first_difference(got, wanted)
        else:
            # a bfloat16 result may round the other way, by one in 2^8
            close = torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=1e-5)
            difference = None if close else "further off than one rounding"
        if difference:
            return f"{name}: {difference}"
    return None
