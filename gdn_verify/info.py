"""What `python -m gdn_verify info` shows: versions, the build, the devices. It never fails: an item
that cannot be found out says why instead."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from typing import Any


def collect() -> dict[str, Any]:
    """item -> value; a string starting with "unknown" where there is none."""
    items: dict[str, Callable[[], Any]] = {
        "gdn_verify": lambda: importlib.metadata.version("gdn-verify"),
        "python": lambda: f"{platform.python_version()} ({platform.platform()})",
        "torch": lambda: importlib.metadata.version("torch"),
        "numpy": lambda: importlib.metadata.version("numpy"),
        "transformers": lambda: importlib.metadata.version("transformers"),
        "location": lambda: os.path.dirname(os.path.abspath(__file__)),
        "build": _build,
        "operators": _operators,
        "cpu": _cpu,
        "cuda_runtime": _cuda_runtime,
        "cuda_driver": _cuda_driver,
        "devices": _devices,
        "environment": _environment,
    }
    return {name: _guarded(find) for name, find in items.items()}


def run(as_json: bool) -> int:
    """Prints everything; returns 0."""
    found = collect()
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    width = max(map(len, found)) + 2
    for name, value in found.items():
        for i, line in enumerate(_lines(value)):
            print(f"{name if i == 0 else '':<{width}}{line}")
    return 0


def _guarded(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # whatever is broken here is what the user wants to read
        return f"unknown: {type(error).__name__}: {error}"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {each}" for key, each in value.items()] or ["none"]
    if isinstance(value, list):
        return [str(each) for each in value] or ["none"]
    return [str(value)]


def _build() -> dict[str, Any]:
    from . import _core

    return dict(_core.build_info())


def _operators() -> list[str]:
    import torch

    from . import ops  # noqa: F401  (loads the library)

    names = ("verify_fused_conv_kn_batched", "verify_fused_conv_kn", "conv1d_update_l2norm")
    return [
        f"gdn::{name}" for name in (*names, "commit_conv_state") if hasattr(torch.ops.gdn, name)
    ]


def _cpu() -> dict[str, Any]:
    import torch

    from . import _core

    return {
        "machine": platform.machine(),
        "level": _core.cpu_level(),
        "available levels": ", ".join(_core.cpu_levels()),
        "threads": torch.get_num_threads(),
    }


def _cuda_runtime() -> str:
    import torch

    return torch.version.cuda or "none: this torch was built without CUDA"


def _cuda_driver() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        return f"unknown: cuDriverGetVersion returned {status}"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _devices() -> list[str]:
    import torch

    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(
            f"cuda:{i} {p.name}, {p.major}.{p.minor}, {p.multi_processor_count} SMs, "
            f"{p.total_memory / 2**30:.0f} GiB, L2 {p.L2_cache_size / 2**20:.0f} MiB"
        )
    return ["cpu", *found]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("GDN_VERIFY_")}
