"""What is wrong with which arguments: the rules of the validation, each with calls that break it.

Every check of csrc/params.c and csrc/commit_params.c has a row: how to build the call, and the
sentence that it must fail with. wrong_input.py has the rules about values and makes the page for
users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from cases import Case
from small_calls import (
    BF16,
    F16,
    F32,
    I32,
    TREE,
    D,
    K,
    N,
    W,
    batched,
    bias_in_state,
    commit,
    commit_in_pool,
    input_and_output_shared,
    input_in_state,
    int32,
    layers_shared,
    new,
    packed_rows,
    ragged,
    single,
    state_and_snapshots_shared,
    stateless,
    twice,
    update,
    view,
    weight_in_state,
    with_last,
)  # fmt: skip


class Rule(NamedTuple):
    """A rule in the words of the documentation, and calls that break it."""

    title: str
    text: str
    # the call, and the sentence that it fails with, whole or up to "…"
    rows: list[tuple[Callable[[], Case], str]]


# fmt: off

SHAPES = Rule(
    "Shapes",
    (
        "Every tensor has the dimensions and sizes that `new_input` and `weight` set: D "
        "channels, K positions, `n_seq` sequences. Without an index tensor a pool has at "
        "least a slot, and the snapshots at least a row, for each sequence."
    ),
    [
        (lambda: batched(new_input=new(N, D, dtype=BF16)),
         "new_input must be [n_seq, K, D] with 3 dimensions, but has 2"),
        (lambda: batched(new_input=new(1, N, K, D, 1, dtype=BF16)),
         "new_input must be [n_seq, K, D] with 3 dimensions, but has 5"),
        (lambda: batched(weight=new(D + 1, W, dtype=BF16)),
         "weight must be [D, W] = [64, any], but is [65, 4]"),
        (lambda: batched(weight=new(D, 1, W, dtype=BF16)),
         "weight must be [D, W] with 2 dimensions, but has 3"),
        (lambda: batched(output=new(N, K, D - 1, dtype=BF16)),
         "output must be [n_seq, K, D] = [3, 4, 64], but is [3, 4, 63]"),
        (lambda: batched(output=new(N, K + 1, D, dtype=BF16)),
         "output must be [n_seq, K, D] = [3, 4, 64], but is [3, 5, 64]"),
        (lambda: batched(bias=new(D + 1, dtype=BF16)), "bias must be [D] = [64], but is [65]"),
        (lambda: batched(bias=np.array(1, F32)), "bias must be [D] with 1 dimension, but has 0"),
        (lambda: batched(conv_state=new(N, D + 1, W)),
         "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [3, 65, 4]"),
        (lambda: batched(conv_state=new(D, W)),
         "conv_state must be [n_slots, D, S] with 3 dimensions, but has 2"),
        (lambda: batched(conv_state=new(N - 1, D, W)),
         "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [2, 64, 4]"),
        (lambda: ragged(new_input=new(N, K, D, dtype=BF16)),
         "new_input must be [total, D] with 2 dimensions, but has 3"),
        (lambda: ragged(output=new(8, D, dtype=BF16)),
         "output must be [total, D] = [7, 64], but is [8, 64]"),
        (lambda: ragged(cu_seqlens=int32(0, 4, 4, 6, 7)),
         "conv_state must be [n_slots, D, S] = [>=4, 64, any], but is [3, 64, 4]"),
        (lambda: single(new_input=new(1, K, D, dtype=BF16)),
         "new_input must be [K, D] with 2 dimensions, but has 3"),
        (lambda: single(output=new(K, D + 1, dtype=BF16)),
         "output must be [K, D] = [4, 64], but is [4, 65]"),
        (lambda: single(conv_state=new(1, D, W)),
         "conv_state must be [D, S] with 2 dimensions, but has 3"),
        (lambda: single(conv_state=new(D - 1, W)),
         "conv_state must be [D, S] = [64, any], but is [63, 4]"),
        (lambda: update(new_input=new(N, 1, D, dtype=BF16)),
         "new_input must be [n_seq, D] with 2 dimensions, but has 3"),
        (lambda: update(output=new(N + 1, D, dtype=BF16)),
         "output must be [n_seq, D] = [3, 64], but is [4, 64]"),
        (lambda: update(conv_state=new(N - 1, D, W)),
         "conv_state must be [n_slots, D, S] = [>=3, 64, any], but is [2, 64, 4]"),
    ],
)

WIDTHS = Rule(
    "Widths",
    (
        "W, the width of the convolution, is 2 to 8. S, the columns of a window, is W or "
        "W - 1."
    ),
    [
        (lambda: batched(weight=new(D, 1, dtype=BF16)),
         "weight must be [D, W] with W from 2 to 8, but its W is 1"),
        (lambda: batched(weight=new(D, 9, dtype=BF16)),
         "weight must be [D, W] with W from 2 to 8, but its W is 9"),
        (lambda: batched(conv_state=new(N, D, W + 1)),
         "conv_state must be [n_slots, D, S] with S = W or W - 1 = 4 or 3, but its S is "
         "5"),
        (lambda: batched(conv_state=new(N, D, W - 2)),
         "conv_state must be [n_slots, D, S] with S = W or W - 1 = 4 or 3, but its S is "
         "2"),
        (lambda: single(conv_state=new(D, W + 1)),
         "conv_state must be [D, S] with S = W or W - 1 = 4 or 3, but its S is 5"),
    ],
)

PRESENCE = Rule(
    "Presence",
    (
        "What points into a tensor goes with that tensor. `conv_state` may be absent only"
        " where a history and `num_accepted_tokens` stand for it."
    ),
    [
        (lambda: batched(conv_state=None),
         "conv_state must be given unless conv_state_inter is a history and "
         "num_accepted_tokens is given, but is absent"),
        (lambda: stateless(num_accepted_tokens=None),
         "conv_state must be given unless conv_state_inter is a history and "
         "num_accepted_tokens is given, but is absent"),
        (lambda: stateless(conv_state_inter=new(N, K, D, W)),
         "conv_state must be given unless conv_state_inter is a history and "
         "num_accepted_tokens is given, but is absent"),
        (lambda: stateless(conv_state_indices=int32(0, 1, 2)),
         "conv_state_indices must be absent without conv_state, but is given"),
        (lambda: batched(conv_state_inter=None, inter_indices=int32(0, 1, 2)),
         "inter_indices must be absent without conv_state_inter, but is given"),
        (lambda: batched(conv_state_inter=None, num_accepted_tokens=int32(0, 0, 0)),
         "num_accepted_tokens must be absent without conv_state_inter, but is given"),
        (lambda: batched(conv_state_inter=new(N, W - 1 + K, D), parent_index=TREE),
         "parent_index must be absent where conv_state_inter is a history (a tree needs "
         "windows), but is given"),
        (lambda: ragged(conv_state_inter=None),
         "max_num_tokens must be given with cu_seqlens where there is no "
         "conv_state_inter, but is absent"),
        (lambda: batched(max_num_tokens=K),
         "max_num_tokens must be absent without cu_seqlens, but is 4"),
    ],
)

SNAPSHOTS = Rule(
    "Snapshots",
    (
        "`conv_state_inter` is windows with four dimensions or a history with three, and "
        "holds at least the K positions of the call."
    ),
    [
        (lambda: stateless(conv_state_inter=new(N, W - 3 + K, D)),
         "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=6, 64], but is [3, 5, "
         "64]"),
        (lambda: batched(conv_state_inter=new(N, D)),
         "conv_state_inter must be windows [n_rows, >=K, D, S] or a history [n_rows, "
         ">=S-1+K, D], but has 2 dimensions"),
        (lambda: batched(conv_state_inter=new(N, K - 1, D, W)),
         "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [3, "
         "3, 64, 4]"),
        (lambda: batched(conv_state_inter=new(N, K, D, W - 1)),
         "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [3, "
         "4, 64, 3]"),
        (lambda: batched(conv_state_inter=new(N - 1, K, D, W)),
         "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, >=4, 64, 4], but is [2, "
         "4, 64, 4]"),
        (lambda: batched(conv_state_inter=new(N, W - 2 + K, D)),
         "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=7, 64], but is [3, 6, "
         "64]"),
        (lambda: ragged(conv_state_inter=new(N - 1, K, D, W)),
         "conv_state_inter must be [n_rows, >=K, D, S] = [>=3, any, 64, 4], but is [2, "
         "4, 64, 4]"),
        (lambda: ragged(conv_state_inter=new(N, W - 2, D)),
         "conv_state_inter must be [n_rows, >=S-1+K, D] = [>=3, >=3, 64], but is [3, 2, "
         "64]"),
        (lambda: single(conv_state_inter=new(1, K, D, W)),
         "conv_state_inter must be windows [>=K, D, S] or a history [>=S-1+K, D], but "
         "has 4 dimensions"),
        (lambda: single(conv_state_inter=new(K - 1, D, W)),
         "conv_state_inter must be [>=K, D, S] = [>=4, 64, 4], but is [3, 64, 4]"),
        (lambda: single(conv_state_inter=new(W - 2 + K, D)),
         "conv_state_inter must be [>=S-1+K, D] = [>=7, 64], but is [6, 64]"),
    ],
)

RAGGED = Rule(
    "Ragged batches",
    (
        "`cu_seqlens` has an entry more than there are sequences. `max_num_tokens` goes "
        "with it, is not negative and not more than the snapshots hold, and must be given"
        " where there are none."
    ),
    [
        (lambda: ragged(cu_seqlens=int32()), "cu_seqlens must be [n_seq + 1] = [>=1], but is [0]"),
        (lambda: ragged(max_num_tokens=K + 1),
         "max_num_tokens must be at most 4, the positions that conv_state_inter holds, "
         "but is 5"),
        (lambda: ragged(max_num_tokens=-1), "max_num_tokens is -1, but it must not be negative"),
    ],
)

INDEX_TENSORS = Rule(
    "Index tensors",
    "They have one entry for each sequence.",
    [
        (lambda: batched(conv_state_indices=int32(0, 1)),
         "conv_state_indices must be [n_seq] = [3], but is [2]"),
        (lambda: batched(inter_indices=int32(0, 1, 2, 3)),
         "inter_indices must be [n_seq] = [3], but is [4]"),
        (lambda: batched(num_accepted_tokens=new(N, 1, dtype=I32)),
         "num_accepted_tokens must be [n_seq] with 1 dimension, but has 2"),
        (lambda: single(num_accepted_tokens=int32(0, 0)),
         "num_accepted_tokens must be [n_seq] = [1], but is [2]"),
        (lambda: update(conv_state_indices=int32(0)),
         "conv_state_indices must be [n_seq] = [3], but is [1]"),
    ],
)

TREES = Rule(
    "Trees",
    (
        "`parent_index` has an entry for each position of each sequence. A tree needs "
        "windows."
    ),
    [
        (lambda: batched(parent_index=TREE[:, 1:]),
         "parent_index must be [n_seq, K] = [3, 4], but is [3, 3]"),
        (lambda: batched(parent_index=TREE[0]),
         "parent_index must be [n_seq, K] with 2 dimensions, but has 1"),
        (lambda: ragged(parent_index=TREE[:, :3]),
         "parent_index must be [n_seq, max_num_tokens] = [3, 4], but is [3, 3]"),
        (lambda: ragged(parent_index=TREE, max_num_tokens=3),
         "parent_index must be [n_seq, max_num_tokens] = [3, 3], but is [3, 4]"),
        (lambda: single(parent_index=TREE), "parent_index must be [K] with 1 dimension, but has 2"),
        (lambda: single(parent_index=TREE[0, 1:]), "parent_index must be [K] = [4], but is [3]"),
    ],
)

LAYERS = Rule(
    "Layers of a commit",
    (
        "`conv_states` and `snapshots` have one entry each a layer, all of one shape, "
        "dtype and strides, with S from 1 to 8."
    ),
    [
        (lambda: commit(num_accepted=new(N, 1, dtype=I32)),
         "num_accepted must be [n_seq] with 1 dimension, but has 2"),
        (lambda: commit(num_accepted=int32(1, 1, 1, 1)),
         "conv_states[0] must be [n_slots, D, S] = [>=4, any, any], but is [3, 64, 4]"),
        (lambda: commit(conv_states=[new(N, D)] * 3),
         "conv_states[0] must be [n_slots, D, S] with 3 dimensions, but has 2"),
        (lambda: commit(conv_states=[new(N, D, 9) for _ in range(3)]),
         "conv_states[0] must be [n_slots, D, S] with S from 1 to 8, but its S is 9"),
        (lambda: commit(conv_states=with_last(3, new(N, D, W - 1))),
         "conv_states[2] must be [n_slots, D, S] = [3, 64, 4], but is [3, 64, 3]"),
        (lambda: commit(conv_states=with_last(3, new(N, W, D).swapaxes(1, 2))),
         "conv_states[2] must have the strides of conv_states[0], but has others"),
        (lambda: commit(snapshots=[new(N, D)] * 3),
         "snapshots[0] must be windows [n_rows, tokens, D, S] or a history [n_rows, "
         ">=S-1, D], but has 2 dimensions"),
        (lambda: commit(snapshots=[new(N, K, D, W - 1)] * 3),
         "snapshots[0] must be [n_rows, tokens, D, S] = [>=3, any, 64, 4], but is [3, 4,"
         " 64, 3]"),
        (lambda: commit(snapshots=[new(N - 1, K, D, W)] * 3),
         "snapshots[0] must be [n_rows, tokens, D, S] = [>=3, any, 64, 4], but is [2, 4,"
         " 64, 4]"),
        (lambda: commit(snapshots=[new(N, W - 2, D)] * 3),
         "snapshots[0] must be [n_rows, >=S-1, D] = [>=3, >=3, 64], but is [3, 2, 64]"),
        (lambda: commit(snapshots=[new(N, K, D, W), new(N, K, D, W), new(N, K + 1, D, W)]),
         "snapshots[2] must be [n_rows, tokens, D, S] = [3, 4, 64, 4], but is [3, 5, 64,"
         " 4]"),
        (lambda: commit(conv_state_indices=int32(0, 1)),
         "conv_state_indices must be [n_seq] = [3], but is [2]"),
        (lambda: commit(inter_indices=int32(0, 1)),
         "inter_indices must be [n_seq] = [3], but is [2]"),
    ],
)

DTYPES = Rule(
    "Dtypes",
    (
        "`new_input` and `conv_state` are float32, bfloat16 or float16; `weight`, `bias` "
        "and `output` are of the input's dtype or float32; the snapshots are of the "
        "state's dtype; index tensors are int32."
    ),
    [
        (lambda: batched(new_input=new(N, K, D, dtype=np.float64)),
         "new_input must be float32 or bfloat16 or float16, but is float64"),
        (lambda: batched(new_input=new(N, K, D, dtype=np.int8)),
         "new_input must be float32 or bfloat16 or float16, but is of another dtype"),
        (lambda: batched(weight=new(D, W, dtype=F16)),
         "weight must be float32 or bfloat16, but is float16"),
        (lambda: batched(output=new(N, K, D, dtype=F16)),
         "output must be float32 or bfloat16, but is float16"),
        (lambda: batched(new_input=new(N, K, D)), "output must be float32, but is bfloat16"),
        (lambda: batched(bias=new(D, dtype=F16)),
         "bias must be float32 or bfloat16, but is float16"),
        (lambda: batched(conv_state=new(N, D, W, dtype=I32)),
         "conv_state must be float32 or bfloat16 or float16, but is int32"),
        (lambda: batched(conv_state_inter=new(N, K, D, W, dtype=BF16)),
         "conv_state_inter must be float32, but is bfloat16"),
        (lambda: stateless(conv_state_inter=new(N, W - 2 + K, D, dtype=np.float64)),
         "conv_state_inter must be float32 or bfloat16 or float16, but is float64"),
        (lambda: ragged(cu_seqlens=new(N + 1, dtype=np.int64)),
         "cu_seqlens must be int32, but is int64"),
        (lambda: batched(conv_state_indices=np.arange(N)),
         "conv_state_indices must be int32, but is int64"),
        (lambda: batched(inter_indices=np.arange(N)), "inter_indices must be int32, but is int64"),
        (lambda: batched(num_accepted_tokens=new(N)),
         "num_accepted_tokens must be int32, but is float32"),
        (lambda: batched(parent_index=TREE.astype(np.int64)),
         "parent_index must be int32, but is int64"),
        (lambda: update(conv_state=new(N, D, W, dtype=np.float64)),
         "conv_state must be float32 or bfloat16 or float16, but is float64"),
        (lambda: commit(num_accepted=np.ones(N, np.int64)),
         "num_accepted must be int32, but is int64"),
        (lambda: commit(conv_states=with_last(3, new(N, D, W, dtype=F16))),
         "conv_states[2] must be float32, but is float16"),
        (lambda: commit(snapshots=[new(N, K, D, W, dtype=BF16)] * 3),
         "snapshots[0] must be float32, but is bfloat16"),
    ],
)

HEADS = Rule(
    "Heads",
    "`head_dim` is 1 or more and divides `qk_channels`, which is between 0 and D.",
    [
        (lambda: batched(qk_channels=-16), "qk_channels must be between 0 and D = 64, but is -16"),
        (lambda: batched(qk_channels=80), "qk_channels must be between 0 and D = 64, but is 80"),
        (lambda: batched(head_dim=0), "head_dim must be 1 or more, but is 0"),
        (lambda: batched(head_dim=0, qk_channels=0), "head_dim must be 1 or more, but is 0"),
        (lambda: batched(head_dim=-16), "head_dim must be 1 or more, but is -16"),
        (lambda: batched(head_dim=24),
         "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
        (lambda: batched(head_dim=64),
         "head_dim must divide qk_channels, but head_dim is 64 and qk_channels is 32"),
        (lambda: single(head_dim=24),
         "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
        (lambda: update(head_dim=24),
         "head_dim must divide qk_channels, but head_dim is 24 and qk_channels is 32"),
    ],
)

EPSILON = Rule(
    "Epsilon",
    "`l2_eps` is not negative and finite as a float32.",
    [
        (lambda: batched(l2_eps=-1e-30),
         "l2_eps must be a float32 that is finite and not negative, but is -1e-30"),
        (lambda: batched(l2_eps=float("nan")),
         "l2_eps must be a float32 that is finite and not negative, but is nan"),
        (lambda: batched(l2_eps=float("inf")),
         "l2_eps must be a float32 that is finite and not negative, but is inf"),
        (lambda: batched(l2_eps=1e39),
         "l2_eps must be a float32 that is finite and not negative, but is 1e+39"),
    ],
)

CHOICES = Rule(
    "Activation and configuration",
    (
        "`activation` is one of two names, `config` one of the launch configurations of "
        "the build or -1."
    ),
    [
        (lambda: batched(activation="relu"),
         'activation is "relu", but it must be "silu" or "none"'),
        (lambda: update(activation="SiLU"),
         'activation is "SiLU", but it must be "silu" or "none"'),
        (lambda: batched(config=-2), "config must be -1 or one of the …"),
        (lambda: single(config=-2), "config must be -1 or one of the …"),
    ],
)

STRIDES = Rule(
    "Strides",
    (
        "The last dimension of `new_input` and `output` has stride 1; every other stride "
        "is free."
    ),
    [
        (lambda: batched(new_input=new(N, K, 2 * D, dtype=BF16)[..., ::2]),
         "new_input must have stride 1 in its last dimension, but has 2"),
        (lambda: batched(output=new(N, D, K, dtype=BF16).swapaxes(1, 2)),
         "output must have stride 1 in its last dimension, but has 4"),
        (lambda: single(new_input=new(D, K, dtype=BF16).T),
         "new_input must have stride 1 in its last dimension, but has 4"),
        (lambda: update(output=new(N, 2 * D, dtype=BF16)[:, ::2]),
         "output must have stride 1 in its last dimension, but has 2"),
        (lambda: batched(new_input=view(new(N, K, 1, dtype=BF16), (N, K, D), (K, 1, 0))),
         "new_input must have stride 1 in its last dimension, but has 0"),
    ],
)

MEMORY = Rule(
    "Shared memory",
    (
        "What is written shares no element with anything else, nor with itself: `output`,"
        " the snapshots, and `conv_state` where the call writes it. Views that interleave"
        " without a common element are fine, and what cannot be decided cheaply is "
        "accepted."
    ),
    [
        (lambda: twice(batched, "new_input", "output"),
         "output must share no memory with new_input, but an element of one is in the "
         "other"),
        (lambda: twice(single, "new_input", "output"),
         "output must share no memory with new_input, but an element of one is in the "
         "other"),
        (lambda: twice(update, "new_input", "output"),
         "output must share no memory with new_input, but an element of one is in the "
         "other"),
        (lambda: batched(**input_and_output_shared(D - 1)),
         "output must share no memory with new_input, but an element of one is in the "
         "other"),
        (lambda: packed_rows(D - 1),
         "output must share no memory with new_input, but an element of one is in the "
         "other"),
        (lambda: batched(**state_and_snapshots_shared(1)),
         "conv_state_inter must share no memory with conv_state, but an element of one "
         "is in the other"),
        (lambda: batched(**state_and_snapshots_shared(0)),
         "conv_state_inter must share no memory with conv_state, but an element of one "
         "is in the other"),
        (lambda: batched(**state_and_snapshots_shared(0), update_state=False),
         "conv_state_inter must share no memory with conv_state, but an element of one "
         "is in the other"),
        (lambda: batched(**state_and_snapshots_shared(0), parent_index=TREE),
         "conv_state_inter must share no memory with conv_state, but an element of one "
         "is in the other"),
        (lambda: input_in_state(),
         "conv_state must share no memory with new_input, but an element of one is in "
         "the other"),
        (lambda: weight_in_state(),
         "conv_state must share no memory with weight, but an element of one is in the "
         "other"),
        (lambda: bias_in_state(),
         "conv_state must share no memory with bias, but an element of one is in the "
         "other"),
        (lambda: batched(output=view(new(K, D, dtype=BF16), (N, K, D), (0, D, 1))),
         "output must not overlap itself, but with shape [3, 4, 64] and strides [0, 64, "
         "1] several of its elements are one"),
        (lambda: batched(output=view(new(N, K * D, dtype=BF16), (N, K, D), (K * D, D - 1, 1))),
         "output must not overlap itself, but with shape [3, 4, 64] and strides [256, "
         "63, 1] several of its elements are one"),
        (lambda: batched(conv_state=view(new(D, W), (N, D, W), (0, W, 1))),
         "conv_state must not overlap itself, but with shape [3, 64, 4] and strides [0, "
         "4, 1] several of its elements are one"),
        (lambda: batched(conv_state=view(new(N, D + W), (N, D, W), (D + W, 1, 1))),
         "conv_state must not overlap itself, but with shape [3, 64, 4] and strides [68,"
         " 1, 1] several of its elements are one"),
        (lambda: single(conv_state=view(new(W), (D, W), (0, 1))),
         "conv_state must not overlap itself, but with shape [64, 4] and strides [0, 1] "
         "several of its elements are one"),
        (lambda: batched(conv_state_inter=view(new(N, K + W, D), (N, K, D, W),
                                           ((K + W) * D, D, 1, D))),
         "conv_state_inter must not overlap itself, but with shape [3, 4, 64, 4] and "
         "strides [512, 64, 1, 64] several of its elements are one"),
        (lambda: commit(conv_states=[new(N, D, W)] * 3),
         "conv_states[0] must share no memory with conv_states[1], but an element of one"
         " is in the other"),
        (lambda: commit(conv_states=layers_shared(D + 1, 3), snapshots=[new(N, K, D + 1, W)] * 3),
         "conv_states[0] must share no memory with conv_states[1], but an element of one"
         " is in the other"),
        (lambda: commit(conv_states=[view(new(D, W), (N, D, W), (0, W, 1))] * 3),
         "conv_states[0] must not overlap itself, but with shape [3, 64, 4] and strides "
         "[0, 4, 1] several of its elements are one"),
        (lambda: commit_in_pool(1),
         "conv_states[0] must share no memory with snapshots[0], but an element of one "
         "is in the other"),
    ],
)

# fmt: on

ARGUMENTS = [
    SHAPES,
    WIDTHS,
    PRESENCE,
    SNAPSHOTS,
    RAGGED,
    INDEX_TENSORS,
    TREES,
    LAYERS,
    DTYPES,
    HEADS,
    EPSILON,
    CHOICES,
    STRIDES,
    MEMORY,
]
