"""The benchmark: the fused operator, what it replaces, what others offer, and the floors.

    python benchmarks/bench_verify.py                     C 1 4 8, K 2 8 17, everything
    python benchmarks/bench_verify.py --full              C 1..8, K 2..17 as well, in graphs, cold
    python benchmarks/bench_verify.py --targets           what the speed targets need, and a verdict
    python benchmarks/bench_verify.py --sweep             every launch configuration
    python benchmarks/bench_verify.py --cpu               the CPU backend against memcpy
    python benchmarks/bench_verify.py --from a.json --compare b.json     measures nothing

Options combine; what two of them need is measured once. --json FILE is written every ten seconds,
so that an interrupted run leaves what it has. plot.py makes pictures and tables of it. All but
--cpu need a GPU and nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where it is not run as a script

import report

SUBSET = [(c, k) for c in (1, 4, 8) for k in (2, 8, 17)]
EVERY = [(c, k) for c in range(1, 9) for k in range(2, 18)]
TARGET_KINDS = ("float32 windows", "bfloat16 windows", "bfloat16 history")
COLD = ("graph_cold",)
SAVE_SECONDS = 10


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_verify.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--c", type=int, nargs="+", help="other C")
    parser.add_argument("--k", type=int, nargs="+", help="other K")
    parser.add_argument("--model", default="qwen3-next-80b-a3b", help="a layer of models.MODELS")
    parser.add_argument("--full", action="store_true", help="all 128 points too")
    parser.add_argument("--targets", action="store_true", help="the speed targets, no more")
    parser.add_argument("--sweep", action="store_true", help="launch configurations, no more")
    parser.add_argument("--cpu", action="store_true", help="the CPU backend, no more")
    parser.add_argument("--tuned", action="store_true", help="with what `gdn_verify tune` found")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    parser.add_argument("--compare", metavar="OLD", help="print ratios to an older result")
    parser.add_argument("--from", dest="source", metavar="FILE", help="report on a written result")
    return parser.parse_args(arguments)


def points_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The (C, K) of the detailed part."""
    cs = args.c or sorted({c for c, _ in SUBSET})
    ks = args.k or sorted({k for _, k in SUBSET})
    return [(c, k) for c in cs for k in ks]


# ---- what to measure -----------------------------------------------------------------------------


def plan_details(plan: Any, shape: Any, points: list[tuple[int, int]]) -> None:
    """Everything of ours, in every way."""
    import contenders as own

    ends = {points[0], points[-1]}
    for c, k in points:
        for each in (*own.FUSED.values(), *own.BASELINES):
            if not each.slow_to_prepare or (c, k) in ends:
                plan.add(own.Point(shape, c, k, each.kinds[0]), each)
        for kind, pdl in own.FUSED:
            plan.add_copy(own.Point(shape, c, k, kind), pdl)


def plan_ratios(
    plan: Any,
    shape: Any,
    points: list[tuple[int, int]],
    launches: tuple[bool, ...] = (False, True),
) -> None:
    """The operator and the copy, in graphs, cold; `launches` says whether dependent."""
    import contenders as own

    for c, k in points:
        for kind in TARGET_KINDS:
            for pdl in launches:
                point = own.Point(shape, c, k, kind)
                plan.add(point, own.FUSED[kind, pdl], COLD)
                plan.add_copy(point, pdl, COLD)


def plan_full(plan: Any, shape: Any) -> None:
    """What the maps over all C and K show."""
    import contenders as own

    plan_ratios(plan, shape, EVERY)
    for c, k in EVERY:
        plan.add(own.Point(shape, c, k), own.PER_TOKEN, COLD)


def main_shape() -> Any:
    """The layer that most targets are of."""
    from gdn_verify.models import Shape

    return Shape(report.MAIN_D, 4096)


def plan_targets(plan: Any) -> None:
    """What the targets need of ours, but for single figures."""
    import contenders as own

    from gdn_verify.models import Shape

    main = main_shape()
    plan_ratios(plan, main, EVERY)
    plan_ratios(plan, main, [(c, k) for c in (16, 32, 64) for k in (2, 8, 17)])
    for shape in (Shape(10240, 4096), Shape(12288, 4096), Shape(1024, 512), Shape(1280, 512),
                  Shape(1536, 512)):  # fmt: skip
        plan_ratios(plan, shape, SUBSET, (False,))
    for c, k in ((1, 2), (1, 17), (8, 2), (8, 17)):
        for pdl in (False, True):
            plan.add(own.Point(main, c, k), own.FUSED[own.WINDOWS, pdl], ("eager",))
        plan.add(own.Point(main, c, k), own.WRAPPER, ("eager",))


