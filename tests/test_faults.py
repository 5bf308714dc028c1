"""What goes wrong around the operator: memory, other threads, the tuning cache, the environment,
signals. More of the cache is in test_autotune.py."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import compare
import pytest
import torch
from calls import Mirror
from small_calls import batched, int32

import gdn_verify
from gdn_verify import tuned
from gdn_verify.tuned import CallShape, Tuned

# ---- memory --------------------------------------------------------------------------------------


def tensors(device: str) -> dict[str, Any]:
    names = ("conv_state", "new_input", "weight", "qk_channels", "head_dim")
    given = Mirror(batched(), device).given
    return {name: given[name] for name in names}


def bits(x: torch.Tensor) -> bytes:
    return x.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("snapshots", ["windows", "history"])
def test_no_memory_for_the_snapshots(device: str, snapshots: Any) -> None:
    """More than any machine has; nothing was written, and the next call is right."""
    given = tensors(device)
    expected = gdn_verify.verify_conv(**{**given, "conv_state": given["conv_state"].clone()})
    before = bits(given["conv_state"])
    packed = {**given, "new_input": given["new_input"].flatten(0, 1)}
    lengths = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"memory|[Aa]lloc"):
        gdn_verify.verify_conv(
            **packed, cu_seqlens=lengths, max_num_tokens=2**40, snapshots=snapshots
        )
    assert bits(given["conv_state"]) == before
    for mine, theirs in zip(gdn_verify.verify_conv(**given), expected, strict=True):
        assert bits(mine) == bits(theirs)


@pytest.mark.parametrize("name", ["output", "conv_state_inter"])
def test_no_memory_for_what_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    given = tensors("cpu")
    before = bits(given["conv_state"])
    if name == "output":
        monkeypatch.setattr(torch, "empty_like", fail)
    else:
        monkeypatch.setattr(torch.Tensor, "new_empty", fail)
    with pytest.raises(torch.OutOfMemoryError):
        gdn_verify.verify_conv(**given)
    assert bits(given["conv_state"]) == before


# ---- threads -------------------------------------------------------------------------------------


def test_exceptions_in_some_threads_leave_the_others_right(built: str) -> None:
    """Half of the calls are wrong: each raises its own sentence, and the rest is right."""
    sound = cases.make_case(5, 4, head_dim=128, slots="permuted")
    expected = cases.run("reference", sound)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(25):
            if number % 2 == 0:
                compare.assert_same_case(cases.run(built, sound), expected, f"thread {number}")
                continue
            wrong = batched(head_dim=-number - turn)
            text = f"^head_dim must be 1 or more, but is -{number + turn}$"
            with pytest.raises((ValueError, RuntimeError), match=text):
                cases.run(built, wrong)
            if built != "cuda":
                wrong = batched(conv_state_indices=int32(0, 9, 1))
                with pytest.raises((IndexError, RuntimeError), match=r"^conv_state_indices must"):
                    cases.run(built, wrong)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


# ---- the tuning cache ----------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_warned", set())
    return tmp_path / "cache" / "tuned.json"


def entry(config: int = 1, n_seq: int = 2) -> tuned.Entries:
    return {("GPU", CallShape(512, 256, n_seq, 3)): Tuned(config, 1.0, 2.0)}


@pytest.mark.parametrize("place", ["mkstemp", "fsync", "replace", "flock"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str,
    code: int,
) -> None:  # fmt: skip
    """One warning; the old file stays, and nothing beside it."""
    assert tuned.save(entry(1)) == entry(1)
    before = cache.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    module = {"mkstemp": tuned.tempfile, "flock": tuned.fcntl}.get(place, os)
    with monkeypatch.context() as patch:
        patch.setattr(module, place, fail)
        assert tuned.save(entry(2)) is None
        assert tuned.save(entry(2)) is None
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"{cache} cannot be written: {os.strerror(code)}; what was tuned is not saved"]
    assert cache.read_bytes() == before
    assert {path.name for path in cache.parent.iterdir()} == {"tuned.json", "tuned.json.lock"}
    assert tuned.save(entry(3)) == entry(3)


def test_a_file_that_may_not_be_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuned.save(entry())

    def fail(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert tuned.read_file(cache) == {}
        assert tuned.read_file(cache) == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"{cache} cannot be read: Permission denied; going on without what was tuned"
    ]


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_file_that_never_ends(cache: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    cache.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(cache)
    else:
        cache.symlink_to("/dev/zero")
    assert tuned.read_file(cache) == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"{cache} cannot be read: it is no regular file; going on without what was tuned"
    ]


WRITER = """
import itertools
from gdn_verify import tuned
from gdn_verify.tuned import CallShape, Tuned
for n in itertools.count(1):
    entries = {("GPU", CallShape(512, 256, n + i, 3)): Tuned(1, 1.0, 2.0) for i in range(200)}
    tuned.save(entries)
    if n == 1:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_is_killed(cache: Path, number: signal.Signals) -> None:
    """At any moment: the file is whole, and its lock is given up."""
    chance = random.Random(number)
    for _ in range(2 if number == signal.SIGKILL else 1):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            time.sleep(chance.random() * 0.2)
            process.send_signal(number)
        json.loads(cache.read_text())
        assert len(tuned.read_file(cache)) >= 200
        merged = tuned.save(entry(7, n_seq=10**6))
        assert merged is not None
        assert merged.items() >= entry(7, n_seq=10**6).items()


