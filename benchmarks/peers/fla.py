"""fla: its Triton `causal_conv1d_update` takes one token of each sequence, so K calls of it.

Written against 0.6.0. bfloat16 throughout, a cache of 4 inputs, of which it reads 3 and writes 4;
no snapshots and no norm.
"""

from __future__ import annotations

import contenders as own
import torch

PACKAGE, DISTRIBUTION = "fla", "flash-linear-attention"


class Buffers:
    def __init__(self, point: own.Point) -> None:
        d, c, k = point.shape.d_inner, point.c, point.k
        bfloat16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.rows = torch.randn(c, k, d + point.shape.qk_channels, **bfloat16)[..., :d]
        self.cache = torch.randn(c, d, 4, **bfloat16)
        self.weight = torch.randn(d, 4, **bfloat16)


def contenders() -> list[own.Contender]:
    from fla.modules.convolution import causal_conv1d_update

    def conv(b: Buffers, shape: own.Shape) -> None:
        for t in range(b.rows.shape[1]):
            x = b.rows[:, t : t + 1]
            causal_conv1d_update(x=x, cache=b.cache, weight=b.weight, activation="silu")

    def moved(point: own.Point) -> int:
        row = point.c * point.shape.d_inner * 2
        return point.k * (row * (2 + 3 + 4) + point.shape.d_inner * 8)

    return [
        own.Contender(
            "fla",
            "one launch for each token of all sequences; no snapshots, no norm",
            False,
            conv,
            operations=lambda point: point.k,
            bytes=moved,
            snapshot_bytes=0,
            buffers=lambda point, sets: [Buffers(point) for _ in range(sets)],
            equal=None,
        )
    ]
