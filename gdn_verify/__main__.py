"""python -m gdn_verify check | info"""

from __future__ import annotations

import argparse
import sys

from .models import DEFAULT_MODEL, MODELS


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; without one, says what there is. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gdn_verify",
        description="Batched causal-convolution verify operator for speculative decoding of Gated "
        "DeltaNet models.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")

    check = commands.add_parser(
        "check",
        help="compare the fused operator with the per-token path and the reference, and time it",
        description="Compares the fused operator, byte for byte, with the per-token path that it "
        "replaces and with the NumPy reference, times both paths, and runs a Qwen3-Next layer's "
        "own input where transformers is installed. Exits with 1 on any difference.",
    )
    check.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        choices=MODELS,
        metavar="NAME",
        help="%(default)s (default), or one of: "
        + ", ".join(name for name in MODELS if name != DEFAULT_MODEL),
    )
    check.add_argument(
        "--device", default="all", help="cpu, cuda, cuda:N or all there are (default)"
    )
    check.add_argument("--json", metavar="FILE", help="write the results to FILE, - for stdout")
    check.add_argument("--quick", action="store_true", help="fewer (C, K), a tiny layer")

    info = commands.add_parser("info", help="print versions, how it was built, and the devices")
    info.add_argument("--json", action="store_true", help="as JSON")

    options = parser.parse_args(arguments)
    if options.command == "check":
        try:
            from .check import run as run_check
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
        return run_check(options.model, options.device, options.quick, options.json)
    if options.command == "info":
        from .info import run as run_info

        return run_info(options.json)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
