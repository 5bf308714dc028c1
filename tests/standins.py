"""Stand-ins of the places in vLLM 0.33.0 and SGLang 0.5.23 that the adapters patch.

Both need their GPU libraries, which are not there where the tests run. A stand-in has the module's
path, and the names, arguments, shapes, strides and order of calls of the original around its verify
step; what these functions compute is written here anew, in plain float32 loops, from what they are
documented to do. Where the real package is installed, tests compare the two.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def put_module(monkeypatch: pytest.MonkeyPatch, path: str) -> ModuleType:
    """An empty module importable as `path`, with its packages."""
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        if i > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module, False)
    return module


def convolve(window: Tensor, x: Tensor, weight: Tensor, activation: Any) -> Tensor:
    """One sequence: what follows the W-1 columns `window` `[D, W-1]` when `x` `[K, D]` comes."""
    inputs = torch.cat([window.float(), x.float().T], 1)
    y = (inputs.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1).T
    return torch.nn.functional.silu(y) if activation else y


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, norm: bool
) -> tuple[Tensor, Tensor]:
    """One token: `state` `[heads, dv, dk]` float32, q and k `[heads, dk]`, v `[heads, dv]`."""
    q, k, v = q.float(), k.float(), v.float()
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = state * decay.exp()[:, None, None]
    delta = (v - (state * k[:, None]).sum(-1)) * beta[:, None]
    state = state + delta[..., None] * k[:, None]
    return (state * (q * q.shape[-1] ** -0.5)[:, None]).sum(-1), state


# ---- vLLM ----------------------------------------------------------------------------------------


class VllmLayer:
    """`QwenGatedDeltaNetAttention` after its projections, one rank of `tp_size`."""

    def __init__(self, module: ModuleType, drafts: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.module = module
        self.tp_size, self.head_k_dim, self.head_v_dim = 2, 16, 16
        self.key_dim, self.value_dim = 2 * 2 * 16, 2 * 4 * 16  # of all ranks
        self.k_heads, self.v_heads = 2, 4  # of this one
        self.d_inner = (2 * self.key_dim + self.value_dim) // self.tp_size
        self.activation = "silu"
        weight = torch.randn(self.d_inner, 1, 4).to(dtype).to(device)
        self.conv1d = SimpleNamespace(weight=weight, bias=None)
        self.A_log = torch.rand(self.v_heads, device=device)
        self.dt_bias = torch.ones(self.v_heads, device=device)
        blocks, shape = 12, (3 + drafts, self.d_inner)
        size = shape[0] * shape[1]
        pages = torch.randn(blocks, size + 64).to(dtype).to(device)  # a block is a part of its page
        if module.is_conv_state_dim_first():
            shape = shape[::-1]
        conv = pages[:, :size].view(blocks, *shape)
        ssm = torch.randn(blocks, self.v_heads, 16, 16).to(device)
        self.kv_cache = (conv, ssm)

    def forward(self, attn_metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        self.attn_metadata = attn_metadata  # the forward context's
        out = mixed_qkv.new_zeros(len(mixed_qkv), self.v_heads, self.head_v_dim)
        self._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=out)
        return out

    def rearrange_mixed_qkv(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        parts = torch.split(mixed_qkv, [key, key, value], dim=-1)
        heads = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        return tuple(
            x.contiguous().view(1, len(x), -1, d) for x, d in zip(parts, heads, strict=True)
        )

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        meta = self.attn_metadata
        dim_first = self.module.is_conv_state_dim_first()
        conv_state = self.kv_cache[0] if dim_first else self.kv_cache[0].transpose(-1, -2)
        weight = self.conv1d.weight
        conv_weights = weight.view(weight.size(0), weight.size(2))
        rule: Any = self.module.fused_sigmoid_gating_delta_rule_update
        if meta.spec_sequence_masks is None:  # a step without drafts
            mixed_qkv = self.module.causal_conv1d_update(
                mixed_qkv,
                conv_state,
                conv_weights,
                self.conv1d.bias,
                self.activation,
                conv_state_indices=meta.non_spec_state_indices_tensor[: meta.num_actual_tokens],
                validate_data=True,
            )
            cu_seqlens, accepted = meta.non_spec_query_start_loc[: meta.num_decodes + 1], {}
            indices = meta.non_spec_state_indices_tensor
        else:
            indices = meta.spec_state_indices_tensor
            mixed_qkv = self.module.causal_conv1d_update(
                mixed_qkv,
                conv_state,
                conv_weights,
                self.conv1d.bias,
                self.activation,
                conv_state_indices=indices[:, 0][: meta.num_spec_decodes],
                num_accepted_tokens=meta.num_accepted_tokens,
                query_start_loc=meta.spec_query_start_loc,
                max_query_len=indices.size(-1),
                validate_data=False,
            )
            cu_seqlens = meta.spec_query_start_loc[: meta.num_spec_decodes + 1]
            accepted = {"num_accepted_tokens": meta.num_accepted_tokens}
        query, key, value = self.rearrange_mixed_qkv(mixed_qkv)
        output, _ = rule(
            A_log=self.A_log,
            a=a,
            b=b,
            dt_bias=self.dt_bias,
            q=query,
            k=key,
            v=value,
            initial_state=self.kv_cache[1],
            inplace_final_state=True,
            cu_seqlens=cu_seqlens,
            ssm_state_indices=indices,
            use_qk_l2norm_in_kernel=True,
            **accepted,
        )
        core_attn_out[: meta.num_actual_tokens] = output.squeeze(0)


def vllm_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Writes over x. With accepted counts the state slides: W-2 of the past, then the inputs."""
    assert conv_state_indices is not None
    out = x if out is None else out
    starts = range(len(x) + 1) if query_start_loc is None else query_start_loc.tolist()
    for i, block in enumerate(conv_state_indices.tolist()):
        tokens = x[starts[i] : starts[i + 1]].clone()
        if block == null_block_id or not len(tokens):
            continue
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[i])
        window = conv_state[block, :, accepted - 1 : accepted + 2].clone()
        out[starts[i] : starts[i + 1]] = convolve(window, tokens, weight, activation).to(x.dtype)
        past = 1 if num_accepted_tokens is None else 0  # without, the window is W-1 columns
        kept = torch.cat([window, tokens.T], 1)
        kept = kept[:, -3:] if past else kept[:, 1:]
        conv_state[block, :, : kept.shape[1]] = kept
    return out


