"""Compiles a .cu file of this folder into a library for the current device, once a process."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"


def nvcc() -> str:
    """The compiler, from the PATH or where the toolkit usually lies."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))
    if not found:
        raise RuntimeError("the benchmark compiles kernels of its own and needs nvcc")
    return found


def compile_command(source: str, target: str, arch: str) -> list[str]:
    """As the package is compiled: nothing contracted."""
    return [
        nvcc(), "-O3", "-std=c++17", "--fmad=false", "-shared", "-Xcompiler=-fPIC",
        f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{CSRC}", str(HERE / source),
        "-o", target,
    ]  # fmt: skip


@functools.cache
def library(source: str) -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory(prefix="gdn_verify_bench_") as folder:
        target = os.path.join(folder, "kernels.so")
        subprocess.run(compile_command(source, target, f"{major}{minor}"), check=True)
        return ctypes.CDLL(target)


def stream() -> ctypes.c_void_p:
    """torch's current stream."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def check(status: int) -> None:
    """Raises for a cudaError_t."""
    if status:
        raise RuntimeError(f"a launch failed with CUDA error {status}")
