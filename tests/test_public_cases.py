"""Faults that users of such operators reported in public, as tests.

Named after the fault. The golden is the per-token path with a copy of the window after each token.
Cases about compiling, tuning and installation stand with those parts.
"""

import cases
import compare
import numpy as np
import pytest

from gdn_verify import reference
from gdn_verify.models import Shape

SHAPE = Shape(1024, 512)


def rows(case, some):
    """The case with only these sequences, copied."""
    args = {
        n: x[some] if isinstance(x, np.ndarray) and n != "weight" else x
        for n, x in case.args.items()
    }
    return cases.Case(case.op, args, case.options)


def update(implementation, state, x, case):
    """One token through the per-token path -> its output; state is advanced."""
    a = case.args
    output = np.zeros(x.shape, a["output"].dtype)
    cases.call(
        implementation, "conv1d_update_l2norm",
        state, x, a["weight"], output, a["qk_channels"], a["head_dim"], a["l2_eps"],
    )  # fmt: skip
    return output


@pytest.mark.parametrize("num_tokens", [8, 17])
@pytest.mark.parametrize("snapshots", ["windows", "history"])
def test_accepted_counts_beyond_the_width(implementation, num_tokens, snapshots):
    """xllm 2247: counts of 4 and more were clamped to the width, then used as snapshot index."""
    case = cases.default_case(SHAPE, 3, num_tokens + 1, snapshots=snapshots)
    straight = cases.per_token(implementation, case)  # K + 1 tokens in a row
    case.args["new_input"] = case.args["new_input"][:, :num_tokens]
    case.args["output"] = case.args["output"][:, :num_tokens]
    inter = case.args["conv_state_inter"]
    case.args["conv_state_inter"] = inter[:, : inter.shape[1] - 1]
    done = cases.run(implementation, case)
    windows = done.args["conv_state_inter"]
    if snapshots == "history":
        windows = reference.history_windows(windows, 4)
    for accepted in range(1, num_tokens + 1):
        state = windows[:, accepted - 1].copy()
        output = update(implementation, state, straight.args["new_input"][:, accepted], case)
        compare.assert_same(output, straight.args["output"][:, accepted], f"accepted {accepted}")
    compare.assert_same(windows[:, -1], done.args["conv_state"], "last snapshot, final state")


@pytest.mark.parametrize("snapshots", ["windows", "history"])
@pytest.mark.parametrize("path", ["num_accepted_tokens", "commit"])
def test_rollback_of_the_convolution_history(implementation, snapshots, path):
    """llama.cpp 28123: the recurrent state was rolled back, the convolution's history was not."""
    case = cases.default_case(SHAPE, 4, 4, snapshots=snapshots)
    accepted = np.array([1, 2, 3, 4], np.int32)
    a = case.args
    more = cases.default_case(SHAPE, 4, 3, seed=1).args["new_input"]
    start = a["conv_state"].copy()
    case.call(implementation)

    output = np.zeros(more.shape, a["output"].dtype)
    scalars = [a["qk_channels"], a["head_dim"], a["l2_eps"]]
    options = {"num_accepted_tokens": accepted} if path == "num_accepted_tokens" else {}
    if path == "commit":
        cases.call(
            implementation, "commit_conv_state",
            [a["conv_state"]], [a["conv_state_inter"]], accepted,
        )  # fmt: skip
    cases.call(
        implementation, "verify_fused_conv_kn_batched",
        a["conv_state"], more, a["weight"], output, a["conv_state_inter"], *scalars, **options,
    )  # fmt: skip

    for i, count in enumerate(accepted):
        state = start[i : i + 1].copy()
        for token in a["new_input"][i, :count]:
            update(implementation, state, token[None], case)
        for t in range(3):
            expected = update(implementation, state, more[i, t][None], case)
            compare.assert_same(output[i, t], expected[0], f"row {i}, token {t}")
        compare.assert_same(a["conv_state"][i], state[0], f"state of row {i}")


