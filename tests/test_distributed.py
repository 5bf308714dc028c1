"""DTensors, by two processes on the CPU: bytes as without sharding, and what is refused."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from processes import python

pytest.importorskip("torch.distributed.tensor")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import gdn_verify
from gdn_verify import GdnVerifyError, verify_conv

WORLD = 2
C, K, D, QK, HEAD, W = 3, 4, 96, 64, 16, 4  # three sequences on two ranks: two and one
HEADS: dict[str, Any] = {"qk_channels": QK, "head_dim": HEAD}


def draw(n_slots: int = C) -> dict[str, Any]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(n_slots)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(C, K, D).bfloat16()
    return {
        "conv_state": normal(n_slots, D, W),
        "new_input": x,
        "weight": normal(D, W).bfloat16(),
        "output": torch.empty_like(x),
        "conv_state_inter": torch.zeros(C, K, D, W),
        "bias": normal(D),
    }


def same(actual: DTensor, expected: torch.Tensor) -> None:
    full = actual.full_tensor().contiguous()
    assert torch.equal(full.view(torch.uint8), expected.contiguous().view(torch.uint8))


def operate(given: dict[str, Any], **options: Any) -> None:
    args = [given[name] for name in given if name != "bias"]
    torch.ops.gdn.verify_fused_conv_kn_batched(*args, QK, HEAD, bias=given["bias"], **options)


# ---- what the processes run --------------------------------------------------------------------


def sequences(given: dict[str, Any], mesh: Any, *placements: Any) -> dict[str, Any]:
    rest = [Replicate()] * mesh.ndim
    return {
        name: distribute_tensor(x.clone(), mesh, rest if name in ("weight", "bias") else placements)
        for name, x in given.items()
    }


def sharded_sequences() -> None:
    import gdn_verify.distributed  # noqa: F401

    mesh = init_device_mesh("cpu", (WORLD,))
    wide = init_device_mesh("cpu", (1, WORLD))
    expected = draw()
    operate(expected)
    for on, placements in ((mesh, [Shard(0)]), (mesh, [Replicate()]),
                           (wide, [Replicate(), Shard(0)])):  # fmt: skip
        given = sequences(draw(), on, *placements)
        operate(given)
        for name, x in given.items():
            same(x, expected[name])

    given = sequences(draw(), mesh, Shard(0))  # the wrapper
    output, inter = verify_conv(
        given["conv_state"], given["new_input"], given["weight"], bias=given["bias"],
        snapshots="none", **HEADS,
    )  # fmt: skip
    assert inter is None
    same(output, expected["output"])
    same(given["conv_state"], expected["conv_state"])

    plain = draw()
    given = sequences(plain, mesh, Shard(0))  # one token
    for call, x, y in ((plain, plain["new_input"], plain["output"]),
                       (given, given["new_input"], given["output"])):  # fmt: skip
        torch.ops.gdn.conv1d_update_l2norm(
            call["conv_state"], x[:, 0], call["weight"], y[:, 0], QK, HEAD
        )
    same(given["conv_state"], plain["conv_state"])
    same(given["output"][:, 0], plain["output"][:, 0])


def refused_sequences() -> None:
    import gdn_verify.distributed  # noqa: F401

    mesh = init_device_mesh("cpu", (WORLD,))
    given = sequences(draw(), mesh, Shard(0))
    before = given["conv_state"].full_tensor()

    def place(x: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(x, mesh, [placement])

    more = place(torch.zeros(C + 2, D, W), Shard(0))
    slots = place(torch.arange(C, dtype=torch.int32), Shard(0))
    for change, options, sentence in (
        ({"conv_state": place(draw()["conv_state"], Replicate())}, {}, "conv_state is placed as"),
        ({"output": place(draw()["output"], Replicate())}, {}, "output is placed as"),
        ({"conv_state_inter": place(draw()["conv_state_inter"], Shard(1))}, {},
         "conv_state_inter is placed as"),
        ({"weight": place(draw()["weight"], Shard(0))}, {}, "weight is placed as"),
        ({"new_input": place(draw()["new_input"], Shard(2))}, {}, "new_input is placed as"),
        ({"new_input": draw()["new_input"]}, {}, "new_input is a plain tensor"),
        ({"conv_state": more}, {}, "conv_state has 5 rows for 3 sequences"),
        ({}, {"conv_state_indices": slots}, "conv_state_indices must be absent"),
    ):  # fmt: skip
        with pytest.raises(GdnVerifyError, match=f"^{sentence}"):
            operate({**given, **change}, **options)
    with pytest.raises(GdnVerifyError, match=r"^conv_state_inter is placed as"):
        verify_conv(given["conv_state"], given["new_input"], given["weight"], **HEADS)
    accepted = place(torch.ones(C, dtype=torch.int32), Shard(0))
    with pytest.raises(NotImplementedError):
        torch.ops.gdn.commit_conv_state(
            [given["conv_state"]], [given["conv_state_inter"]], accepted
        )
    same(given["conv_state"], before)


def tensor_parallel() -> None:
    from gdn_verify.distributed import channel_order, verify_conv_tensor_parallel

    mesh = init_device_mesh("cpu", (WORLD,))
    order = channel_order(D, QK, WORLD)
    half = torch.arange(D).split([16, 16, 16, 16, 16, 16])
    assert torch.equal(order, torch.cat([half[i] for i in (0, 2, 4, 1, 3, 5)]))
    dims = {"conv_state": 1, "new_input": -1, "weight": 0, "output": -1, "bias": 0}
    accepted = torch.tensor([0, 2, 4], dtype=torch.int32)
    slots = torch.tensor([4, 1, 0], dtype=torch.int32)
    pool = {"conv_state_indices": slots, "num_accepted_tokens": accepted}
    packed = {"cu_seqlens": torch.tensor([0, 3, 3, 9], dtype=torch.int32), "max_num_tokens": 9}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("windows", {}), ("history", {}), ("none", {}), ("given", pool), ("windows", packed)
    ]  # fmt: skip
    for kind, options in cases:
        options = {**HEADS, "update_state": kind != "history", **options}
        plain = draw(n_slots=5)
        inter = plain.pop("conv_state_inter")
        if "cu_seqlens" in options:
            plain = {**plain, "new_input": plain["new_input"].flatten(0, 1)[:9],
                     "output": plain["output"].flatten(0, 1)[:9]}  # fmt: skip
        if kind != "given":
            options["snapshots"] = kind
            del plain["output"]
        given = {name: distribute_tensor(x.index_select(dims[name], order), mesh,
                                         [Shard(dims[name] % x.dim())])
                 for name, x in plain.items()}  # fmt: skip
        if kind == "given":
            plain["conv_state_inter"] = inter.clone()
            given["conv_state_inter"] = distribute_tensor(inter[:, :, order], mesh, [Shard(2)])
        expected = verify_conv(**plain, **options)
        actual = verify_conv_tensor_parallel(**given, **options)
        same(actual[0], expected[0][..., order])
        same(given["conv_state"], plain["conv_state"][:, order])
        if kind == "none":
            assert actual[1] is None
        elif not packed.keys() <= options.keys():  # what no token wrote is not initialised
            assert expected[1] is not None
            assert actual[1] is not None
            same(actual[1], expected[1][:, :, order])
    refused_channels(mesh, given, options)


def refused_channels(mesh: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
    from gdn_verify.distributed import channel_order, verify_conv_tensor_parallel

    for change, sentence in (
        ({"weight": distribute_tensor(draw()["weight"], mesh)}, "weight is placed as"),
        ({"weight": draw()["weight"]}, "weight is a plain tensor"),
        ({"qk_channels": 63}, "qk_channels is 63 of 96 channels"),
        ({"head_dim": 24}, "head_dim"),
    ):
        with pytest.raises(GdnVerifyError, match=f"^{sentence}"):
            verify_conv_tensor_parallel(**{**given, **options, **change})
    with pytest.raises(GdnVerifyError, match=r"^32 channels of q and k .* by 5 ranks"):
        channel_order(D, QK, 5)


PARTS = {part.__name__: part for part in (sharded_sequences, refused_sequences, tensor_parallel)}


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        for part in PARTS.values():
            part()
    finally:
        dist.destroy_process_group()


def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=WORLD)


def test_nothing_is_registered_before_it_is_asked_for() -> None:
    code = "import sys, gdn_verify; assert 'torch.distributed.tensor' not in sys.modules"
    python(code)
    assert "distributed" not in gdn_verify.__all__
