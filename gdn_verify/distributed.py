"""DTensors in the operators: sequences sharded over ranks, or channels (tensor parallelism).

Importing this module teaches `torch.ops.gdn.verify_fused_conv_kn_batched` and
`.conv1d_update_l2norm` to run on DTensors whose sequences are sharded: each rank calls the operator
on what it holds, and nothing is communicated. On every dimension of the mesh, state, input, output
and snapshots are all `Shard(0)` or all `Replicate()`, weight and bias are `Replicate()`, and there
are as many slots and snapshot rows as sequences, so that each rank has those of its own. Anything
else raises GdnVerifyError, index tensors too, which would point into another rank's memory: the
operators write into their arguments, and what DTensor would do with arguments that do not fit,
redistributing copies of them, would lose the writes.

`verify_conv_tensor_parallel` is `verify_conv` where each rank holds all sequences and its own
channels. The other operators have no rule: call them on what `to_local()` gives.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from .errors import GdnVerifyError
from .ops import verify_conv

__all__ = ["channel_order", "verify_conv_tensor_parallel"]

_PER_SEQUENCE = ("new_input", "conv_state", "output", "conv_state_inter")
_CONSTANT = ("weight", "bias")


# ---- sequences -----------------------------------------------------------------------------------


def _require(name: str, tensor: DTensor, wanted: tuple[Placement, ...], why: str) -> None:
    if tensor.placements != wanted:
        raise GdnVerifyError(
            f"{name} is placed as {tensor.placements}, but must be {wanted}: {why}"
        )


def _check_sequences(given: dict[str, DTensor]) -> None:
    """Raises unless each rank may call the operator on its own parts of `given`."""
    first = given["new_input"]
    for placement in first.placements:
        if placement not in (Shard(0), Replicate()):
            raise GdnVerifyError(
                f"new_input is placed as {first.placements}, but only its sequences may be sharded:"
                " every placement must be Shard(0) or Replicate()"
            )
    for name, tensor in given.items():
        if name in _PER_SEQUENCE:
            _require(name, tensor, first.placements, "as new_input is")
        elif name in _CONSTANT:
            _require(name, tensor, (Replicate(),) * len(first.placements), "all ranks read it")
        else:
            raise GdnVerifyError(f"{name} must be absent where tensors are sharded, but is given")
        if tensor.device_mesh != first.device_mesh:
            raise GdnVerifyError(f"{name} is on another device mesh than new_input")
    if Shard(0) in first.placements:
        for name in _PER_SEQUENCE:
            if name in given and given[name].shape[0] != first.shape[0]:
                raise GdnVerifyError(
                    f"{name} has {given[name].shape[0]} rows for {first.shape[0]} sequences, but"
                    " where sequences are sharded it must have one for each"
                )


def _call_on_own_sequences(
    cls: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> None:
    names = [argument.name for argument in function._schema.arguments]
    arguments = dict(zip(names, args, strict=False), **(kwargs or {}))
    given: dict[str, DTensor] = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            if not isinstance(x, DTensor):
                raise GdnVerifyError(f"{name} is a plain tensor among DTensors: all must be one")
            given[name] = x
    _check_sequences(given)
    local = {**arguments, **{name: x.to_local() for name, x in given.items()}}
    function(*[local[name] for name in names[: len(args)]], **{n: local[n] for n in kwargs or {}})


def _register() -> None:
    for name in ("verify_fused_conv_kn_batched", "conv1d_update_l2norm"):
        with suppress(RuntimeError):  # of a second one, where the module was imported before
            torch.library.register_torch_dispatch(f"gdn::{name}", DTensor, _call_on_own_sequences)


_register()


# ---- channels ------------------------------------------------------------------------------------


def channel_order(d_inner: int, qk_channels: int, world: int) -> Tensor:
    """The order of channels that gives rank r, by an even split, its own q, k and v: q_0 | k_0 |
    v_0 | q_1 | k_1 | v_1 .. from q | k | v.

    `tensor[.., channel_order(..)]` with `Shard` of that dimension is what tensor parallelism takes
    of conv weight and bias (and of the projection's rows); engines load their weights that way.
    """
    q = qk_channels // 2
    for name, count in (("q and k", q), ("v", d_inner - qk_channels)):
        if count % world != 0:
            raise GdnVerifyError(f"{count} channels of {name} cannot be shared by {world} ranks")
    parts = torch.arange(d_inner).split([q, q, d_inner - qk_channels])
    return torch.cat([part.view(world, -1) for part in parts], 1).flatten()


def verify_conv_tensor_parallel(
    conv_state: DTensor | None,
    new_input: DTensor,
    weight: DTensor,
    *,
    qk_channels: int,
    head_dim: int,
    output: DTensor | None = None,
    conv_state_inter: DTensor | None = None,
    snapshots: Literal["windows", "history", "none"] = "windows",
    bias: DTensor | None = None,
    conv_state_indices: Tensor | None = None,
    inter_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    parent_index: Tensor | None = None,
    **options: Any,
) -> tuple[DTensor, DTensor | None]:
    """`gdn_verify.verify_conv` on the channels of this rank, without communication.

    On a mesh of one dimension the DTensors are `Shard` of their channels, which lie in the order of
    `channel_order`; index tensors are plain tensors, the same on every rank. `qk_channels` is that
    of all ranks together. `options` are the other ones of `verify_conv`. Returns DTensors that are
    sharded alike. Every rank's bits are those of the call that is not sharded.
    """
    mesh = new_input.device_mesh
    if mesh.ndim != 1:
        raise GdnVerifyError(
            f"the mesh has {mesh.ndim} dimensions, but must have 1: take one by name"
        )
    rows = Shard(new_input.dim() - 1)
    tensors = {
        "conv_state": (conv_state, Shard(1)),
        "new_input": (new_input, rows),
        "weight": (weight, Shard(0)),
        "output": (output, rows),
        "conv_state_inter": (conv_state_inter, Shard(2)),
        "bias": (bias, Shard(0)),
    }
    for name, (tensor, placement) in tensors.items():
        if tensor is not None:
            if not isinstance(tensor, DTensor):
                raise GdnVerifyError(f"{name} is a plain tensor, but it must be a DTensor")
            _require(name, tensor, (placement,), "each rank has its own channels")
    if qk_channels % mesh.size() != 0 or new_input.shape[-1] % mesh.size() != 0:
        raise GdnVerifyError(
            f"qk_channels is {qk_channels} of {new_input.shape[-1]} channels, but {mesh.size()}"
            " ranks must share both evenly"
        )

    def call(*local: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return verify_conv(
            **dict(zip(tensors, local, strict=True)),  # type: ignore[arg-type]
            qk_channels=qk_channels // mesh.size(),
            head_dim=head_dim,
            snapshots=snapshots,
            conv_state_indices=conv_state_indices,
            inter_indices=inter_indices,
            num_accepted_tokens=num_accepted_tokens,
            cu_seqlens=cu_seqlens,
            parent_index=parent_index,
            **options,
        )

    kept = conv_state_inter is not None or snapshots != "none"
    placements = ((rows,), (Shard(2),) if kept else None)
    return local_map(call, placements, device_mesh=mesh)(*(x for x, _ in tensors.values()))