@pytest.mark.parametrize("index", [False, True])
def test_strided_slot_view(implementation, index):
    """vLLM 55357: unit stride was assumed on a strided slot view; row 0 right, later rows wrong."""
    case = cases.default_case(SHAPE)
    expected = cases.run("reference", case)
    case.args["conv_state"] = cases.spaced(case.args["conv_state"], "pool")
    if index:
        case.options["conv_state_indices"] = np.arange(3, dtype=np.int32)
    actual = cases.run(implementation, case)
    for name in ("output", "conv_state", "conv_state_inter"):
        compare.assert_same(actual.args[name], expected.args[name], name)
    assert np.isnan(cases.buffer_of(actual.args["conv_state"])[:, 1:]).all()


def test_nan_rows_do_not_leak(implementation):
    """vLLM 40047: NaN in graph-padding rows leaked into real rows through a reduction."""
    case = cases.default_case(SHAPE, 4, 4)
    case.args["new_input"][2:] = 0x7FC0
    case.args["conv_state"][2:] = np.nan
    two = rows(case, [0, 1])
    actual, expected = cases.run(implementation, case), cases.run(implementation, two)
    for name in ("output", "conv_state", "conv_state_inter"):
        compare.assert_same(actual.args[name][:2], expected.args[name], name)


def test_one_nan_channel_reaches_only_its_head(implementation):
    case = cases.default_case(SHAPE, output_dtype="float32")
    clean = cases.run(implementation, case).args["output"]
    case.args["new_input"][1, 0, 5] = 0x7FC0
    output = cases.run(implementation, case).args["output"]
    assert np.isnan(output[1, :, :128]).all()  # W = 4: the NaN stays in all four windows
    compare.assert_same(output[1, :, 128:], clean[1, :, 128:])
    compare.assert_same(output[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("n_seq", [65_535, 65_536])
def test_very_many_sequences(built, n_seq):
    """causal-conv1d 32: "invalid configuration argument" at 65,536 sequences."""
    case = cases.make_case(1000, 1, 256, 128, head_dim=128)
    for name in ("conv_state", "new_input", "output", "conv_state_inter"):
        x = case.args[name]
        case.args[name] = np.resize(x, (n_seq, *x.shape[1:]))  # the same ones again and again
    last = rows(case, [n_seq - 1])
    some = [0, 1, n_seq // 2, n_seq - 2, n_seq - 1]
    expected = cases.run("reference", rows(case, some))
    case.call(built)
    for name in ("output", "conv_state", "conv_state_inter"):
        compare.assert_same(case.args[name][some], expected.args[name], name)
    compare.assert_same(case.args["output"][-1:], cases.run(built, last).args["output"], "last row")


@pytest.mark.parametrize(("n_seq", "num_tokens", "d_inner"), [(0, 4, 64), (3, 0, 64), (3, 4, 0)])
def test_empty_batches(implementation, n_seq, num_tokens, d_inner):
    """sglang 23609: an empty batch raised a launch error that surfaced in a later operator."""
    whole = cases.make_case(3, 4, 64, 32, head_dim=32)
    a = whole.args
    args = {
        **a,
        "conv_state": a["conv_state"][:, :d_inner],
        "new_input": a["new_input"][:n_seq, :num_tokens, :d_inner],
        "weight": a["weight"][:d_inner],
        "output": a["output"][:n_seq, :num_tokens, :d_inner],
        "conv_state_inter": a["conv_state_inter"][:, :, :d_inner],
        "qk_channels": min(32, d_inner),
    }
    before = cases.Case(whole.op, args)
    after = before.copy()
    after.call(implementation)
    compare.assert_same_case(after, before)
    # and what runs after it is right
    compare.assert_same_case(cases.run(implementation, whole), cases.run("reference", whole))


def test_epsilon_stands_inside_the_root_on_the_sum(implementation):
    """transformers 40842, mlx-lm 1624: epsilon inside or outside, on the sum or on the mean."""
    n, d_inner = 1, 256
    x = np.full((n, 1, d_inner), 1e-4, np.float32)
    x[..., 128:] = 0
    weight = np.zeros((d_inner, 4), np.float32)
    weight[:, 3] = 1
    output = np.full_like(x, 7)
    cases.call(
        implementation, "verify_fused_conv_kn_batched",
        np.zeros((n, d_inner, 4), np.float32), x, weight, output, None, d_inner, 128, 1e-6,
        activation="none",
    )  # fmt: skip
    np.testing.assert_allclose(output[..., :128], 0.0662, atol=5e-5)
    compare.assert_same(output[..., 128:], np.zeros((n, 1, 128), np.float32), "all-zero head")
