"""Compares tensors by their bytes: -0 is not 0, a NaN equals itself."""

from __future__ import annotations

import torch


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every byte are equal."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def first_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How many elements of two tensors of one shape and dtype differ, and the first; or None."""
    if same_bytes(a, b):
        return None
    differing = (_bits(a) != _bits(b)).nonzero()
    where = tuple(differing[0].tolist())
    return (
        f"{len(differing)} of {a.numel()} elements, first at {list(where)}: "
        f"{a[where].item()!r} instead of {b[where].item()!r}"
    )
