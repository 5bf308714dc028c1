"""Tuning: the table of the core, the file, the recording of calls, the command; on CUDA the whole.

Without a GPU the devices and the timer are stand-ins; everything else is what runs on one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import python
from test_c_abi import LIBRARY, Params, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn_verify
from gdn_verify import _core, ops, tuned
from gdn_verify.__main__ import main
from gdn_verify.autotune import bytes_touched, call_shapes, choose
from gdn_verify.tuned import CallShape, Tuned

autotune = sys.modules[
    "gdn_verify.autotune"
]  # the package's attribute of that name is the function
DEVICE = "NVIDIA H200, 9.0, 132 SMs"
SHAPE = CallShape(512, 256, 2, 3)
HEADS = {"qk_channels": 256, "head_dim": 128}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, and afterwards the process as it was."""
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_warned", set())
    before = (tuned._loaded, tuned._entries, tuned.on_call)
    yield tmp_path / "cache" / "tuned.json"
    monkeypatch.undo()
    assert not tuned._recorders
    tuned.use(before[1])
    tuned._loaded, tuned._entries, tuned.on_call = before


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees one GPU, and a timer that finds configuration 1 the fastest of 3."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda *_, **__: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    info = {**_core.build_info(), "has_cuda": True, "num_configs": 3, "configs": "1x1 1x2 2x4"}
    monkeypatch.setattr(_core, "build_info", lambda: info)
    monkeypatch.setattr(autotune, "measure", lambda shape: Tuned(1, 2.0, 3.0))


# ---- the table of the core -----------------------------------------------------------------------


def params_of(call: dict[str, Any]) -> Params:
    """The C struct of a call of `verify_conv`, whose tensors it points into."""
    p = Params(op=0, l2_eps=1e-6, pad_slot_id=-1, update_state=1, max_num_tokens=-1, config=-1)
    dtypes = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3}
    for name, value in call.items():
        if not isinstance(value, torch.Tensor):
            setattr(p, name, value)
            continue
        shape, stride = tuple(value.shape), value.stride()
        sizes = ((ctypes.c_int64 * 4)(*each) for each in (shape, stride))
        setattr(p, name, Tensor(value.data_ptr(), *sizes, len(shape), dtypes[value.dtype]))
    return p


def shape_of(call: dict[str, Any]) -> CallShape | None:
    options = {**ops._DEFAULTS, **call}
    names = ("conv_state", "new_input", "weight", "output", "conv_state_inter")
    tensors = (call.get(name) for name in names)
    return tuned.shape_of_call(*tensors, call["qk_channels"], call["head_dim"], options)


def make_call(shape: CallShape, device: str = "cpu") -> dict[str, Any]:
    """A call that has this shape: what tuning measures."""
    buffers = autotune._Buffers(shape, torch.Generator(device).manual_seed(0))
    call = {name: value for name, value in vars(buffers).items() if value is not None}
    return {**call, "qk_channels": shape.qk_channels, "head_dim": 128, "pdl": shape.pdl}


SHAPES = [
    SHAPE,
    CallShape(512, 256, 3, 2),
    CallShape(256, 256, 2, 3),
    CallShape(512, 128, 2, 3),
    CallShape(512, 256, 2, 3, "history"),
    CallShape(512, 256, 2, 3, "none"),
    CallShape(512, 256, 2, 3, input_dtype="float16"),
    CallShape(512, 256, 2, 3, state_dtype="bfloat16"),
    CallShape(512, 256, 2, 3, state_len=3),
    CallShape(512, 256, 2, 3, token_major=True),
    CallShape(512, 256, 2, 3, "history", "bfloat16", "bfloat16", 3, True, True, True),
    CallShape(512, 256, 2, 3, rollback=True),
    CallShape(512, 256, 2, 3, pdl=True),
]


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_lookup_by_the_shape_of_a_call(index):
    """The core and Python make the same key of a call, and every part of it counts."""
    shape = SHAPES[index]
    call = make_call(shape)
    assert shape_of(call) == shape
    table = [tuned.core_entry(0, each, i) for i, each in enumerate(SHAPES)]
    _core.load_tuned(table)
    p = params_of(call)
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == index
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 1) == -1  # another device
    _core.load_tuned(table[:index] + table[index + 1 :])
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == -1
    _core.load_tuned([*table, tuned.core_entry(0, shape, 99)])
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 99  # the later one counts
    _core.load_tuned([])
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == -1


