"""The arithmetic of the C core on arrays: exp, silu, sums of squares, conversions of 16-bit types.

By default over samples of every exponent; with --slow over all 2^32 float32.
"""

import cases
import compare
import numpy as np
import pytest

from gdn_verify import _core, reference

CHUNK = 1 << 22
# Measured over all inputs, at -0x1.765026p+2.
WORST_EXP_ULPS = 0.8914


def sample(n_per_exponent: int = 400) -> np.ndarray:
    """float32 of every sign and exponent: the ends, and random ones between."""
    rng = np.random.default_rng(0)
    high = np.arange(2**9, dtype=np.uint32)[:, None] << np.uint32(23)
    low = rng.integers(0, 2**23, (2**9, n_per_exponent), dtype=np.uint32)
    low[:, :3] = [0, 1, 2**23 - 1]
    dense = rng.uniform(-105, 90, 200_000).astype(np.float32)
    return np.concatenate([(high | low).ravel().view(np.float32), dense])


def all_chunks():
    for begin in range(0, 2**32, CHUNK):
        yield np.arange(begin, begin + CHUNK, dtype=np.uint64).astype(np.uint32).view(np.float32)


def check_exp(x: np.ndarray) -> None:
    result = _core.exp(x)
    compare.assert_same(result, reference.exp(x), "exp")
    number = ~np.isnan(x)
    assert np.isnan(result[~number]).all()
    assert compare.exp_error_ulps(x[number], result[number]).max(initial=0) <= WORST_EXP_ULPS


def check_silu(x: np.ndarray) -> None:
    """The quick form of the core is the plain form, on the core's own exp."""
    with np.errstate(all="ignore"):
        one = np.float32(1)
        plain = x * (one / (one + _core.exp(-x)))
    compare.assert_same(_core.silu(x), plain, "silu")


def test_exp(cpu_level):
    check_exp(sample())


def test_silu(cpu_level):
    x = sample()
    check_silu(x)
    compare.assert_same(_core.silu(x), reference.silu(x), "silu")


@pytest.mark.slow
def test_exp_of_every_float32():
    for x in all_chunks():
        for part in np.split(x, CHUNK >> 16):  # the reference's temporaries stay in a cache
            check_exp(part)


@pytest.mark.slow
def test_silu_of_every_float32(cpu_level):
    for x in all_chunks():
        check_silu(x)


def test_exp_is_monotonic_where_it_crosses_a_power_of_two():
    k = np.arange(-149, 128)
    around = np.float32(k * np.log(2))
    x = np.stack([np.nextafter(around, np.float32(-200)), around,
                  np.nextafter(around, np.float32(200))])  # fmt: skip
    assert (np.diff(_core.exp(x.ravel()).reshape(x.shape), axis=0) >= 0).all()


@pytest.mark.parametrize("n", [1, 5, 16, 31, 32, 33, 63, 64, 96, 100, 127, 128, 130, 256, 300])
def test_sum_squares(cpu_level, n):
    rng = np.random.default_rng(n)
    x = cases.special(rng, (50, n), np.float32)
    x[:20] = cases.normal(rng, (20, n), np.float32)
    compare.assert_same(_core.sum_squares(x), reference.sum_squares(x), f"n = {n}")


def test_arrays_of_odd_lengths(cpu_level):
    x = sample()[1000:1100]
    for n in range(40):
        compare.assert_same(_core.exp(x[:n]), reference.exp(x[:n]), f"n = {n}")
        compare.assert_same(_core.silu(x[:n]), reference.silu(x[:n]), f"n = {n}")


def convolve(implementation: str, x: np.ndarray, weight: np.ndarray, output_dtype, state_dtype):
    """0 + x * weight, one sequence per row of x [n, D] -> output [n, D], newest of conv_state.

    W = 2, on a zero state, no activation, no norm. The newest entry of the state is x, rounded.
    """
    d_inner = x.shape[1]
    output = np.zeros(x.shape, output_dtype)
    state = np.zeros((*x.shape, 2), state_dtype)
    taps = np.stack([np.zeros(d_inner, np.float32), weight], axis=1)
    cases.call(
        implementation, "verify_fused_conv_kn_batched",
        state, x[:, None], taps, output[:, None], None, 0, 1, activation="none",
    )  # fmt: skip
    return output, state[..., 1]


