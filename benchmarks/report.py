"""Turns measured rows into tables, targets and estimates. Needs neither torch nor a GPU.

A result is what bench_verify.py writes: machine, d_inner, tuned_entries, ceiling_gbps, empty,
peers, contenders, rows (see measure.py), sweep, allocations, cpu. A ratio is always to the copy of
the same bytes under the same launch attributes, cold, in a graph.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Row = dict[str, Any]
Grid = dict[tuple[int, int], float]  # (C, K) -> figure

COPY, FUSED, PER_TOKEN = "copy", "fused", "per-token path"
LAYERS = 36  # Gated DeltaNet layers of Qwen3-Next
MAIN_D = 8192
LAUNCHES = {False: "plain launch", True: "dependent launch"}
WINDOWS, HISTORY = ("float32 windows", "bfloat16 windows"), "bfloat16 history"


def read(path: str | Path) -> Result:
    """What bench_verify.py wrote to `path`. Exits with a sentence where it is something else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    if not isinstance(result, dict) or not {"machine", "rows"} <= result.keys():
        sys.exit(f"{path} is not a result of bench_verify.py")
    return result


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def label(row: Row) -> str:
    kind = f", {row['kind']}" if row["contender"] in (FUSED, COPY) else ""
    return row["contender"] + kind + (", dependent launch" if row["pdl"] else "")


def find(
    result: Result, contender: str, kind: str, pdl: bool = False, way: str = "graph_cold"
) -> dict[tuple[int, int, int], float]:
    """(D, C, K) -> median microseconds."""
    return {
        (row["d_inner"], row["c"], row["k"]): row[way]["median_us"]
        for row in result["rows"]
        if (row["contender"], row["kind"], row["pdl"]) == (contender, kind, pdl) and way in row
    }


def grid_of(
    result: Result, contender: str, kind: str, pdl: bool = False, way: str = "graph_cold"
) -> Grid:
    """The same at the shape that the tables are about."""
    times = find(result, contender, kind, pdl, way)
    return {(c, k): us for (d, c, k), us in times.items() if d == result["d_inner"]}


def quotient(above: dict[Any, float], below: dict[Any, float]) -> dict[Any, float]:
    return {key: above[key] / below[key] for key in above if key in below}


# ---- tables --------------------------------------------------------------------------------------


