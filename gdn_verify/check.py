"""The check: the fused operator against what it replaces, on every device that there is.

For every C and K of a grid, on synthetic input of a model's shape (float32 state, bfloat16 rows
that are a strided view of wider projection rows), the bytes of output, snapshots and state are
compared between

- the fused operator: one call,
- the per-token path: K C calls of `conv1d_update_l2norm`, each followed by a copy of the window,
- the NumPy reference, run once for the largest C and K: sequences are independent and causal, so
  every smaller result is a corner of it, and the state is the last snapshot.

Both paths are timed (see timing.py). Then a Qwen3-Next layer's own input and results follow
(real_input.py), where `transformers` is installed.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, TextIO

import torch

from . import _core, real_input, reference, table, timing
from .arrays import to_array, to_tensor
from .compare import first_difference
from .models import MODELS, Shape

GRID = [(n_seq, num_tokens) for n_seq in range(1, 9) for num_tokens in range(1, 18)]
QUICK_GRID = [(n_seq, num_tokens) for n_seq in (1, 2, 4, 8) for num_tokens in (1, 2, 4, 8, 17)]
PARTS = ("output", "snapshots", "state")


class Tensors(NamedTuple):
    """The operator's tensors for one (C, K)."""

    conv_state: torch.Tensor  # [C, D, W] float32
    new_input: torch.Tensor  # [C, K, D] bfloat16, rows further apart than D
    weight: torch.Tensor  # [D, W] bfloat16
    output: torch.Tensor  # [C, K, D] bfloat16
    conv_state_inter: torch.Tensor  # [C, K, D, W] float32

    def corner(self, n_seq: int, num_tokens: int) -> Tensors:
        """The first sequences and tokens; the state is a copy, the results are not set."""
        return Tensors(
            self.conv_state[:n_seq].clone(),
            self.new_input[:n_seq, :num_tokens],
            self.weight,
            torch.full_like(self.output[:n_seq, :num_tokens], torch.nan).contiguous(),
            torch.full_like(self.conv_state_inter[:n_seq, :num_tokens], torch.nan).contiguous(),
        )

    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of PARTS."""
        return self.output, self.conv_state_inter, self.conv_state


def make_tensors(
    shape: Shape, n_seq: int, num_tokens: int, device: torch.device, sets: int = 1
) -> list[Tensors]:
    """`sets` independent sets of input, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    d_inner, d_conv = shape.d_inner, shape.d_conv
    projected = d_inner + shape.qk_channels  # q | k | v | z in one row
    state = numbers(n_seq, d_inner, d_conv).to(device)
    rows = numbers(n_seq, num_tokens, projected).to(torch.bfloat16).to(device)
    weight = (numbers(d_inner, d_conv) / d_conv**0.5).to(torch.bfloat16).to(device)
    # state holds rounded inputs in a model; here it uses all of float32
    states = state.repeat(sets, 1, 1, 1)
    inputs = rows.repeat(sets, 1, 1, 1)[..., :d_inner]
    weights = weight.repeat(sets, 1, 1)
    output = torch.zeros(sets, n_seq, num_tokens, d_inner, dtype=torch.bfloat16, device=device)
    inter = torch.zeros(sets, n_seq, num_tokens, d_inner, d_conv, device=device)
    return [Tensors(*each) for each in zip(states, inputs, weights, output, inter, strict=True)]


# ---- the two paths -------------------------------------------------------------------------------


def run_fused(t: Tensors, shape: Shape) -> None:
    """One call, one launch."""
    torch.ops.gdn.verify_fused_conv_kn_batched(
        t.conv_state,
        t.new_input,
        t.weight,
        t.output,
        t.conv_state_inter,
        shape.qk_channels,
        shape.head_dim,
    )


def run_per_token(t: Tensors, shape: Shape) -> None:
    """2 K C operations: a launch and a copy of the window for every sequence and token."""
    update = torch.ops.gdn.conv1d_update_l2norm
    for seq in range(t.new_input.shape[0]):
        state = t.conv_state[seq : seq + 1]
        for token in range(t.new_input.shape[1]):
            update(
                state,
                t.new_input[seq, token : token + 1],
                t.weight,
                t.output[seq, token : token + 1],
                shape.qk_channels,
                shape.head_dim,
            )
            t.conv_state_inter[seq, token].copy_(state[0])


def run_reference(t: Tensors, shape: Shape) -> Tensors:
    """The NumPy reference on the CPU, results as tensors on the device of `t`."""
    state, rows, weight, output, inter = (to_array(x) for x in t)
    reference.verify_fused_conv_kn_batched(
        state, rows, weight, output, inter, shape.qk_channels, shape.head_dim
    )
    arrays = (state, rows, weight, output, inter)
    return Tensors(*(to_tensor(array).to(t.output.device) for array in arrays))


# ---- one row of the table ------------------------------------------------------------------------


def check_bytes(everything: Tensors, expected: Tensors, shape: Shape, c: int, k: int) -> dict:
    """Fused against the per-token path and the reference: part -> None or what differs."""
    fused, golden = everything.corner(c, k), everything.corner(c, k)
    run_fused(fused, shape)
    run_per_token(golden, shape)
    snapshots = expected.conv_state_inter[:c, :k]
    from_reference = (expected.output[:c, :k], snapshots, snapshots[:, -1])
    differences: dict[str, str | None] = {}
    for part, mine, theirs, wanted in zip(
        PARTS, fused.results(), golden.results(), from_reference, strict=True
    ):
        found = []
        for name, other in (("per-token path", theirs), ("reference", wanted)):
            difference = first_difference(mine, other)
            if difference:
                found.append(f"{part} against the {name}: {difference}")
        differences[part] = "; ".join(found) or None
    return differences


