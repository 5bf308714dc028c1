"""One build of the PyTorch operators under other versions of torch and Python.

    python tests/matrix.py PYTHON.. [-- PYTEST_OPTION..]

Builds with the Python that runs this and its torch, and runs the CPU tests on the same
`_torch_ops.so` and `libgdn_verify.so` under every PYTHON given (each with its torch, numpy and
pytest; the oldest supported torch should build, or the one of a release). `_core` belongs to one
version of Python, so another one builds it for itself and needs setuptools and a compiler. Exits
with 1 where a test fails. Not part of CI, which has one torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("libgdn_verify.so", "_torch_ops.so")
CONFIG = "pyproject.toml"
# About the checkout or the tools of its environment; test_autotune pretends devices, and a torch
# with CUDA then looks for a driver.
LEFT_OUT = ("test_autotune.py", "test_bench.py", "test_packaging.py", "test_typing.py")

ABOUT = "import sys, torch; print(*sys.version_info[:2], sep='.'); print(torch.__version__)"


def about(python: str) -> tuple[str, str]:
    """Versions of Python and torch."""
    version, torch = subprocess.check_output([python, "-c", ABOUT], text=True).split()
    return version, torch


def build(python: str, folder: Path) -> None:
    """The package as `python` builds it, with its Python files."""
    command = [python, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for path in (ROOT / "gdn_verify").rglob("*.py"):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)


def run_tests(python: str, folder: Path, options: list[str]) -> str:
    """The last line of pytest under `python`, on the package in `folder`."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / CONFIG)]
    command += [f"--ignore={ROOT / 'tests' / name}" for name in LEFT_OUT]
    paths = {each: ROOT / each for each in options if (ROOT / each.partition("::")[0]).exists()}
    command += [str(paths.get(each, each)) for each in options]
    if not paths:
        command.append(str(ROOT / "tests"))
    # In the folder, so that its package is found before any other.
    env = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    check = [python, "-c", "import gdn_verify; print(gdn_verify.ops.__file__)"]
    found = subprocess.check_output(check, cwd=folder, env=env, text=True)
    assert found.startswith(str(folder)), found
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip().rpartition("\n")[2]
    print(done.stdout + done.stderr)
    return f"FAILED (pytest's exit status {done.returncode})"


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    pythons, options = arguments[:cut], arguments[cut + 1 :]
    if not pythons or any(python.startswith("-") for python in pythons):
        print(__doc__)
        return 2
    missing = [python for python in pythons if not shutil.which(python)]
    if missing:
        print(f"no such Python: {', '.join(missing)}")
        return 2
    pythons = [os.path.abspath(shutil.which(python) or python) for python in pythons]
    built_by = about(sys.executable)
    print(f"built with Python {built_by[0]}, torch {built_by[1]}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as work:
        first = Path(work) / built_by[0]
        build(sys.executable, first)
        for python in pythons:
            version, torch = about(python)
            folder = Path(work) / version
            if not folder.exists():
                build(python, folder)
                for name in SHARED:
                    shutil.copy(first / "gdn_verify" / name, folder / "gdn_verify")
            result = run_tests(python, folder, options)
            failed |= result.startswith("FAILED")
            print(f"Python {version:<5} torch {torch:<14} {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
