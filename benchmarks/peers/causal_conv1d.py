"""causal-conv1d: its CUDA `causal_conv1d_update` takes K tokens, and keeps only the last window.

bfloat16 throughout; no snapshots, so that nothing can be rolled back, and no norm.
"""

from __future__ import annotations

import contenders as own
import torch

PACKAGE, DISTRIBUTION = "causal_conv1d", "causal-conv1d"


class Buffers:
    def __init__(self, point: own.Point) -> None:
        d, c, k = point.shape.d_inner, point.c, point.k
        bfloat16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.rows = torch.randn(c, k, d + point.shape.qk_channels, **bfloat16)[..., :d]
        self.state = torch.randn(c, d, 3, **bfloat16)
        self.weight = torch.randn(d, 4, **bfloat16)


def contenders() -> list[own.Contender]:
    from causal_conv1d import causal_conv1d_update

    def conv(b: Buffers, shape: own.Shape) -> None:
        causal_conv1d_update(b.rows.transpose(1, 2), b.state, b.weight, None, "silu")

    def moved(point: own.Point) -> int:
        row = point.c * point.shape.d_inner * 2
        return row * (2 * point.k + 2 * 3) + point.shape.d_inner * 8

    return [
        own.Contender(
            "causal-conv1d",
            "no snapshots, no norm",
            False,
            conv,
            bytes=moved,
            snapshot_bytes=0,
            buffers=lambda point, sets: [Buffers(point) for _ in range(sets)],
            equal=None,
        )
    ]
