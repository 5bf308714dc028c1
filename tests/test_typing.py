"""What a user's type checker sees, and that the stub of the compiled module is what it is."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPERATORS

import gdn_verify
from gdn_verify import _core, reference

SNIPPET = """
import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import gdn_verify
from gdn_verify import GdnVerifyError, Supported, _core, history_windows, supported, verify_conv
from gdn_verify.compat import causal_conv1d_update

state, x, weight = torch.zeros(1, 8, 4), torch.zeros(1, 2, 8), torch.zeros(8, 4)


def step(slots: Tensor | None = None) -> Tensor:
    answer = supported(state, x, weight, qk_channels=4, head_dim=4, conv_state_indices=slots)
    assert_type(answer, Supported)
    if not answer:
        print(answer.reason.upper())
    try:
        output, snapshots = verify_conv(
            state, x, weight, qk_channels=4, head_dim=4, snapshots="history", l2_eps=1e-6
        )
    except GdnVerifyError as error:
        raise SystemExit(str(error)) from error
    assert_type(output, Tensor)
    assert_type(snapshots, Tensor | None)
    if snapshots is not None:
        assert_type(history_windows(snapshots, 4), Tensor)
    return output


with gdn_verify.autotune():
    step()
assert_type(gdn_verify.load_tuned(), int)
shapes = gdn_verify.call_shapes("qwen3.5-27b", [1, 2], [4], snapshots=["windows"])
best = {shape.n_seq: tuned.us for shape, tuned in gdn_verify.tune(shapes).items()}
assert_type(best, dict[int, float])
assert_type(gdn_verify.__version__, str)
assert_type(_core.build_info()["has_cuda"], bool)
_core.exp(np.zeros(3, np.float32)).sum()

verify_conv(state, x, weight, qk_channels=4)  # type: ignore[call-arg]
verify_conv(state, x, weight, qk_channels=4, head_dim=4, activation="")  # type: ignore[arg-type]
verify_conv(state, x, weight, qk_channels=4, head_dim=4, config="fast")  # type: ignore[arg-type]
supported(state, x, None, qk_channels=4, head_dim=4)  # type: ignore[arg-type]
"""


def test_a_users_strict_check(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    cache = Path(__file__).parents[1] / ".mypy_cache"  # torch takes long the first time
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "snippet.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


STUB = Path(gdn_verify.__file__).with_name("_core.pyi").read_text()


def stub_functions() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(STUB).body if isinstance(node, ast.FunctionDef)}


def test_the_stub_has_every_function() -> None:
    public = {name for name in dir(_core) if not name.startswith("_")}
    assert stub_functions().keys() == public
    assert list(_core.build_info()) == re.findall(r"^    (\w+): \w+$", STUB, re.MULTILINE)


def arguments_of(function: Callable[..., Any]) -> list[tuple[str, bool, Any]]:
    """Name, whether it must be named, default."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind == p.KEYWORD_ONLY, p.default) for p in parameters]


def defined(name: str, source: str) -> Callable[..., Any]:
    """A function whose defaults are literals and whose annotations may be anything."""
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source}", names)
    return names[name]


@pytest.mark.parametrize("name", stub_functions())
def test_the_stub_has_every_argument(name: str) -> None:
    stub = defined(name, ast.unparse(stub_functions()[name]))
    header = getattr(_core, name).__doc__.partition("\n")[0]
    assert arguments_of(stub) == arguments_of(defined(name, f"def {header}: ..."))


@pytest.mark.parametrize("name", OPERATORS)
def test_arguments_and_defaults_are_the_same_everywhere(name: str) -> None:
    """In the schema for PyTorch, in the stub of the core, in the reference, in verify_conv."""
    schema = getattr(torch.ops.gdn, name).default._schema.arguments
    required = inspect.Parameter.empty
    expected = [
        (a.name, a.kwarg_only, a.default_value if a.has_default_value() else required)
        for a in schema
    ]
    assert arguments_of(defined(name, ast.unparse(stub_functions()[name]))) == expected
    launch = ("config", "pdl")
    plain = [each for each in expected if each[0] not in launch]
    assert arguments_of(getattr(reference, name)) == plain
    if name == "verify_fused_conv_kn_batched":
        defaults = {argument: default for argument, _, default in expected if default != required}
        assert defaults.items() <= gdn_verify.verify_conv.__kwdefaults__.items()


def test_everything_public_is_documented() -> None:
    for name in gdn_verify.__all__:
        thing = getattr(gdn_verify, name)
        assert inspect.getdoc(thing), name
    documented = inspect.getdoc(gdn_verify.verify_conv)
    for name in inspect.signature(gdn_verify.verify_conv).parameters:
        assert f"`{name}`" in documented, name
    parameters = inspect.signature(gdn_verify.verify_conv).parameters
    assert inspect.signature(gdn_verify.supported).parameters == parameters
