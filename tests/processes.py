"""Code in a new interpreter that finds the modules of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def start(code: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths, **env},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints and what it reports; raises where it fails."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out, err


def python(code: str, *arguments: str, **env: str) -> str:
    """Runs code to its end; returns what it prints."""
    return finish(start(code, *arguments, **env))[0]
