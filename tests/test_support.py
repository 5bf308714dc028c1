"""`supported` says what `verify_conv` would, and the exception of a refused call."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import Mirror
from cases import Case
from small_calls import batched
from test_validation import LEGAL
from wrong_arguments import ARGUMENTS

from gdn_verify import GdnVerifyError, Supported, support, supported, verify_conv
from gdn_verify.support import runs_on

TABLE = [(build, text) for rule in ARGUMENTS for build, text in rule.rows
         if build().op == "verify_fused_conv_kn_batched"]  # fmt: skip
ALL = [*TABLE, *((build, "") for build in LEGAL.values()
                 if build().op == "verify_fused_conv_kn_batched")]  # fmt: skip


def keywords(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The case's arguments for verify_conv; views of one buffer stay views of one storage."""
    return Mirror(case, device).given


@pytest.mark.parametrize("number", range(len(ALL)))
def test_says_what_the_call_would(number: int) -> None:
    build, text = ALL[number]
    given = keywords(build())
    if given["conv_state_inter"] is None:
        given["snapshots"] = "none"
    answer = supported(**given)
    assert answer == supported(**{**given, **keywords(build(), "meta")})
    assert bool(answer) == (not text)
    if answer:
        verify_conv(**given)
    else:
        with pytest.raises(GdnVerifyError) as caught:
            verify_conv(**given)
        assert answer.reason == str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, ""),
        ({"activation": "relu"}, 'activation is "relu"'),
        ({"snapshots": "some"}, "snapshots is 'some'"),
        ({"snapshots": "history"}, ""),
        ({"num_accepted_tokens": torch.zeros(3, dtype=torch.int32)}, "conv_state_inter must be"),
        ({"weight": torch.nn.Parameter(torch.empty(64, 4))}, "weight requires grad"),
        ({"weight": torch.empty(64, 4, device="meta")}, "weight is on meta, but new_input is on"),
    ],
)  # fmt: skip
def test_of_the_wrapper_too(change: dict[str, Any], sentence: str) -> None:
    given = keywords(batched())
    given = {**given, "output": None, "conv_state_inter": None, **change}
    answer = supported(**given)
    assert answer.reason.startswith(sentence)
    assert bool(answer) == (not sentence)
    if sentence:
        with pytest.raises(GdnVerifyError) as caught:
            verify_conv(**given)
        assert str(caught.value).startswith(sentence)


def test_nothing_runs_or_is_allocated() -> None:
    given = keywords(batched())
    given["conv_state"] = given["conv_state"].clone()  # memory that torch owns
    before = given["conv_state"].clone()
    lazy = torch._lazy_clone(given["conv_state"])
    assert supported(**{**given, "conv_state": lazy})
    assert torch._C._is_cow_tensor(lazy)  # not even copied
    assert torch.equal(given["conv_state"], before)


@pytest.mark.gpu
def test_while_a_graph_is_captured() -> None:
    given = keywords(batched(), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_allocated()
        answer = supported(**{**given, "output": None, "conv_state_inter": None})
        assert torch.cuda.memory_allocated() == allocated
        verify_conv(**given)
    assert answer
    assert not supported(**{**given, "weight": given["weight"].cpu()})


@pytest.mark.parametrize(
    ("archs", "major", "minor", "runs"),
    [
        ("8.0 9.0 10.0 12.0+PTX", 9, 0, True),
        ("8.0 9.0 10.0 12.0+PTX", 8, 6, True),
        ("8.0 9.0 10.0 12.0+PTX", 7, 5, False),
        ("8.0 9.0 10.0 12.0+PTX", 13, 0, True),
        ("8.6", 8, 0, False),
        ("9.0a", 9, 0, True),
        ("10.0a+PTX", 10, 3, False),
        ("10.0f", 10, 3, True),
        ("8.0+PTX", 9, 0, True),
        ("", 9, 0, False),
    ],
)
def test_architectures(archs: str, major: int, minor: int, runs: bool) -> None:
    assert runs_on(archs, major, minor) == runs


def test_other_architectures_are_named(monkeypatch) -> None:
    build = {**support._core.build_info(), "has_cuda": True, "cuda_archs": "8.0 9.0+PTX"}
    monkeypatch.setattr(support, "_core", SimpleNamespace(build_info=lambda: build))
    reason = support._why_not_on_cuda.__wrapped__
    for capability, sentence in (((9, 0), ""), ((10, 0), ""), ((7, 5), (
        "gdn_verify was built for the architectures 8.0 9.0+PTX, but device 1 is 7.5:"
        " rebuild with TORCH_CUDA_ARCH_LIST=7.5"
    ))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert reason(1) == sentence


def test_the_exception() -> None:
    assert issubclass(GdnVerifyError, ValueError)
    assert issubclass(GdnVerifyError, RuntimeError)
    error = pickle.loads(pickle.dumps(GdnVerifyError("one sentence")))
    assert isinstance(error, GdnVerifyError)
    assert str(error) == "one sentence"
    answer = pickle.loads(pickle.dumps(Supported("no")))
    assert answer == Supported("no")
    assert not answer


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"),
                                   RuntimeError("CUDA error: launch failed")])  # fmt: skip
def test_errors_of_the_machine_stay_what_they_are(monkeypatch, error: Exception) -> None:
    class Operator:
        @staticmethod
        def default(*args: Any, **options: Any) -> None:
            raise error

    monkeypatch.setattr(torch.ops.gdn, "verify_fused_conv_kn_batched", Operator)
    with pytest.raises(RuntimeError) as caught:
        verify_conv(**keywords(batched()))
    assert caught.value is error
