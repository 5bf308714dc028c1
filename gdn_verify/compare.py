"""Compares tensors by their bytes: -0 is not +0, a NaN equals a NaN of any payload, nothing else is
forgiven. (tests/compare.py is the same rule for NumPy arrays.)"""

from __future__ import annotations

import torch


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two tensors of one shape and dtype differ."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    unequal = a.contiguous().view(bits) != b.contiguous().view(bits)
    return unequal & ~(a.isnan() & b.isnan()) if unequal.any() else unequal


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every byte but those of NaN are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and not _differing(a, b).any()


def first_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How many elements of two tensors of one shape and dtype differ, and the first; or None."""
    differing = _differing(a, b).nonzero()
    if not len(differing):
        return None
    where = tuple(differing[0].tolist())
    return (
        f"{len(differing)} of {a.numel()} elements, first at {list(where)}: "
        f"{a[where].item()!r} instead of {b[where].item()!r}"
    )
