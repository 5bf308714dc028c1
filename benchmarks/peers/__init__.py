"""What others offer for this step, where it is installed. Nothing of theirs is in this project.

An adapter is a module with the PACKAGE that it needs and `contenders()`, which imports it. None of
them keeps float32 windows of 4: each contender says what it keeps and whether the L2 norm is in.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from importlib.util import find_spec
from typing import Any

ADAPTERS = ("vllm", "sglang", "causal_conv1d", "fla")


def norm_bytes(point: Any) -> int:
    """Of a norm that takes q and k from a dense copy: both are read and written twice."""
    return 4 * point.c * point.k * point.shape.qk_channels * 2


def load() -> tuple[list[Any], dict[str, str]]:
    """The contenders of all that is installed, and package -> its version or why it is absent."""
    found: list[Any] = []
    state: dict[str, str] = {}
    for name in ADAPTERS:
        adapter = importlib.import_module(f".{name}", __name__)
        if find_spec(adapter.PACKAGE) is None:
            state[adapter.DISTRIBUTION] = "absent"
            continue
        try:
            found += adapter.contenders()
            state[adapter.DISTRIBUTION] = metadata.version(adapter.DISTRIBUTION)
        except Exception as error:  # another version, a broken installation
            state[adapter.DISTRIBUTION] = f"absent: {type(error).__name__}: {error}"
    return found, state
