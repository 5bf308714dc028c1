"""The supply chain: what importing and calling does, and what the build asks for. How the libraries
are protected is in test_abi.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_verify

ROOT = Path(gdn_verify.__file__).parents[1]


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
