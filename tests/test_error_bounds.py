"""The distance from exact arithmetic, step by step: the bounds of docs/numerics.md.

The C core is measured; that all implementations have its bits is what other tests show. float64
stands for exact arithmetic. `exp` has its own test in test_numerics.py.
"""

import cases
import numpy as np
import pytest

from gdn_verify import _core, reference

U = 2.0**-24  # half a unit of the last place of 1
C, K, D, W, QK, HEAD = 4, 8, 1024, 4, 512, 128
EPS = float(np.float32(1e-6))


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Normally distributed; rows and weight bfloat16, state float32."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return cases.normal(rng, shape, np.uint16)

    return {
        "state": rng.standard_normal((C, D, W)).astype(np.float32),
        "new_input": draw(C, K, D),
        "weight": draw(D, W),
    }


def run(arrays: dict[str, np.ndarray], dtype: type, qk: int = QK, **options: str) -> np.ndarray:
    output = np.zeros((C, K, D), dtype)
    _core.verify_fused_conv_kn_batched(
        arrays["state"].copy(), arrays["new_input"], arrays["weight"], output, None, qk, HEAD,
        **options,
    )  # fmt: skip
    return output


def products(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """float64 [W, C, K, D]"""
    past = np.moveaxis(arrays["state"], 2, 1)[:, 1:].astype(np.float64)
    rows = np.concatenate([past, reference.to_float32(arrays["new_input"])], axis=1)
    weight = reference.to_float32(arrays["weight"]).astype(np.float64)
    return np.stack([rows[:, k : k + K] * weight[:, k] for k in range(W)])


def finish(acc: np.ndarray) -> np.ndarray:
    """SiLU, and the norm of the first QK channels."""
    y = acc / (1 + np.exp(-acc))
    heads = y[..., :QK].reshape(C, K, -1, HEAD)
    heads /= np.sqrt((heads * heads).sum(-1, keepdims=True) + EPS)
    return y


def test_convolution(arrays):
    exact = products(arrays)
    error = np.abs(run(arrays, np.float32, qk=0, activation="none") - exact.sum(0))
    worst = (error / np.abs(exact).sum(0)).max()
    assert U / 2 < worst <= 4 * U  # and measured at all


@pytest.mark.parametrize("sign", [1, -1])
def test_silu(sign):
    x = np.arange(0x2000_0000, 0x42AE_0000, 97, dtype=np.uint32).view(np.float32)[::3]  # to 87
    x = np.concatenate([x, np.linspace(0, 87, 1 << 20, dtype=np.float32)[1:]]) * np.float32(sign)
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    worst = (np.abs(_core.silu(x) - exact) / np.abs(exact)).max()
    assert U < worst <= 4.8 * U


def test_silu_far_below_zero():
    x = np.linspace(-200, -87, 1 << 20, dtype=np.float32)
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    assert np.abs(_core.silu(x) - exact).max() <= 2.7e-37


def test_silu_and_norm(arrays):
    acc = run(arrays, np.float32, qk=0, activation="none").astype(np.float64)
    exact = finish(acc)[..., :QK]
    worst = (np.abs(run(arrays, np.float32)[..., :QK] - exact) / np.abs(exact)).max()
    assert U < worst <= 17.6 * U


def test_bfloat16_output(arrays):
    """Nearly always the exact result, rounded once; never another than its neighbour."""
    exact = reference.from_float32(finish(products(arrays).sum(0)).astype(np.float32), np.uint16)
    output = run(arrays, np.uint16)
    apart = np.abs((output & 0x7FFF).astype(int) - (exact & 0x7FFF))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-4
