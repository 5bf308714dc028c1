"""Programmatic dependent launches between others: each waits for all that came before it.

A block that ends before its predecessor's grid has would let the launch after it start too early,
so blocks with nothing to do count most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import BASE, Mirror, batched, change, equal
from cases import PAD, make_case
from test_graphs import device_of, each_mode, repeated


def idle(kind: str, device: str) -> Callable[[], None]:
    """A dependent launch of blocks that end at once."""
    head_dim = 64 if kind.startswith("general") else 128
    chosen: dict[str, Any] = {"head_dim": head_dim, "qk": "all", "slots": "permuted", "spare": 1}
    if kind.endswith(("empty", "unowned", "short")):
        chosen["ragged"] = "max_num_tokens"
    if kind.endswith("tree"):
        chosen["tree"] = True
    case = make_case(4, 17, **chosen)
    if kind.endswith("empty"):
        case.options["cu_seqlens"][:] = 0
        for name in ("new_input", "output"):
            case.args[name] = case.args[name][:0]
    elif kind.endswith("unowned"):
        case.options["cu_seqlens"][:] = 0
    elif kind.endswith("short"):
        case.options["cu_seqlens"][:] = np.arange(5)
        case.options["conv_state_indices"][:] = np.arange(4)
    elif kind.endswith("nothing"):
        for name in ("new_input", "output"):
            case.args[name] = case.args[name][:0]
        case.options["conv_state_indices"] = case.options["conv_state_indices"][:0]
    elif not kind.endswith("wrong") or device == "cpu":
        case.options["conv_state_indices"][:] = -1
    else:
        case.options["conv_state_indices"][:] = PAD
    mirror = Mirror(case, device)
    return lambda: mirror.run(pdl=True)


IDLE = ["padded", "empty", "unowned", "short", "nothing", "wrong", "general-padded",
        "general-empty", "general-tree"]  # fmt: skip


@each_mode
@pytest.mark.parametrize("kind", IDLE)
def test_idle_launches_between_two_live_ones(kind: str, mode: str) -> None:
    """The last launch of each round reads what the first writes. Blocks between them that end
    before the first has would let it start too early and see the round before."""
    device = device_of(mode)
    n_seq, num_tokens, rounds = (256, 17, 10) if device == "cuda" else (8, 3, 4)
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, BASE.d_inner, generator=generator).bfloat16().to(device)

    inputs = [rows(n_seq, num_tokens) for _ in range(2)]
    state = torch.randn(n_seq, BASE.d_inner, 4, generator=generator).to(device)
    weight = torch.randn(BASE.d_inner, 4, generator=generator).bfloat16().to(device)
    between = torch.empty_like(inputs[0])
    results = torch.empty(rounds, 2, num_tokens, BASE.d_inner, device=device, dtype=between.dtype)
    wait = idle(kind, device)

    def operate(x: torch.Tensor, y: torch.Tensor, pdl: bool) -> None:
        head_dim = 64 if y is between else 128  # the first launch has blocks that run for long
        torch.ops.gdn.verify_fused_conv_kn_batched(
            state, x, weight, y, None, BASE.qk_channels, head_dim, update_state=False, pdl=pdl
        )

    expected = torch.empty_like(results)
    for i in range(rounds):
        for x, y in ((inputs[i % 2], between), (between[-2:], expected[i])):
            operate(x, y, pdl=False)
            if device == "cuda":
                torch.cuda.synchronize()

    def all_rounds() -> None:
        for i in range(rounds):
            operate(inputs[i % 2], between, pdl=True)
            for _ in range(1 + i % 3):
                wait()
            operate(between[-2:], results[i], pdl=True)

    assert not torch.equal(expected[0], expected[1])
    run = repeated(mode, all_rounds)
    for i in range(1 if device == "cpu" else 10):
        results.zero_()
        run()
        equal(results, expected, f"repetition {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("before", ["copy", "fill", "kernel", "two streams", "commit", "nothing"])
def test_dependent_launch_after_anything(before: str, mode: str) -> None:
    """What runs before it on the stream need not be a kernel of ours, or a kernel, or one thing."""
    case = batched(n_seq=16, num_tokens=17, snapshots="history", input_layout="contiguous")
    mirror = Mirror(case, "cuda")
    x, state = mirror.given["new_input"], mirror.given["conv_state"]
    source = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    states = torch.empty_like(state)
    one = torch.ones(16, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    windows = torch.empty(16, 1, *state.shape[1:], device="cuda")

    def step() -> None:
        here = torch.cuda.current_stream()
        if before == "copy":
            x.copy_(source)
        elif before == "kernel":
            torch.mul(source, 1, out=x)
        elif before == "fill":
            x.copy_(source)
            state.fill_(0.5)
        elif before == "two streams":
            side.wait_stream(here)
            with torch.cuda.stream(side):
                x.copy_(source)
            state.copy_(states)
            here.wait_stream(side)
        elif before == "commit":
            x.copy_(source)
            windows[:, 0].copy_(states)
            torch.ops.gdn.commit_conv_state([state], [windows], one)
        mirror.run(pdl=True)
        if before == "two streams":  # and two that wait for it
            side.wait_stream(here)
            with torch.cuda.stream(side):
                states.copy_(state)
            here.wait_stream(side)

    run = repeated(mode, step)
    rng = np.random.default_rng(4)
    for i in range(5):
        change(case, rng)
        mirror.upload()
        source.copy_(x)
        states.copy_(state)
        if before in ("copy", "kernel", "two streams", "commit"):
            x.fill_(float("nan"))
        if before in ("two streams", "commit"):
            state.fill_(float("nan"))
        if before == "fill":
            case.args["conv_state"][...] = 0.5
        run()
        case.call("core")
        mirror.assert_same(f"{before}, step {i}")
        if before == "two streams":
            equal(states, case.args["conv_state"], f"{before}, step {i}")
