"""`python -m gdn_verify bench`: runs the benchmark of the source tree that this package lies in.

It compiles kernels of its own and stands in benchmarks/, which is not in wheels: there is one in a
checkout that was installed editable, as `make` does, or from whose folder it is run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Passes the options on; returns the exit status, 2 where there is no benchmark or no GPU."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    if not (folder / "bench_verify.py").exists():
        print(
            "The benchmark is in the source tree only: run `python benchmarks/bench_verify.py` in a"
            " checkout of gdn-verify.",
            file=sys.stderr,
        )
        return 2
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("bench_verify").main(arguments)
