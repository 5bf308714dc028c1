"""Markers and the implementations that tests run on.

`slow` tests run with --slow or -m slow, `large` ones with -m large, `gpu` tests where torch sees a
CUDA device. A test with the argument `implementation` runs on the reference, the core, the torch
operators on the CPU and on CUDA; with the argument `built` on all of these but the reference; with
the argument `device` on "cpu" and "cuda".
"""

from collections.abc import Iterator

import cases
import pytest
import torch

from gdn_verify import _core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the exhaustive tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("markexpr") or ""
    slow = config.getoption("--slow") or "slow" in asked
    gpu = any(item.get_closest_marker("gpu") for item in items) and torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow or -m slow"))
        if item.get_closest_marker("large") and "large" not in asked:
            item.add_marker(pytest.mark.skip(reason="large: run alone, with -n 0 -m large"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left for tests after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=_core.cpu_levels())
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test at every SIMD level that this machine has."""
    before = _core.cpu_level()
    _core.set_cpu_level(request.param)
    yield request.param
    _core.set_cpu_level(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = cases.CPU_IMPLEMENTATIONS
    cuda = pytest.param("cuda", marks=pytest.mark.gpu)
    for fixture, values in (("implementation", names), ("built", names[1:])):
        own = [m.args[0] for m in metafunc.definition.iter_markers("parametrize")]
        if fixture in metafunc.fixturenames and fixture not in own:
            metafunc.parametrize(fixture, [*values, cuda])
