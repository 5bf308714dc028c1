"""The promise of the fused operator: the bytes of the per-token path.

For C sequences of K tokens the same bytes come from one fused call, from K per-token calls with a
copy of the window after each, from C calls of one sequence, and from the NumPy reference. The
reference runs once per shape at the largest C and K: windows are independent, so smaller batches
are a part of it.
"""

import functools

import cases
import compare
import numpy as np
import pytest

MAX_SEQ, MAX_TOKENS = 8, 17


@functools.lru_cache(maxsize=2)
def largest(shape, items):
    """A case of 8 sequences and 17 tokens, and what the reference makes of it."""
    case = cases.default_case(shape, MAX_SEQ, MAX_TOKENS, **dict(items))
    return case, cases.run("reference", case)


def part(case: cases.Case, n_seq: int, num_tokens: int) -> cases.Case:
    """The first sequences and tokens of `largest`."""
    a = case.args
    args = {
        **a,
        "conv_state": a["conv_state"][:n_seq],
        "new_input": a["new_input"][:n_seq, :num_tokens],
        "output": a["output"][:n_seq, :num_tokens],
        "conv_state_inter": a["conv_state_inter"][:n_seq, :num_tokens],
    }
    return cases.Case(case.op, args, case.options, f"C={n_seq} K={num_tokens} {case.label}")


def check(implementation, shape, n_seq, num_tokens, **chosen):
    items = tuple(chosen.items())
    case, reference_run = largest(shape, items)
    small, expected = part(case, n_seq, num_tokens), part(reference_run, n_seq, num_tokens)
    label = f"{implementation} {small.label}"
    snapshots = expected.args["conv_state_inter"]

    def same(run: cases.Case, path: str) -> None:
        for name in ("output", "conv_state_inter"):
            compare.assert_same(run.args[name], expected.args[name], f"{path} {name} {label}")
        compare.assert_same(run.args["conv_state"], snapshots[:, -1], f"{path} state {label}")

    fused = cases.run(implementation, small)
    same(fused, "fused")
    golden = cases.per_token(implementation, small)
    compare.assert_same_case(fused, golden, f"fused against per token, {label}")
    single = small.copy()
    for i in range(n_seq):
        arrays = [single.args[n] for n in cases.OPERATORS["verify_fused_conv_kn"]]
        args = [x if n == 2 else x[i] for n, x in enumerate(arrays)]
        cases.call(
            implementation, "verify_fused_conv_kn", *args, *list(small.args.values())[5:],
            **small.options,
        )  # fmt: skip
    compare.assert_same_case(single, golden, f"single against per token, {label}")


@pytest.mark.parametrize("n_seq", range(1, MAX_SEQ + 1))
@pytest.mark.parametrize("model", cases.EIGHTH_SHAPES)
def test_grid_at_one_eighth(built, model, n_seq):
    for num_tokens in range(1, MAX_TOKENS + 1):
        check(built, cases.EIGHTH_SHAPES[model], n_seq, num_tokens)


@pytest.mark.parametrize("model", cases.FULL_SHAPES)
def test_full_width(built, model):
    for n_seq, num_tokens in ((1, 1), (1, 17), (2, 3), (5, 4), (8, 2), (8, 17)):
        check(built, cases.FULL_SHAPES[model], n_seq, num_tokens)


@pytest.mark.parametrize("shape", [*cases.TOY_SHAPES.values(), *cases.ODD_SHAPES.values()], ids=str)
def test_other_heads(built, shape):
    for n_seq, num_tokens in ((1, 1), (1, 17), (3, 4), (8, 5)):
        check(built, shape, n_seq, num_tokens)


@pytest.mark.parametrize("num_tokens", [31, 64, 130, 1000])
@pytest.mark.parametrize("snapshots", ["windows", "history"])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_many_tokens(built, num_tokens, snapshots, head_dim):
    case = cases.make_case(
        2, num_tokens, 3 * head_dim, 2 * head_dim, head_dim=head_dim, snapshots=snapshots
    )
    fused = cases.run(built, case)
    compare.assert_same_case(fused, cases.run("reference", case), built)
    compare.assert_same_case(fused, cases.per_token(built, case), built)


@pytest.mark.parametrize("d_conv", range(2, 9))
@pytest.mark.parametrize("state_dtype", cases.DTYPES)
def test_other_widths(built, d_conv, state_dtype):
    for num_tokens in (1, 2, d_conv - 1, d_conv, d_conv + 1, 17):
        check(
            built, cases.EIGHTH_SHAPES["qwen3.5-27b-tp8"], 3, num_tokens,
            d_conv=d_conv, state_dtype=state_dtype,
        )  # fmt: skip


@pytest.mark.parametrize("input_dtype", cases.DTYPES)
@pytest.mark.parametrize("output_dtype", ["input", "float32"])
@pytest.mark.parametrize("state", ["W", "W-1"])
def test_dtypes(built, input_dtype, output_dtype, state):
    for state_dtype in cases.DTYPES:
        check(
            built, cases.TOY_SHAPES["toy-64"], 3, 5, state=state, values="special",
            input_dtype=input_dtype, output_dtype=output_dtype, state_dtype=state_dtype,
            bias="float32",
        )  # fmt: skip


def test_input_and_output_in_one_row_buffer(built):
    """Interleaved views that share no element are legal."""
    case = cases.default_case(cases.TOY_SHAPES["toy-32"], 3, 4)
    d_inner = case.args["new_input"].shape[-1]
    rows = cases.filled((3, 4, 2 * d_inner + 5), np.uint16)
    rows[..., :d_inner] = case.args["new_input"]
    expected = cases.run("reference", case)
    case.args["new_input"] = rows[..., :d_inner]
    case.args["output"] = rows[..., d_inner : 2 * d_inner]
    actual = cases.run(built, case)
    compare.assert_same(actual.args["output"], expected.args["output"])
    compare.assert_same(actual.args["new_input"], expected.args["new_input"])
    assert (cases.buffer_of(actual.args["output"])[..., 2 * d_inner :] == 0x7FC0).all()


def test_a_sequence_does_not_depend_on_its_batch(implementation):
    """The same sequence at every place of batches with other sequences, layouts and padding."""
    alone = cases.default_case(cases.TOY_SHAPES["toy-96"], 1, 6, seed=7)
    expected = cases.run("reference", alone)
    for place in range(4):
        for layout in ("contiguous", "transposed", "strided", "pool"):
            batch = cases.default_case(
                cases.TOY_SHAPES["toy-96"], 4, 6, seed=place,
                state_layout=layout, input_layout="contiguous", values="special",
            )  # fmt: skip
            for name in ("conv_state", "new_input"):
                batch.args[name][place] = alone.args[name][0]
            batch.args["weight"][...] = alone.args["weight"]
            actual = cases.run(implementation, batch)
            for name in ("output", "conv_state_inter", "conv_state"):
                compare.assert_same(actual.args[name][place], expected.args[name][0], name)
