"""Bytewise comparison: -0 is not +0, a NaN equals a NaN of any payload, nothing else is forgiven.

Also the error of an exponential in units of the last place.
"""

from __future__ import annotations

import numpy as np
from cases import Case, buffer_of, offset_of


def is_nan(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint16:  # bfloat16
        return (x & 0x7FFF) > 0x7F80
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


def _differs(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    bits = np.dtype(f"u{actual.itemsize}")
    a, e = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    unequal = a.view(bits) != e.view(bits)
    if unequal.any():
        unequal &= ~(is_nan(a) & is_nan(e))
    return unequal


def _text(x: np.generic) -> str:
    value = (np.uint32(x) << np.uint32(16)).view(np.float32) if x.dtype == np.uint16 else x
    bits = int(x.view(f"u{x.itemsize}"))
    return f"{value!r} (0x{bits:0{2 * x.itemsize}x})"


def difference(actual: np.ndarray, expected: np.ndarray) -> str:
    """ "" where equal, otherwise a sentence with the first differing coordinate and both values."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"{actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
        )
    unequal = _differs(actual, expected)
    if not unequal.any():
        return ""
    first = tuple(int(i) for i in np.unravel_index(np.argmax(unequal), unequal.shape))
    return (
        f"{np.count_nonzero(unequal)} of {unequal.size} elements differ, first at {list(first)}: "
        f"{_text(actual[first])}, expected {_text(expected[first])}"
    )


def assert_same(actual: np.ndarray, expected: np.ndarray, label: str = "") -> None:
    text = difference(actual, expected)
    assert not text, f"{label}: {text}"


def assert_same_case(actual: Case, expected: Case, label: str = "") -> None:
    """All arrays of two cases that ran: the views first, for their coordinates, then what lies
    around them in their buffers."""
    label = f"{label} {expected!r}"
    theirs = expected.arrays()
    for name, x in actual.arrays().items():
        assert_same(x, theirs[name], f"{label} {name}")
    for name, x in actual.arrays().items():
        assert_same(buffer_of(x), buffer_of(theirs[name]), f"{label} buffer behind {name}")


def assert_same_around(actual: Case, expected: Case) -> None:
    """What lies in the buffers around the views, of which nothing may be written."""
    theirs = expected.arrays()
    for name, x in actual.arrays().items():
        outside = np.ones(buffer_of(x).shape, bool)
        if x.size:
            strides = [s // x.itemsize for s in x.strides]
            np.ndarray(x.shape, bool, outside, offset_of(x) // x.itemsize, strides)[...] = False
        mine, other = buffer_of(x)[outside], buffer_of(theirs[name])[outside]
        assert_same(mine, other, f"around {name}")


def exp_error_ulps(x: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Distance of `result` from exp(x) in units of the last place of a float32 there."""
    with np.errstate(all="ignore"):
        true = np.exp(np.minimum(x.astype(np.float64), 200))
        exponent = np.maximum(np.frexp(true)[1] - 1, -126)
        ulps = np.abs(result.astype(np.float64) - true) / np.exp2(exponent - 23.0)
    largest = 2.0**128 - 2.0**103  # halfway to what would be the next float32
    return np.where(np.isinf(result), np.where(true >= largest, 0, np.inf), ulps)
