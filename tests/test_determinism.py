"""The same call gives the same bytes: repeated, permuted, beside other work, compiled at run time.

On a GPU everything is compared there, so that hundreds of repeats cost little. Nothing here knows
what is right, which other tests do, only whether it stays the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from calls import Mirror
from processes import finish, python, start

import gdn_verify.ops  # noqa: F401
from gdn_verify import _core

TESTS = Path(__file__).parent
CONFIGS = range(-1, _core.build_info()["num_configs"])
REPEATS = {"cpu": 20, "cuda": 200}

CASES: dict[str, dict[str, Any]] = {
    "windows": {},
    "windows, bfloat16, token-major": {
        "state_dtype": "bfloat16", "state_layout": "transposed", "snapshot_layout": "transposed",
    },
    "history, rollback": {"snapshots": "history", "accepted": "mixed", "slots": "permuted"},
    "none, ragged": {"snapshots": None, "ragged": True, "state": "W-1"},
    "tree": {"tree": True, "slots": "padded"},
    "other heads": {"head_dim": 96, "d_conv": 3},
}  # fmt: skip


def make(name: str, n_seq: int = 6, num_tokens: int = 9) -> cases.Case:
    return cases.make_case(
        n_seq, num_tokens, 384 if "heads" not in name else None, **{"head_dim": 128, **CASES[name]}
    )


class Call(Mirror):
    """A case on a device, that starts from the same bytes as often as one likes."""

    def __init__(self, case: cases.Case, device: str):
        super().__init__(case, device)
        names = ("conv_state", "output", "conv_state_inter")
        owners = {id(cases.buffer_of(case.args[n])) for n in names if n in case.arrays()}
        buffers = [flat for owner, (_, flat) in self.buffers.items() if owner in owners]
        self.written = [(flat, flat.clone()) for flat in buffers]

    def run(self, **options: Any) -> None:
        for now, first in self.written:
            now.copy_(first)
        super().run(**options)

    def bits(self) -> list[torch.Tensor]:
        return [now.view(torch.uint8) for now, _ in self.written]


def differing(call: Call, expected: list[torch.Tensor], total: torch.Tensor) -> None:
    """Adds the bytes that differ now; waits for nothing."""
    for mine, theirs in zip(call.bits(), expected, strict=True):
        total += (mine != theirs).sum()


def repeat(name: str, device: str, repeats: int, between: Callable[[], None] = lambda: None) -> int:
    """Every launch configuration so many times; returns how many bytes changed."""
    call = Call(make(name), device)
    call.run()
    expected = [x.clone() for x in call.bits()]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for config in CONFIGS:
        for _ in range(repeats):
            between()
            call.run(config=config)
            differing(call, expected, total)
    return int(total)


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_repeated(name: str, device: str) -> None:
    assert repeat(name, device, REPEATS[device]) == 0


@pytest.mark.parametrize("name", ["windows", "history, rollback"])
def test_permuted_batches(name: str, device: str) -> None:
    """The sequences in any order have the same rows, in the order of the batch."""
    chosen = {**CASES[name], "rows": "permuted", "slots": "permuted", "head_dim": 128}
    case = cases.make_case(6, 9, 384, **chosen)
    call = Call(case, device)
    call.run()
    expected = [x.clone() for x in call.bits()]
    names = ("new_input", "conv_state_indices", "inter_indices", "num_accepted_tokens")
    of_sequence = [n for n in names if n in case.arrays()]
    before = {n: call.given[n].clone() for n in of_sequence}
    first_output = call.given["output"].clone()
    total = torch.zeros((), dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(REPEATS[device]):
        order = torch.randperm(6, generator=generator).to(device)
        for n in of_sequence:
            call.given[n].copy_(before[n][order])
        call.run()
        call.given["output"].copy_(call.given["output"].clone()[order.argsort()])
        differing(call, expected, total)
    assert torch.equal(call.given["output"].float(), first_output.float())
    assert int(total) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_beside_other_work_on_the_device(name: str) -> None:
    """Another stream is kept busy with products that fill every SM, and with copies."""
    other = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    memory = torch.empty(1 << 26, device="cuda")
    turn = iter(range(10**9))

    def keep_busy() -> None:
        if next(turn) % 4 == 0:  # a product takes as long as some calls
            with torch.cuda.stream(other):
                torch.mm(a, a)
                memory.normal_()

    assert repeat(name, "cuda", 50, keep_busy) == 0
    torch.cuda.synchronize()


def test_from_several_threads(device: str) -> None:
    """Each thread its own call, on CUDA its own stream."""

    def work(_: int) -> int:
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            return repeat("windows", device, 20)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_on_the_cpu(threads: int) -> None:
    before = torch.get_num_threads()
    expected = digest("torch")
    try:
        torch.set_num_threads(threads)
        assert digest("torch") == expected == digest("core")
    finally:
        torch.set_num_threads(before)


# ---- other processes -----------------------------------------------------------------------------


def digest(implementation: str, repeats: int = 1) -> str:
    """Of all bytes of all cases, which must be the same in each repeat."""
    digests = set()
    for _ in range(repeats):
        found = hashlib.sha256()
        for name in CASES:
            for num_tokens in (1, 4, 17):
                done = cases.run(implementation, make(name, 3, num_tokens))
                for x in done.arrays().values():
                    found.update(np.ascontiguousarray(x).tobytes())
        digests.add(found.hexdigest())
    assert len(digests) == 1, digests
    return digests.pop()


DIGEST = "import test_determinism as t; print(t.digest({!r}, {}))"


def test_two_processes_at_once(device: str) -> None:
    implementation, repeats = ("cuda", 30) if device == "cuda" else ("torch", 2)
    processes = [start(DIGEST.format(implementation, repeats)) for _ in range(2)]
    assert {finish(each)[0] for each in processes} == {f"{digest(implementation)}\n"}


@pytest.mark.gpu
def test_beside_a_process_that_keeps_the_device_busy() -> None:
    busy = start("""
        import torch
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        torch.mm(a, a)
        torch.cuda.synchronize()
        print("busy", flush=True)
        while True:
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.synchronize()
    """)
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "busy\n"
        assert repeat("windows", "cuda", 50) == 0
        assert repeat("history, rollback", "cuda", 50) == 0
        assert busy.poll() is None
    finally:
        busy.kill()
        busy.wait()


def ptx_runs_here() -> bool:
    """Whether the build embeds PTX that is not newer than this device."""
    if not torch.cuda.is_available():
        return False
    archs = _core.build_info()["cuda_archs"].split()
    numbers = [a.removesuffix("+PTX") for a in archs if a.endswith("+PTX")]
    mine = torch.cuda.get_device_capability()
    return any(tuple(map(int, n.split("."))) <= mine for n in numbers if n[-1].isdigit())


@pytest.mark.gpu
def test_ptx_that_is_compiled_at_run_time(tmp_path: Path) -> None:
    """The driver's compiler gives the bits that nvcc's gives. The cases run without a kernel of
    torch, which need not have PTX for this device."""
    if not ptx_runs_here():
        pytest.skip("no PTX for this device in the build: TORCH_CUDA_ARCH_LIST=9.0+PTX has some")
    said = python(
        DIGEST.format("cuda", 1), CUDA_FORCE_PTX_JIT="1", CUDA_CACHE_PATH=str(tmp_path / "cache")
    )
    assert said == f"{digest('core')}\n"
    assert any((tmp_path / "cache").rglob("*")), "nothing was compiled"


# ---- that all this can fail (of the check command: test_check.py) --------------------------------

PLANTED = """
import pytest
import cases
import compare
import test_determinism as determinism
from test_determinism import Call

@pytest.mark.parametrize("bit", [0, 1])
def test_one_wrong_bit_in_a_result(bit):
    case = cases.make_case(3, 4)
    done = cases.run("core", case)
    done.args["output"].flat[7] ^= bit
    compare.assert_same_case(done, cases.run("reference", case))

@pytest.mark.parametrize("bit", [0, 1])
def test_one_run_of_many_is_another(monkeypatch, bit):
    right, runs = Call.run, iter(range(10**6))
    def run(self, **options):
        right(self, **options)
        if next(runs) == 13:
            self.bits()[0][5] ^= bit
    monkeypatch.setattr(Call, "run", run)
    assert determinism.repeat("windows", "cpu", 20) == 0
"""


def test_a_planted_wrong_bit_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 2 passed" in done.stdout
