"""The operators for PyTorch: loads them, tells torch.compile about them, and wraps the main one.

`torch.ops.gdn.verify_fused_conv_kn_batched`, `.verify_fused_conv_kn`, `.conv1d_update_l2norm` and
`.commit_conv_state` write into the tensors that they are given and return nothing; their schemas
stand in csrc/torch_ops.cpp. `verify_conv` allocates what it is not given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import tuned
from .errors import GdnVerifyError

__all__ = ["history_windows", "verify_conv"]

_LIBRARY = Path(__file__).with_name("_torch_ops.so")
if not _LIBRARY.exists():
    raise ImportError(
        f"gdn_verify was built without its PyTorch operators ({_LIBRARY} is missing): install it"
        " where torch is installed, with `pip install --no-build-isolation .`"
    )
_loaded = str(_LIBRARY.resolve()) in torch.ops.loaded_libraries
if not _loaded and hasattr(torch.ops.gdn, "verify_fused_conv_kn_batched"):
    raise ImportError(
        "torch.ops.gdn.* are those of another copy of gdn_verify in this process,"
        f" not of {_LIBRARY}"
    )
torch.ops.load_library(str(_LIBRARY))


# ---- fakes: what torch.compile, torch.export and meta tensors run instead ------------------------
#
# The operators return nothing, so there is no shape to tell. Devices are compared because a call
# that mixes in a meta tensor comes here and nowhere else. Sizes are left to the real kernel: to
# compare them here would specialise a dynamic graph on them.


def _register_fake(name: str, first: str) -> None:
    """Registers the fake of an operator, whose tensors must all be on the device of `first`."""
    names = [argument.name for argument in getattr(torch.ops.gdn, name).default._schema.arguments]

    def fake(*args: Any, **options: Any) -> None:
        _lower_storage_offset()
        arguments = dict(zip(names, args, strict=False), **options)
        device = arguments[first].device
        if device.type == "cuda":  # a compiled call does not come by verify_conv
            tuned.load_once()
        for argument, value in arguments.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor) and item.device != device:
                    raise RuntimeError(
                        f"{argument} is on {item.device}, but {first} is on {device}:"
                        " all tensors must be on one device"
                    )

    torch.library.register_fake(f"gdn::{name}", fake, allow_override=True)  # by a reload


def _lower_storage_offset() -> None:
    """Gives Inductor the lowering of aten.sym_storage_offset that it lacks (as of torch 2.13).

    A compiled graph hands a view that an operator writes to as `as_strided(base, size, stride,
    sym_storage_offset(view))`. Inductor runs what it cannot lower on a stand-in of the view, whose
    offset is 0: under dynamic shapes any operator would silently write at the start of the base.
    Called by the fakes, which Inductor runs before it lowers, so that nobody imports it in vain.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    offset = torch.ops.aten.sym_storage_offset
    if lowering is None or offset.default in lowering.lowerings:
        return
    from torch._inductor.virtualized import V

    def lower(view: Any) -> Any:
        value = V.graph.current_node.meta["val"]
        return value.node.expr if isinstance(value, torch.SymInt) else int(value)

    lowering.register_lowering(offset)(lower)


_register_fake("verify_fused_conv_kn_batched", "new_input")
_register_fake("verify_fused_conv_kn", "new_input")
_register_fake("conv1d_update_l2norm", "new_input")
_register_fake("commit_conv_state", "num_accepted")


# ---- the wrapper ---------------------------------------------------------------------------------