def test_a_folder_that_vanishes(cache: Path) -> None:
    """Somebody clears the cache while it is written: at worst nothing is saved."""
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            shutil.rmtree(cache.parent, ignore_errors=True)

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for n_seq in range(100):
            merged = tuned.save(entry(n_seq=n_seq))
            assert merged is None or merged.items() >= entry(n_seq=n_seq).items()
    finally:
        stop.set()
        thread.join()
    merged = tuned.save(entry())
    assert merged is not None
    assert merged.items() >= entry().items()


# ---- the environment -----------------------------------------------------------------------------

CALL = """
import torch
import gdn_verify
from gdn_verify import tuned
cuda = torch.cuda.is_available() and gdn_verify._core.build_info()["has_cuda"]
device = "cuda" if cuda else "cpu"
state, x, weight = torch.zeros(1, 8, 4), torch.randn(1, 2, 8), torch.randn(8, 4)
moved = [each.to(device) for each in (state, x, weight)]
gdn_verify.verify_conv(*moved, qk_channels=4, head_dim=4)
tuned.save({("GPU", tuned.CallShape(512, 256, 2, 3)): tuned.Tuned(1, 1.0, 2.0)})
print("done")
"""


@pytest.mark.parametrize("home", [None, "", "/dev/null"])
def test_homes_that_are_none(home: str | None, tmp_path: Path) -> None:
    """A call and a save end without an exception, and with a file in no other place."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "GDN_VERIFY_"))}
    environment.pop("HOME", None)
    if home is None:  # then the home is the user's
        environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    else:
        environment["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", CALL], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert [path.name for path in tmp_path.iterdir()] == ([] if home is not None else ["cache"])
    assert ("saved" in done.stderr) == (home is not None)


# ---- signals -------------------------------------------------------------------------------------

TUNE = """
import sys, threading, time
from types import SimpleNamespace
import torch
import gdn_verify
from gdn_verify import _core, tuned
from gdn_verify.__main__ import main
autotune = sys.modules["gdn_verify.autotune"]
properties = SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132,
                             total_memory=2**30, L2_cache_size=2**20)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda index: threading.Lock()
torch.cuda._utils._get_device_index = lambda *_, **__: 0
torch.cuda.get_device_name = lambda *_: "GPU"
torch.cuda.get_device_properties = lambda *_: properties
info = {**_core.build_info(), "has_cuda": True, "num_configs": 3, "configs": "1x1 1x2 2x4"}
_core.build_info = lambda: info
def measure(shape):
    print("measured", shape.num_tokens, flush=True)
    time.sleep(0.02)
    return tuned.Tuned(1, 2.0, 3.0)
autotune.measure = measure
sys.exit(main(["tune", "--sequences", "1..8", "--tokens", "2..60"]))
"""


def heed_interrupts() -> None:
    """What runs in the background of a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_signals_during_tuning(cache: Path, number: signal.Signals, status: int, word: str) -> None:
    """What was measured is saved, the table is printed, and the status says what happened."""
    with subprocess.Popen(
        [sys.executable, "-c", TUNE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for _ in range(10):
            assert process.stdout.readline().startswith("measured")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{word}: what was measured until now is kept" in err
    assert "Traceback" not in err
    assert "of 472 shapes measured" in out
    document = json.loads(cache.read_text())
    assert 9 <= len(document["entries"]) < 472


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_to_the_command_on_a_device(
    cache: Path, number: signal.Signals, status: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gdn_verify", "tune", "--tokens", "2..17"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        process.stderr.readline()  # a quarter is done
        process.send_signal(number)
        assert process.wait(60) == status
    assert len(tuned.read_file(cache)) >= 32
