"""Measures: which contender at which point in which way, and the machine that it ran on.

A plan maps (point, name, pdl) to the ways to measure it, so that whoever asks for the same thing
twice has it measured once. A row is what one entry gives, ready for JSON; timings are microseconds.

    graph_cold    in a graph, buffers rotated past the L2 (see gdn_verify/timing.py)
    graph_warm    in a graph, always the same buffers
    eager, host   outside of graphs, cold: device time, and the host's time to issue the call
"""

from __future__ import annotations

import ctypes
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import floor
import torch
from contenders import (
    Contender,
    Point,
    compare,
    make_buffers,
    read_written,
    required_bytes,
    run_fused,
)

from gdn_verify import _core, timing

COPY = "copy"  # the floor: read and write as many bytes
CPU_COLD_BYTES = 300_000_000  # more than the caches of a CPU
WAYS = ("graph_cold", "graph_warm", "eager")


class Entry(NamedTuple):
    point: Point
    name: str
    pdl: bool


class Plan:
    """What to measure, in the order in which it was asked for first."""

    def __init__(self) -> None:
        self.entries: dict[Entry, set[str]] = {}
        self.contenders: dict[Entry, Contender | None] = {}

    def add(self, point: Point, contender: Contender, ways: tuple[str, ...] = WAYS) -> None:
        entry = Entry(point, contender.name, contender.pdl)
        self.entries.setdefault(entry, set()).update(ways)
        self.contenders[entry] = contender

    def add_copy(self, point: Point, pdl: bool, ways: tuple[str, ...] = WAYS) -> None:
        entry = Entry(point, COPY, pdl)
        self.entries.setdefault(entry, set()).update(set(ways) - {"eager"})
        self.contenders[entry] = None

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields one row for each entry."""
        ordered = list(self.entries)
        start, before = time.perf_counter(), None
        for i, entry in enumerate(ordered):
            here = (entry.point.shape.d_inner, entry.point.c, entry.point.k)
            if here != before:
                seconds = time.perf_counter() - start
                print(f"{seconds:4.0f} s: {i} of {len(ordered)}, D {here[0]} C {here[1]} "
                      f"K {here[2]}", file=sys.stderr, flush=True)  # fmt: skip
                before = here
            yield run_entry(entry, self.contenders[entry], self.entries[entry])


def run_entry(entry: Entry, contender: Contender | None, ways: set[str]) -> dict[str, Any]:
    point = entry.point
    row: dict[str, Any] = {
        "contender": entry.name,
        "kind": point.kind,
        "pdl": entry.pdl,
        "d_inner": point.shape.d_inner,
        "c": point.c,
        "k": point.k,
        "operations": contender.operations(point) if contender else 1,
        "bytes": contender.bytes(point) if contender else required_bytes(point),
        "required_bytes": required_bytes(point),
    }
    try:
        row.update(_time_contender(point, contender, ways) if contender
                   else _time_copy(point, entry.pdl, ways))  # fmt: skip
    except Exception as error:  # a peer of another version, a compiler that is missing: say so
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
    return row


def _time_copy(point: Point, pdl: bool, ways: set[str]) -> dict[str, Any]:
    read, written = read_written(point)
    return {
        way: floor.time_copy(read, written, pdl, warm=way == "graph_warm")._asdict()
        for way in sorted(ways)
    }


def _time_contender(point: Point, contender: Contender, ways: set[str]) -> dict[str, Any]:
    if contender.slow_to_prepare:
        torch._dynamo.reset()
    operations = contender.operations(point)
    row: dict[str, Any] = {"differs": compare(contender, point)}
    touched = min(contender.bytes(point), required_bytes(point))
    sets, row["cold"] = timing.cold_sets(touched, torch.device("cuda"), operations)
    buffers = contender.buffers(point, sets)
    calls = [functools.partial(contender.run, each, point.shape) for each in buffers]
    if "graph_cold" in ways:
        row["graph_cold"] = timing.time_graph(calls, operations=operations)._asdict()
    if "graph_warm" in ways:
        row["graph_warm"] = timing.time_graph(calls[:1], operations=operations)._asdict()
    if "eager" in ways:
        device, host = timing.time_eager(calls, operations=operations)
        row["eager"], row["host"] = device._asdict(), host._asdict()
    return row


# ---- configurations ------------------------------------------------------------------------------


def sweep(point: Point, pdl: bool) -> dict[str, Any]:
    """Every launch configuration at one point; -1 is the one that the operator chooses."""
    sets, _ = timing.cold_sets(required_bytes(point), torch.device("cuda"))
    buffers = make_buffers(point, sets)
    times = {}
    for config in range(-1, _core.build_info()["num_configs"]):
        calls = [functools.partial(run_fused, each, point.shape, config=config, pdl=pdl)
                 for each in buffers]  # fmt: skip
        times[str(config)] = timing.time_graph(calls).median_us
    return {"d_inner": point.shape.d_inner, "c": point.c, "k": point.k, "kind": point.kind,
            "pdl": pdl, "us": times}  # fmt: skip


# ---- single figures ------------------------------------------------------------------------------


def empty_launches() -> dict[str, Any]:
    """An empty kernel, in a graph and by itself."""
    found: dict[str, Any] = {}
    for name, pdl in (("plain launch", False), ("dependent launch", True)):
        calls = [functools.partial(floor.empty, pdl)]
        device, host = timing.time_eager(calls)
        found[f"{name}, in a graph"] = timing.time_graph(calls)._asdict()
        found[f"{name}, outside of graphs"] = device._asdict()
        found[f"{name}, host time"] = host._asdict()
    return found


def allocations(point: Point) -> int:
    """Allocations of device memory that one call of the operator makes."""
    (buffers,) = make_buffers(point, 1)
    run_fused(buffers, point.shape)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run_fused(buffers, point.shape)
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def cpu_against_memcpy(point: Point, threads: int = 2, rounds: int = 7) -> dict[str, Any]:
    """The CPU backend, and memcpy in as many threads of as many bytes, past the caches, in turn."""
    sets = max(2, -(-CPU_COLD_BYTES // required_bytes(point)))
    half = required_bytes(point) // 2
    buffers = make_buffers(point, sets, "cpu")
    blocks = torch.zeros(2 * sets, half, dtype=torch.uint8)
    share = half // threads
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def fused() -> None:
        for each in buffers:
            run_fused(each, point.shape)

    with ThreadPoolExecutor(threads) as pool:

        def copied() -> None:
            for i in range(sets):
                to, source = (blocks[2 * i + j].data_ptr() for j in range(2))
                ends = [(to + at, source + at, share) for at in range(0, share * threads, share)]
                list(pool.map(ctypes.memmove, *zip(*ends, strict=True)))

        try:
            samples = [(_seconds(fused), _seconds(copied)) for _ in range(1 + rounds)][1:]
        finally:
            torch.set_num_threads(before)
    fused_us, memcpy_us = (
        statistics.median(each) * 1e6 / sets for each in zip(*samples, strict=True)
    )
    return {"kind": point.kind, "c": point.c, "k": point.k, "fused_us": fused_us,
            "memcpy_us": memcpy_us, "bytes": required_bytes(point), "threads": threads,
            "cpu_level": _core.cpu_level()}  # fmt: skip


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- the machine ---------------------------------------------------------------------------------

_SMI = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
        "power.limit", "temperature.gpu")  # fmt: skip


def clocks() -> dict[str, str] | str:
    """What nvidia-smi says of clocks (MHz), or why it does not."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([*command, *which], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    if done.returncode != 0:
        return "unknown: nvidia-smi failed"
    values = done.stdout.strip().splitlines()[0].split(",")
    return dict(zip(_SMI, map(str.strip, values), strict=False))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine(arguments: list[str]) -> dict[str, Any]:
    """Versions, device and command. Paths are left out of what may be published."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shown = [Path(argument).name if "/" in argument else argument for argument in arguments]
    return {
        "command": " ".join(["python", "benchmarks/bench_verify.py", *shown]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gdn_verify": _core.build_info()["version"],
        "commit": _commit(),
        "cuda_archs": _core.build_info()["cuda_archs"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "clocks": clocks(),
    }
