"""The guards around every buffer see a write of one byte beside it."""

from __future__ import annotations

import cases
import compare
import numpy as np
import pytest


def beyond(x: np.ndarray, elements: int) -> np.ndarray:
    """One element of what lies `elements` after the end of a contiguous array."""
    return np.lib.stride_tricks.as_strided(x.ravel()[-1:], (elements + 1,), (x.itemsize,))[-1:]


@pytest.mark.parametrize("elements", [1, 7, 512])
def test_a_write_after_a_buffer_shows(elements):
    case = cases.make_case(3, 4)
    mine = case.copy()
    mine.verify_guards()
    beyond(mine.args["output"], elements).view(np.uint16)[...] = 1
    with pytest.raises(AssertionError, match=r"^\d bytes after a buffer of \d+ were written to"):
        mine.verify_guards()


def test_a_write_before_a_buffer_shows():
    mine = cases.make_case(3, 4).copy()
    mine.guarded[0].whole[cases.GUARD - 1] ^= 1
    with pytest.raises(AssertionError, match=r"^1 bytes before a buffer"):
        mine.verify_guards()


def test_guards_are_nan_in_every_dtype():
    for dtype in (np.float32, np.float16):
        assert np.isnan(np.frombuffer(cases.Guarded(np.zeros(1)).whole[:4096], dtype)).all()
    halves = np.frombuffer(cases.Guarded(np.zeros(1)).whole[:4096], np.uint16)
    assert compare.is_nan(halves).all()  # bfloat16
    assert (halves.view(np.int32) < 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [-1, 0])
def test_a_write_beside_a_buffer_on_cuda_shows(elements):
    case = cases.make_case(3, 4)
    device = cases.OnDevice()
    tensor = device.tensor(case.args["output"])
    start = tensor.storage_offset() + (tensor.numel() if elements == 0 else elements)
    tensor.as_strided((1,), (1,), start).fill_(1.0)
    with pytest.raises(AssertionError, match=r"a buffer of .* were written to"):
        device.copy_back()
