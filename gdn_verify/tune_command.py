"""python -m gdn_verify tune: tunes one model at a range of sequences and tokens, and prints the
gain over the heuristic's choice."""

from __future__ import annotations

import argparse
import math
import signal
import sys

from . import table, tuned
from .autotune import call_shapes, tune
from .check import describe, find_devices
from .tuned import CallShape, Tuned


class _Terminated(BaseException):
    """SIGTERM."""


def _terminated(*_: object) -> None:
    raise _Terminated


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 0 tuned, 1 not everything, 2 nothing to run on, 130 interrupted, 143
    terminated."""
    try:
        device = find_devices(options.device)[0]
        if device.type != "cuda":
            raise RuntimeError(f"--device {options.device}: only CUDA has configurations to tune")
        shapes = call_shapes(
            options.model,
            options.sequences,
            options.tokens,
            snapshots=options.snapshots.split(","),
            input_dtype=options.dtype,
            state_dtype=options.state_dtype,
            state_len=options.state_len,
            token_major=options.token_major,
            rollback=options.rollback,
            pdl=options.pdl,
        )
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    progress = table.Progress(len(shapes), str(device), sys.stderr)
    found: dict[CallShape, Tuned] = {}

    def report(shape: CallShape, measured: Tuned | None) -> None:
        if measured:
            found[shape] = measured
        progress.step(f"C {shape.n_seq} K {shape.num_tokens} {shape.snapshots}")

    status = 0
    # so that what was measured is saved on the way out
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        tune(shapes, device, again=options.again, report=report)
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured until now is kept", file=sys.stderr)
        status = 130
    except _Terminated:
        print("\nterminated: what was measured until now is kept", file=sys.stderr)
        status = 143
    finally:
        signal.signal(signal.SIGTERM, before)
    show(options.model, describe(device), found, len(shapes))
    return status or int(len(found) < len(shapes))


def show(model: str, device: str, found: dict[CallShape, Tuned], asked: int) -> None:
    """A row for each shape that has a better configuration than the heuristic's, and a summary."""
    print(f"\n{model} on {device}\n")
    better = {shape: each for shape, each in found.items() if each.config >= 0}
    names = tuned.configs()
    if better:
        print("  C   K  snapshots  heuristic us    best us  gain  configuration")
    for shape, each in better.items():
        gain = 100 * (1 - each.us / each.heuristic_us)
        print(
            f"{shape.n_seq:>3} {shape.num_tokens:>3}  {shape.snapshots:<9} "
            f"{each.heuristic_us:>13.2f} {each.us:>10.2f} {gain:>4.0f}%  "
            f"{each.config} ({names[each.config]})"
        )
    ratios = [each.heuristic_us / each.us for each in found.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    print(
        f"\n{len(found)} of {asked} shapes measured; a configuration is faster than the heuristic's"
        f" at {len(better)}; geometric mean over all {mean:.3f}\nfile: {tuned.cache_file()}"
    )
