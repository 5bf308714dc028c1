"""python -m gdn_verify check | bench | tune | info"""

from __future__ import annotations

import argparse
import re
import signal
import sys

from .models import DEFAULT_MODEL, MODELS

MOST_NUMBERS = 10_000  # of a range


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; without one, says what there is. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gdn_verify",
        description="Batched causal-convolution verify operator for speculative decoding of Gated "
        "DeltaNet models.",
        epilog="In Python: gdn_verify.verify_conv and torch.ops.gdn. In other projects: "
        "gdn_verify.compat in place of causal_conv1d_update, gdn_verify.integrations for "
        "transformers and vLLM.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")

    check = commands.add_parser(
        "check",
        help="compare the fused operator with the per-token path and the reference, and time it",
        description="Compares the fused operator, byte for byte, with the per-token path that it "
        "replaces and with the NumPy reference, times both paths, and runs a Qwen3-Next layer's "
        "own input where transformers is installed. Exits with 1 on any difference.",
    )
    _add_model(check)
    check.add_argument(
        "--device", default="all", help="cpu, cuda, cuda:N or all there are (default)"
    )
    check.add_argument("--json", metavar="FILE", help="write the results to FILE, - for stdout")
    check.add_argument("--quick", action="store_true", help="fewer (C, K), a tiny layer")

    tune = commands.add_parser(
        "tune",
        help="measure the launch configurations on this GPU and keep the best",
        description="Measures every launch configuration for a model's calls on a CUDA device, and "
        "keeps the best in the user's cache folder (GDN_VERIFY_CACHE names another), from where "
        "verify_conv loads them. Takes about half a second for each C and K.",
    )
    _add_model(tune)
    _add_tuning(tune)

    info = commands.add_parser("info", help="print versions, how it was built, and the devices")
    info.add_argument("--json", action="store_true", help="as JSON")

    commands.add_parser("bench", help="run the benchmark (in a checkout; on a GPU, or --cpu)")

    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:  # has options of its own
        from .bench import run as run_bench

        return run_bench(arguments[1:])
    options = parser.parse_args(arguments)
    if options.command == "check":
        try:
            from .check import run as run_check
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
        return run_check(options.model, options.device, options.quick, options.json)
    if options.command == "tune":
        try:
            from .tune_command import run as run_tune
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
        return run_tune(options)
    if options.command == "info":
        from .info import run as run_info

        return run_info(options.json)
    parser.print_help()
    return 0


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        choices=MODELS,
        metavar="NAME",
        help="%(default)s (default), or one of: "
        + ", ".join(name for name in MODELS if name != DEFAULT_MODEL),
    )


def _add_tuning(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cuda", help="cuda (the first, default) or cuda:N")
    for name, default, symbol in (("--sequences", "1..8", "C"), ("--tokens", "2..17", "K")):
        command.add_argument(
            name,
            type=_numbers,
            default=default,
            metavar="N..M",
            help=f"{symbol}, default {default}",
        )
    command.add_argument(
        "--snapshots",
        default="windows",
        metavar="KINDS",
        help="windows, history, none, or several with commas between (default %(default)s)",
    )
    command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    command.add_argument(
        "--state-dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="float32 (default), or that of --dtype",
    )
    command.add_argument("--state-len", default=4, type=int, choices=[3, 4], help="S (default 4)")
    command.add_argument(
        "--token-major", action="store_true", help="adjacent channels lie side by side"
    )
    command.add_argument("--rollback", action="store_true", help="with num_accepted_tokens")
    command.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    command.add_argument("--again", action="store_true", help="also what was measured before")


def _numbers(text: str) -> list[int]:
    """ "1..4,8" -> 1, 2, 3, 4, 8; for argparse."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part)
        if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]) < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 8, 1..8 or 1,2,4..8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_NUMBERS} numbers")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "info | head" ends like any other program
    sys.exit(main())
