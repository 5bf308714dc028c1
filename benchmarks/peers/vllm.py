"""vLLM: the Triton `causal_conv1d_update` as its Gated DeltaNet layers call it to verify drafts.

Written against 0.33.0. A sliding bfloat16 state of K + 2 inputs, from which `num_accepted_tokens`
picks the start: 2 bytes a channel and token, no windows. The output overwrites the input. From
Hopper on its launches are dependent ones. To verify, vLLM normalises q and k inside the recurrence;
"conv + L2" puts its `l2norm_fwd` behind the convolution, which takes dense heads: a copy and a
launch more.
"""

from __future__ import annotations

import contenders as own
import torch

from . import norm_bytes

PACKAGE = DISTRIBUTION = "vllm"


class Buffers:
    def __init__(self, point: own.Point) -> None:
        d, c, k = point.shape.d_inner, point.c, point.k
        bfloat16 = {"device": "cuda", "dtype": torch.bfloat16}
        int32 = {"device": "cuda", "dtype": torch.int32}
        self.rows = torch.randn(c, k, d + point.shape.qk_channels, **bfloat16)[..., :d]
        # token-major, and slot 0 is padding
        self.state = torch.randn(c + 1, k + 2, d, **bfloat16).transpose(1, 2)
        self.weight = torch.randn(d, 4, **bfloat16)
        # a column of the blocks of each sequence
        self.slots = torch.arange(1, c + 1, **int32)[:, None].repeat(1, k)[:, 0]
        self.accepted = torch.ones(c, **int32)
        self.starts = torch.arange(0, (c + 1) * k, k, **int32)
        self.k = k


def contenders() -> list[own.Contender]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

    def conv(b: Buffers, shape: own.Shape) -> torch.Tensor:
        return causal_conv1d_update(
            b.rows.flatten(0, 1),
            b.state,
            b.weight,
            None,
            "silu",
            conv_state_indices=b.slots,
            num_accepted_tokens=b.accepted,
            query_start_loc=b.starts,
            max_query_len=b.k,
            validate_data=False,
        )

    def conv_norm(b: Buffers, shape: own.Shape) -> None:
        y = conv(b, shape)
        l2norm_fwd(y[:, : shape.qk_channels].reshape(-1, shape.head_dim))

    def moved(point: own.Point) -> int:
        row = point.c * point.shape.d_inner * 2
        return row * (2 * point.k + 3 + point.k + 2) + point.shape.d_inner * 8

    common = {
        "snapshot_bytes": 2,
        "buffers": lambda point, sets: [Buffers(point) for _ in range(sets)],
        "equal": None,
    }
    state = "sliding bfloat16 state of K + 2 inputs, no windows"
    return [
        own.Contender(
            "vLLM conv", f"{state}; dependent launch; no norm", False, conv, bytes=moved, **common
        ),
        own.Contender(
            "vLLM conv + L2", f"{state}; then a copy of q and k and their norm", True, conv_norm,
            operations=lambda point: 3, bytes=lambda point: moved(point) + norm_bytes(point),
            **common,
        ),
    ]  # fmt: skip
