"""The floors: an empty launch, and a tuned copy kernel that moves given numbers of bytes.

Compiles floor.cu with nvcc for the current device on first use.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from gdn_verify import timing

SOURCE = Path(__file__).with_name("floor.cu")
SHAPES = [(threads, steps) for threads in (128, 256, 512) for steps in (1, 2, 4)]


@functools.cache
def library() -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    target = Path(tempfile.mkdtemp(prefix="gdn_verify_floor_")) / "floor.so"
    arch = f"arch=compute_{major}{minor},code=sm_{major}{minor}"
    command = ["nvcc", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode", arch]
    subprocess.run([*command, str(SOURCE), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def empty(pdl: bool) -> None:
    """One launch of a kernel that does nothing."""
    if library().floor_empty(int(pdl), _stream()):
        raise RuntimeError("the empty launch failed")


def copy(
    to: torch.Tensor, source: torch.Tensor, read_bytes: int, threads: int, steps: int, pdl: bool
) -> None:
    """Reads `read_bytes` of `source`, writes all of `to`; byte tensors, sizes multiples of 16."""
    if library().floor_copy(
        ctypes.c_void_p(to.data_ptr()),
        ctypes.c_int64(to.numel()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(read_bytes),
        threads,
        steps,
        int(pdl),
        _stream(),
    ):
        raise RuntimeError("the copy's launch failed")


def time_copy(read_bytes: int, write_bytes: int, pdl: bool, shapes=SHAPES) -> float:
    """Microseconds of the best launch shape of the copy, buffers rotated past the L2."""
    device = torch.device("cuda")
    sets = timing.cold_sets(read_bytes + write_bytes, device)
    sources = [torch.ones(read_bytes, dtype=torch.uint8, device=device) for _ in range(sets)]
    targets = [torch.empty(write_bytes, dtype=torch.uint8, device=device) for _ in range(sets)]

    def call(i: int, threads: int, steps: int) -> Callable[[], None]:
        return lambda: copy(targets[i], sources[i], read_bytes, threads, steps, pdl)

    return min(
        timing.time_graph([call(i, *shape) for i in range(sets)]).median_us for shape in shapes
    )
