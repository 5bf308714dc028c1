"""Every rule about wrong input, and the page of the documentation that lists them.

    python tests/wrong_input.py        writes docs/wrong-input.md

ARGUMENTS (wrong_arguments.py) are rules that can be told from the arguments alone; here are those
about the values of index tensors, about devices, and about arrays of NumPy.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from cases import Case
from small_calls import (
    BF16,
    F32,
    TREE,
    D,
    N,
    W,
    batched,
    commit,
    int32,
    new,
    ragged,
    single,
    stateless,
    update,
)
from wrong_arguments import ARGUMENTS, Rule

PAGE = Path(__file__).resolve().parent.parent / "docs" / "wrong-input.md"
LEAST, MOST = -(2**31), 2**31 - 1


def tree(token: int, parent: int) -> Case:
    """Sequence 1 has a wrong parent at `token`."""
    parents = TREE.copy()
    parents[1, token] = parent
    return batched(parent_index=parents)


# fmt: off

SLOTS = Rule(
    "Slots",
    "An entry of `conv_state_indices` is a slot of the pool, or padding: negative or "
    "`pad_slot_id`. Two sequences that are written have two slots.",
    [
        (lambda: batched(conv_state_indices=int32(0, 1, N)),
         "conv_state_indices must be a slot of conv_state or padding, but is not at sequence 2"),
        (lambda: batched(conv_state_indices=int32(MOST, 1, -1)),
         "conv_state_indices must be a slot of conv_state or padding, but is not at sequence 0"),
        (lambda: update(conv_state_indices=int32(0, N, 2)),
         "conv_state_indices must be a slot of conv_state or padding, but is not at sequence 1"),
        (lambda: commit(conv_state_indices=int32(0, N, 2)),
         "conv_state_indices must be a slot of conv_state or padding, but is not at sequence 1"),
        (lambda: batched(conv_state_indices=int32(1, 2, 1)),
         "conv_state_indices must give each sequence that is written a slot of its own, but is not "
         "at sequence 2"),
        (lambda: commit(conv_state_indices=int32(1, 1, 2)),
         "conv_state_indices must give each sequence that is written a slot of its own, but is not "
         "at sequence 1"),
    ],
)

ROWS = Rule(
    "Rows",
    "An entry of `inter_indices` is a row of the snapshots. Two sequences have two rows. Without "
    "`conv_state` a negative one, or `pad_slot_id`, is padding.",
    [
        (lambda: batched(inter_indices=int32(0, -1, 2)),
         "inter_indices must be a row of the snapshots, but is not at sequence 1"),
        (lambda: batched(inter_indices=int32(N, 1, 2)),
         "inter_indices must be a row of the snapshots, but is not at sequence 0"),
        (lambda: stateless(inter_indices=int32(0, -1, MOST)),
         "inter_indices must be a row of the snapshots, but is not at sequence 2"),
        (lambda: commit(inter_indices=int32(LEAST, 1, 2)),
         "inter_indices must be a row of the snapshots, but is not at sequence 0"),
        (lambda: batched(inter_indices=int32(0, 2, 2)),
         "inter_indices must give each sequence a row of conv_state_inter of its own, but is not "
         "at sequence 2"),
    ],
)

TOO_MANY = (
    "num_accepted_tokens (of a commit: num_accepted) must be at least 0 (1 without conv_state) and "
    "at most the snapshots that a row holds"
)
ACCEPTED = Rule(
    "Accepted tokens",
    "`num_accepted_tokens`, and `num_accepted` of a commit, is 0 to the snapshots that a row "
    "holds; 1 or more where there is no `conv_state` to start from.",
    [
        (lambda: batched(num_accepted_tokens=int32(0, 5, 1)),
         f"{TOO_MANY}, but is not at sequence 1"),
        (lambda: batched(num_accepted_tokens=int32(0, 4, LEAST)),
         f"{TOO_MANY}, but is not at sequence 2"),
        (lambda: stateless(num_accepted_tokens=int32(0, 1, 1)),
         f"{TOO_MANY}, but is not at sequence 0"),
        (lambda: single(num_accepted_tokens=int32(-1)),
         f"{TOO_MANY}, but is not at sequence 0"),
        (lambda: commit(num_accepted=int32(0, 4, 5)),
         f"{TOO_MANY}, but is not at sequence 2"),
    ],
)

LENGTHS = Rule(
    "Lengths",
    "`cu_seqlens` starts with 0, never decreases, ends within the rows of `new_input`, and gives "
    "no sequence more than `max_num_tokens` rows.",
    [(lambda bounds=bounds: ragged(cu_seqlens=int32(*bounds)),
      "cu_seqlens must start with 0, never decrease, stay within the rows of new_input and give a "
      f"sequence at most max_num_tokens rows, but is not at sequence {seq}")
     for bounds, seq in (
         ((1, 4, 4, 7), 0), ((-1, 3, 4, 7), 0), ((0, 4, 3, 7), 1), ((0, 4, 4, 8), 2),
         ((0, 5, 5, 7), 0), ((0, 2, LEAST, 7), 1), ((0, 4, MOST, 7), 1),
     )],
)

PARENTS = Rule(
    "Parents",
    "An entry of `parent_index` is an earlier position of its sequence, or -1, the root.",
    [(lambda token=token, parent=parent: tree(token, parent),
      "parent_index must be an earlier position of the sequence, or -1, but is not at sequence 1")
     for token, parent in ((2, 2), (2, 3), (0, 0), (2, -2), (3, MOST), (1, LEAST))],
)

ONE = ": all tensors must be on one device"
DEVICES = Rule(
    "Devices",
    "All tensors are on one device.",
    [
        (batched, f"weight is on meta, but new_input is on cpu{ONE}"),
        (batched, f"output is on meta, but new_input is on cpu{ONE}"),
        (lambda: ragged(bias=new(D)),
         f"cu_seqlens is on meta, but new_input is on cpu{ONE}"),
        (lambda: single(parent_index=TREE[0]),
         f"parent_index is on meta, but new_input is on cpu{ONE}"),
        (update, f"conv_state is on meta, but new_input is on cpu{ONE}"),
        (commit, f"snapshots is on meta, but num_accepted is on cpu{ONE}"),
    ],
)
"""In PyTorch: the argument that the sentence names is on the device meta."""


def read_only() -> Case:
    case = batched()
    case.args["output"].flags.writeable = False
    return case


NUMPY = Rule(
    "NumPy arrays",
    "What is written is writeable, elements lie at multiples of their size, and have the byte "
    "order of the machine. (Tensors of PyTorch are like that.)",
    [
        (read_only, "output is read-only, but it must be writeable"),
        (lambda: batched(conv_state=np.ndarray((N, D, W), F32, bytearray(4 * N * D * W + 2), 2)),
         "conv_state is not aligned to its item size of 4 bytes"),
        (lambda: batched(weight=np.zeros((D, W), [("a", BF16), ("b", "u1")])["a"]),
         "weight has a stride of 3 bytes, but it must be a multiple of its item size of 2 bytes"),
        (lambda: batched(weight=np.zeros((D, W), ">f4")),
         "weight must be float32 or bfloat16, but is of another dtype"),
    ],
)

# fmt: on

INDEX_VALUES = [SLOTS, ROWS, ACCEPTED, LENGTHS, PARENTS]

HEAD = """\
<!-- written by tests/wrong_input.py -->
# Wrong input

