"""Times operators: CUDA in graphs over rotating buffers, the CPU by the clock.

CUDA. A graph holds calls that walk through buffer sets, together larger than the L2 cache, so that
every call finds its data in memory, as a model does that comes back to a layer only after all the
others. The graph is replayed several times between events; a figure is the median over replays of
the time of one call. Graphs leave out the host's time, which is what a serving engine does too.

CPU. The median of single calls by the clock; the caller's buffers may be cached.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# A rotation is this many times as large as the L2, whose replacement is not strictly the oldest
# first.
COLD_FACTOR = 2
# A graph has at least this many operations, so that its launch does not count.
MIN_OPERATIONS = 48
# And not many more than this, which take a second to capture. Only toy layers need more to be cold.
MAX_OPERATIONS = 1 << 14
# As many launches fit a stream's queue with room to spare; a launch into a full one waits.
MAX_QUEUED = 256


class Timing(NamedTuple):
    """Microseconds of one call, over the samples taken."""

    median_us: float
    min_us: float
    max_us: float
    samples: int


def cold_sets(bytes_per_set: int, device: torch.device, operations: int = 1) -> tuple[int, bool]:
    """How many buffer sets to rotate over, and whether that is more than the L2 can hold.

    A call touches `bytes_per_set` bytes and takes up to `operations` operations.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    cold = max(2, -(-COLD_FACTOR * l2_bytes // max(1, bytes_per_set)))
    most = max(2, MAX_OPERATIONS // operations)
    return min(cold, most), cold <= most


def time_graph(
    calls: Sequence[Callable[[], None]],
    *,
    operations: int = 1,
    replays: int = 15,
    warmup: int = 3,
) -> Timing:
    """Times `calls`, one for each buffer set, on the current CUDA device.

    A call launches `operations` kernels and copies on the current stream and allocates nothing.
    The graph goes through all calls, several times where they are few.
    """
    rounds = max(1, -(-MIN_OPERATIONS // (len(calls) * operations)))
    calls[0]()  # loads the kernels, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        for _ in range(warmup):
            graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
    marks[-1].synchronize()
    per_call = 1e3 / (rounds * len(calls))
    return _summary([a.elapsed_time(b) * per_call for a, b in itertools.pairwise(marks)])


def time_eager(
    calls: Sequence[Callable[[], None]], *, operations: int = 1, samples: int = 15
) -> tuple[Timing, Timing]:
    """Times `calls`, taken in turn, outside of graphs: on the device, and the host's own time.

    The host's is that of issuing a call on a stream that is not waited for; the device's is that
    between events around a run of calls, so that it is the host's where that is the longer.
    """
    count = max(1, MAX_QUEUED // operations)
    run = [calls[i % len(calls)] for i in range(count)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device, host = [], []
    for call in run:
        call()
    for _ in range(samples):
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        for call in run:
            call()
        stop = time.perf_counter()
        end.record()
        end.synchronize()
        host.append((stop - start) * 1e6 / count)
        device.append(begin.elapsed_time(end) * 1e3 / count)
    return _summary(device), _summary(host)


def time_wall(
    call: Callable[[], None], *, min_seconds: float = 0.02, min_samples: int = 3
) -> Timing:
    """Times `call`, which returns when it is done, at least `min_samples` times."""
    call()
    samples: list[float] = []
    while len(samples) < min_samples or sum(samples) < min_seconds * 1e6:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return _summary(samples)


def _summary(samples: list[float]) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples))
