"""The tuned table: measured launch configurations in a file of the user, loaded into the C core.

The file is `tuned.json` in the folder GDN_VERIFY_CACHE, by default `gdn_verify` under
XDG_CACHE_HOME or ~/.cache. It holds the versions that it was made with and one entry for each
device and `CallShape` that was measured, with config -1 where the heuristic's choice is the best:

    {"format": 1, "version": "0.1.0", "configs": "1x1 1x2 ..", "entries": [
      {"device": "NVIDIA H200, 9.0, 132 SMs", "d_inner": 8192, .., "config": 3, "us": ..}, ..]}

A file of other versions is ignored, one that cannot be understood is reported; either is replaced
at the next save. A save merges into the file under a lock (`tuned.json.lock`) and replaces it in
one step, so that processes and threads lose nothing of each other and never see half a file. Where
there is no place for it, tuning holds for the process.

`verify_conv` calls `on_call` as long as that is not None: it loads the file at the first call on a
CUDA device, and lets whoever records (autotune.py) know the shapes of the calls.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _core

FORMAT = 1  # of the file
SNAPSHOTS = ("none", "windows", "history")  # gdn_verify_snapshot_kind
DTYPES = ("float32", "bfloat16", "float16")  # gdn_verify_dtype

logger = logging.getLogger("gdn_verify")


class CallShape(NamedTuple):
    """What the best launch configuration of a call depends on, besides the device."""

    d_inner: int
    qk_channels: int
    n_seq: int
    num_tokens: int  # with cu_seqlens the most rows of a sequence
    snapshots: str = "windows"  # one of SNAPSHOTS
    input_dtype: str = "bfloat16"  # of new_input and output
    state_dtype: str = "float32"
    state_len: int = 4  # S
    token_major: bool = False  # adjacent channels of the windows (or of conv_state) are neighbours
    rollback: bool = False  # with num_accepted_tokens
    pdl: bool = False


class Tuned(NamedTuple):
    """What was measured for one shape."""

    config: int  # -1: none is faster than what the heuristic chooses
    us: float  # of this configuration
    heuristic_us: float


Entries = dict[tuple[str, CallShape], Tuned]  # by device_name and shape


# ---- devices and calls ---------------------------------------------------------------------------


def device_name(index: int) -> str:
    """How the file calls a device: what the choice depends on."""
    p = torch.cuda.get_device_properties(index)
    return f"{p.name}, {p.major}.{p.minor}, {p.multi_processor_count} SMs"


def shape_of_call(
    conv_state: Tensor | None,
    new_input: Tensor,
    weight: Tensor,
    output: Tensor,
    conv_state_inter: Tensor | None,
    qk_channels: int,
    head_dim: int,
    options: Mapping[str, Any],
) -> CallShape | None:
    """The shape of a call of the batched operator; None where there is no choice, or nothing to do.

    The same key as csrc/tuned.c makes. A wrong call may get a shape, or none.
    """
    d_inner = new_input.shape[-1]
    dtype = _dtype_name(new_input)
    first = conv_state_inter if conv_state is None else conv_state
    if (
        first is None
        or dtype not in ("bfloat16", "float16")
        or output.dtype != new_input.dtype
        or first.dtype not in (torch.float32, new_input.dtype)
        or options["parent_index"] is not None
        or (head_dim, weight.shape[-1]) != (128, 4)
        or d_inner % head_dim != 0
    ):
        return None
    state_len = 3 if conv_state is None else conv_state.shape[-1]
    snapshots, token_major = "none", conv_state is None or conv_state.stride(1) == 1
    if conv_state_inter is not None:
        snapshots = "windows" if conv_state_inter.dim() == 4 else "history"
        if snapshots == "windows":
            token_major = conv_state_inter.stride(2) == 1
    cu_seqlens, num_tokens = options["cu_seqlens"], options["max_num_tokens"]
    if cu_seqlens is None:
        n_seq, num_tokens = new_input.shape[0], new_input.shape[1]
    else:
        n_seq = cu_seqlens.shape[0] - 1
        if num_tokens is None and conv_state_inter is not None:
            lead = 0 if snapshots == "windows" else state_len - 1
            num_tokens = conv_state_inter.shape[1] - lead
    if num_tokens is None or min(n_seq, num_tokens, d_inner) < 1:
        return None
    return CallShape(
        d_inner,
        qk_channels,
        n_seq,
        num_tokens,
        snapshots,
        dtype,
        _dtype_name(first),
        state_len,
        token_major,
        options["num_accepted_tokens"] is not None,
        bool(options["pdl"]),
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def core_entry(device: int, shape: CallShape, config: int) -> tuple[int, ...]:
    """As `_core.load_tuned` wants it."""
    return (
        device,
        SNAPSHOTS.index(shape.snapshots),
        DTYPES.index(shape.input_dtype),
        DTYPES.index(shape.state_dtype),
        shape.state_len,
        int(shape.token_major),
        int(shape.rollback),
        int(shape.pdl),
        config,
        shape.d_inner,
        shape.qk_channels,
        shape.n_seq,
        shape.num_tokens,
    )


# ---- the file ------------------------------------------------------------------------------------


def cache_file() -> Path | None:
    """Where the file is or would be; None where the user has no folder for it."""
    folder = os.environ.get("GDN_VERIFY_CACHE")
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(cache):  # absent, or one that is to be ignored
            home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
            if not os.path.isabs(home):
                return None
            cache = os.path.join(home, ".cache")
        folder = os.path.join(cache, "gdn_verify")
    return Path(folder).absolute() / "tuned.json"


def configs() -> list[str]:
    """The names of the launch configurations of this build."""
    return _core.build_info()["configs"].split()


def _versions() -> dict[str, Any]:
    info = _core.build_info()
    return {"format": FORMAT, "version": info["version"], "configs": info["configs"]}


def read_file(path: Path) -> Entries:
    """The entries of a file: none where it is absent, of other versions, or (with a warning) broken
    or unreadable."""
    try:
        if path.exists() and not path.is_file():  # a pipe, say, which would never end
            raise OSError(errno.EINVAL, "it is no regular file")
        document = json.loads(path.read_bytes())
        found = {name: document[name] for name in _versions()}
        return dict(map(_entry, document["entries"])) if found == _versions() else {}
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn_once(f"{path} cannot be read: {error.strerror}; going on without what was tuned")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        logger.warning("%s is broken and is ignored; the next tuning replaces it", path)
    return {}


def _entry(fields: dict[str, Any]) -> tuple[tuple[str, CallShape], Tuned]:
    """Raises for anything that _text would not have written."""
    values = {name: fields[name] for name in ("device", *CallShape._fields, *Tuned._fields)}
    for name, value in values.items():
        kind: type | tuple[type, ...] = int
        if name in CallShape._field_defaults:
            kind = type(CallShape._field_defaults[name])
        elif name == "device":
            kind = str
        elif name in ("us", "heuristic_us"):
            kind = (int, float)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} is {value!r}")
        if kind is int and value not in range(-1 if name == "config" else 0, 2**31):
            raise ValueError(f"{name} is {value}")
    shape = CallShape(*(values[name] for name in CallShape._fields))
    core_entry(0, shape, 0)  # raises for a kind or dtype that there is not
    return (values["device"], shape), Tuned(*(values[name] for name in Tuned._fields))


def _text(entries: Entries) -> str:
    """One line an entry."""
    lines = [
        json.dumps({"device": device, **shape._asdict(), **measured._asdict()})
        for (device, shape), measured in sorted(entries.items())
    ]
    head = json.dumps({**_versions(), "entries": []}).removesuffix("]}")
    return head + "\n" + ",\n".join(lines) + "\n]}\n"


def save(new: Entries) -> Entries | None:
    """Merges into the file and returns all that it holds now. None where it cannot be written, with
    a warning at the first time."""
    path = cache_file()
    if path is None:
        _warn_once("there is no home folder: what was tuned is not saved")
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            merged = {**read_file(path), **new}
            _replace(path, _text(merged))
    except OSError as error:
        _warn_once(f"{path} cannot be written: {error.strerror}; what was tuned is not saved")
        return None
    return merged


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock beside `path`, which is given up when the process ends, however it does."""
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """Writes a file in one step: whoever reads finds the old text or the new one."""
    target = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(prefix="tuned.json.", dir=os.path.dirname(target))
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