What can be told from the arguments raises before anything is written, with one sentence that names
the argument, what it must be and what it is: from `gdn_verify.verify_conv` a
`gdn_verify.GdnVerifyError`, which is a `ValueError` and a `RuntimeError`; from `torch.ops.gdn.*` a
`RuntimeError`; from `gdn_verify._core`, the core on NumPy arrays, a `ValueError`; from C the status
`GDN_VERIFY_INVALID` with the sentence in `err.text`. `gdn_verify.supported` returns the sentence of
a call without making it.

Below stands every rule, and under it sentences as they are raised: those of the calls that the
tests make, with C = 3 sequences, K = 4 positions, D = 64 channels and W = 4 where nothing else is
said.
"""

INDEX_HEAD = """\
## Index values

The values of index tensors lie on the device. The CPU path looks at all of them first and raises,
with nothing written (from `gdn_verify._core` an `IndexError`, from C `GDN_VERIFY_BAD_INDEX`). The
CUDA path does not wait for them: whatever they hold, it reads and writes nothing outside of the
tensors, and a sequence with a wrong value is padding (its rows of the output become zero, and its
state and snapshots are left alone). Which of two sequences wins that share a slot or a row is open
there. With the environment variable `GDN_VERIFY_CHECK=1`, read when the library is loaded, it waits
and raises as the CPU path does, except while a graph is captured.
"""


def section(rule: Rule, level: str) -> str:
    sentences = dict.fromkeys(text for _, text in rule.rows)
    text = textwrap.fill(rule.text, 100, break_on_hyphens=False)
    return "\n".join([f"{level} {rule.title}\n", text, "\n```text", *sentences, "```\n"])


def page() -> str:
    rules = [section(rule, "##") for rule in [*ARGUMENTS, DEVICES, NUMPY]]
    values = [section(rule, "###") for rule in INDEX_VALUES]
    return "\n".join([HEAD, *rules, INDEX_HEAD, *values])


if __name__ == "__main__":
    PAGE.write_text(page())
