"""SGLang: the Triton `causal_conv1d_update` as its Gated DeltaNet layers call it to verify drafts.

Writes bfloat16 windows of 3 after every token: 6 bytes a channel and token. The norm is a second
launch.
"""

from __future__ import annotations

import contenders as own
import torch

PACKAGE = DISTRIBUTION = "sglang"


class Buffers:
    def __init__(self, point: own.Point) -> None:
        d, c, k = point.shape.d_inner, point.c, point.k
        bfloat16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.rows = torch.randn(c, k, d + point.shape.qk_channels, **bfloat16)[..., :d]
        self.state = torch.randn(c, d, 3, **bfloat16)
        self.inter = torch.empty(c, k, d, 3, **bfloat16)
        self.weight = torch.randn(d, 4, **bfloat16)
        self.slots = torch.arange(c, device="cuda", dtype=torch.int32)


def contenders() -> list[own.Contender]:
    from sglang.srt.layers.attention.fla.l2norm import l2norm_fwd
    from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update

    def conv(b: Buffers, shape: own.Shape) -> torch.Tensor:
        return causal_conv1d_update(
            b.rows.transpose(1, 2),
            b.state,
            b.weight,
            None,
            "silu",
            conv_state_indices=b.slots,
            intermediate_conv_window=b.inter,
            intermediate_state_indices=b.slots,
        )

    def conv_norm(b: Buffers, shape: own.Shape) -> None:
        y = conv(b, shape).transpose(1, 2)
        l2norm_fwd(y[..., : shape.qk_channels].reshape(-1, shape.head_dim))

    def moved(point: own.Point) -> int:
        row = point.c * point.shape.d_inner * 2
        return row * (2 * point.k + 3 * point.k + 3) + point.shape.d_inner * 8

    common = {
        "snapshot_bytes": 6,
        "buffers": lambda point, sets: [Buffers(point) for _ in range(sets)],
        "bytes": moved,
        "equal": None,
    }
    return [
        own.Contender("SGLang conv", "bfloat16 windows of 3; no norm", False, conv, **common),
        own.Contender(
            "SGLang conv + L2", "bfloat16 windows of 3; the norm is another launch", True,
            conv_norm, operations=lambda point: 3, **common,
        ),
    ]  # fmt: skip
