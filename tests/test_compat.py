"""The drop-ins against plain statements of what causal-conv1d, vLLM and SGLang document.

Outputs agree within rounding, states and windows exactly. Chains of rolled back steps equal the
per-token path of this project byte for byte.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gdn_verify
from gdn_verify import compat

SGLANG, VLLM = compat.causal_conv1d_update_sglang, compat.causal_conv1d_update_vllm
D, W, QK, HEAD = 80, 4, 64, 32
NORM = {"qk_channels": QK, "head_dim": HEAD}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def weights(device: str, dtype: torch.dtype, width: int = W) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(D, width, device=device).to(dtype),
        torch.randn(D, device=device).to(dtype),
    )


def channel_last(device: str, dtype: torch.dtype, n: int, d: int, columns: int) -> Tensor:
    """(n, d, columns) whose channels have stride 1, a part of longer rows."""
    rows = torch.randn(n, columns, d + 16, device=device).to(dtype)
    return rows[..., :d].transpose(1, 2)


def convolve(
    past: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, norm: bool
) -> Tensor:
    """What follows the W-1 inputs `past` (dim, W-1) when x (dim, K) comes, in float64."""
    inputs = torch.cat([past, x], 1).double()
    y = (inputs.unfold(1, weight.shape[1], 1) * weight.double()[:, None]).sum(-1)
    if bias is not None:
        y = y + bias.double()[:, None]
    if silu:
        y = torch.nn.functional.silu(y)
    if norm:
        heads = y[:QK].unflatten(0, (-1, HEAD))
        heads = heads / (heads.square().sum(1, keepdim=True) + 1e-6).sqrt()
        y = torch.cat([heads.flatten(0, 1), y[QK:]])
    return y


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype != torch.float64
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance / 8)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bytes, layout aside."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, e = actual.reshape(-1), expected.reshape(-1)
    return torch.equal(a.view(torch.uint8), e.view(torch.uint8))


# ---- causal-conv1d -------------------------------------------------------------------------------


def causal_conv1d_statement(x, state, weight, bias, silu, indices, norm):
    """The state is the last inputs; the convolution sees the newest W-1; negative is padding."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for i, slot in enumerate(range(len(x)) if indices is None else indices.tolist()):
        if slot < 0:
            continue
        out[i] = convolve(state[slot][:, 1 - W :], x[i], weight, bias, silu, norm)
        inputs = torch.cat([state[slot], x[i].to(state.dtype)], 1)
        state[slot] = inputs[:, inputs.shape[1] - state.shape[2] :]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [W - 1, W])
@pytest.mark.parametrize("seqlen", [None, 1, 3, 6])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_causal_conv1d(device, dtype, columns, seqlen, norm, activation):
    weight, bias = weights(device, dtype)
    x = channel_last(device, dtype, 4, D, seqlen or 1)
    for indices in (None, ints(device, 5, -1, 0, 2)):
        state = torch.randn(6, D, columns, device=device).to(dtype)  # channel-major, as theirs
        expected = state.clone()
        before = x.clone()
        out = compat.causal_conv1d_update(
            x if seqlen else x[..., 0], state, weight, bias, activation, None, indices,
            **(NORM if norm else {}),
        )  # fmt: skip
        wanted = causal_conv1d_statement(x, expected, weight, bias, bool(activation), indices, norm)
        assert out.shape == (x.shape if seqlen else x.shape[:2])
        assert_close(out, wanted if seqlen else wanted[..., 0])
        assert same(state, expected)
        assert same(x, before)


def test_causal_conv1d_snapshots(device):
    """The added arguments are those of verify_conv."""
    weight, bias = weights(device, torch.bfloat16)
    x = channel_last(device, torch.bfloat16, 3, D, 5)
    state = torch.randn(3, D, W, device=device)
    before = state.clone()
    windows = torch.zeros(3, 5, D, W, device=device)
    out = compat.causal_conv1d_update(
        x, state, weight, bias, "silu", **NORM, conv_state_inter=windows, update_state=False
    )
    assert same(state, before)
    output, snapshots = gdn_verify.verify_conv(
        state, x.transpose(1, 2), weight, bias=bias, **NORM, snapshots="windows"
    )
    assert same(out, output.transpose(1, 2))
    assert same(windows, snapshots)


