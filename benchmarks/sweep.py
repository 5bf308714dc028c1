"""Every launch configuration at every (C, K), against the copy of the same bytes.

    python benchmarks/sweep.py --kind windows --state float32 --json sweep.json

Prints, for each (C, K), the copy's microseconds, the heuristic's and the best configuration's, and
their ratios. This is the table from which the heuristic in csrc/verify_cuda.cu was made.
"""

from __future__ import annotations

import argparse
import json
import math

import floor
import torch

import gdn_verify
from gdn_verify import _core, models, timing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bytes_moved(kind: str, size: int, c: int, k: int, d: int) -> tuple[int, int]:
    """Bytes read and written: each input read once, each output written once."""
    state = c * d * 4 * size
    snapshots = {"windows": c * k * d * 4, "history": c * (k + 3) * d, "none": 0}[kind] * size
    return c * k * d * 2 + d * 4 * 2 + state, c * k * d * 2 + state + snapshots


def make_call(kind: str, dtype: torch.dtype, c: int, k: int, shape: models.Shape, pdl: bool):
    """A function of the configuration that runs one call on buffers of its own."""
    d = shape.d_inner
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(c, k, d + 4096, **options)[:, :, :d]
    weight = torch.randn(d, 4, **options)
    output = torch.empty(c, k, d, **options)
    state = torch.zeros(c, d, 4, device="cuda", dtype=dtype)
    sizes = {"windows": (c, k, d, 4), "history": (c, k + 3, d)}
    inter = torch.empty(sizes[kind], device="cuda", dtype=dtype) if kind != "none" else None

    def call(config: int) -> None:
        torch.ops.gdn.verify_fused_conv_kn_batched(
            state, rows, weight, output, inter, shape.qk_channels, shape.head_dim,
            config=config, pdl=pdl,
        )  # fmt: skip

    return call


def measure(kind: str, state: str, c: int, k: int, shape: models.Shape, pdl: bool, configs):
    dtype = DTYPES[state]
    read, written = bytes_moved(kind, dtype.itemsize, c, k, shape.d_inner)
    sets = timing.cold_sets(read + written, torch.device("cuda"))
    calls = [make_call(kind, dtype, c, k, shape, pdl) for _ in range(sets)]
    times = {}
    for config in (-1, *configs):
        bound = [lambda call=call, config=config: call(config) for call in calls]
        times[config] = timing.time_graph(bound).median_us
    copy = floor.time_copy(read, written, pdl, [(256, 1), (256, 2), (256, 4)])
    return {"c": c, "k": k, "megabytes": (read + written) / 1e6, "copy_us": copy, "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kind", choices=["windows", "history", "none"], default="windows")
    parser.add_argument("--state", choices=list(DTYPES), default="float32")
    parser.add_argument("--model", choices=list(models.MODELS), default=models.DEFAULT_MODEL)
    parser.add_argument("--pdl", action="store_true")
    parser.add_argument("--c", type=int, nargs="*", default=list(range(1, 9)))
    parser.add_argument("--k", type=int, nargs="*", default=list(range(2, 18)))
    parser.add_argument("--json")
    args = parser.parse_args()
    shape = models.MODELS[args.model]
    configs = list(range(_core.build_info()["num_configs"]))
    rows = []
    print(f"{args.kind} {args.state} {args.model} pdl={args.pdl} {gdn_verify.__version__}")
    for c in args.c:
        for k in args.k:
            row = measure(args.kind, args.state, c, k, shape, args.pdl, configs)
            rows.append(row)
            best = min(configs, key=row["us"].__getitem__)
            own, copy = row["us"][-1], row["copy_us"]
            print(
                f"C {c:2} K {k:2} {row['megabytes']:6.1f} MB copy {copy:6.2f} "
                f"heuristic {own:6.2f} ({own / copy:.2f}) "
                f"best {row['us'][best]:6.2f} ({row['us'][best] / copy:.2f}) config {best}",
                flush=True,
            )
    for name, pick in (
        ("heuristic", lambda row: row["us"][-1]),
        ("best", lambda row: min(row["us"].values())),
    ):
        ratios = [pick(row) / row["copy_us"] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{name}: geometric mean {mean:.3f}, worst {max(ratios):.2f} times the copy")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "rows": rows}, file)


if __name__ == "__main__":
    main()
