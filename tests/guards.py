"""Arrays between guards: bytes that are NaN in every float dtype, and negative in int32.

Reading a guard shows in the results; every run is verified to have written to none.
"""

from __future__ import annotations

import functools

import numpy as np

GUARD = 4096
"""Bytes before and after a buffer; on CUDA 16 times as many. A multiple of every alignment."""


@functools.cache
def _canary(size: int) -> bytes:
    """`size` bytes, two neighbours of which are a NaN in 16 bits, and four in 32."""
    return (0xFF81 + np.arange(size // 2) % 126).astype(np.uint16).tobytes()


class Guarded:
    """A copy of a contiguous array between two guards."""

    def __init__(self, owner: np.ndarray, guard: int = GUARD) -> None:
        self.guard = guard
        canary = _canary(guard)
        memory = bytearray(canary + bytes(owner.nbytes) + canary)
        self.whole = np.frombuffer(memory, np.uint8)
        # the memory is no array, so that this one is its own `buffer_of`
        self.array = np.ndarray(owner.shape, owner.dtype, memory, guard)
        self.array[...] = owner

    def verify(self, whole: np.ndarray | None = None) -> None:
        """Raises where the guards, those of `whole` or its own, were written to."""
        whole = self.whole if whole is None else whole
        canary = np.frombuffer(_canary(self.guard), np.uint8)
        for place, guard in (("before", whole[: self.guard]), ("after", whole[-self.guard :])):
            changed = np.flatnonzero(guard != canary)
            if len(changed):
                raise AssertionError(
                    f"{len(changed)} bytes {place} a buffer of {self.array.nbytes} were written"
                    f" to, from byte {changed[0]} of {self.guard} to byte {changed[-1]}"
                )
