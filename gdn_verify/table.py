"""What `python -m gdn_verify check` shows: progress, the table, the real-input lines."""

from __future__ import annotations

from typing import Any, TextIO

from .models import Shape

_COLUMNS = "  C   K   output   snapshots  state     operations   per-token us    fused us    ratio"


class Progress:
    """One line that is updated on a terminal; a few plain lines elsewhere."""

    def __init__(self, total: int, label: str, stream: TextIO) -> None:
        self.total, self.label, self.stream = total, label, stream
        self.live = stream.isatty()
        self.done = 0

    def step(self, text: str) -> None:
        self.done += 1
        line = f"{self.label}: {self.done} of {self.total}, {text}"
        if self.live:
            clear = "\r\033[K"
            self.stream.write(clear + (line if self.done < self.total else ""))
        elif self.done == self.total or self.done % -(-self.total // 4) == 0:
            self.stream.write(line + "\n")
        self.stream.flush()


def show(
    model: str,
    shape: Shape,
    device: str,
    kind: str,
    rows: list[dict[str, Any]],
    real: list[dict[str, Any]],
    out: TextIO,
) -> None:
    """Prints everything about one device."""
    print(f"\n{model} on {device}", file=out)
    print(
        f"D {shape.d_inner}, q and k {shape.qk_channels}, head_dim {shape.head_dim}, "
        f"W {shape.d_conv}; float32 state and windows, bfloat16 rows; bytes against the per-token "
        "path and the reference\n",
        file=out,
    )
    print(_COLUMNS, file=out)
    for row in rows:
        print(_row(row), file=out)
        for difference in row["differences"]:
            print(f"          {difference}", file=out)
    equal = sum(not row["differences"] for row in rows)
    print(f"\n{equal} of {len(rows)} equal in every byte of output, snapshots and state", file=out)
    print(f"times: {_timed(kind, rows)}", file=out)
    for result in real:
        print(_real_input(result), file=out)
    out.flush()


def _timed(kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "cpu":
        return "median of single calls by the clock"
    cold = sum(row["cold"] for row in rows)
    where = "memory" if cold == len(rows) else f"memory in {cold} rows, from the L2 in the others"
    return f"median over replays of a CUDA graph, both paths; the data come from {where}"


def _row(row: dict[str, Any]) -> str:
    output, snapshots, state = (
        "equal" if row[f"{part}_equal"] else "DIFFERS" for part in ("output", "snapshots", "state")
    )
    return (
        f"{row['n_seq']:>3} {row['num_tokens']:>3}   {output:<9}{snapshots:<11}{state:<11}"
        f"{row['operations_replaced']:>4} -> 1 {row['per_token_us']:>14.1f} "
        f"{row['fused_us']:>11.2f} {row['ratio']:>8.1f}"
    )


def _real_input(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"real input: skipped, {result['skipped']}"
    windows = "equal" if result["windows_equal"] and result["state_equal"] else "DIFFER"
    verdict = "ok" if result["ok"] else "FAILED"
    return (
        f"real input: Qwen3-Next layer of {result['source']}, {result['dtype']}, D "
        f"{result['d_inner']}, {result['n_seq']} sequences of {result['num_tokens']} tokens: "
        f"windows and state {windows}; output off by at most {result['largest_difference']:.2g}, "
        f"{result['largest_share']:.2f} of what the layer's own rounding allows: {verdict}"
    )
