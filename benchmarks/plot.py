"""Pictures and tables from what bench_verify.py wrote. Needs matplotlib; the same input gives the
same bytes.

    python benchmarks/plot.py benchmarks/results/h200.json      # beside it: tables.md and *.png
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where it is not run as a script

import report

# A map's file -> the table it shows and how light and dark are spread.
MAPS = {
    "speedup": ("Times as fast as the per-token path (float32 windows)", "log"),
    **{
        f"floor-{kind.replace(' ', '-')}": (
            f"Times the copy of the same bytes, {kind}, plain launch",
            "linear",
        )
        for kind in (*report.WINDOWS, report.HISTORY)
    },
}


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return path


def heat_map(grid: report.Grid, title: str, scale: str, path: Path) -> Path:
    """C down, K across, the figure in every field."""
    from matplotlib.colors import LogNorm, Normalize

    cs, ks = sorted({c for c, _ in grid}), sorted({k for _, k in grid})
    values = [[grid.get((c, k), math.nan) for k in ks] for c in cs]
    figure, axes = _figure(1.6 + 0.55 * len(ks), 1.2 + 0.42 * len(cs))
    low, high = min(grid.values()), max(grid.values())
    norm = LogNorm(low, high) if scale == "log" else Normalize(min(1.0, low), high)
    image = axes.imshow(values, cmap="viridis", norm=norm, aspect="auto")
    middle = math.sqrt(low * high) if scale == "log" else (min(1.0, low) + high) / 2
    for (c, k), value in grid.items():
        text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
        color = "white" if value < middle else "black"
        axes.text(ks.index(k), cs.index(c), text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(ks)), map(str, ks))
    axes.set_yticks(range(len(cs)), map(str, cs))
    axes.set_xlabel("K, draft tokens of a sequence")
    axes.set_ylabel("C, sequences")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image)
    return _save(figure, path)


def roofline(result: report.Result, path: Path) -> Path:
    """Achieved GB/s over the bytes of a call, below the copy ceiling and the copy of each size."""
    figure, axes = _figure(7.5, 4.5)
    for kind in (*report.WINDOWS, report.HISTORY):
        for name, marker in ((report.FUSED, "o"), (report.COPY, "_")):
            rows = [
                row
                for row in result["rows"]
                if (row["contender"], row["kind"], row["pdl"]) == (name, kind, False)
                and "graph_cold" in row
                and row["d_inner"] == result["d_inner"]
            ]
            if not rows:
                continue
            rows.sort(key=lambda row: row["required_bytes"])
            axes.plot(
                [row["required_bytes"] / 1e6 for row in rows],
                [row["required_bytes"] / row["graph_cold"]["median_us"] / 1e3 for row in rows],
                marker,
                markersize=4,
                label=f"{name}, {kind}",
            )
    axes.axhline(result["ceiling_gbps"], color="black", linewidth=1, label="copy ceiling")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MB that a call must move")
    axes.set_ylabel("GB/s")
    axes.set_title(f"{result['machine']['device']}, D {result['d_inner']}, cold", fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    return _save(figure, path)


def draw(result: report.Result, folder: Path) -> list[Path]:
    """Writes all that the result allows; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    grids = report.grids(result)
    found = [
        heat_map(grids[title], title, scale, folder / f"{name}.png")
        for name, (title, scale) in MAPS.items()
        if title in grids
    ]
    found.append(roofline(result, folder / "roofline.png"))
    tables = folder / "tables.md"
    tables.write_text(report.markdown(result), encoding="utf-8")
    return [*found, tables]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--to", type=Path, help="folder (default: that of the JSON)")
    args = parser.parse_args(arguments)
    result = report.read(args.json)
    for path in draw(result, args.to or args.json.parent):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
