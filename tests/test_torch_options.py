"""The operators with all their options under opcheck and torch.compile, and what has no backward.

The calls of calls.py and, for the batched operator, choices that hold every pair of options. The
tensors have the cases' strides: slots of a pool, parts of projection rows, columns of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from calls import CALLS, HEADS, Mirror, batched, commit, operator, single, update
from cases import FACTORS, Case, covering_array, legal, make_case

from gdn_verify import GdnVerifyError, supported, verify_conv

# What changes which tensors a call has, which it writes, and how they lie.
CHOSEN = {
    **{name: FACTORS[name] for name in (
        "state", "activation", "snapshots", "rows", "accepted", "ragged", "tree", "update_state",
        "index_stride", "spare", "input_layout", "state_layout", "snapshot_layout",
    )},
    "bias": (None, "input"),
    "slots": (None, "permuted", "padded"),
}  # fmt: skip


def pairs_of_options() -> list[Case]:
    choices = covering_array(CHOSEN, legal)
    return [make_case(4, 3, seed=i, **chosen) for i, chosen in enumerate(choices)]


def more_of_the_others() -> list[Case]:
    chain = np.int32([3])
    rolled = single(snapshots="history", update_state=False)
    rolled.options["num_accepted_tokens"] = chain
    return [
        rolled,
        single(tree=True, activation="none", state_layout="transposed"),
        single(state="W-1", snapshots=None, input_layout="rows"),
        update(bias="input", activation="none", state_layout="pool"),
        commit(snapshots="history", state_layout="transposed"),
        commit(state="W-1", snapshot_layout="rows"),
    ]


ALL = [*pairs_of_options(), *more_of_the_others()]
each_case = pytest.mark.parametrize("index", range(len(ALL)))


@each_case
def test_opcheck(index: int, device: str) -> None:
    case = ALL[index].copy()
    given = Mirror(case, device).given
    options = {"config": 0, "pdl": True} if case.op.startswith("verify") and index % 2 else {}
    if device == "cpu":
        options.pop("config", None)
    torch.library.opcheck(operator(case.op).default, (), {**given, **options})


# ---- torch.compile -----------------------------------------------------------------------------


def check_compiled(cases: list[Case], device: str, **how: Any) -> None:
    """All in one graph: each call writes what the core writes, in views too, and nothing else."""
    cases = [case.copy() for case in cases]
    mirrors = [Mirror(case, device) for case in cases]

    def call_all(given: list[dict[str, Any]]) -> None:
        for case, arguments in zip(cases, given, strict=True):
            operator(case.op)(**arguments)

    torch.compile(call_all, fullgraph=True, **how)([mirror.given for mirror in mirrors])
    for case, mirror in zip(cases, mirrors, strict=True):
        case.call("core")
        mirror.assert_same(f"compiled {case!r}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_every_call_compiles(name: str, backend: str, device: str) -> None:
    check_compiled([CALLS[name]()], device, backend=backend)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.usefixtures("fresh_dynamo")
def test_many_calls_with_options_in_one_graph(part: int, device: str) -> None:
    check_compiled(ALL[part::4], device, backend="aot_eager")


@pytest.mark.parametrize("op", ["verify_fused_conv_kn", "conv1d_update_l2norm"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_smaller_operators_compile_nothing_again(op: str, device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def call(*args: Any) -> None:
        operator(op)(*args)

    compiled_before = 0
    for size in (7, 5, 11):
        if op == "verify_fused_conv_kn":
            case = single(num_tokens=size, spare=2)
        else:
            case = update(n_seq=size, spare=2)
        mirror = Mirror(case, device)
        call(*mirror.given.values())
        case.call("core")
        mirror.assert_same(f"size {size}")
        compiled_before = compiled_before or counter.frame_count
        assert counter.frame_count == compiled_before


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_of_torch_compile() -> None:
    """mode="reduce-overhead" captures CUDA graphs by itself: again and again the same bytes."""
    state, x, weight = list(Mirror(batched(), "cuda").given.values())[:3]

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, windows = verify_conv(state, x * 2, weight, **HEADS)
        assert windows is not None
        return output + 1, windows[:, -1] + 1

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    expected_state = state.clone()
    for i in range(6):
        given = x + i
        expected = step(expected_state, given)
        torch.compiler.cudagraph_mark_step_begin()
        actual = [result.clone() for result in compiled(state, given)]
        for a, e in zip((*actual, state), (*expected, expected_state), strict=True):
            assert torch.equal(a.view(torch.uint8), e.view(torch.uint8)), i


# ---- no backward -------------------------------------------------------------------------------

FLOATS = ("conv_state", "new_input", "weight", "output", "conv_state_inter", "bias")


@pytest.mark.parametrize("name", FLOATS)
def test_an_argument_that_requires_grad_is_refused(name: str) -> None:
    given = Mirror(batched(bias="float32"), "cpu").given
    given[name] = given[name].clone().requires_grad_()
    sentence = (
        f"{name} requires grad, but verify_conv has no backward:"
        " call it under torch.no_grad() or torch.inference_mode()"
    )
    calls: list[Callable[..., Any]] = [verify_conv]
    calls.append(torch.compile(verify_conv, backend="aot_eager"))
    for call in calls:
        with pytest.raises(GdnVerifyError) as caught:
            call(**given)
        assert str(caught.value) == sentence
    assert supported(**given).reason == sentence
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert supported(**given)
            output, inter = verify_conv(**given)
            assert inter is not None
            assert output.requires_grad == (name == "output")
            assert inter.requires_grad == (name == "conv_state_inter")


def test_raw_operators_write_what_requires_no_grad(device: str) -> None:
    """No graph is recorded, whatever the inputs ask for."""
    for name in ("batched", "single", "update"):
        case = CALLS[name]()
        mirror = Mirror(case, device)
        for argument in ("new_input", "weight"):
            mirror.given[argument] = mirror.given[argument].clone().requires_grad_()
        mirror.run()
        case.call("core")
        mirror.assert_same(name)
        for argument in ("conv_state", "output", "conv_state_inter"):
            if argument in mirror.given:
                assert mirror.given[argument].grad_fn is None
                assert not mirror.given[argument].requires_grad