def plan_peers(
    plan: Any,
    peers: list[Any],
    shape: Any,
    points: list[tuple[int, int]],
    ways: tuple[str, ...],
) -> None:
    """What others offer, as far as it is installed."""
    import contenders as own

    for c, k in points:
        for each in peers:
            plan.add(own.Point(shape, c, k), each, ways)


# ---- measuring -----------------------------------------------------------------------------------


def save(path: str | None, result: dict[str, Any]) -> None:
    """Replaces the file at once, so that it is whole at any time."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = f"{path}.part"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(result, file, separators=(",", ":"))
        os.replace(temporary, path)


def run_plan(plan: Any, result: dict[str, Any], path: str | None) -> None:
    """Measures it into the result, which is saved now and then."""
    for each in filter(None, plan.contenders.values()):
        name = each.name if each.name != "fused" else f"{each.name}, {each.kinds[0]}"
        result["contenders"][name] = {
            "does": each.does,
            "norm": each.norm,
            "snapshot_bytes": each.snapshot_bytes,
        }
    saved = time.perf_counter()
    for row in plan.run():
        result["rows"].append(row)
        if time.perf_counter() - saved > SAVE_SECONDS:
            save(path, result)
            saved = time.perf_counter()


def measure_sweep(result: dict[str, Any], shape: Any, points: list[tuple[int, int]]) -> None:
    import contenders as own
    import measure

    for kind in TARGET_KINDS:
        for c, k in points:
            result["sweep"].append(measure.sweep(own.Point(shape, c, k, kind), False))


def measure_cpu(shape: Any) -> list[dict[str, Any]]:
    import contenders as own
    import measure

    return [measure.cpu_against_memcpy(own.Point(shape, 8, 17, kind)) for kind in TARGET_KINDS]


def run(args: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    import contenders as own
    import floor
    import measure
    import peers
    import torch

    from gdn_verify import tuned
    from gdn_verify.models import MODELS

    torch.manual_seed(0)
    tuned_entries = tuned.load_tuned() if args.tuned else tuned.use({})
    shape, points = MODELS[args.model], points_of(args)
    detailed = not (args.targets or args.sweep) or args.full
    plan = measure.Plan()
    if args.targets:
        plan_targets(plan)
    if args.full:
        plan_full(plan, shape)
    if args.sweep:
        plan_ratios(plan, shape, points)
    if detailed:
        plan_details(plan, shape, points)
    result: dict[str, Any] = {
        "machine": measure.machine(arguments),
        "d_inner": shape.d_inner,
        "tuned_entries": tuned_entries,
        "ceiling_gbps": floor.copy_ceiling(),
        "empty": measure.empty_launches(),
        "peers": {},
        "contenders": {},
        "rows": [],
        "sweep": [],
    }
    run_plan(plan, result, args.json)
    if args.targets or args.sweep:
        measure_sweep(result, shape, SUBSET if args.targets else points)
    if args.targets:
        result["allocations"] = measure.allocations(own.Point(shape, 8, 17))
        result["cpu"] = measure_cpu(shape)
    # last of all, since importing them changes how torch compiles
    installed, result["peers"] = peers.load()
    theirs = measure.Plan()
    if args.targets:
        plan_peers(theirs, installed, main_shape(), EVERY, COLD)
    if detailed:
        plan_peers(theirs, installed, shape, points, measure.WAYS)
    run_plan(theirs, result, args.json)
    result["machine"]["clocks_after"] = measure.clocks()
    return result


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    old = report.read(args.compare) if args.compare else None  # before minutes of measuring
    if args.cpu:
        from gdn_verify.models import MODELS

        print("\n".join(map(report.show_cpu, measure_cpu(MODELS[args.model]))))
        return 0
    if args.source:
        result = report.read(args.source)
    else:
        import torch

        from gdn_verify import _core

        if not torch.cuda.is_available() or not _core.build_info()["has_cuda"]:
            print(
                "The benchmark needs a CUDA device and gdn_verify built with CUDA. On the CPU, "
                "--cpu compares with memcpy, `python -m gdn_verify check --device cpu` times both "
                "paths.",
                file=sys.stderr,
            )
            return 2  # fmt: skip
        result = run(args, arguments)
        save(args.json, result)
    print(report.show(result, points_of(args)))
    if result["sweep"]:
        copies = {
            (r["d_inner"], r["c"], r["k"], r["kind"], r["pdl"]): r["graph_cold"]["median_us"]
            for r in result["rows"] if r["contender"] == report.COPY and "graph_cold" in r
        }  # fmt: skip
        print("\nlaunch configurations\n" + report.sweep_table(result["sweep"], copies))
    if old:
        print("\n" + report.compare(old, result))
    targets = report.evaluate(result)
    if args.targets or args.source:
        print("\ntargets\n" + "\n".join(map(report.show_target, targets)))
    failed = [row for row in result["rows"] if row.get("differs") or "error" in row]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