# ---- vLLM ----------------------------------------------------------------------------------------


def vllm_statement(xs, state, weight, bias, silu, slots, accepted, null, norm):
    """xs: the tokens (dim, K) of each sequence. Updates state, returns the outputs, None for
    sequences that are not processed.

    The window is the first W-1 columns, or with accepted counts those from accepted - 1 on. After
    it, the state holds the window of the call, or the window without its oldest and all inputs.
    """
    outs = []
    for i, (x, slot) in enumerate(zip(xs, slots.tolist(), strict=True)):
        if slot == null or x.shape[1] == 0:
            outs.append(None)
            continue
        start = 0 if accepted is None else int(accepted[i]) - 1
        window = state[slot][:, start : start + W - 1].clone()
        outs.append(convolve(window, x, weight, bias, silu, norm))
        inputs = torch.cat([window, x.to(state.dtype)], 1)
        kept = inputs[:, x.shape[1] :] if accepted is None else inputs[:, 1:]
        state[slot, :, : kept.shape[1]] = kept
    return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen", [None, 1, 4])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_vllm(device, dtype, seqlen, speculative, norm):
    weight, bias = weights(device, dtype)
    x = channel_last(device, dtype, 4, D, seqlen or 1)
    state = channel_last(device, dtype, 7, D, W - 1 + 3)  # three speculative tokens
    expected = state.clone()
    slots = ints(device, 5, 0, 1, 3)  # 0 is the null block
    accepted = ints(device, 4, -7, 1, 2) if speculative else None
    out = VLLM(
        x if seqlen else x[..., 0], state, weight, bias, True, slots, accepted, validate_data=True,
        **(NORM if norm else {}),
    )  # fmt: skip
    wanted = vllm_statement(x, expected, weight, bias, True, slots, accepted, 0, norm)
    for i, y in enumerate(wanted):
        row = out[i] if seqlen else out[i][:, None]
        assert_close(row, torch.zeros_like(row).double() if y is None else y)
    assert same(state, expected)


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (2, 0, 4, 1)])
@pytest.mark.parametrize("speculative", [False, True])
def test_vllm_packed(device, lengths, speculative):
    """As its layers call it: the first column of the block table, lists longer than the batch."""
    dtype = torch.bfloat16
    weight, bias = weights(device, dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    x = torch.randn(starts[-1] + 2, D + 8, device=device).to(dtype)[:, :D]  # two rows are nobody's
    state = channel_last(device, dtype, 9, D, W - 1 + 4)
    expected = state.clone()
    table = torch.full((4, 5), 8, dtype=torch.int32, device=device)
    table[:, 0] = ints(device, 2, 7, -1, 4)
    accepted = ints(device, 1, 3, 99, 5, 99, 99)
    out = VLLM(
        x, state, weight, bias, "silu",
        conv_state_indices=table,
        num_accepted_tokens=accepted if speculative else None,
        query_start_loc=ints(device, *starts, starts[-1], starts[-1]),
        max_query_len=5 if speculative else 4,
        pad_slot_id=-1,
        **NORM,
    )  # fmt: skip
    xs = [x[a:b].T for a, b in pairwise(starts)]
    counts = accepted if speculative else None
    wanted = vllm_statement(xs, expected, weight, bias, True, table[:, 0], counts, -1, True)
    for y, (a, b) in zip(wanted, pairwise(starts), strict=True):
        assert_close(out[a:b].T, torch.zeros(D, b - a, device=device).double() if y is None else y)
    assert not out[starts[-1] :].any()
    assert same(state, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_vllm_out(device, packed):
    """The same bits in memory that is given, here a part of longer rows; x keeps its values."""
    weight, bias = weights(device, torch.bfloat16)
    x = channel_last(device, torch.bfloat16, 2, D, 3)
    out = channel_last(device, torch.bfloat16, 2, D, 3)
    options = {"conv_state_indices": ints(device, 1, 2), "num_accepted_tokens": ints(device, 1, 3)}
    if packed:
        x, out = (rows.transpose(1, 2).flatten(0, 1) for rows in (x, out))
        options |= {"query_start_loc": ints(device, 0, 3, 6), "max_query_len": 3}
    state = channel_last(device, torch.bfloat16, 3, D, W - 2 + 3)
    copy, before = state.clone(), x.clone()
    expected = VLLM(x, copy, weight, bias, "silu", **options, **NORM)
    found = VLLM(x, state, weight, bias, "silu", **options, **NORM, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert found.shape == x.shape
    assert same(out, expected)
    assert same(state, copy)
    assert same(x, before)


def test_vllm_older_padding(device):
    weight, _ = weights(device, torch.float32)
    for padding, live in (
        ({}, False),
        ({"pad_slot_id": -1}, True),
        ({"null_block_id": None}, True),
    ):
        state = channel_last(device, torch.float32, 2, D, W - 1)
        before = state.clone()
        x = torch.randn(2, D, device=device)
        out = VLLM(x, state, weight, conv_state_indices=ints(device, 0, -1), **padding)
        assert bool(out[0].any()) == live
        assert not out[1].any()
        assert same(state[0], before[0]) != live
        assert same(state[1], before[1])


@pytest.mark.parametrize("update", [VLLM, SGLANG])
def test_rollback_chain_is_the_per_token_path(device, update):
    """Steps of changing K, each of which keeps a random part of the one before."""
    dtype = torch.bfloat16
    weight, bias = weights(device, dtype)
    most, n, n_slots = 5, 3, 6
    state = channel_last(device, dtype, n_slots, D, W - 2 + most)
    golden = state[..., : W - 1].clone()  # the windows as prefill left them
    slots, accepted = ints(device, 4, 1, 3), ints(device, 1, 1, 1)
    counts = "num_accept_tokens" if update is SGLANG else "num_accepted_tokens"
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        k = most if step % 3 else int(torch.randint(1, most + 1, (), generator=generator))
        x = channel_last(device, dtype, n, D, k)
        out = update(
            x, state, weight, bias, "silu", conv_state_indices=slots, **{counts: accepted}, **NORM
        )
        accepted = torch.randint(1, k + 1, (n,), generator=generator).int().to(device)
        draft = golden.clone()
        for t in range(k):
            y = torch.empty(n, D, dtype=dtype, device=device)
            torch.ops.gdn.conv1d_update_l2norm(
                draft, x[..., t], weight, y, QK, HEAD, bias=bias, conv_state_indices=slots
            )
            assert same(out[..., t], y), (step, t)
            kept = slots[accepted == t + 1].long()
            golden[kept] = draft[kept]
    for i, slot in enumerate(slots.tolist()):
        start = int(accepted[i]) - 1
        assert same(state[slot][:, start : start + W - 1], golden[slot])


# ---- SGLang --------------------------------------------------------------------------------------


def test_sglang_chain(device):
    dtype = torch.bfloat16
    weight, bias = weights(device, dtype)
    x = channel_last(device, dtype, 4, D, 5)
    state = channel_last(device, dtype, 7, D, W + 1)  # the first W-1 columns count
    slots, rows = ints(device, 6, 2, -1, 0), ints(device, 1, 3, 99, 0)
    for row_indices in (rows, None):  # None: the slot's row, as before the argument existed
        expected = state.clone()
        windows = torch.zeros(7, 6, W - 1, D, device=device, dtype=dtype).transpose(2, 3)
        out = SGLANG(
            x, state, weight, bias, "silu", None, slots, None, windows, row_indices,
            metadata=object(), **NORM,
        )  # fmt: skip
        wanted = torch.zeros_like(windows)
        for i, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not out[i].any()
                continue
            window = expected[slot][:, : W - 1].clone()
            assert_close(out[i], convolve(window, x[i], weight, bias, True, True))
            inputs = torch.cat([window, x[i]], 1)
            row = slot if row_indices is None else int(row_indices[i])
            wanted[row, :5] = inputs[:, 1:].unfold(1, W - 1, 1).transpose(0, 1)
            expected[slot, :, : W - 1] = inputs[:, 5:]
        assert same(windows, wanted)
        assert same(state, expected)


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each token, the children of a token in order."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for parent in set(parents) - {-1}:
        children = [t for t, p in enumerate(parents) if p == parent]
        next_token[parent] = children[0]
        for a, b in pairwise(children):
            next_sibling[a] = b
    return next_token, next_sibling


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_sglang_tree(device, index_dtype):
    dtype, k = torch.bfloat16, 9
    weight, bias = weights(device, dtype)
    generator = torch.Generator().manual_seed(2)
    trees = [
        [-1, *(int(torch.randint(0, t, (), generator=generator)) for t in range(1, k))]
        for _ in range(3)
    ]
    trees += [[-1, *range(k - 1)], [-1] + [0] * (k - 1)]  # a chain, and only siblings
    n = len(trees)
    tables = [torch.tensor(x, dtype=index_dtype, device=device) for x in
              zip(*(links(t) for t in trees), strict=True)]  # fmt: skip
    parents = torch.full((n, k), 77, dtype=index_dtype, device=device)
    x = channel_last(device, dtype, n, D, k)
    state = channel_last(device, dtype, n, D, W - 1)
    before = state.clone()
    windows = torch.zeros(n, k, D, W - 1, device=device, dtype=dtype)
    slots = torch.arange(n, dtype=torch.int32, device=device)
    out = SGLANG(
        x, state, weight, bias, "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=slots,
        retrieve_next_token=tables[0],
        retrieve_next_sibling=tables[1],
        retrieve_parent_token=parents,
        **NORM,
    )  # fmt: skip
    assert same(state, before)
    assert parents.tolist() == [[max(p, 0) for p in tree] for tree in trees]
    for i, tree in enumerate(trees):
        for t in range(k):
            path = [t]
            while tree[path[0]] >= 0:
                path.insert(0, tree[path[0]])
            y = convolve(state[i], x[i][:, path], weight, bias, True, True)
            assert_close(out[i, :, t], y[:, -1])
            wanted = torch.cat([state[i], x[i][:, path]], 1)[:, 1 - W :]
            assert same(windows[i, t], wanted)


def test_sglang_tree_of_padding(device):
    """Links of a padded sequence hold anything."""
    weight, _ = weights(device, torch.float32)
    state = channel_last(device, torch.float32, 1, D, W - 1)
    junk = torch.tensor([[1, 2, -1], [7, -9, 2**30]], device=device)
    out = SGLANG(
        channel_last(device, torch.float32, 2, D, 3), state, weight,
        conv_state_indices=ints(device, 0, -1),
        retrieve_next_token=junk,
        retrieve_next_sibling=-torch.ones_like(junk),
    )  # fmt: skip
    assert out[0].any()
    assert not out[1].any()


# ---- all -----------------------------------------------------------------------------------------


def test_signatures():
    """Names, order and defaults of the originals; what is added is keyword only."""

    def positional(f: Callable[..., Tensor]) -> str:
        return ", ".join(
            p.name if p.default in (None, p.empty) else f"{p.name}={p.default}"
            for p in inspect.signature(f).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        )

    common = "x, conv_state, weight, bias, activation, "
    assert positional(compat.causal_conv1d_update) == common + "cache_seqlens, conv_state_indices"
    assert positional(VLLM) == common + (
        "conv_state_indices, num_accepted_tokens, query_start_loc, max_query_len=-1,"
        " null_block_id=0, validate_data=False, out"
    )
    assert positional(SGLANG) == common + (
        "cache_seqlens, conv_state_indices, num_accept_tokens, intermediate_conv_window,"
        " intermediate_state_indices, retrieve_next_token, retrieve_next_sibling,"
        " retrieve_parent_token, pad_slot_id=-1, metadata, validate_data=False"
    )
    for f in (compat.causal_conv1d_update, VLLM, SGLANG):
        added = inspect.signature(f).parameters
        assert {"qk_channels", "head_dim", "l2_eps"} <= {
            name for name, p in added.items() if p.kind is p.KEYWORD_ONLY
        }


@pytest.mark.parametrize("update", [compat.causal_conv1d_update, VLLM, SGLANG])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_widths_dtypes_and_layout_of_the_result(device, update, width):
    weight, bias = weights(device, torch.float32, width)
    x = channel_last(device, torch.float16, 2, D, 3)
    state = torch.zeros(2, D, width - 1, device=device)
    out = update(x, state, weight, bias)
    assert out.dtype == torch.float16
    assert out.stride(1) == 1
    assert out.data_ptr() != x.data_ptr()
    assert_close(out[0], convolve(torch.zeros_like(state[0]), x[0], weight, bias, False, False))


def refusals(device: str) -> list[tuple[Callable[..., Tensor], dict, str]]:
    def wide(n: int) -> Tensor:
        return torch.zeros(2, D, n, device=device)

    one, two = ints(device, 1, 1), torch.zeros(2, 3, dtype=torch.int64, device=device)
    rows = torch.zeros(6, D, device=device)
    packed = {"x": rows, "query_start_loc": ints(device, 0, 3, 6)}
    dao = compat.causal_conv1d_update
    return [
        *((f, {"x": wide(3)}, "x has strides .* channels") for f in (dao, VLLM, SGLANG)),
        *((f, {"x": wide(3)[None]}, "x has 4 dimensions") for f in (dao, VLLM, SGLANG)),
        *((f, {"activation": "gelu"}, "activation is 'gelu'") for f in (dao, VLLM, SGLANG)),
        *((f, {"qk_channels": 64}, "head_dim must be given") for f in (dao, VLLM, SGLANG)),
        *((f, {"cache_seqlens": one}, "cache_seqlens is given") for f in (dao, SGLANG)),
        *((f, {"conv_state": wide(2)}, "conv_state") for f in (dao, VLLM, SGLANG)),
        (dao, {"conv_state": wide(5)}, "conv_state has 5 columns"),
        (VLLM, {"block_idx_last_scheduled_token": one}, "block_idx_last_scheduled_token is given"),
        (VLLM, {"initial_state_idx": one}, "initial_state_idx is given"),
        (VLLM, {"out": wide(3)}, "out has strides .* channels"),
        (VLLM, {"out": channel_last(device, torch.float32, 2, D, 2)}, "output must be"),
        (VLLM, {**packed, "max_query_len": 3}, "conv_state_indices must be given"),
        (VLLM, {**packed, "conv_state_indices": one}, "max_query_len is -1"),
        (VLLM, {"num_accepted_tokens": one}, "conv_state has 3 columns.* at least 5"),
        (
            SGLANG,
            {"num_accept_tokens": one, "intermediate_conv_window": wide(3)},
            "intermediate_conv_window is given",
        ),
        (SGLANG, {"num_accept_tokens": one, "retrieve_next_token": two}, "retrieve_next_token is"),
        (SGLANG, {"retrieve_next_token": two}, "retrieve_next_sibling must be given"),
    ]


def test_refusals(device):
    weight, _ = weights(device, torch.float32)
    for update, changed, message in refusals(device):
        arguments = {
            "x": channel_last(device, torch.float32, 2, D, 3),
            "conv_state": torch.zeros(2, D, W - 1, device=device),
            "weight": weight,
            **changed,
        }
        with pytest.raises((ValueError, RuntimeError), match=message):
            update(**arguments)
        assert not arguments["conv_state"].any()


def test_compiles(device):
    """Without a graph break: engines compile their layers."""
    weight, bias = weights(device, torch.bfloat16)
    x = channel_last(device, torch.bfloat16, 2, D, 3)
    state = channel_last(device, torch.bfloat16, 3, D, W - 2 + 3)
    slots, accepted = ints(device, 2, 1), ints(device, 2, 3)

    def f(state: Tensor) -> Tensor:
        return VLLM(x, state, weight, bias, "silu", slots, accepted, **NORM) * 2

    compiled, copy = torch.compile(f, fullgraph=True, backend="aot_eager"), state.clone()
    assert same(compiled(copy), f(state))
    assert same(copy, state)
