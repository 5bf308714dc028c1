"""The CUDA kernels, run on the CPU with threads and blocks in two orders (see emulated.py).

What they compute, for every launch configuration and option, and where a barrier is missing. How
fast they are, and that nvcc compiles them so, the tests on a GPU and `make cuda` show.
"""

from __future__ import annotations

import ctypes
import mmap

import cases
import compare
import emulated
import numpy as np
import processes
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


# ---- reads -------------------------------------------------------------------------------------


def between_pages(owner: np.ndarray, at_end: bool) -> tuple[mmap.mmap, int]:
    """A copy of a buffer next to memory that cannot be touched, and where in the map it starts."""
    page = mmap.PAGESIZE
    inside = -(-max(owner.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, page + inside + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for each in (address, address + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(each), ctypes.c_size_t(page), 0) == 0
    start = page + inside - owner.nbytes if at_end else page
    memory[start : start + owner.nbytes] = owner.tobytes()
    return memory, start


def run_between_pages(case: Case, at_end: bool, **options: int) -> None:
    copies = {}

    def view(x: np.ndarray) -> np.ndarray:
        owner = cases.buffer_of(x)
        if id(owner) not in copies:
            copies[id(owner)] = between_pages(owner, at_end)
        memory, start = copies[id(owner)]
        return np.ndarray(x.shape, x.dtype, memory, start + cases.offset_of(x), x.strides)

    args, more = cases.map_arrays(view, case.args), cases.map_arrays(view, case.options)
    Case(case.op, args, more).call("emulated", **options)


def test_nothing_is_read_beside_a_buffer():
    """Not even what nobody uses: see the tokens before the first. A read ends the process."""
    processes.python("""
        import sanitize
        import test_emulated

        for index, case in enumerate(sanitize.shipped()):
            for at_end in (False, True):
                config = (index + 9 * at_end) % (test_emulated.CONFIGS + 1) - 1
                test_emulated.run_between_pages(case, at_end, config=config)
    """)
