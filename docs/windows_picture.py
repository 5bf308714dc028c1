"""Draws docs/windows.svg: the windows of one channel over one verify step, and the rollback.

    python docs/windows_picture.py        writes the picture beside this file

Inputs are numbered as they came: 1 to 4 are in the state, 5 to 8 are the draft tokens (W = S = 4,
K = 4). Two drafts are accepted.
"""

from pathlib import Path

TAPS, DRAFTS, ACCEPTED = 4, 4, 2
BOX, GAP, LEFT, TOP = 34, 12, 190, 62  # pixels
OLD, NEW, LOST = "#dfe5ec", "#bfe3c8", "#f4cfc9"  # of the past, accepted, rejected
WIDTH = LEFT + (TAPS + DRAFTS) * BOX + 270


def text(x: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{content}</text>'


def box(number: int, row: float) -> str:
    """Input `number` in its column."""
    x, y = LEFT + (number - 1) * BOX, row
    fill = OLD if number <= TAPS else NEW if number <= TAPS + ACCEPTED else LOST
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" fill="{fill}" stroke="#333"/>'
        + text(x + BOX / 2, y + BOX / 2 + 5, str(number), "middle")
    )


def boxes(first: int, last: int, row: float, label: str, note: str) -> str:
    """Inputs first to last in one row, named on the left, explained on the right."""
    middle = row + BOX / 2 + 5
    drawn = [box(number, row) for number in range(first, last + 1)]
    drawn += [text(LEFT - 12, middle, label, "end", "bold")]
    drawn += [text(LEFT + (TAPS + DRAFTS) * BOX + 16, middle, note)]
    return "\n".join(drawn)


def draw() -> str:
    parts = [text(LEFT, TOP - 34, "inputs of one channel, oldest first", weight="bold")]
    parts += [text(LEFT, TOP - 14, "grey: before the step; green: accepted; red: rejected")]
    y: float = TOP
    parts.append(boxes(1, TAPS, y, "state before", "conv_state, S = 4"))
    for t in range(DRAFTS):
        y += BOX + GAP
        newest = TAPS + 1 + t
        note = f"gives the output of token {t}"
        parts.append(boxes(newest - TAPS + 1, newest, y, f"snapshot {t}", note))
    y += BOX + 2.5 * GAP
    newest = TAPS + ACCEPTED
    note = f"num_accepted = {ACCEPTED}: snapshot {ACCEPTED - 1}"
    parts.append(boxes(newest - TAPS + 1, newest, y, "state afterwards", note))
    y += BOX + 2.5 * GAP
    note = "snapshot t is rows t to t + 3"
    parts.append(boxes(2, TAPS + DRAFTS, y, "history", note))
    height = y + BOX + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="15" role="img">\n'
        "<title>Windows of one channel over one verify step</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    Path(__file__).with_name("windows.svg").write_text(draw(), encoding="utf-8")
