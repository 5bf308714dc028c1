"""The CUDA backend without a GPU: its sources as C++ (tests/cuda/emulation), called as _core is.

`core()` builds a module like gdn_verify._core whose operators run the kernels, once for each state
of the sources, under build/emulated. It takes a minute on one core and needs the headers of CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
EMULATION = Path(__file__).resolve().parent / "cuda" / "emulation"
TORCH = Path(torch.__file__).resolve().parent  # which has pybind11, as the build takes it
KERNELS = ("verify_cuda.cu", "commit_cuda.cu")
# What the CPU backend calls itself here; the emulation has its names.
RENAMED = ["-Dgdn_verify_conv_cpu=real_conv_cpu", "-Dgdn_verify_commit_cpu=real_commit_cpu"]


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime.h, None where there is no toolkit."""
    nvcc = shutil.which("nvcc")
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
    return next((h / "include" for h in homes if (h / "include" / "cuda_bf16.h").exists()), None)


def commands(folder: Path) -> list[list[str]]:
    """One compilation an object; nothing contracted, as everywhere."""
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    common = ["-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", f"-I{CSRC}", "-c"]
    sanitize = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    cuda = ["-isystem", str(cuda_headers())]
    plus = [cxx, *common, "-std=c++17"]
    found = [
        [*plus, *cuda, *sanitize, "-w", "-include", str(EMULATION / "emulation.h"), "-x", "c++",
         str(CSRC / name)] for name in KERNELS
    ]  # fmt: skip
    found.append([*plus, *cuda, *sanitize, str(EMULATION / "emulation.cpp")])
    found.append([*plus, f"-I{sysconfig.get_path('include')}", "-isystem", str(TORCH / "include"),
                  str(CSRC / "pybind_core.cpp")])  # fmt: skip
    for source in sorted(CSRC.glob("*.c")):
        if source.name != "no_cuda.c":
            math = ["-fno-math-errno", "-fno-trapping-math"]
            renamed = RENAMED if source.name in ("verify_cpu.c", "commit_cpu.c") else []
            found.append([cc, *common, "-std=c11", *math, *renamed, str(source)])
    return [[*each, "-o", str(folder / (Path(each[-1]).name + ".o"))] for each in found]


def build() -> Path:
    """The module's path."""
    sources = [*sorted(CSRC.iterdir()), *sorted(EMULATION.iterdir()), Path(__file__)]
    state = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    python = sysconfig.get_config_var("EXT_SUFFIX")
    folder = ROOT / "build" / "emulated"
    target = folder / f"{state}{python}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.so"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:  # another process may build too
        first, *rest = commands(Path(work))
        with subprocess.Popen(first) as kernels:  # which take as long as all the rest
            for command in rest:
                subprocess.run(command, check=True)
            if kernels.wait():
                raise subprocess.CalledProcessError(kernels.returncode, first)
        objects = sorted(map(str, Path(work).glob("*.o")))
        made = os.path.join(work, "made.so")
        link = ["-shared", "-Wl,-Bsymbolic", "-static-libubsan", "-fsanitize=undefined"]
        libraries = ["-lm", "-lpthread"]
        cxx = os.environ.get("CXX", "c++")
        subprocess.run([cxx, *link, *objects, *libraries, "-o", made], check=True)
        os.replace(made, target)
    return target


@functools.cache
def core() -> ModuleType:
    """The module; its `backwards(yes)` turns the order of threads and blocks."""
    path = build()
    spec = importlib.util.spec_from_file_location("emulated._core", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.backwards = ctypes.CDLL(str(path)).gdn_verify_emulate_backwards  # type: ignore[attr-defined]
    return module
