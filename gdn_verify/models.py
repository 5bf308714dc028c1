"""Shapes of the Gated DeltaNet layers that the check, the tests and the benchmarks run.

`MODELS` maps a name to its layer's shape. `<model>-tp8` is one tensor-parallel eighth of a model,
`toy-<head_dim>` a small layer whose heads have another size than the 128 of every shipped model.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """One layer, in the terms of the operator's arguments."""

    d_inner: int
    qk_channels: int
    head_dim: int = 128
    d_conv: int = 4


_SHIPPED = {
    "qwen3-next-80b-a3b": Shape(8192, 4096),
    "qwen3.5-35b-a3b": Shape(8192, 4096),
    "qwen3.6-35b-a3b": Shape(8192, 4096),
    "qwen3.5-27b": Shape(10240, 4096),
    "qwen3.6-27b": Shape(10240, 4096),
    "qwen3.5-397b-a17b": Shape(12288, 4096),
}

MODELS: dict[str, Shape] = {
    **_SHIPPED,
    **{
        f"{name}-tp8": Shape(shape.d_inner // 8, shape.qk_channels // 8)
        for name, shape in _SHIPPED.items()
    },
    **{
        f"toy-{head_dim}": Shape(8 * head_dim, 4 * head_dim, head_dim)
        for head_dim in (8, 16, 32, 64, 96, 256)
    },
}

DEFAULT_MODEL = "qwen3-next-80b-a3b"
