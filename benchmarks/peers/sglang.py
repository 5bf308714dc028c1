"""SGLang: the Triton `causal_conv1d_update` as its Gated DeltaNet layers call it to verify drafts.

Written against 0.5.23. After every token it stores a bfloat16 window of 3, into windows that
overlap in memory (chains of drafts, on CUDA): 2 bytes a channel and token. From Hopper on its
launch is a dependent one. To verify, SGLang normalises q and k inside the recurrence; "conv + L2"
puts its `l2norm_fwd` behind the convolution, which takes dense heads: a copy and a launch more.
"""

from __future__ import annotations

import contenders as own
import torch

from . import norm_bytes

PACKAGE = DISTRIBUTION = "sglang"


class Buffers:
    def __init__(self, point: own.Point) -> None:
        d, c, k = point.shape.d_inner, point.c, point.k
        bfloat16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.rows = torch.randn(c, k, d + point.shape.qk_channels, **bfloat16)[..., :d]
        self.state = torch.randn(c + 1, d, 3, **bfloat16)  # slot 0 is padding
        # each token's window begins one input further on in the K + 2 inputs of a channel
        kept = torch.zeros(c + 1, d, k + 2, **bfloat16)
        self.inter = kept.as_strided((c + 1, k, d, 3), (d * (k + 2), 1, k + 2, 1))
        self.weight = torch.randn(d, 4, **bfloat16)
        self.sequences = torch.arange(c, device="cuda", dtype=torch.int32)
        self.slots = self.sequences + 1


def contenders() -> list[own.Contender]:
    from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    def conv(b: Buffers, shape: own.Shape) -> torch.Tensor:
        return causal_conv1d_update(
            b.rows.transpose(1, 2),
            b.state,
            b.weight,
            None,
            "silu",
            conv_state_indices=b.slots,
            intermediate_conv_window=b.inter,
            intermediate_state_indices=b.sequences,
        )

    def conv_norm(b: Buffers, shape: own.Shape) -> None:
        y = conv(b, shape).transpose(1, 2)
        l2norm_fwd(y[..., : shape.qk_channels].reshape(-1, shape.head_dim))

    def moved(point: own.Point) -> int:
        row = point.c * point.shape.d_inner * 2
        return row * (2 * point.k + point.k + 2 + 2 * 3) + point.shape.d_inner * 8

    common = {
        "snapshot_bytes": 2,
        "buffers": lambda point, sets: [Buffers(point) for _ in range(sets)],
        "equal": None,
    }
    kept = "overlapping bfloat16 windows of 3"
    return [
        own.Contender(
            "SGLang conv", f"{kept}; dependent launch; no norm", False, conv, bytes=moved, **common
        ),
        own.Contender(
            "SGLang conv + L2", f"{kept}; then a copy of q and k and their norm", True, conv_norm,
            operations=lambda point: 3, bytes=lambda point: moved(point) + norm_bytes(point),
            **common,
        ),
    ]  # fmt: skip