@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
def test_every_16_bit_pattern_survives(implementation, dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 64).copy()
    one = np.ones(64, np.float32)
    output, state = convolve(implementation, every, one, dtype, dtype)
    compare.assert_same(state, every, "state")
    wide, _ = convolve(implementation, every, one, np.float32, np.float32)
    expected = reference.fma(reference.to_float32(every), 1, 0)  # which makes -0 a +0
    compare.assert_same(wide, expected, "to float32")
    compare.assert_same(output, reference.from_float32(expected, dtype), "there and back")


@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
def test_rounding_to_16_bits(implementation, dtype):
    # the midpoints of neighbouring 16-bit values and the floats beside them, and a sample
    values = reference.to_float32(np.arange(2**16, dtype=np.uint16).view(dtype))
    finite = np.sort(values[np.isfinite(values)]).astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    ends = (np.float32(np.inf), np.float32(-np.inf))
    x = np.concatenate([middle, *(np.nextafter(middle, end) for end in ends), sample()])
    x = x[: len(x) // 64 * 64].reshape(-1, 64)
    _, state = convolve(implementation, x, np.ones(64, np.float32), np.float32, dtype)
    compare.assert_same(state, nearest_even(x, dtype), "state")
    # an output of 16 bits has an input of 16 bits: 1, times a float32 weight
    one = reference.from_float32(np.ones((1, x.size), np.float32), dtype)
    output, _ = convolve(implementation, one, x.ravel(), dtype, dtype)
    compare.assert_same(
        output, nearest_even(reference.fma(x.reshape(1, -1), 1, 0), dtype), "output"
    )


@np.errstate(all="ignore")
def nearest_even(x: np.ndarray, dtype) -> np.ndarray:
    """float32 to a 16-bit type, by search among its values."""
    patterns = np.arange(0x8000, dtype=np.uint16)
    values = reference.to_float32(patterns.view(dtype)).astype(np.float64)
    count = int(np.argmax(np.isinf(values)))  # finite, not negative, ascending
    values = values[: count + 1].copy()
    values[count] = 2 * values[count - 1] - values[count - 2]  # infinity stands for the next one
    magnitude = np.minimum(np.abs(x).astype(np.float64), values[count])
    above = np.clip(np.searchsorted(values, magnitude), 1, count)
    to_above, to_below = values[above] - magnitude, magnitude - values[above - 1]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    result = np.where(up, above, above - 1).astype(np.uint16)
    result[np.isnan(x)] = 0x7FC0 if dtype == np.uint16 else 0x7E00
    return (result | (np.signbit(x).astype(np.uint16) << 15)).view(dtype)


def test_denormals_are_kept(implementation):
    """Denormal inputs, products and sums; also with the caller's thread set to flush them."""
    case = cases.make_case(
        2, 3, 64, 32, head_dim=32, activation="none", input_dtype="float32", l2_eps=0.0
    )
    for name in ("new_input", "conv_state"):
        case.args[name][...] *= np.float32(2.0**-126)
    expected = cases.run("reference", case)
    wanted = expected.args["output"][..., 32:]
    assert ((wanted != 0) & (np.abs(wanted) < 2.0**-126)).any()
    compare.assert_same_case(cases.run(implementation, case), expected)
    if implementation == "torch":
        import torch

        if torch.set_flush_denormal(True):
            try:
                actual = cases.run(implementation, case)
                # the caller's setting is restored: a denormal product is flushed again
                still_flushing = float(torch.tensor([2.0**-126]) * 0.5) == 0
            finally:
                torch.set_flush_denormal(False)
            compare.assert_same_case(actual, expected)
            assert still_flushing