def time_both(shape: Shape, c: int, k: int, device: torch.device) -> dict[str, Any]:
    """Median microseconds of the per-token path and of a fused call."""
    if device.type == "cpu":
        (tensors,) = make_tensors(shape, c, k, device)
        per_token = timing.time_wall(lambda: run_per_token(tensors, shape))
        fused = timing.time_wall(lambda: run_fused(tensors, shape))
        cold = False
    else:
        # state read and written, input, output and windows
        touched = c * shape.d_inner * (2 * 4 * shape.d_conv + k * (4 + 4 * shape.d_conv))
        n_sets, cold = timing.cold_sets(touched, device, 2 * k * c)
        sets = make_tensors(shape, c, k, device, n_sets)
        per_token = timing.time_graph(
            [functools.partial(run_per_token, each, shape) for each in sets], operations=2 * k * c
        )
        fused = timing.time_graph([functools.partial(run_fused, each, shape) for each in sets])
    return {
        "per_token_us": per_token.median_us,
        "fused_us": fused.median_us,
        "ratio": per_token.median_us / fused.median_us,
        "cold": cold,  # from memory, not from the L2
    }


# ---- devices -------------------------------------------------------------------------------------


def find_devices(wanted: str) -> list[torch.device]:
    """What cpu, cuda (every GPU), cuda:N or all stands for. RuntimeError where it is absent."""
    if wanted == "cpu":
        return [torch.device("cpu")]
    if wanted not in ("cuda", "all") and not re.fullmatch(r"cuda:\d+", wanted):
        raise RuntimeError(f"--device {wanted}: it must be cpu, cuda, cuda:N or all")
    found: list[torch.device] = []
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    elif not _core.build_info()["has_cuda"]:
        reason = "gdn_verify was built without CUDA"
    else:
        found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if wanted == "all":
        if reason and torch.cuda.is_available():
            print(f"CUDA is left out: {reason}.", file=sys.stderr)
        return [torch.device("cpu"), *found]
    if wanted.startswith("cuda:"):
        found = [device for device in found if str(device) == wanted]
        reason = reason or f"there is no {wanted}"
    if not found:
        raise RuntimeError(f"--device {wanted}: {reason}")
    return found


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda})"
    return f"cpu ({platform.machine()}, {_core.cpu_level()}, {torch.get_num_threads()} threads)"


# ---- the check of one device ---------------------------------------------------------------------


def check_device(
    shape: Shape, grid: list[tuple[int, int]], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yields one row for each (C, K)."""
    n_seq, num_tokens = max(c for c, _ in grid), max(k for _, k in grid)
    (everything,) = make_tensors(shape, n_seq, num_tokens, device)
    expected = run_reference(everything.corner(n_seq, num_tokens), shape)
    for c, k in grid:
        differences = check_bytes(everything, expected, shape, c, k)
        yield {
            "n_seq": c,
            "num_tokens": k,
            **{f"{part}_equal": differences[part] is None for part in PARTS},
            "differences": [text for text in differences.values() if text],
            "operations_replaced": 2 * k * c,
            **time_both(shape, c, k, device),
        }


def check_real_input(device: torch.device, dtype: torch.dtype, size: str) -> dict[str, Any]:
    """The layer of `transformers` on this device; "skipped" says why there is none."""
    result: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "size": size}
    try:
        run = real_input.run_layer(size, dtype=dtype, device=device)
    except real_input.Unavailable as reason:
        return {**result, "skipped": str(reason)}
    comparison = real_input.compare(run, *real_input.run_operator(run))
    n_seq, num_tokens, d_inner = run.rows.shape
    return {
        **result,
        "source": run.source,
        "n_seq": n_seq,
        "num_tokens": num_tokens,
        "d_inner": d_inner,
        **comparison._asdict(),
        "ok": comparison.ok,
    }


# ---- the whole check -----------------------------------------------------------------------------


def run(model: str, device: str, quick: bool, json_path: str | None) -> int:
    """Checks, prints, and returns the exit status: 0 equal, 1 different, 2 nothing to run on."""
    shape = MODELS[model]
    grid = QUICK_GRID if quick else GRID
    out = sys.stderr if json_path == "-" else sys.stdout
    try:
        devices = find_devices(device)
        if json_path not in (None, "-"):
            open(json_path, "a").close()  # rather than after all the work
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "version": _core.build_info()["version"],
        "model": model,
        **shape._asdict(),
        "devices": [_run_device(model, shape, grid, each, quick, out) for each in devices],
    }
    report["ok"] = all(each["ok"] for each in report["devices"])
    if json_path == "-":
        print(json.dumps(report, indent=1))
    elif json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print("All equal." if report["ok"] else "There are DIFFERENCES.", file=out)
    return 0 if report["ok"] else 1


def _run_device(
    model: str,
    shape: Shape,
    grid: list[tuple[int, int]],
    device: torch.device,
    quick: bool,
    out: TextIO,
) -> dict[str, Any]:
    name = describe(device)
    progress = table.Progress(len(grid), str(device), sys.stderr)
    rows = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for row in check_device(shape, grid, device):
            rows.append(row)
            progress.step(f"C {row['n_seq']} K {row['num_tokens']}")
        real = [
            check_real_input(device, dtype, "tiny" if quick else "full")
            for dtype in (torch.bfloat16, torch.float32)
        ]
    table.show(model, shape, name, device.type, rows, real, out)
    ok = all(not row["differences"] for row in rows) and all(r.get("ok", True) for r in real)
    return {"device": name, "rows": rows, "real_input": real, "ok": ok}