def test_lookup_of_other_calls():
    """Ragged batches, the history as the only state, and what gets no shape."""
    call = make_call(SHAPE)
    ints = torch.tensor([0, 1, 3], dtype=torch.int32)
    rows = {name: call[name].flatten(0, 1) for name in ("new_input", "output")}
    ragged = {**call, **rows, "cu_seqlens": ints}
    assert shape_of(ragged) == SHAPE
    assert shape_of({**ragged, "max_num_tokens": 2}) == SHAPE._replace(num_tokens=2)
    _core.load_tuned([tuned.core_entry(0, SHAPE, 7)])
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(params_of(ragged)), 0) == 7

    only = SHAPE._replace(snapshots="history", state_len=3, token_major=True, rollback=True)
    alone = make_call(only)
    del alone["conv_state"]
    assert shape_of(alone) == only
    _core.load_tuned([tuned.core_entry(0, only, 8)])
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(params_of(alone)), 0) == 8

    assert shape_of({**call, "parent_index": ints}) is None
    assert shape_of({**call, "head_dim": 64}) is None
    assert shape_of({**call, "weight": torch.zeros(512, 3)}) is None
    assert shape_of({**call, "output": call["output"].float()}) is None
    assert shape_of({**call, "new_input": call["new_input"][:0]}) is None
    wrong = params_of({**call, "qk_channels": -1})
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(wrong), 0) == -1


def test_the_core_refuses_wrong_tables():
    with pytest.raises(ValueError, match=r"entries\[1\].config must be 0 or more, but is -1"):
        _core.load_tuned([tuned.core_entry(0, SHAPE, 0), tuned.core_entry(0, SHAPE, -1)])
    text = (ctypes.c_char * 512)()
    for n, sentence in ((-1, b"n must be from 0 to"), (1, b"entries must be given")):
        assert LIBRARY.gdn_verify_load_tuned(None, ctypes.c_int64(n), text) == 1
        assert text.value.startswith(sentence)


def test_a_large_table():
    shapes = [SHAPE._replace(n_seq=n, num_tokens=k) for n in range(1, 200) for k in range(1, 100)]
    _core.load_tuned([tuned.core_entry(0, each, i) for i, each in enumerate(shapes)])
    p = params_of(make_call(SHAPE))
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == shapes.index(SHAPE)


@pytest.mark.skipif(_core.build_info()["has_cuda"], reason="a build with CUDA asks the device")
def test_without_cuda_no_configuration_is_chosen():
    assert LIBRARY.gdn_verify_chosen_config(ctypes.byref(params_of(make_call(SHAPE)))) == -1


# ---- the choice ----------------------------------------------------------------------------------


def test_choice():
    assert choose({-1: 3.0, 0: 4.0, 1: 2.0, 2: 3.0}.__getitem__, 3) == (1, 2.0, 3.0)
    assert choose({-1: 3.0, 0: 4.0, 1: 2.95, 2: 3.0}.__getitem__, 3) == (-1, 3.0, 3.0)  # noise
    assert choose({-1: 3.0}.__getitem__, 0) == (-1, 3.0, 3.0)


def test_the_second_time_decides():
    """A slow first time of the heuristic's choice, say, is no reason to replace it."""
    times = {-1: iter([9.0, 2.0]), 0: iter([2.0, 2.0]), 1: iter([3.0, 3.0])}
    assert choose(lambda config: next(times[config]), 2).config == -1


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_what_is_measured_is_a_call(index):
    shape = SHAPES[index]
    buffers = autotune._Buffers(shape, torch.Generator().manual_seed(0))
    autotune._call(buffers, shape, -1)
    assert buffers.output.isfinite().all()
    assert (buffers.output != 0).float().mean() > 0.9
    assert (buffers.conv_state != 0).any()
    assert buffers.conv_state_inter is None or (buffers.conv_state_inter != 0).any()