# ---- the table of this process -------------------------------------------------------------------

_lock = threading.RLock()  # for all below
_loaded = False
_entries: Entries = {}
_recorders: list[set[tuple[int, CallShape]]] = []


def load_tuned() -> int:
    """Reads the file of the user and gives the C core what it has for this machine's devices.

    Replaces what was loaded before. The first `verify_conv` on a CUDA device does this by itself;
    call it where another process has tuned meanwhile, or before `torch.ops.gdn.*` is used alone.
    Returns how many configurations were loaded.
    """
    path = cache_file()
    return use(read_file(path) if path else {})


def use(entries: Entries, without: Iterable[tuple[str, CallShape]] = ()) -> int:
    """Makes `entries` those of this process; the C core gets all but `without`."""
    global _loaded, _entries
    hidden = set(without)
    with _lock:
        table = []
        for index in range(torch.cuda.device_count()):
            name = device_name(index)
            table += [
                core_entry(index, shape, measured.config)
                for (device, shape), measured in entries.items()
                if device == name and measured.config >= 0 and (device, shape) not in hidden
            ]
        _core.load_tuned(table)
        _loaded, _entries = True, entries
        _set_hook()
    return len(table)


def add(new: Entries) -> None:
    """Saves what was measured and uses it."""
    with _lock:
        merged = save(new)
        use({**_entries, **new} if merged is None else merged)


def entries() -> Entries:
    """What this process knows."""
    return dict(_entries)


def load_once() -> None:
    """For the first call on a CUDA device, and for what stands for it in torch.compile."""
    if not _loaded:
        with _lock:
            if not _loaded:
                load_tuned()


@contextmanager
def recording() -> Iterator[set[tuple[int, CallShape]]]:
    """Notes device and shape of every call of `verify_conv` on CUDA that leaves the choice open, by
    any thread. What torch.compile has compiled is not seen."""
    met: set[tuple[int, CallShape]] = set()
    with _lock:
        _recorders.append(met)
        _set_hook()
    try:
        yield met
    finally:
        with _lock:
            _recorders[:] = [each for each in _recorders if each is not met]
            _set_hook()


def _on_call(*call: Any) -> None:
    load_once()
    recorders = list(_recorders)
    if not recorders or call[-1]["config"] != -1 or torch.compiler.is_compiling():
        return
    try:
        shape = shape_of_call(*call)
    except (IndexError, RuntimeError):  # a wrong call, which the operator is about to refuse
        return
    for met in recorders:
        if shape:
            met.add((call[1].device.index, shape))


def _set_hook() -> None:
    global on_call
    on_call = None if _loaded and not _recorders else _on_call


on_call: Callable[..., None] | None = _on_call
