"""Streams, threads and devices: whose stream a call runs on, eight threads at once, other devices.

What needs that nothing was called before runs in a process of its own, by `main`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from calls import BASE, CALLS, Mirror, batched, change, commit, equal, update
from cases import Case, make_case
from processes import python

import gdn_verify
from gdn_verify import tuned, verify_conv

MILLISECOND = 2_000_000  # cycles, more or less

MAIN = "import sys, test_streams; test_streams.main(*sys.argv[1:])"


def main(part: str, device: str = "cuda") -> None:
    assert not torch.cuda.is_initialized()
    if part == "threads":
        eight_threads(device, load=True)
    else:
        every_device()


def in_threads(work: Callable[[int], None], n: int) -> None:
    """work(0), .. work(n - 1), each in its own thread; raises what one of them raised."""
    with ThreadPoolExecutor(n) as pool:
        list(pool.map(work, range(n)))


# ---- streams -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_runs_on_the_current_stream(name: str, pdl: bool) -> None:
    """Inputs that the side stream writes late, and a copy that it makes at once, are all ordered by
    that stream alone."""
    case = CALLS[name]()
    options = {"pdl": True} if pdl and case.op.startswith("verify") else {}
    mirror = Mirror(case, "cuda")
    rng = np.random.default_rng(0)
    change(case, rng)
    late = Mirror(case, "cuda")  # on the device already: an upload would wait for the host
    case.call("core")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20 * MILLISECOND)
        for (_, flat), (_, source) in zip(
            mirror.buffers.values(), late.buffers.values(), strict=True
        ):
            flat.copy_(source)
        mirror.run(**options)
        results = [flat.clone() for _, flat in mirror.buffers.values()]
    side.synchronize()
    for (owner, _), result in zip(mirror.buffers.values(), results, strict=True):
        equal(result.reshape(owner.shape), owner, f"{name} on a side stream")


@pytest.mark.gpu
def test_waits_for_no_other_stream() -> None:
    """Neither the host nor the default stream notices a side stream that is busy for long."""
    case = batched()
    here, there = Mirror(case, "cuda"), Mirror(case, "cuda")
    for mirror in (here, there):  # loaded, and back to what it was
        mirror.run()
        mirror.upload()
    case.call("core")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000 * MILLISECOND)
        there.run()
        commit_here = Mirror(commit(), "cpu")  # the CPU's operators wait for nothing either
        commit_here.run()
    here.run()
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the call waited for a stream that is not its own"
    here.assert_same("default stream")
    side.synchronize()
    there.assert_same("side stream")


# ---- threads -----------------------------------------------------------------------------------

SHAPES: list[Callable[[], Case]] = [
    *CALLS.values(),
    lambda: batched(n_seq=7, num_tokens=17, snapshots="history", state="W-1"),
    lambda: batched(n_seq=1, num_tokens=2, snapshots=None),
    lambda: make_case(5, 3, head_dim=33, d_conv=7, input_dtype="float32"),
    lambda: make_case(6, 9, head_dim=128, slots="padded", spare=1, input_dtype="float16"),
    lambda: update(n_seq=33),
]
THREADS = 8


def eight_threads(device: str, load: bool) -> None:
    """Each on a stream of its own and in its own order, with wrong calls between; all make their
    first calls at the same time. `load`: while the tuned table is loaded again and again."""
    cases = [make() for make in SHAPES]
    expected = [case.copy() for case in cases]
    for case in expected:
        case.call("core")
    barrier = threading.Barrier(THREADS)

    def operate(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(cases))
        mirrors = [Mirror(cases[i], device) for i in order]
        stream = torch.cuda.Stream() if device == "cuda" else None
        barrier.wait(60)
        with torch.cuda.stream(stream):
            for i, mirror in zip(order, mirrors, strict=True):
                mirror.run()
                if mirror.case.op == "verify_fused_conv_kn_batched":
                    check_wrapper_and_errors(mirror, expected[i])
                if load and i % THREADS == number:
                    gdn_verify.load_tuned()
            for i, mirror in zip(order, mirrors, strict=True):
                mirror.assert_same(f"thread {number} {expected[i]!r}", expected[i])

    in_threads(operate, THREADS)


def check_wrapper_and_errors(mirror: Mirror, expected: Case) -> None:
    """The wrapper on fresh state, and a wrong call whose sentence is that of this thread."""
    given = dict(mirror.given)
    if given["conv_state"] is not None and "num_accepted_tokens" not in given:
        fresh = Mirror(mirror.case, mirror.device).given
        del fresh["output"]
        output, _ = verify_conv(**fresh)
        equal(output, np.ascontiguousarray(expected.args["output"]), f"wrapper {expected!r}")
    wrong = given["new_input"].shape[-1] + 1
    with pytest.raises(RuntimeError, match=f"qk_channels .*{wrong}"):
        torch.ops.gdn.verify_fused_conv_kn_batched(**{**given, "qk_channels": wrong})


def test_eight_threads(device: str) -> None:
    eight_threads(device, load=False)


def test_eight_threads_make_the_first_calls_on_the_cpu(tmp_path: Any) -> None:
    python(MAIN, "threads", "cpu", GDN_VERIFY_CACHE=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["0", "1"])
def test_eight_threads_make_the_first_calls(check: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path))
    shapes = [tuned.CallShape(BASE.d_inner, BASE.qk_channels, n, 4) for n in range(1, 200)]
    assert tuned.save({(tuned.device_name(0), each): tuned.Tuned(0, 1.0, 2.0) for each in shapes})
    python(MAIN, "threads", "cuda", GDN_VERIFY_CHECK=check)


@pytest.mark.gpu
@pytest.mark.parametrize("error_mode", ["thread_local", "global"])
def test_a_thread_captures_while_others_call(error_mode: str) -> None:
    cases = [batched(n_seq=n) for n in (2, 3, 4)]
    mirrors = [Mirror(case, "cuda") for case in cases]
    for mirror in mirrors:
        mirror.run(pdl=True)
        mirror.upload()
    graph = torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream() for _ in mirrors]
    torch.cuda.synchronize()
    barrier = threading.Barrier(3)

    def work(number: int) -> None:
        with torch.cuda.stream(streams[number]):
            if number == 0:
                graph.capture_begin(capture_error_mode=error_mode)
            barrier.wait(60)
            for _ in range(5):
                mirrors[number].run(pdl=True)
            barrier.wait(60)
            if number == 0:
                graph.capture_end()

    in_threads(work, 3)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    for case, mirror in zip(cases, mirrors, strict=True):
        for _ in range(5):
            case.call("core")
        mirror.assert_same(repr(case))


# ---- devices -----------------------------------------------------------------------------------


def every_call_on(device: str, current: int) -> None:
    """Each operator on `device` while `current` is the current device, which it stays."""
    with torch.cuda.device(current):
        for name, make in CALLS.items():
            case = make()
            mirror = Mirror(case, device)
            mirror.run()
            assert torch.cuda.current_device() == current
            case.call("core")
            mirror.assert_same(f"{name} on {device}")
        mirror = Mirror(batched(), device)
        with pytest.raises(RuntimeError, match="head_dim"):
            mirror.run(head_dim=100)
        assert torch.cuda.current_device() == current
        given = {n: x for n, x in mirror.given.items() if n != "output"}
        output, _ = verify_conv(**given)
        assert str(output.device) == device
        assert torch.cuda.current_device() == current


def graph_on(device: str) -> None:
    for pdl in (False, True):
        case = batched()
        mirror = Mirror(case, device)
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                mirror.run(pdl=pdl)
            graph.replay()
            torch.cuda.synchronize()
        case.call("core")
        mirror.assert_same(f"graph on {device}")


def every_device() -> None:
    """The last one first; with one device, what it allows of this."""
    count = torch.cuda.device_count()
    for index in reversed(range(count)):
        device = f"cuda:{index}"
        for current in {0, index, count - 1}:
            every_call_on(device, current)
        in_threads(lambda _, device=device: every_call_on(device, 0), 2)
        in_threads(lambda _, device=device: graph_on(device), 1)
        graph_on(device)
    if count > 1:
        given = Mirror(batched(), "cuda:0").given
        given["weight"] = given["weight"].to("cuda:1")
        with pytest.raises(RuntimeError, match=r"^weight is on cuda:1, but new_input is on cuda:0"):
            torch.ops.gdn.verify_fused_conv_kn_batched(**given)


@pytest.mark.gpu
def test_every_device() -> None:
    every_device()


@pytest.mark.gpu
def test_the_last_device_is_the_first_to_be_used() -> None:
    python(MAIN, "devices")
