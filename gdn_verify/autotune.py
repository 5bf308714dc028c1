"""Tuning: measures every launch configuration on buffers of its own and keeps the best.

Nothing here runs unless it is asked for, during the capture of a graph, or on the caller's tensors.
A shape is measured as a model runs it: calls in a graph that rotate through buffer sets larger than
the L2 cache (timing.py), rows that are views of wider projection rows. Its memory is bounded by
twice the L2 or two sets, whichever is more; a set holds one call's own sequences, no pool.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from . import (
    _core,
    ops,  # noqa: F401  (loads the operators)
    timing,
    tuned,
)
from .models import MODELS, Shape
from .tuned import CallShape, Tuned

# A configuration must take less than this share of the heuristic's time: beyond it is noise.
MARGIN = 0.98
# A figure stands on this many calls at least, and on MIN_REPLAYS replays of the graph.
MIN_CALLS = 720
MIN_REPLAYS = 3
# This many of the fastest are measured a second time.
FINALISTS = 3

Report = Callable[[CallShape, Tuned | None], None]

_tuning = threading.RLock()  # two at once would disturb each other's times


def call_shapes(
    model: str | Shape,
    n_seq: Iterable[int] = range(1, 9),
    num_tokens: Iterable[int] = range(2, 18),
    *,
    snapshots: Iterable[str] = ("windows",),
    input_dtype: str = "bfloat16",
    state_dtype: str = "float32",
    state_len: int = 4,
    token_major: bool = False,
    rollback: bool = False,
    pdl: bool = False,
) -> list[CallShape]:
    """The calls of one model at every number of sequences and of tokens, for `tune`.

    `model` is a name of `gdn_verify.models.MODELS` or a `Shape`. `snapshots` are "windows",
    "history" and "none"; `state_len` (3 or 4) is S; `token_major` says that the windows (without
    windows conv_state) have adjacent channels side by side, `rollback` that num_accepted_tokens is
    given. Raises ValueError for a model whose
    calls have no choice: those with another head_dim than 128 or another d_conv than 4.
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"there is no model {model!r}; there are {', '.join(MODELS)}")
        model = MODELS[model]
    if (model.head_dim, model.d_conv) != (128, 4):
        raise ValueError(
            f"head_dim {model.head_dim} with d_conv {model.d_conv} has no launch configurations to"
            " choose from: only head_dim 128 with d_conv 4 has"
        )
    for name, value, allowed in (
        *(("snapshots", kind, tuned.SNAPSHOTS) for kind in snapshots),
        ("input_dtype", input_dtype, ("bfloat16", "float16")),
        ("state_dtype", state_dtype, ("float32", input_dtype)),
        ("state_len", state_len, (3, 4)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, but it must be one of {allowed}")
    layout = (input_dtype, state_dtype, state_len, token_major)
    return [
        CallShape(
            model.d_inner, model.qk_channels, c, k, kind, *layout, rollback and kind != "none", pdl
        )
        for kind, c, k in product(snapshots, n_seq, num_tokens)
    ]


# ---- measuring one shape -------------------------------------------------------------------------


class _Buffers:
    """The tensors of one call, drawn by `generator`."""

    def __init__(self, shape: CallShape, generator: torch.Generator):
        s = shape
        dtype: torch.dtype = getattr(torch, s.input_dtype)
        state_dtype: torch.dtype = getattr(torch, s.state_dtype)
        device = generator.device

        def zeros(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def windows(*size: int) -> Tensor:
            if not s.token_major:
                return zeros(*size, s.state_len, dtype=state_dtype)
            return zeros(*size[:-1], s.state_len, size[-1], dtype=state_dtype).mT

        rows = zeros(s.n_seq, s.num_tokens, s.d_inner + s.qk_channels)  # q | k | v | z
        self.new_input = rows.normal_(generator=generator)[..., : s.d_inner]
        self.weight = zeros(s.d_inner, 4).normal_(generator=generator)
        self.output = zeros(s.n_seq, s.num_tokens, s.d_inner)
        self.conv_state = windows(s.n_seq, s.d_inner)
        self.conv_state_inter: Tensor | None = None
        self.num_accepted_tokens: Tensor | None = None
        if s.rollback and s.snapshots != "none":
            self.num_accepted_tokens = zeros(s.n_seq, dtype=torch.int32) + 1
        if s.snapshots == "windows":
            self.conv_state_inter = windows(s.n_seq, s.num_tokens, s.d_inner)
        elif s.snapshots == "history":
            rows_of_history = s.state_len - 1 + s.num_tokens
            self.conv_state_inter = zeros(s.n_seq, rows_of_history, s.d_inner, dtype=state_dtype)


def _call(buffers: _Buffers, shape: CallShape, config: int) -> None:
    torch.ops.gdn.verify_fused_conv_kn_batched(
        buffers.conv_state,
        buffers.new_input,
        buffers.weight,
        buffers.output,
        buffers.conv_state_inter,
        shape.qk_channels,
        128,
        config=config,
        num_accepted_tokens=buffers.num_accepted_tokens,
        pdl=shape.pdl,
    )


def bytes_touched(shape: CallShape) -> int:
    """By one call: every byte read or written, once."""
    s = shape
    size: int = getattr(torch, s.state_dtype).itemsize
    kept = {"none": 0, "windows": s.num_tokens * s.state_len}
    snapshots = kept.get(s.snapshots, s.state_len - 1 + s.num_tokens)
    per_sequence = 4 * s.num_tokens + size * (s.state_len + snapshots)
    return s.d_inner * (8 + s.n_seq * per_sequence)


def measure(shape: CallShape) -> Tuned:
    """Times the heuristic's choice and every configuration on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    sets, _ = timing.cold_sets(bytes_touched(shape), device)
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay his
    buffers = [_Buffers(shape, generator) for _ in range(sets)]

    def time(config: int) -> float:
        calls = [functools.partial(_call, each, shape, config) for each in buffers]
        replays = max(MIN_REPLAYS, -(-MIN_CALLS // max(len(calls), timing.MIN_OPERATIONS)))
        return timing.time_graph(calls, replays=replays, warmup=1).median_us

    return choose(time, _core.build_info()["num_configs"])


def choose(time: Callable[[int], float], num_configs: int) -> Tuned:
    """The configuration for which `time` is least, or -1 where that is the heuristic's, to which
    -1 stands."""
    times = {config: time(config) for config in (-1, *range(num_configs))}
    finalists = sorted(range(num_configs), key=times.__getitem__)[:FINALISTS]
    for config in (-1, *finalists):
        times[config] = min(times[config], time(config))
    heuristic_us = times[-1]
    best = min(finalists, key=times.__getitem__, default=-1)
    if times[best] >= MARGIN * heuristic_us:
        best = -1
    return Tuned(best, round(times[best], 4), round(heuristic_us, 4))


# ---- tuning --------------------------------------------------------------------------------------


def why_not() -> str | None:
    """Why nothing can be tuned here, in a sentence."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: there is nothing to tune"
    if not _core.build_info()["has_cuda"]:
        return "gdn_verify was built without CUDA: there is nothing to tune"
    return None


def tune(
    shapes: Iterable[CallShape],
    device: torch.device | str | int | None = None,
    *,
    again: bool = False,
    report: Report | None = None,
) -> dict[CallShape, Tuned]:
    """Measures all launch configurations for each of `shapes` (see `call_shapes`) on `device` (by
    default the current one), saves the best, and uses them from now on in this process.

    Shapes that the file of the user has already are not measured again unless `again`. `report` is
    called with each shape as it is done, and what was found, or None where it failed (no memory for
    it, say; a warning is logged). What was measured is saved even where an exception ends this.
    During the capture of a graph nothing is done but to log a warning. Raises RuntimeError where
    there is no CUDA. Returns what is known of each shape.
    """
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    index = torch.cuda._utils._get_device_index(device, optional=True)
    with torch.cuda.device(index), _tuning:
        if torch.cuda.is_current_stream_capturing():
            tuned.logger.warning("a CUDA graph is being captured: nothing is tuned")
            return {}
        return _tune(list(dict.fromkeys(shapes)), tuned.device_name(index), again, report)


def _tune(
    shapes: list[CallShape], name: str, again: bool, report: Report | None
) -> dict[CallShape, Tuned]:
    """On the current device, which the file calls `name`."""
    tuned.load_tuned()  # what other processes have found meanwhile
    known = tuned.entries()
    todo = [shape for shape in shapes if again or (name, shape) not in known]
    if again:  # so that config -1 stands for the heuristic while it is measured
        tuned.use(known, without=[(name, shape) for shape in todo])
    found: tuned.Entries = {}
    try:
        for shape in shapes:
            if shape in todo:
                measured = _measure_or_warn(shape)
                if measured:
                    found[name, shape] = measured
            if report:
                report(shape, found.get((name, shape)) or known.get((name, shape)))
    finally:
        if todo:
            tuned.add(found)
    known = tuned.entries()
    return {shape: known[name, shape] for shape in shapes if (name, shape) in known}


def _measure_or_warn(shape: CallShape) -> Tuned | None:
    try:
        return measure(shape)
    except RuntimeError as error:  # torch.OutOfMemoryError too
        first_line = str(error).partition("\n")[0]
        tuned.logger.warning("%s is not tuned: %s", shape, first_line)
        return None


@contextmanager
def autotune(
    shapes: Iterable[CallShape] = (), *, again: bool = False, report: Report | None = None
) -> Iterator[None]:
    """Tunes, when it is left, for `shapes` on the current device and for those that calls of
    `verify_conv` had inside, on theirs:

        with gdn_verify.autotune():
            warm_up(model)

    Calls inside run as ever, and none of their tensors is touched by the tuning, which has its own.
    Calls from all threads count; those that torch.compile has compiled do not. Nothing is tuned
    where an exception leaves the block, or while a graph is being captured. `again` and `report`
    are those of `tune`.
    """
    asked = list(shapes)
    reason = why_not() if asked else None
    if reason:
        raise RuntimeError(reason)
    with tuned.recording() as met:
        yield
    by_device: dict[int, list[CallShape]] = {}
    if asked:
        by_device[torch.cuda.current_device()] = asked
    for index, shape in sorted(met):
        by_device.setdefault(index, []).append(shape)
    for index, wanted in by_device.items():
        tune(wanted, index, again=again, report=report)
