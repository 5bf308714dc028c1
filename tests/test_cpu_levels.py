"""The SIMD levels of the CPU backend: each gives the baseline's bytes, in IEEE's default
floating-point environment whatever the caller's thread has set."""

import cases
import compare
import numpy as np
import pytest
import torch
from processes import python

from gdn_verify import _core

LEVELS = _core.cpu_levels()


@pytest.fixture(autouse=True)
def keep_level():
    before = _core.cpu_level()
    yield
    _core.set_cpu_level(before)


def run_at(level: str, case: cases.Case) -> cases.Case:
    _core.set_cpu_level(level)
    assert _core.cpu_level() == level
    return cases.run("core", case)


def every_kind():
    """Cases that between them take every path of the kernels."""
    for d_conv in range(2, 9):
        for state in ("W", "W-1"):
            for layout in ("contiguous", "transposed"):
                yield {"d_conv": d_conv, "state": state, "state_layout": layout,
                       "snapshot_layout": layout, "head_dim": 100}  # fmt: skip
    for state_dtype in cases.DTYPES:
        for input_dtype in cases.DTYPES:
            for snapshots in ("windows", "history"):
                yield {"state_dtype": state_dtype, "input_dtype": input_dtype,
                       "snapshots": snapshots, "accepted": "mixed", "head_dim": 33}  # fmt: skip
    for head_dim in (1, 5, 64, 128, 130, 256, 300):  # 300: a head in two chunks
        yield {"head_dim": head_dim, "ragged": True}
        yield {"head_dim": head_dim, "tree": True, "state_layout": "strided"}
        yield {"head_dim": head_dim, "bias": "input", "activation": "none", "snapshots": None}


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same_bytes(level):
    for number, chosen in enumerate(every_kind()):
        case = cases.make_case(3, 5, seed=number, values="special", **chosen)
        expected = run_at("baseline", case)
        compare.assert_same_case(run_at(level, case), expected, f"{level} {chosen}")


@pytest.mark.parametrize("level", LEVELS)
def test_float16_is_rounded_to_nearest_even(level):
    """Every float16, every midpoint between two of them, and the float32 beside each midpoint."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (half + np.append(half[1:], np.float32(65536))) / np.float32(2)  # exact
    near = [half, middle, np.nextafter(middle, 0, dtype=np.float32)]
    near += [np.nextafter(middle, np.float32(np.inf)), np.float32([np.inf, 2**-149, 3e38])]
    x = np.concatenate(near)
    x = np.concatenate([x, -x])
    history = np.zeros((1, 2, x.size), np.float16)
    state = np.zeros((1, x.size, 2), np.float16)
    weight = np.ones((x.size, 2), np.float32)
    output = np.zeros((1, 1, x.size), np.float32)
    _core.set_cpu_level(level)
    _core.verify_fused_conv_kn_batched(
        state, x.reshape(1, 1, -1), weight, output, history, 0, 1, activation="none"
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    compare.assert_same(history[0, 1], expected, "rounded")
    compare.assert_same(output.ravel(), x + np.float32(0), "as it came")
    again = np.zeros_like(output)  # float16 to float32
    _core.verify_fused_conv_kn_batched(
        state, np.zeros_like(x).reshape(1, 1, -1), weight, again, None, 0, 1, activation="none"
    )
    compare.assert_same(again.ravel(), expected.astype(np.float32) + np.float32(0), "widened")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_large_snapshots(level, layout):
    """Beyond 2 MiB of snapshots they are written past the caches."""
    case = cases.make_case(5, 13, 4104, 2048, head_dim=128, state_layout=layout,
                           snapshot_layout=layout)  # fmt: skip
    assert case.args["conv_state_inter"].nbytes > 2**21
    compare.assert_same_case(run_at(level, case), cases.run("reference", case), level)


@pytest.mark.parametrize("level", LEVELS)
def test_flushing_of_denormals_is_ignored_and_restored(level):
    case = cases.make_case(2, 3, 64, 32, head_dim=32, activation="none", input_dtype="float32",
                           l2_eps=0.0)  # fmt: skip
    for name in ("new_input", "conv_state"):
        case.args[name][...] *= np.float32(2.0**-126)
    x = np.float32([-87.5, -95.0, -103.0, 2.0**-130])
    expected = run_at(level, case), _core.exp(x), _core.silu(x)
    assert (expected[1][:3] > 0).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        actual = run_at(level, case), _core.exp(x), _core.silu(x)
        still_flushing = float(torch.tensor([2.0**-126]) * 0.5) == 0
    finally:
        torch.set_flush_denormal(False)
    compare.assert_same_case(actual[0], expected[0], level)
    compare.assert_same(actual[1], expected[1], "exp")
    compare.assert_same(actual[2], expected[2], "silu")
    assert still_flushing


def test_a_level_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="avx9000"):
        _core.set_cpu_level("avx9000")
    assert LEVELS[0] == "baseline"
    assert _core.cpu_level() == _core.build_info()["cpu_level"]


@pytest.mark.parametrize("name", [*LEVELS, "avx9000", ""])
def test_level_of_the_environment(name):
    """It holds where it is known; otherwise the best one does."""
    code = "from gdn_verify import _core; print(_core.cpu_level())"
    said = python(code, GDN_VERIFY_CPU_LEVEL=name)
    assert said.strip() == (name if name in LEVELS else LEVELS[-1])
