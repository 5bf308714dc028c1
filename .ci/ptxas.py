"""Sums up what ptxas -v said: registers, stack and spills of every kernel. Fails on any of the two.

python .ci/ptxas.py LOG
"""

import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.S,
)


def main() -> None:
    kernels = [match.groupdict() for match in ENTRY.finditer(Path(sys.argv[1]).read_text())]
    if not kernels:
        raise SystemExit("no kernel was compiled")
    names = "\n".join(kernel["name"] for kernel in kernels)
    readable = subprocess.check_output(["c++filt"], input=names, text=True).splitlines()
    in_memory = 0
    for kernel, name in zip(kernels, readable, strict=True):
        if any(int(kernel[key]) for key in ("stack", "stores", "loads")):
            in_memory += 1
            spilled = f"{kernel['stores']} B spilled"
            print(f"  {kernel['arch']}: {kernel['stack']} B stack, {spilled}: {name}")
    most = max(int(kernel["registers"]) for kernel in kernels)
    archs = " ".join(sorted({kernel["arch"] for kernel in kernels}))
    print(
        f"{len(kernels)} kernels over {archs}: at most {most} registers; "
        f"{in_memory} with stack or spills"
    )
    if in_memory:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
