"""The supply chain: what the built libraries are protected by, and what importing them does."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_verify

PACKAGE = Path(gdn_verify.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("*.so"))
ROOT = PACKAGE.parent

# of <elf.h>
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 1, 2, 0x6474E551, 0x6474E552
PF_X, PF_W = 1, 2
DT_STRTAB, DT_RPATH, DT_TEXTREL = 5, 15, 22
DT_RUNPATH, DT_FLAGS, DT_FLAGS_1 = 29, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW = 8, 1


class Elf:
    """Program headers, dynamic entries and bytes of a 64-bit little-endian library."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (start,) = struct.unpack_from("<Q", self.data, 32)
        size, count = struct.unpack_from("<HH", self.data, 54)
        headers = [
            struct.unpack_from("<IIQQQQQQ", self.data, start + i * size) for i in range(count)
        ]
        self.flags = [(kind, flags) for kind, flags, *_ in headers]
        dynamic = next(each for each in headers if each[0] == PT_DYNAMIC)
        pairs = struct.iter_unpack("<QQ", self.data[dynamic[2] : dynamic[2] + dynamic[5]])
        self.dynamic = dict(pairs)  # of entries that come once
        self.loads = [each for each in headers if each[0] == PT_LOAD]

    def string(self, offset: int) -> bytes:
        """An entry of the dynamic string table."""
        address = self.dynamic[DT_STRTAB] + offset
        load = next(each for each in self.loads if each[3] <= address < each[3] + each[6])
        start = address - load[3] + load[2]
        return self.data[start : self.data.index(b"\0", start)]


def test_there_are_three_libraries():
    assert len(LIBRARIES) == 3


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name.partition(".")[0])
def test_libraries_are_hardened(path):
    elf = Elf(path)
    segments = dict(elf.flags)
    assert PT_GNU_STACK in segments
    assert not segments[PT_GNU_STACK] & PF_X, "the stack is executable"
    assert PT_GNU_RELRO in segments, "relocations stay writeable"
    assert elf.dynamic.get(DT_FLAGS, 0) & DF_BIND_NOW or elf.dynamic.get(DT_FLAGS_1, 0) & DF_1_NOW
    assert DT_TEXTREL not in elf.dynamic
    for kind, flags in elf.flags:
        assert kind != PT_LOAD or flags & (PF_W | PF_X) != PF_W | PF_X, "writeable code"
    assert b"__stack_chk_fail\0" in elf.data
    # nobody's folder is searched for libraries but the package's own
    assert DT_RPATH not in elf.dynamic
    if DT_RUNPATH in elf.dynamic:
        assert elf.string(elf.dynamic[DT_RUNPATH]) == b"$ORIGIN"


def test_the_core_is_fortified():
    """Its formatted writes are the checked ones of the C library."""
    data = (PACKAGE / "libgdn_verify.so").read_bytes()
    assert re.search(rb"__v?snprintf_chk\0", data)


AUDITED = """
import sys
import torch
seen = []
FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.",
             "socket.", "urllib.", "http.", "ftplib.", "smtplib.")
def hook(event, args):
    if event.startswith(FORBIDDEN):
        seen.append(event)
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(f"open for writing: {args[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import gdn_verify, gdn_verify.__main__, gdn_verify.compat, gdn_verify.distributed
state, x, weight = torch.zeros(1, 8, 4), torch.randn(1, 2, 8), torch.randn(8, 4)
gdn_verify.verify_conv(state, x, weight, qk_channels=4, head_dim=4)
from gdn_verify import _core, tuned
tuned.load_tuned()
if torch.cuda.is_available() and _core.build_info()["has_cuda"]:
    moved = [each.cuda() for each in (state, x, weight)]
    gdn_verify.verify_conv(*moved, qk_channels=4, head_dim=4)
print(seen)
"""


def test_import_and_calls_start_nothing_and_reach_nothing(tmp_path):
    """No process, no socket, no file opened for writing."""
    done = subprocess.run(
        [sys.executable, "-c", AUDITED], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "GDN_VERIFY_CACHE": str(tmp_path / "cache")}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")
def test_the_build_needs_little_and_says_what():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^requires = \["setuptools>=\d+"\]$', text, re.M)
    assert re.search(r'^dependencies = \["torch>=2\.10", "numpy"\]$', text, re.M)
    for tool in ("ruff", "mypy", "clang-format"):  # formatters change what they want
        assert re.search(rf'"{tool}==[\d.]+"', text), tool
