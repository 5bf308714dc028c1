"""The CUDA kernels, run on the CPU with threads and blocks in two orders (see emulated.py).

What they compute, for every launch configuration and option, and where a barrier is missing. How
fast they are, and that nvcc compiles them so, the tests on a GPU and `make cuda` show.
"""

from __future__ import annotations

import cases
import compare
import emulated
import pytest
import sanitize
from cases import Case

from gdn_verify.models import Shape

pytestmark = pytest.mark.skipif(
    emulated.cuda_headers() is None, reason="needs the headers of a CUDA toolkit"
)

CONFIGS = 17
KINDS = [
    {"state": "float32", "snapshots": "windows"},
    {"state": "bfloat16", "snapshots": "windows"},
    {"state": "bfloat16", "snapshots": "history"},
]


@pytest.fixture(params=["forwards", "backwards"])
def order(request):
    core = emulated.core()
    core.backwards(request.param == "backwards")
    yield request.param
    core.backwards(False)


def check(case: Case, expected: Case, label: str, **options: int) -> None:
    actual = cases.run("emulated", case, **options)
    compare.assert_same_case(actual, expected, f"{label} {options} {case!r}")


def test_number_of_configurations():
    assert emulated.core().build_info()["num_configs"] == CONFIGS


@pytest.mark.parametrize("config", range(-1, CONFIGS))
def test_every_configuration(order, config):
    """Every pair of options; each order has every other case, the two together all."""
    for index, case in enumerate(sanitize.shipped()):
        if (index + config + (order == "backwards")) % 2 == 0:
            check(case, cases.run("core", case), order, config=config)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_models_forms_at_every_k(order, kind):
    """The forms that kernels are compiled for: all K, of one sequence, which starts at a model's
    state, and of several that start from their own snapshots."""
    for num_tokens in (*range(1, 20), 40, 70):
        for chosen in ({}, {"accepted": "mixed", "slots": "permuted"}):
            case = cases.default_case(
                Shape(384, 256), 1 + 2 * len(chosen), num_tokens, **kind, **chosen
            )
            expected = cases.run("core", case)
            for config in (-1, num_tokens % CONFIGS, (7 * num_tokens) % CONFIGS):
                check(case, expected, order, config=config)


def test_everything_else(order):
    for case in sanitize.others():
        check(case, cases.run("core", case), order)


def test_wrong_index_values_touch_nothing_else(order):
    for case in sanitize.wrong():
        compare.assert_same_around(cases.run("emulated", case), case)