def refuse_grad(**tensors: Tensor | None) -> None:
    """Raises where one of them asks for a backward."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise GdnVerifyError(
                    f"{name} requires grad, but verify_conv has no backward:"
                    " call it under torch.no_grad() or torch.inference_mode()"
                )


def refuse_indices(inter_indices: Tensor | None, num_accepted_tokens: Tensor | None) -> None:
    """For where conv_state_inter is not given."""
    for name, tensor in (
        ("num_accepted_tokens", num_accepted_tokens),
        ("inter_indices", inter_indices),
    ):
        if tensor is not None:
            raise GdnVerifyError(
                f"conv_state_inter must be given with {name}, which points into it"
            )


def allocate_snapshots(
    kind: str,
    conv_state: Tensor | None,
    new_input: Tensor,
    cu_seqlens: Tensor | None,
    max_num_tokens: int | None,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """What verify_conv takes for `conv_state_inter` where it is not given, on `device`."""
    if kind == "none":
        return None
    if kind not in ("windows", "history"):
        raise GdnVerifyError(
            f'snapshots is {kind!r}, but it must be "windows", "history" or "none"'
        )
    if conv_state is None:
        raise GdnVerifyError(
            "conv_state_inter must be given where conv_state is None: its history is the only state"
        )
    if conv_state.dim() != 3:
        raise GdnVerifyError(f"conv_state has {conv_state.dim()} dimensions, but it must have 3")
    dims = 3 if cu_seqlens is None else 2
    if new_input.dim() != dims:
        raise GdnVerifyError(f"new_input has {new_input.dim()} dimensions, but it must have {dims}")
    if cu_seqlens is None:
        n_seq, num_tokens = new_input.shape[0], new_input.shape[1]
    else:
        if max_num_tokens is None:
            raise GdnVerifyError(
                "max_num_tokens must be given with cu_seqlens where conv_state_inter is not:"
                " it tells how many snapshots of a sequence to allocate"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise GdnVerifyError(f"cu_seqlens must be [n_seq + 1], but is {list(cu_seqlens.shape)}")
        # in a graph it may be a number that is known only later
        if not is_dynamo_compiling() and isinstance(max_num_tokens, int) and max_num_tokens < 0:
            raise GdnVerifyError(f"max_num_tokens is {max_num_tokens}, but it must not be negative")
        n_seq, num_tokens = cu_seqlens.shape[0] - 1, max_num_tokens
    d_inner, state_len = conv_state.shape[1], conv_state.shape[2]
    if kind == "windows":
        return conv_state.new_empty((n_seq, num_tokens, d_inner, state_len), device=device)
    return conv_state.new_empty((n_seq, state_len - 1 + num_tokens, d_inner), device=device)


def verify_conv(
    conv_state: Tensor | None,
    new_input: Tensor,
    weight: Tensor,
    *,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    output: Tensor | None = None,
    conv_state_inter: Tensor | None = None,
    snapshots: Literal["windows", "history", "none"] = "windows",
    bias: Tensor | None = None,
    activation: Literal["silu", "none"] = "silu",
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inter_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_num_tokens: int | None = None,
    parent_index: Tensor | None = None,
    update_state: bool = True,
    config: int = -1,
    pdl: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs K draft tokens of each sequence through convolution, activation and L2 norm.

    Calls `torch.ops.gdn.verify_fused_conv_kn_batched`, whose arguments these are:

    - `conv_state` `[n_slots, D, S]`, S = W or W-1: float32, bfloat16 or float16; read and written.
      None where the history in `conv_state_inter` is the only state;
    - `new_input` `[n_seq, K, D]`: the same dtypes, strides free but the last, which is 1;
    - `weight` `[D, W]` and `bias` `[D]`: the dtype of `new_input`, or float32;
    - `qk_channels`: how many channels, from the first, are normalised, in heads of `head_dim`, with
      `l2_eps` under the root;
    - `activation`: "silu" or "none";
    - `conv_state_indices`, `inter_indices`, `num_accepted_tokens` int32 `[n_seq]`: slot, row of
      `conv_state_inter`, and how many tokens of the last call were accepted (0: start from
      `conv_state`). A slot that is negative or `pad_slot_id` is padding;
    - `cu_seqlens` int32 `[n_seq + 1]`: `new_input` and `output` are packed, `[total, D]`, with at
      most `max_num_tokens` rows of a sequence;
    - `parent_index` int32 `[n_seq, K]`: a tree instead of a chain;
    - `update_state`: False leaves `conv_state` as it was;
    - `config`, `pdl`: how CUDA launches it; the bits do not depend on them.

    What is not given is allocated:

    - `output`: contiguous, shape and dtype of `new_input`;
    - `conv_state_inter`, as `snapshots` says: "windows" `[n_seq, K, D, S]`, "history"
      `[n_seq, S-1+K, D]` (see `history_windows`), in `conv_state`'s dtype, or "none": None, where
      nothing will be rolled back. With `cu_seqlens`, K is `max_num_tokens`. What is not written
      (the rows of padding and of tokens that a sequence does not have) is left uninitialised.
      `snapshots` is not looked at when `conv_state_inter` is given.

    The first call on a CUDA device loads what was tuned before (see `gdn_verify.autotune`).
    Writes the committed window into `conv_state` (unless `update_state` is False or `parent_index`
    is given) and returns `(output, conv_state_inter)`. There is no backward.

    Raises GdnVerifyError for a call that the operator refuses, before anything is written; in a
    graph of torch.compile, and from `torch.ops.gdn.*`, that is a plain RuntimeError. `supported`
    tells without a call.
    """
    refuse_grad(
        conv_state=conv_state,
        new_input=new_input,
        weight=weight,
        output=output,
        conv_state_inter=conv_state_inter,
        bias=bias,
    )
    options = {
        "bias": bias,
        "activation": activation,
        "conv_state_indices": conv_state_indices,
        "pad_slot_id": pad_slot_id,
        "inter_indices": inter_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "cu_seqlens": cu_seqlens,
        "max_num_tokens": max_num_tokens,
        "parent_index": parent_index,
        "update_state": update_state,
        "config": config,
        "pdl": pdl,
    }
    if conv_state_inter is None:
        refuse_indices(inter_indices, num_accepted_tokens)
        conv_state_inter = allocate_snapshots(
            snapshots, conv_state, new_input, cu_seqlens, max_num_tokens
        )
    if output is None:
        output = torch.empty_like(new_input, memory_format=torch.contiguous_format)
    if not is_dynamo_compiling() and tuned.on_call is not None and new_input.is_cuda:
        tuned.on_call(
            conv_state,
            new_input,
            weight,
            output,
            conv_state_inter,
            qk_channels,
            head_dim,
            options,
        )
    try:
        torch.ops.gdn.verify_fused_conv_kn_batched.default(
            conv_state,
            new_input,
            weight,
            output,
            conv_state_inter,
            qk_channels,
            head_dim,
            l2_eps,
            # torch takes half a microsecond to match an argument passed by name, default or not
            **{name: x for name, x in options.items() if x is not _DEFAULTS[name]},
        )
    except RuntimeError as error:
        # Of torch's own errors (memory) and those of CUDA nobody knows what was written.
        if type(error) is not RuntimeError or str(error).startswith("CUDA error"):
            raise
        raise GdnVerifyError(str(error)) from None
    return output, conv_state_inter


_DEFAULTS = verify_conv.__kwdefaults__ or {}


def history_windows(history: Tensor, S: int) -> Tensor:
    """The windows `[n_rows, K, D, S]` that a history `[n_rows, S-1+K, D]` holds, without a copy.

    Works for any strides, and without the first dimension too. Snapshot t of row r is
    `history_windows(history, S)[r, t]`.
    """
    if history.dim() not in (2, 3):
        raise GdnVerifyError(f"history has {history.dim()} dimensions, but it must have 3 (or 2)")
    if S < 1 or history.shape[-2] < S:
        raise GdnVerifyError(
            f"history holds {history.shape[-2]} entries a row, but a window takes S = {S}"
        )
    return history.unfold(-2, S, 1)
