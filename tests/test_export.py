"""torch.export and AOTInductor packages, one compilation for many sizes, autocast."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from gdn_verify import history_windows, verify_conv

D, QK, HEAD, W, SLOTS = 96, 64, 16, 4, 19
HEADS: dict[str, Any] = {"qk_channels": QK, "head_dim": HEAD}
SIZES = ((3, 5), (1, 1), (7, 17), (2, 9))  # n_seq, K
Inputs = tuple[torch.Tensor, ...]


def draw(n_seq: int, num_tokens: int, device: str = "cpu", seed: int = 0) -> Inputs:
    """conv_state, new_input, num_accepted."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(SLOTS, D, W, generator=generator).to(device),
        torch.randn(n_seq, num_tokens, D, generator=generator).bfloat16().to(device),
        torch.randint(num_tokens + 1, (n_seq,), generator=generator, dtype=torch.int32).to(device),
    )


class Layer(torch.nn.Module):
    """A verify step, its commit, and the next step: all must see what was written before."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(D, W, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(
        self, state: torch.Tensor, x: torch.Tensor, accepted: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        first, history = verify_conv(
            state, x, self.weight, snapshots="history", update_state=False, **HEADS
        )
        assert history is not None
        torch.ops.gdn.commit_conv_state([state], [history], accepted)
        second, windows = verify_conv(state, x, self.weight, **HEADS)
        assert windows is not None
        return first, history_windows(history, W)[:, 0] + 1, second * 2, windows


def check(function: Callable[..., Any], device: str, sizes: Any = SIZES) -> None:
    """`function` does what the eager layer does, at all sizes."""
    layer = Layer().to(device)
    for seed, (n_seq, num_tokens) in enumerate(sizes):
        expected_inputs = draw(n_seq, num_tokens, device, seed)
        inputs = tuple(x.clone() for x in expected_inputs)
        expected, actual = layer(*expected_inputs), function(*inputs)
        for a, e in zip((*actual, *inputs), (*expected, *expected_inputs), strict=True):
            assert a.dtype == e.dtype
            assert torch.equal(a.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8))


def exported(device: str, strict: bool) -> Any:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({}, {0: dynamic, 1: dynamic}, {0: dynamic})
    layer, inputs = Layer().to(device), draw(3, 5, device)
    return torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program(device: str, strict: bool) -> None:
    program = exported(device, strict)
    check(program.module(), device)
    names = [str(node.target) for node in program.graph.nodes if "gdn." in str(node.target)]
    assert sorted(set(names)) == ["gdn.commit_conv_state.default",
                                  "gdn.verify_fused_conv_kn_batched.default"]  # fmt: skip
    assert len(names) == 3
    check(program.run_decompositions().module(), device)  # functionalised


# A package of one addition. Under some installations of torch 2.11 its loading crashes on CUDA.
TRIVIAL_PACKAGE = """
import sys, torch
class Add(torch.nn.Module):
    def forward(self, x):
        return x + 1
program = torch.export.export(Add(), (torch.ones(4, device="cuda"),))
package = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
torch._inductor.aoti_load_package(package)
"""


def test_aot_inductor_package(device: str, tmp_path: Any) -> None:
    if device == "cuda":
        command = [sys.executable, "-c", TRIVIAL_PACKAGE, os.fspath(tmp_path / "trivial.pt2")]
        status = subprocess.run(command, capture_output=True).returncode
        if status < 0:
            pytest.skip(f"torch itself dies of signal {-status} where it loads a package on CUDA")
    package = torch._inductor.aoti_compile_and_package(
        exported(device, strict=False), package_path=os.fspath(tmp_path / "layer.pt2")
    )
    check(torch._inductor.aoti_load_package(package), device)


@pytest.mark.usefixtures("fresh_dynamo")
def test_sizes_and_values_compile_nothing_again(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Layer().to(device), fullgraph=True, backend=counter)
    compiled(*draw(3, 5, device))
    compiled(*draw(4, 6, device))  # here dynamo learns that sizes change
    after_two = counter.frame_count
    assert after_two <= 2
    check(compiled, device)
    # sizes of 1 are special to torch, whatever the operator
    assert counter.frame_count <= after_two + 1
    after_all = counter.frame_count
    check(compiled, device)
    assert counter.frame_count == after_all


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_compiles_once_for_all_sizes(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    layer = Layer().to(device)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled(*draw(5, 6, device))  # none equals W, which dynamo would take for the same size
    after_one = counter.frame_count
    check(compiled, device, [size for size in SIZES if 1 not in size])
    assert counter.frame_count == after_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_leaves_it_alone(device: str, dtype: torch.dtype) -> None:
    state, x, _ = (t.to(dtype) if t.is_floating_point() else t for t in draw(3, 5, device))
    weight = torch.randn(D, W, device=device, dtype=dtype)
    expected_state = state.clone()
    expected = verify_conv(expected_state, x, weight, **HEADS)
    with torch.autocast(device, torch.bfloat16):
        actual = verify_conv(state, x, weight, **HEADS)
    for a, e in zip((*actual, state), (*expected, expected_state), strict=True):
        assert a is not None
        assert e is not None
        assert a.dtype == dtype
        assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))