def vllm_rule(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Block t of a sequence takes the state after its token t."""
    assert initial_state is not None
    assert cu_seqlens is not None
    assert ssm_state_indices is not None
    output = torch.zeros_like(v)
    repeats = v.shape[2] // q.shape[2]
    decay = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    blocks = ssm_state_indices.reshape(len(ssm_state_indices), -1).tolist()
    starts = cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[i])
        if start == end or blocks[i][0] == 0:
            continue
        state = initial_state[blocks[i][accepted - 1]].clone()
        for t in range(start, end):
            output[0, t], state = delta_rule(
                state,
                q[0, t].repeat_interleave(repeats, 0),
                k[0, t].repeat_interleave(repeats, 0),
                v[0, t],
                decay[t],
                b[t].float().sigmoid(),
                use_qk_l2norm_in_kernel,
            )
            initial_state[blocks[i][min(t - start, len(blocks[i]) - 1)]] = state
    return output, initial_state


def put_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
    module: Any = put_module(monkeypatch, path)
    module.causal_conv1d_update = vllm_update
    module.fused_sigmoid_gating_delta_rule_update = vllm_rule
    module.is_conv_state_dim_first = lambda: False  # VLLM_SSM_CONV_STATE_LAYOUT=DS
    # a class of its own for every test: the adapter patches it
    module.QwenGatedDeltaNetAttention = type("QwenGatedDeltaNetAttention", (VllmLayer,), {})
    return module


# ---- SGLang --------------------------------------------------------------------------------------


class SglangPool:
    """`MambaPool.SpeculativeState` of one layer: `conv[0]` and `intermediate_conv_window[0]`."""

    def __init__(self, rows: int, drafts: int, d: int, device: str, shared: bool) -> None:
        dtype = torch.bfloat16
        self.conv = torch.randn(rows + 6, d, 3).to(dtype).to(device)
        if shared:  # a chain: windows overlap
            buffer = torch.zeros(rows, d, drafts + 2, dtype=dtype, device=device)
            size, stride = (rows, drafts, d, 3), (buffer.stride(0), 1, buffer.stride(1), 1)
            self.windows = buffer.as_strided(size, stride)
        else:
            self.windows = torch.zeros(rows, drafts, d, 3, dtype=dtype, device=device)

    def accept(self, slots: Tensor, last_correct: Tensor) -> None:
        """What the scatter after a verify does: the accepted window becomes the state."""
        for row, (slot, step) in enumerate(zip(slots.tolist(), last_correct.tolist(), strict=True)):
            if slot >= 0 and step >= 0:
                self.conv[slot] = self.windows[row, step]


class SglangBackend:
    """`GDNAttnBackend.forward_extend` up to the recurrence, in target verify."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def verify(
        self,
        layer: Any,
        pool: SglangPool,
        mixed_qkv: Tensor,
        draft_token_num: int,
        cache_indices: Tensor,
        tree: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ) -> Tensor:
        seq_len = mixed_qkv.shape[0]
        batch_size = seq_len // draft_token_num
        rows = torch.arange(batch_size, dtype=torch.int32, device=mixed_qkv.device)
        mixed_qkv_reshaped = mixed_qkv.view(batch_size, draft_token_num, -1).transpose(1, 2)
        mixed_qkv_processed = self.module.causal_conv1d_update(
            mixed_qkv_reshaped,
            pool.conv,
            layer.conv_weights,
            layer.bias,
            layer.activation,
            conv_state_indices=cache_indices[:batch_size],
            intermediate_conv_window=pool.windows,
            intermediate_state_indices=rows[:batch_size],
            retrieve_next_token=tree[0],
            retrieve_next_sibling=tree[1],
            retrieve_parent_token=tree[2],
        )
        return mixed_qkv_processed.transpose(1, 2).view(seq_len, -1)

    def decode(self, layer: Any, pool: SglangPool, mixed_qkv: Tensor, slots: Tensor) -> Tensor:
        return self.module.causal_conv1d_update(
            mixed_qkv,
            pool.conv,
            layer.conv_weights,
            layer.bias,
            layer.activation,
            conv_state_indices=slots,
        )


def sglang_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """A chain or single tokens; window t of a row is what token t leaves."""
    assert conv_state_indices is not None
    tokens = x[..., None] if x.dim() == 2 else x
    out = torch.zeros_like(tokens.transpose(1, 2)).transpose(1, 2)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot == pad_slot_id:
            continue
        state = conv_state[slot].clone()
        out[i] = convolve(state, tokens[i].T, weight, activation).T.to(x.dtype)
        inputs = torch.cat([state, tokens[i]], 1)
        conv_state[slot] = inputs[:, -3:]
        if intermediate_conv_window is not None:
            assert intermediate_state_indices is not None
            for t in range(tokens.shape[2]):
                row = int(intermediate_state_indices[i])
                intermediate_conv_window[row, t] = inputs[:, t + 1 : t + 4]
    return out.squeeze(-1) if x.dim() == 2 else out


def put_sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = put_module(monkeypatch, "sglang.srt.layers.attention.linear.gdn_backend")
    module.causal_conv1d_update = sglang_update
    return module
