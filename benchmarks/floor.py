"""The floors: an empty launch, and a tuned copy kernel that moves given numbers of bytes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import compiled
import torch

from gdn_verify import timing

# (threads a block, steps of 16 bytes a thread, streaming stores) that the copy is tuned over.
SHAPES = [(threads, steps, streaming) for threads, steps in ((128, 2), (256, 1), (256, 2), (256, 4))
          for streaming in (False, True)]  # fmt: skip


def empty(pdl: bool) -> None:
    """One launch of a kernel that does nothing."""
    compiled.check(compiled.library("floor.cu").floor_empty(int(pdl), compiled.stream()))


def copy(
    to: torch.Tensor,
    source: torch.Tensor,
    read_bytes: int,
    threads: int,
    steps: int,
    streaming: bool,
    pdl: bool,
) -> None:
    """Reads `read_bytes` of `source`, writes all of `to`; byte tensors, sizes multiples of 16."""
    compiled.check(
        compiled.library("floor.cu").floor_copy(
            compiled.pointer(to),
            ctypes.c_int64(to.numel()),
            compiled.pointer(source),
            ctypes.c_int64(read_bytes),
            threads,
            steps,
            int(streaming),
            int(pdl),
            compiled.stream(),
        )
    )


def time_copy(read_bytes: int, write_bytes: int, pdl: bool, *, warm: bool = False) -> timing.Timing:
    """The best launch shape of the copy, buffers rotated past the L2, or one set of them (warm).

    The kernel cannot read more than it writes; what would be read beyond that is left out, which
    makes the floor lower, never higher.
    """
    device = torch.device("cuda")
    sets = 1 if warm else timing.cold_sets(read_bytes + write_bytes, device)[0]
    read_bytes = min(read_bytes, write_bytes)
    sources = torch.ones(sets, read_bytes, dtype=torch.uint8, device=device)
    targets = torch.empty(sets, write_bytes, dtype=torch.uint8, device=device)

    def calls(*shape: int) -> list[Callable[[], None]]:
        return [
            functools.partial(copy, targets[i], sources[i], read_bytes, *shape, pdl)
            for i in range(sets)
        ]

    # the shape is chosen by other samples than those that count
    best = min(SHAPES, key=lambda s: timing.time_graph(calls(*s), replays=5, warmup=1).median_us)
    return timing.time_graph(calls(*best))


def copy_ceiling() -> float:
    """GB/s of a large copy, read and written: what the fractions are of."""
    size = 1 << 29
    return 2 * size / time_copy(size, size, False).median_us / 1e3