def grid_table(grid: Grid, digits: int = 2) -> str:
    """Markdown, C down and K across."""
    ks = sorted({k for _, k in grid})
    lines = ["| C \\ K | " + " | ".join(map(str, ks)) + " |", "|---" * (len(ks) + 1) + "|"]
    for c in sorted({c for c, _ in grid}):
        cells = (f"{grid[c, k]:.{digits}f}" if (c, k) in grid else "" for k in ks)
        lines.append(f"| **{c}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rectangle(grid: Grid) -> Grid:
    """Without the C at which only some K were measured."""
    ks = {k for _, k in grid}
    return {
        (c, k): value for (c, k), value in grid.items() if all((c, each) in grid for each in ks)
    }


def estimate(result: Result) -> Grid:
    """Milliseconds that a verify step of Qwen3-Next saves: arithmetic, not a measurement."""
    per_token = grid_of(result, PER_TOKEN, WINDOWS[0])
    fused = grid_of(result, FUSED, WINDOWS[0])
    return {key: LAYERS * (per_token[key] - fused[key]) / 1e3 for key in per_token if key in fused}


def grids(result: Result) -> dict[str, Grid]:
    """Every table over C and K that the rows allow, by its title."""
    per_token = grid_of(result, PER_TOKEN, WINDOWS[0])
    found = {
        "Times as fast as the per-token path (float32 windows)": quotient(
            per_token, grid_of(result, FUSED, WINDOWS[0])
        )
    }
    for kind in (*WINDOWS, HISTORY, "float32 none"):
        for pdl, launch in LAUNCHES.items():
            fused = grid_of(result, FUSED, kind, pdl)
            copy = grid_of(result, COPY, kind, pdl)
            found[f"Microseconds, {kind}, {launch}"] = fused
            found[f"Times the copy of the same bytes, {kind}, {launch}"] = quotient(fused, copy)
    found[
        f"Milliseconds saved in a verify step of Qwen3-Next against the per-token path: {LAYERS} "
        "layers times the difference of the medians (arithmetic from measured parts)"
    ] = estimate(result)
    return {title: rectangle(grid) for title, grid in found.items() if grid}


def markdown(result: Result) -> str:
    """All tables; where and how they were measured comes first."""
    machine = result["machine"]
    parts = [
        "# Measured",
        f"{machine['device']}, CUDA {machine['cuda']}, torch {machine['torch']}, gdn-verify "
        f"{machine['gdn_verify']} ({machine['commit']}), {machine['time']}: "
        f"`{machine['command']}`. D {result['d_inner']}, bfloat16 rows. Medians over replays of a "
        "CUDA graph that rotates over buffers larger than the L2. Copy ceiling "
        f"{result['ceiling_gbps']:.0f} GB/s.",
    ]
    parts += [f"## {title}\n\n{grid_table(grid)}" for title, grid in grids(result).items()]
    targets = evaluate(result)
    if targets:
        parts.append("## Targets\n\n" + "\n".join(f"- {show_target(each)}" for each in targets))
    return "\n\n".join(parts) + "\n"


def wide_table(result: Result, way: str, points: list[tuple[int, int]]) -> str:
    """Contenders down, (C, K) across, microseconds; for the screen."""
    lines = [f"{'C,K':<44}" + "".join(f"{f'{c},{k}':>8}" for c, k in points)]
    labels = dict.fromkeys(label(row) for row in result["rows"] if way in row)
    for name in labels:
        cells = {
            (row["c"], row["k"]): row[way]["median_us"]
            for row in result["rows"]
            if label(row) == name and way in row and row["d_inner"] == result["d_inner"]
        }
        if any(point in cells for point in points):
            texts = (f"{cells[p]:>8.2f}" if p in cells else " " * 8 for p in points)
            lines.append(f"{name:<44}" + "".join(texts))
    return "\n".join(lines)


def bandwidth_table(result: Result, points: list[tuple[int, int]]) -> str:
    """GB/s of what a contender moves itself, and the share of the copy ceiling."""
    lines = [f"{'C,K':<44}" + "".join(f"{f'{c},{k}':>11}" for c, k in points)]
    labels = dict.fromkeys(label(row) for row in result["rows"] if "graph_cold" in row)
    for name in labels:
        cells = {}
        for row in result["rows"]:
            if label(row) == name and "graph_cold" in row and row["d_inner"] == result["d_inner"]:
                rate = row["bytes"] / row["graph_cold"]["median_us"] / 1e3
                share = rate / result["ceiling_gbps"]
                cells[row["c"], row["k"]] = f"{rate:>6.0f} {share:>4.0%}"
        if any(point in cells for point in points):
            lines.append(f"{name:<44}" + "".join(f"{cells.get(p, ''):>11}" for p in points))
    return "\n".join(lines)


def _rate(row: Row) -> float:
    """GB/s of the bytes that must move, cold."""
    return row["required_bytes"] / row["graph_cold"]["median_us"] / 1e3


def spread(result: Result) -> str:
    """How far the samples of a figure lie apart: (max - min) / median."""
    shares = sorted(
        (row["graph_cold"]["max_us"] - row["graph_cold"]["min_us"]) / row["graph_cold"]["median_us"]
        for row in result["rows"]
        if "graph_cold" in row
    )
    if not shares:
        return "no cold figures"
    return (
        f"spread of a cold figure over its replays, (max - min) / median: median "
        f"{shares[len(shares) // 2]:.1%}, nine in ten below {shares[len(shares) * 9 // 10]:.1%}"
    )


def show(result: Result, points: list[tuple[int, int]]) -> str:
    """The whole report as plain text."""
    machine, out = result["machine"], []
    out.append(f"{machine['device']}, CUDA {machine['cuda']}, torch {machine['torch']}")
    out.append(f"clocks: {machine['clocks']}")
    out.append(f"tuned configurations loaded: {result['tuned_entries']} (0: the untuned choice)")
    out.append(f"copy ceiling {result['ceiling_gbps']:.0f} GB/s (512 MB read, 512 MB written)")
    for name, timing in result["empty"].items():
        out.append(f"empty kernel, {name}: {timing['median_us']:.2f} us")
    for name, state in result["peers"].items():
        out.append(f"peer {name}: {state}")
    out.append("\nwhat each does (snapshot bytes per channel and token):")
    for name, about in result["contenders"].items():
        norm = "norm inside" if about["norm"] else "no norm"
        out.append(f"  {name}: {about['does']}; {about['snapshot_bytes']} bytes; {norm}")
    titles = {
        "graph_cold": "in a graph, cold: microseconds",
        "graph_warm": "in a graph, warm (the same buffers): microseconds",
        "eager": "outside of graphs, cold, on the device: microseconds",
        "host": "outside of graphs, on the host: microseconds to issue a call",
    }
    for way, title in titles.items():
        if any(way in row for row in result["rows"]):
            out.append(f"\n{title}\n{wide_table(result, way, points)}")
    out.append(f"\nGB/s and share of the copy ceiling, cold\n{bandwidth_table(result, points)}")
    out.append("\n" + spread(result))
    for row in result["rows"]:
        where = f"{label(row)} at D {row['d_inner']} C {row['c']} K {row['k']}"
        if row.get("differs"):
            out.append(f"DIFFERS: {where}: {row['differs']}")
        if "error" in row:
            out.append(f"failed: {where}: {row['error']}")
        if "graph_cold" in row and _rate(row) > 1.03 * result["ceiling_gbps"]:
            out.append(f"faster than the copy ceiling, so in part from the L2: {where}")
        if row.get("cold") is False:
            out.append(f"not past the L2: {where}")
    saved = estimate(result)
    if saved:
        out.append(
            f"\nestimate (arithmetic from measured parts, not a measurement): milliseconds saved "
            f"in a verify step of Qwen3-Next, {LAYERS} layers times the difference to the "
            f"per-token path\n{grid_table(saved)}"
        )
    return "\n".join(out)


def compare(old: Result, new: Result) -> str:
    """Old over new, so that above 1 is faster, for everything in both."""

    def keyed(result: Result) -> dict[tuple, Row]:
        return {(label(r), r["d_inner"], r["c"], r["k"]): r for r in result["rows"]}

    before, after = keyed(old), keyed(new)
    lines = [f"old: {old['machine']['time']} {old['machine']['commit']}, old / new:"]
    for way in ("graph_cold", "graph_warm", "eager", "host"):
        ratios: dict[str, list[tuple[float, tuple]]] = {}
        for key, row in after.items():
            if way in row and way in before.get(key, {}):
                ratio = before[key][way]["median_us"] / row[way]["median_us"]
                ratios.setdefault(key[0], []).append((ratio, key[1:]))
        for name, found in ratios.items():
            (low, at), (high, _) = min(found), max(found)
            lines.append(
                f"{way:<11}{name:<44}{geomean(r for r, _ in found):>6.3f} over {len(found):>3}, "
                f"{low:.3f} (D {at[0]} C {at[1]} K {at[2]}) to {high:.3f}"
            )
    return "\n".join(lines)


# ---- targets -------------------------------------------------------------------------------------


def target(text: str, figure: str, met: bool) -> dict[str, Any]:
    return {"target": text, "figure": figure, "met": met}


def show_target(each: dict[str, Any]) -> str:
    return f"{'met' if each['met'] else 'NOT MET'}: {each['target']}: {each['figure']}"


def evaluate(result: Result) -> list[dict[str, Any]]:
    """Each target with its figure, as far as it was measured."""
    found: list[dict[str, Any]] = []
    groups: list[tuple[str, Callable[[int, int], bool]]] = [
        (f"D {MAIN_D}, C 1 to 8", lambda d, c: d == MAIN_D and c <= 8),
        (f"D {MAIN_D}, C 16 to 64", lambda d, c: d == MAIN_D and c >= 16),
        ("D 10240 and 12288", lambda d, c: d > MAIN_D),
        ("D 1024 to 1536", lambda d, c: d < MAIN_D),
    ]
    for where, belongs in groups:
        for kind in (*WINDOWS, HISTORY):
            for pdl in LAUNCHES:
                found += _ratio_targets(result, where, belongs, kind, pdl)
    found += _history_time(result)
    found += _peer_targets(result)
    found += _host_targets(result)
    found += _heuristic_targets(result)
    if "allocations" in result:
        count = result["allocations"]
        found.append(target("no allocation in the operator", f"{count} in a call", count == 0))
    for cpu in result.get("cpu", []):
        text = f"CPU, {_cpu_case(cpu)}: at most 1.5 times a memcpy of the same bytes"
        ratio = cpu["fused_us"] / cpu["memcpy_us"]
        found.append(target(text, f"{ratio:.2f}", ratio <= 1.5))
    return found


def _cpu_case(cpu: dict[str, Any]) -> str:
    return (
        f"{cpu['kind']}, C {cpu['c']} K {cpu['k']}, {cpu['bytes'] / 1e6:.1f} MB, {cpu['threads']} "
        f"threads ({cpu['cpu_level']})"
    )


def show_cpu(cpu: dict[str, Any]) -> str:
    """One line for the screen."""
    return (
        f"{_cpu_case(cpu)}: {cpu['fused_us']:.0f} us, memcpy {cpu['memcpy_us']:.0f} us, "
        f"{cpu['fused_us'] / cpu['memcpy_us']:.2f} times"
    )


def _ratio_targets(
    result: Result, where: str, belongs: Callable[[int, int], bool], kind: str, pdl: bool
) -> list[dict[str, Any]]:
    fused, copy = (find(result, name, kind, pdl) for name in (FUSED, COPY))
    ratio = {k: v for k, v in quotient(fused, copy).items() if belongs(k[0], k[1])}
    if not ratio:
        return []
    about = f"{kind}, {where}, {LAUNCHES[pdl]}, {len(ratio)} points"
    mean = geomean(ratio.values())
    if kind == HISTORY:
        text = f"{about}: at most twice its copy as geometric mean"
        return [target(text, f"{mean:.3f}", mean <= 2)]
    text = f"{about}: at most 1.2 times the copy as geometric mean"
    found = [target(text, f"{mean:.3f}", mean <= 1.2)]
    sizes = {(r["d_inner"], r["c"], r["k"]): r["required_bytes"] for r in result["rows"]
             if r["kind"] == kind}  # fmt: skip
    large = [value for key, value in ratio.items() if sizes[key] > 8e6]
    if large:
        mean = geomean(large)
        text = f"{about}: at most 1.1 times where more than 8 MB move ({len(large)} points)"
        found.append(target(text, f"{mean:.3f}, largest {max(large):.2f}", mean <= 1.1))
    # how far above what is allowed, in microseconds
    excess = {key: fused[key] - max(1.5 * copy[key], copy[key] + 0.4) for key in ratio}
    worst = max(excess, key=excess.__getitem__)
    _, c, k = worst
    text = f"{about}: nowhere above 1.5 times the copy or 0.4 us more, whichever is larger"
    figure = (
        f"{ratio[worst]:.2f} times, {fused[worst] - copy[worst]:.2f} us more at D {worst[0]} C {c} "
        f"K {k}; {sum(e > 0 for e in excess.values())} points above"
    )
    return [*found, target(text, figure, excess[worst] <= 0)]


def _history_time(result: Result) -> list[dict[str, Any]]:
    found = []
    for pdl, launch in LAUNCHES.items():
        us = find(result, FUSED, HISTORY, pdl).get((MAIN_D, 8, 17))
        if us is not None:
            text = f"{HISTORY}, {launch}: under 4 us at C 8, K 17"
            found.append(target(text, f"{us:.2f} us", us < 4))
    return found


def _peer_targets(result: Result) -> list[dict[str, Any]]:
    """Nothing is said of a peer that is not installed."""
    found = []
    claims = [(HISTORY, "vLLM conv"), (HISTORY, "SGLang conv"), (WINDOWS[0], "SGLang conv + L2")]
    for kind, peer in claims:
        theirs = find(result, peer, WINDOWS[0])
        for pdl, launch in LAUNCHES.items():
            ratio = quotient(theirs, find(result, FUSED, kind, pdl))
            if ratio:
                worst = min(ratio, key=ratio.__getitem__)
                text = f"{kind}, {launch}: faster than {peer} at every point"
                figure = (
                    f"{geomean(ratio.values()):.2f} times as fast, at least {ratio[worst]:.2f} at "
                    f"C {worst[1]} K {worst[2]}, {len(ratio)} points"
                )
                found.append(target(text, figure, ratio[worst] > 1))
    return found


def _host_targets(result: Result) -> list[dict[str, Any]]:
    found = []
    for name in (FUSED, "verify_conv"):
        for pdl, launch in LAUNCHES.items():
            times = find(result, name, WINDOWS[0], pdl, "host").values()
            if times:
                text = f"host time of an eager call, {name}, {launch}: at most 8 us"
                found.append(target(text, f"{max(times):.2f} us", max(times) <= 8))
    return found


def _heuristic_targets(result: Result) -> list[dict[str, Any]]:
    ratios: dict[tuple[str, bool], list[float]] = {}
    for row in result.get("sweep", []):
        best = min(us for config, us in row["us"].items() if config != "-1")
        ratios.setdefault((row["kind"], row["pdl"]), []).append(row["us"]["-1"] / best)
    return [
        target(
            f"{kind}, {LAUNCHES[pdl]}: the untuned choice within 5 % of the best configuration on "
            f"average ({len(values)} points)",
            f"{geomean(values) - 1:.1%}, at most {max(values) - 1:.1%}",
            geomean(values) <= 1.05,
        )
        for (kind, pdl), values in ratios.items()
    ]


def sweep_table(rows: list[dict[str, Any]], copies: dict[tuple, float]) -> str:
    """For each point the chosen and the best configuration, and both against the copy."""
    lines = []
    for row in rows:
        times = {int(config): us for config, us in row["us"].items()}
        own = times.pop(-1)
        best = min(times, key=times.__getitem__)
        copy = copies.get((row["d_inner"], row["c"], row["k"], row["kind"], row["pdl"]))
        over = (lambda us, copy=copy: f" ({us / copy:.2f})") if copy else (lambda us: "")
        lines.append(
            f"{row['kind']:<17}{LAUNCHES[row['pdl']]:<17} C {row['c']:2} K {row['k']:2} copy "
            f"{copy or math.nan:6.2f} heuristic {own:6.2f}{over(own)} best "
            f"{times[best]:6.2f}{over(times[best])} config {best}"
        )
    return "\n".join(lines)