def test_bytes_touched():
    call = make_call(SHAPE)
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    assert bytes_touched(SHAPE) == sum(x.numel() * x.itemsize for x in tensors)


def test_shapes_asked_for():
    shapes = call_shapes("qwen3.5-27b", [1, 2], [3], snapshots=["none", "history"], rollback=True)
    assert [each[:5] for each in shapes] == [
        (10240, 4096, n_seq, 3, kind) for kind in ("none", "history") for n_seq in (1, 2)
    ]
    assert [each.rollback for each in shapes] == [False, False, True, True]
    assert len(set(call_shapes("qwen3-next-80b-a3b"))) == 8 * 16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": "gpt"}, "there is no model 'gpt'"),
        ({"model": "toy-64"}, "head_dim 64 with d_conv 4 has no launch configurations"),
        ({"snapshots": ["all"]}, "snapshots is 'all'"),
        ({"state_dtype": "float16"}, "state_dtype is 'float16'"),
        ({"input_dtype": "float32"}, "input_dtype is 'float32'"),
        ({"state_len": 5}, "state_len is 5"),
    ],
)
def test_wrong_shapes_asked_for(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call_shapes(**{"model": "qwen3.5-27b", **arguments})


# ---- the file ------------------------------------------------------------------------------------


def entry(n_seq: int = 1, config: int = 1) -> tuned.Entries:
    return {(DEVICE, SHAPE._replace(n_seq=n_seq)): Tuned(config, 2.0, 3.0)}


def test_saved_and_read_again(cache):
    both = {**entry(1), **entry(2, -1), ("another GPU", SHAPES[-3]): Tuned(5, 1.5, 1.75)}
    assert tuned.save(entry(1)) == entry(1)
    assert tuned.save({k: v for k, v in both.items() if k not in entry(1)}) == both
    assert tuned.read_file(cache) == both
    assert tuned.save(entry(1, 0)) == {**both, **entry(1, 0)}  # replaced
    document = json.loads(cache.read_text())
    assert document["version"] == _core.build_info()["version"]
    assert document["entries"][-1]["device"] == "another GPU"
    assert {path.name for path in cache.parent.iterdir()} == {"tuned.json", "tuned.json.lock"}


@pytest.mark.parametrize("change", [{"format": 2}, {"version": "0.0.1"}, {"configs": "9x9"}])
def test_other_versions_are_ignored_and_replaced(cache, caplog, change):
    tuned.save(entry(1))
    cache.write_text(json.dumps({**json.loads(cache.read_text()), **change}))
    assert tuned.read_file(cache) == {}
    assert tuned.load_tuned() == 0
    assert not caplog.records
    assert tuned.save(entry(2)) == entry(2)
    assert tuned.read_file(cache) == entry(2)


def broken_files() -> dict[str, bytes]:
    whole = {**tuned._versions(), "entries": []}
    good = json.loads(tuned._text(entry()))["entries"][0]
    wrong = (
        {"config": 1.5}, {"config": -2}, {"n_seq": "1"}, {"n_seq": True}, {"n_seq": -1},
        {"d_inner": 2**40}, {"snapshots": "all"}, {"state_dtype": 3}, {"pdl": 1}, {"device": None},
        {"us": "fast"},
    )  # fmt: skip
    broken = {f"{each}": {**whole, "entries": [good, {**good, **each}]} for each in wrong}
    broken["a field is missing"] = {**whole, "entries": [{"device": DEVICE}]}
    broken["entries"] = {**whole, "entries": 3}
    broken["an entry"] = {**whole, "entries": ["x"]}
    broken["a list"] = [whole]  # type: ignore[assignment]
    broken["versions are missing"] = {"entries": []}
    files = {name: json.dumps(document).encode() for name, document in broken.items()}
    text = tuned._text(entry()).encode()
    return {**files, "empty": b"", "cut": text[: len(text) // 2], "bytes": b"\xff\x00", "deep": b"[" * 10**5}  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", broken_files())
def test_broken_files_are_reported_and_replaced(cache, caplog, name):
    cache.parent.mkdir()
    cache.write_bytes(broken_files()[name])
    assert tuned.load_tuned() == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{cache} is broken" in caplog.text
    assert tuned.save(entry(2)) == entry(2)
    caplog.clear()
    assert tuned.read_file(cache) == entry(2)
    assert not caplog.records


@pytest.mark.parametrize("obstacle", ["file", "folder"])
def test_a_cache_that_cannot_be_written(cache, caplog, one_device, obstacle):
    """Reported once; what was tuned holds for the process."""
    if obstacle == "file":
        cache.parent.write_text("no folder")
    else:
        cache.mkdir(parents=True)
    for _ in range(2):
        assert gdn_verify.tune([SHAPE], again=True) == {SHAPE: Tuned(1, 2.0, 3.0)}
    writes = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(writes) == 1
    p = params_of(make_call(SHAPE))
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 1
    assert not [
        path for path in cache.parent.parent.rglob("tuned.json.*") if path.suffix != ".lock"
    ]


def test_where_the_file_is(monkeypatch, caplog):
    home = {"HOME": "/home/u", "XDG_CACHE_HOME": "", "GDN_VERIFY_CACHE": ""}
    for change, expected in (
        ({}, "/home/u/.cache/gdn_verify/tuned.json"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/gdn_verify/tuned.json"),
        ({"XDG_CACHE_HOME": "x"}, "/home/u/.cache/gdn_verify/tuned.json"),
        ({"XDG_CACHE_HOME": "/x", "GDN_VERIFY_CACHE": "/g"}, "/g/tuned.json"),
        ({"HOME": ""}, None),
    ):
        for name, value in {**home, **change}.items():
            monkeypatch.setenv(name, value)
        assert tuned.cache_file() == (expected and Path(expected))
    assert tuned.load_tuned() == 0
    assert not caplog.records
    assert tuned.save(entry()) is None
    assert tuned.save(entry()) is None
    assert [r.getMessage() for r in caplog.records] == [
        "there is no home folder: what was tuned is not saved"
    ]


WRITER = """
import sys
from gdn_verify import tuned
from gdn_verify.tuned import CallShape, Tuned
first = int(sys.argv[1])
for n_seq in range(first, first + 25):
    merged = tuned.save({("GPU", CallShape(512, 256, n_seq, 3)): Tuned(first, 1.0, 2.0)})
    assert merged, "not written"
"""


def test_processes_and_threads_lose_nothing(cache):
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(first)]) for first in (1, 101, 201)
    ]
    counts = []

    def write(first: int) -> None:
        for n_seq in range(first, first + 25):
            tuned.save({("GPU", SHAPE._replace(n_seq=n_seq)): Tuned(first, 1.0, 2.0)})
            counts.append(len(tuned.read_file(cache)))

    threads = [threading.Thread(target=write, args=(first,)) for first in (301, 401)]
    for thread in threads:
        thread.start()
    for each in [*threads]:
        each.join()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert min(counts) > 0  # nobody ever read half a file
    found = tuned.read_file(cache)
    firsts = (1, 101, 201, 301, 401)
    assert {(shape.n_seq, each.config) for (_, shape), each in found.items()} == {
        (n_seq, first) for first in firsts for n_seq in range(first, first + 25)
    }


def test_a_write_that_fails_leaves_the_old_file(cache, monkeypatch):
    tuned.save(entry(1))
    before = cache.read_bytes()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned.save(entry(2))
    assert cache.read_bytes() == before
    assert {path.name for path in cache.parent.iterdir()} == {"tuned.json", "tuned.json.lock"}


# ---- tuning, with a stand-in for the device ------------------------------------------------------


def test_tuned_once_then_known(one_device, monkeypatch):
    seen: list[Any] = []
    result = gdn_verify.tune([SHAPE, SHAPE], report=lambda *each: seen.append(each))
    assert result == {SHAPE: Tuned(1, 2.0, 3.0)}
    assert seen == [(SHAPE, Tuned(1, 2.0, 3.0))]
    p = params_of(make_call(SHAPE))
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 1
    monkeypatch.setattr(autotune, "measure", lambda shape: Tuned(-1, 3.0, 3.0))
    assert gdn_verify.tune([SHAPE]) == result
    assert gdn_verify.tune([SHAPE], again=True) == {SHAPE: Tuned(-1, 3.0, 3.0)}
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == -1


def test_the_heuristic_is_measured_and_not_the_table(one_device, monkeypatch):
    """With config -1 the table would answer for a shape that is tuned again."""
    gdn_verify.tune([SHAPE])
    p = params_of(make_call(SHAPE))

    def measure(shape: CallShape) -> Tuned:
        assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == -1
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        gdn_verify.tune([SHAPE], again=True)
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 1  # as it was


def test_what_fails_is_reported_and_the_rest_tuned(one_device, monkeypatch, caplog):
    def measure(shape: CallShape) -> Tuned:
        if shape.n_seq == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore")
        return Tuned(1, 2.0, 3.0)

    monkeypatch.setattr(autotune, "measure", measure)
    other = SHAPE._replace(n_seq=1)
    assert gdn_verify.tune([other, SHAPE]) == {SHAPE: Tuned(1, 2.0, 3.0)}
    assert "is not tuned: CUDA out of memory." in caplog.text


def test_an_interruption_keeps_what_was_measured(one_device, monkeypatch, cache, capsys):
    def measure(shape: CallShape) -> Tuned:
        if shape.num_tokens == 4:
            raise KeyboardInterrupt
        return Tuned(1, 2.0, 3.0)

    monkeypatch.setattr(autotune, "measure", measure)
    assert main(["tune", "--sequences", "1", "--tokens", "2..5"]) == 130
    assert {shape.num_tokens for _, shape in tuned.read_file(cache)} == {2, 3}
    assert "2 of 4 shapes measured" in capsys.readouterr().out


def test_nothing_is_tuned_while_a_graph_is_captured(one_device, monkeypatch, caplog, cache):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with gdn_verify.autotune([SHAPE]):
        pass
    assert gdn_verify.tune([SHAPE]) == {}
    assert [r.getMessage() for r in caplog.records] == [
        "a CUDA graph is being captured: nothing is tuned"
    ] * 2
    assert not cache.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda(capsys):
    for tune in (lambda: gdn_verify.tune([SHAPE]), gdn_verify.autotune([SHAPE]).__enter__):
        with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
            tune()
    assert main(["tune"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "--device cuda: torch sees no CUDA device\n"
    assert captured.out == ""


# ---- recording -----------------------------------------------------------------------------------


def fake_call(n_seq: int, **options: Any) -> None:
    """On CUDA tensors without memory."""
    with FakeTensorMode():
        state = torch.empty(9, 512, 4, device="cuda")
        rows = torch.empty(n_seq, 3, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(512, 4, device="cuda", dtype=torch.bfloat16)
        gdn_verify.verify_conv(state, rows, weight, **{**HEADS, **options})


def test_calls_inside_are_recorded_and_tuned(one_device, cache):
    fake_call(1)
    with gdn_verify.autotune():
        fake_call(2)
        fake_call(2, snapshots="history")
        fake_call(4, config=0)  # the choice is made
        fake_call(2, head_dim=64)  # there is none
        thread = threading.Thread(target=fake_call, args=(3,))
        thread.start()
        thread.join()
        assert not cache.exists()
    fake_call(5)
    expected = {SHAPE, SHAPE._replace(snapshots="history"), SHAPE._replace(n_seq=3)}
    assert {shape for _, shape in tuned.read_file(cache)} == expected
    assert tuned.on_call is None


def test_contexts_nest(one_device, cache):
    with gdn_verify.autotune():
        fake_call(1)
        with gdn_verify.autotune():
            fake_call(2)
        assert {shape.n_seq for _, shape in tuned.read_file(cache)} == {2}
    assert {shape.n_seq for _, shape in tuned.read_file(cache)} == {1, 2}


def test_nothing_is_tuned_after_an_exception(one_device, cache):
    context = gdn_verify.autotune([SHAPE])
    context.__enter__()
    fake_call(1)
    assert not context.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert not cache.exists()


def test_nothing_is_tuned_without_being_asked(one_device, cache):
    fake_call(1)
    fake_call(1)
    assert not cache.parent.exists()


def test_the_first_call_loads_the_file(one_device):
    tuned.save({(DEVICE, SHAPE): Tuned(2, 2.0, 3.0), **entry(7, -1)})
    tuned._loaded, tuned.on_call = False, tuned._on_call
    p = params_of(make_call(SHAPE))
    state = torch.zeros(2, 512, 4)
    rows, weight = torch.zeros(2, 3, 512), torch.zeros(512, 4)
    gdn_verify.verify_conv(state, rows, weight, **HEADS)  # on the CPU nothing is loaded
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == -1
    fake_call(1)
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 2
    assert tuned.on_call is None
    tuned.save({(DEVICE, SHAPE): Tuned(0, 1.0, 3.0)})
    fake_call(1)
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 2
    assert gdn_verify.load_tuned() == 1
    assert LIBRARY.gdn_verify_tuned_config(ctypes.byref(p), 0) == 0


# ---- the command ---------------------------------------------------------------------------------


def test_command(one_device, capsys, cache):
    arguments = ["tune", "--sequences", "1,2", "--tokens", "2..4", "--snapshots", "none,history"]
    assert main([*arguments, "--state-dtype", "bfloat16", "--pdl"]) == 0
    captured = capsys.readouterr()
    assert "12 of 12" in captured.err
    assert captured.out.count("1 (1x2)") == 12
    assert "geometric mean over all 1.500" in captured.out
    assert str(cache) in captured.out
    assert {shape[:2] + shape[6:] for _, shape in tuned.read_file(cache)} == {
        (8192, 4096, "bfloat16", 4, False, False, True)
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "3..2"], "'3..2' is not like 8, 1..8 or 1,2,4..8"),
        (["--sequences", "0"], "'0' is not like"),
        (["--model", "x"], "invalid choice: 'x'"),
    ],
)
def test_wrong_arguments_of_the_command(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_arguments_that_do_not_fit(one_device, capsys):
    assert main(["tune", "--model", "toy-64"]) == 2
    assert main(["tune", "--state-dtype", "float16"]) == 2
    assert main(["tune", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


# ---- on CUDA -------------------------------------------------------------------------------------

FIRST_CALLS = """
import sys
import torch
import gdn_verify
from gdn_verify import tuned

D, W, HEADS = 1024, 4, dict(qk_channels=512, head_dim=128)
generator = torch.Generator().manual_seed(0)

def numbers(*size, dtype=torch.bfloat16):
    return torch.randn(*size, generator=generator).to(dtype).cuda()

def golden(state, rows, weight, slots):
    state, output = state.clone(), torch.empty_like(rows)
    windows = state.new_empty(*rows.shape, W)
    for t in range(rows.shape[1]):
        out = torch.empty_like(rows[:, t])
        torch.ops.gdn.conv1d_update_l2norm(
            state, rows[:, t], weight, out, 512, 128, conv_state_indices=slots)
        output[:, t], windows[:, t] = out, state[slots.long()]
    return state, output, windows

pool = numbers(40000, D, W, dtype=torch.float32)  # 655 MB: more than tuning may take
weight = numbers(D, W)
calls = []
with gdn_verify.autotune():
    for n_seq, num_tokens in ((1, 2), (3, 4), (8, 17)):
        slots = torch.randperm(40000, generator=generator)[:n_seq].int().cuda()
        rows = numbers(n_seq, num_tokens, D)
        for _ in range(2):
            before = pool[slots.long()].clone()
            expected = golden(pool, rows, weight, slots)
            results = gdn_verify.verify_conv(pool, rows, weight, conv_state_indices=slots, **HEADS)
            for mine, theirs in zip((pool, *results), expected):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            calls.append((before, slots, rows, results))
        del expected
    kept = pool.cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
more = torch.cuda.max_memory_allocated() - held
limit = 4 * torch.cuda.get_device_properties(0).L2_cache_size + (64 << 20)
assert more < limit < pool.numel() * 4, (more, limit)
assert torch.equal(pool.cpu(), kept), "tuning changed the pool"
assert len(tuned.entries()) == 3, tuned.entries()
for before, slots, rows, (output, windows) in calls:  # now with what was tuned
    pool[slots.long()] = before
    again = gdn_verify.verify_conv(pool, rows, weight, conv_state_indices=slots, **HEADS)
    for mine, theirs in zip(again, (output, windows)):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
"""


@pytest.mark.gpu
def test_first_calls_of_a_fresh_process(cache):
    python(FIRST_CALLS)
    assert len(tuned.read_file(cache)) == 3
    python(FIRST_CALLS)  # and of one that finds the file


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (actual, expected)))


def chosen(p: Params) -> int:
    return LIBRARY.gdn_verify_chosen_config(ctypes.byref(p))


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_table_decides_and_the_bits_stay(index):
    shape, call = SHAPES[index], make_call(SHAPES[index], "cuda")
    torch.cuda.current_device()
    tuned.use({})
    p = params_of(call)
    heuristic = chosen(p)
    assert heuristic >= 0
    state = call["conv_state"].clone()
    names = [n for n in ("output", "conv_state", "conv_state_inter") if n in call]
    inter = call["conv_state_inter"].normal_().clone() if "conv_state_inter" in call else None

    def run(config: int) -> list[torch.Tensor]:
        call["conv_state"].copy_(state)
        if inter is not None:
            call["conv_state_inter"].copy_(inter)
        arguments = {**call, "snapshots": "none", "config": config}
        tensors = [arguments.pop(n) for n in ("conv_state", "new_input", "weight")]
        gdn_verify.verify_conv(*tensors, **arguments)
        return [call[name].clone() for name in names]

    expected = run(-1)
    for config in range(_core.build_info()["num_configs"]):
        p.config = config
        forced = chosen(p)
        p.config = -1
        tuned.use({(tuned.device_name(0), shape): Tuned(config, 1.0, 2.0)})
        assert chosen(p) == forced  # itself, or the heuristic's where it cannot run the call
        for mine, theirs in zip(run(-1), expected, strict=True):
            assert_same(mine, theirs)
    tuned.use({(tuned.device_name(0), shape): Tuned(10**6, 1.0, 2.0)})
    assert chosen(p) == heuristic


@pytest.mark.gpu
def test_tuning_on_a_device(cache):
    shapes = call_shapes("qwen3.5-35b-a3b-tp8", [1, 8], [3, 17], snapshots=["windows", "history"])
    random = torch.cuda.get_rng_state()
    found = gdn_verify.tune(shapes)
    assert set(found) == set(shapes)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert all(0.1 < each.us <= each.heuristic_us for each in found.values())
    assert tuned.read_file(cache).keys() == {(tuned.device_name(0), shape) for shape in shapes}
    for shape, each in found.items():
        p = params_of(make_call(shape, "cuda"))
        p.config = each.config
        forced = chosen(p)
        p.config = -1
        assert chosen(p) == forced


@pytest.mark.gpu
def test_capture_inside_the_context(cache):
    """Calls that are captured are recorded; leaving the context while capturing tunes nothing."""
    call = make_call(SHAPE, "cuda")
    tensors = [call.pop(n) for n in ("conv_state", "new_input", "weight")]
    del call["pdl"]
    gdn_verify.verify_conv(*tensors, **call)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), gdn_verify.autotune():
        gdn_verify.verify_conv(*tensors, **call)
    assert not cache.exists()
    graph = torch.cuda.CUDAGraph()
    with gdn_verify.autotune(), torch.cuda.graph(graph):
        gdn_verify.verify_conv(*tensors, **call)
    graph.replay()
    torch.cuda.synchronize()
    assert {shape for _, shape in tuned.read_file(cache)} == {SHAPE}


@pytest.mark.gpu
def test_the_command_finds_its_own_results(capsys):
    arguments = ["tune", "--model", "qwen3.5-27b-tp8", "--sequences", "2", "--tokens", "2,3"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
