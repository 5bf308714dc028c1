"""The NumPy reference against things simpler than it: exact fractions, scalar loops, float64."""

from fractions import Fraction

import cases
import compare
import numpy as np
import pytest

from gdn_verify import reference

BITS = np.uint32


def random_floats(rng, n):
    """float32 of all exponents, denormals, infinities and NaN among them."""
    return rng.integers(0, 2**32, n, dtype=np.uint64).astype(BITS).view(np.float32)


def round_to_float32(x: Fraction) -> np.float32:
    """The float32 nearest to x, ties to even, by comparing exact distances to candidates."""
    largest = float(np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        guess = np.float32(max(-largest, min(largest, float(x))))
        around = [guess, *(np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf))]

    def exact(c: np.float32) -> Fraction:
        if np.isinf(c):
            return Fraction(2) ** 128 * (1 if c > 0 else -1)
        return Fraction(float(c))

    return min(around, key=lambda c: (abs(exact(c) - x), int(c.view(BITS)) & 1))


def test_fma_is_exact():
    rng = np.random.default_rng(1)
    n = 4000
    a, b, c = (random_floats(rng, n) for _ in range(3))
    # sums that cancel, and sums that lie near a midpoint of float32
    a[: n // 2] = np.float32(1) + rng.integers(0, 2**12, n // 2) * np.float32(2**-23)
    b[: n // 2] = np.float32(1) + rng.integers(0, 2**12, n // 2) * np.float32(2**-23)
    c[: n // 4] = -(a[: n // 4] * b[: n // 4])
    c[n // 4 : n // 2] = np.exp2(rng.integers(-80, 40, n // 4)).astype(np.float32)
    # denormal results
    a[-500:], b[-500:] = np.float32(2.0**-100), a[:500] * np.float32(2.0**-45)
    c[-500:] = rng.integers(-50, 50, 500).astype(np.float32) * np.float32(2.0**-149)
    result = reference.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, result, strict=True):
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if exact == 0:
            assert r == 0
        else:
            expected = np.float32([round_to_float32(exact)])
            compare.assert_same(np.float32([r]), expected, f"fma({x}, {y}, {z})")


def test_fma_of_infinities_and_nan():
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    compare.assert_same(
        reference.fma(
            np.float32([inf, inf, 1, nan, 3e38, 0, -0.0]),
            np.float32([2, 0, 1, 1, 10, 5, 1]),
            np.float32([1, 1, -inf, 1, -3e38, -0.0, -0.0]),
        ),
        np.float32([inf, nan, -inf, nan, inf, 0, -0.0]),
    )


def test_exp_is_within_one_ulp():
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [rng.uniform(-104.5, 89.5, 200_000).astype(np.float32), random_floats(rng, 100_000)]
    )
    x = x[~np.isnan(x)]
    ulps = compare.exp_error_ulps(x, reference.exp(x))
    assert ulps.max() <= 0.8914


def test_exp_at_its_edges():
    compare.assert_same(
        reference.exp(np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 88.73, -103.98, -103.0])),
        np.float32([np.nan, np.inf, 0, 1, 1, np.inf, 0, 2.0**-149]),
    )


def test_sum_squares_is_the_written_tree():
    rng = np.random.default_rng(3)
    for n in (1, 5, 16, 31, 32, 33, 64, 100, 127, 128, 130, 300):
        x = rng.standard_normal(n, np.float32)
        total = None
        for begin in range(0, n, 32):
            group = [v * v for v in x[begin : begin + 32]]
            group += [np.float32(0)] * (32 - len(group))
            for width in (16, 8, 4, 2, 1):
                for i in range(width):
                    group[i] = group[i] + group[i + width]
            total = group[0] if total is None else total + group[0]
        compare.assert_same(reference.sum_squares(x[None]), np.float32([total]), f"n = {n}")


def test_bfloat16_rounds_to_nearest_even():
    x = np.float32([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, np.inf, np.nan])
    rounded = reference.from_float32(x, np.uint16)
    expected = np.array([0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80, 0x7F80, 0x7FC0], np.uint16)
    compare.assert_same(rounded, expected)
    every = np.arange(2**16, dtype=np.uint16)
    compare.assert_same(reference.from_float32(reference.to_float32(every), np.uint16), every)


def scalar_operator(x, state, w, qk_channels, head_dim, eps):
    """One sequence by plain loops: x [K, D], state [D, W], w [D, W], all float32."""
    outputs, windows = [], []
    window = [list(row) for row in state]
    for token in x:
        y = []
        for d, value in enumerate(token):
            window[d] = [*window[d][1:], value]
            acc = np.float32(0)
            for k in range(w.shape[1]):
                acc = acc + window[d][k] * w[d, k]
            y.append(acc * (np.float32(1) / (np.float32(1) + reference.exp(-acc)[()])))
        for begin in range(0, qk_channels, head_dim):
            head = np.float32(y[begin : begin + head_dim])
            inv = np.float32(1) / np.sqrt(reference.sum_squares(head[None])[0] + np.float32(eps))
            y[begin : begin + head_dim] = [v * inv for v in head]
        outputs.append(y)
        windows.append([list(row) for row in window])
    return np.float32(outputs), np.float32(windows)


@pytest.mark.parametrize("d_conv", [2, 4, 7])
def test_operator_is_the_scalar_loop(d_conv):
    case = cases.make_case(
        2, 5, 13, 10, d_conv=d_conv, head_dim=5, input_dtype="float32", values="special"
    )
    done = cases.run("reference", case)
    for i in range(2):
        with np.errstate(all="ignore"):
            outputs, windows = scalar_operator(
                case.args["new_input"][i], case.args["conv_state"][i], case.args["weight"],
                10, 5, 1e-6,
            )  # fmt: skip
        compare.assert_same(done.args["output"][i], outputs, "output")
        compare.assert_same(done.args["conv_state_inter"][i], windows, "windows")
        compare.assert_same(done.args["conv_state"][i], windows[-1], "state")


def test_state_is_rounded_once_and_the_newest_input_is_not():
    # W = 2: the accumulator is old * w0 + new * w1, old from a bfloat16 state, new in float32
    x = np.float32([[[1 + 2**-10], [2 + 2**-9]]])
    state = np.zeros((1, 1, 2), np.uint16)
    weight = np.float32([[1, 1]])
    output = np.zeros((1, 2, 1), np.float32)
    reference.verify_fused_conv_kn_batched(state, x, weight, output, None, 0, 1, activation="none")
    compare.assert_same(output, np.float32([[[1 + 2**-10], [1 + 2 + 2**-9]]]))
    compare.assert_same(state, np.array([[[0x3F80, 0x4000]]], np.uint16))


@pytest.mark.parametrize("state_len", [3, 4])
def test_history_windows_is_a_view_of_the_windows(state_len):
    history = np.arange(2 * 7 * 3, dtype=np.float32).reshape(2, 7, 3)
    windows = reference.history_windows(history, state_len)
    assert windows.shape == (2, 8 - state_len, 3, state_len)
    assert np.shares_memory(windows, history)
    for t in range(windows.shape[1]):
        compare.assert_same(windows[:, t], history[:, t : t + state_len].swapaxes(1, 2))


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_operator_is_near_float64(activation):
    case = cases.default_case(
        cases.EIGHTH_SHAPES["qwen3.5-35b-a3b-tp8"],
        output_dtype="float32", activation=activation, bias="float32",
    )  # fmt: skip
    actual = cases.run("reference", case).args["output"]
    expected = in_float64(case)
    compare_error = np.abs(actual - expected) / np.maximum(np.abs(expected), 1e-3)
    # errors of the convolution grow where its terms cancel, so the bound is on values of about 1e-3
    assert compare_error.max() < 2e-3
    assert np.abs(actual - expected).max() < 4e-6


def in_float64(case: cases.Case) -> np.ndarray:
    """The default form of a case in float64 with numpy's own exp and sums."""
    a = case.args
    state, x, w = (
        reference.to_float32(a[n]).astype(np.float64) for n in ("conv_state", "new_input", "weight")
    )
    timeline = np.concatenate([state.swapaxes(1, 2), x], 1)
    K, W = x.shape[1], w.shape[1]
    acc = sum(timeline[:, k + 1 : k + 1 + K] * w[:, k] for k in range(W))
    acc = acc + reference.to_float32(case.options["bias"])
    y = acc / (1 + np.exp(-acc)) if case.options.get("activation") != "none" else acc
    qk, head_dim = a["qk_channels"], a["head_dim"]
    heads = y[..., :qk].reshape(*x.shape[:2], -1, head_dim)
    heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + a["l2_eps"])
    return np.concatenate([heads.reshape(*x.shape[:2], qk), y[..., qk:]], -1)
