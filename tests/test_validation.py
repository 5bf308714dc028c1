"""Wrong arguments raise a sentence that names the argument, before anything is written.

The rules stand in wrong_input.py, which makes docs/wrong-input.md of them; here beside them are
legal calls that look alike. What Python cannot express is in test_c_abi.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import compare
import numpy as np
import pytest
import torch
import wrong_input
from cases import Case
from processes import python
from small_calls import (
    BF16,
    F32,
    I32,
    TREE,
    D,
    K,
    N,
    W,
    batched,
    commit,
    commit_in_pool,
    input_and_output_shared,
    int32,
    layers_shared,
    new,
    packed_rows,
    ragged,
    single,
    state_and_snapshots_shared,
    stateless,
    update,
    view,
    weight_in_state,
)
from wrong_arguments import ARGUMENTS, Rule

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def sentence(text: str) -> str:
    """The pattern of a row: the whole sentence, or up to the ellipsis."""
    return "^" + re.escape(text.removesuffix("…")) + ("" if text.endswith("…") else "$")


def rows(*rules: Rule) -> list[Any]:
    return [
        pytest.param(build, text, id=f"{rule.title}: {text[:60]}")
        for rule in rules
        for build, text in rule.rows
    ]


@pytest.mark.parametrize(("build", "text"), rows(*ARGUMENTS))
def test_wrong_arguments(built, build, text):
    case = build()
    mine = case.copy()
    with pytest.raises(ValueError if built == "core" else RuntimeError, match=sentence(text)):
        mine.call(built)
    mine.verify_guards()
    compare.assert_same_case(mine, case, "written to")


@pytest.mark.parametrize(("build", "text"), rows(*wrong_input.INDEX_VALUES))
@pytest.mark.parametrize("implementation", cases.BUILT)
def test_wrong_index_values(implementation, build, text):
    case = build()
    mine = case.copy()
    error = IndexError if implementation == "core" else RuntimeError
    with pytest.raises(error, match=sentence(text)):
        mine.call(implementation)
    mine.verify_guards()
    compare.assert_same_case(mine, case, "written to")


@pytest.mark.gpu
@pytest.mark.parametrize(("build", "text"), rows(*wrong_input.INDEX_VALUES))
def test_wrong_index_values_on_cuda(build, text):
    """No exception; inputs and guards are left alone; a sound call afterwards is right."""
    case = build()
    mine = cases.run("cuda", case)
    for name in ("new_input", "weight", "snapshots[0]", *case.options):
        if name in mine.arrays():
            compare.assert_same(mine.arrays()[name], case.arrays()[name], name)
    compare.assert_same_case(cases.run("cuda", batched()), cases.run("core", batched()))


CHECKED = """
import cases, compare, wrong_input
for rule in wrong_input.INDEX_VALUES:
    for build, text in rule.rows:
        case = build()
        mine = case.copy()
        try:
            mine.call("cuda")
        except RuntimeError as error:
            assert str(error) == text, (str(error), text)
        else:
            raise AssertionError(f"accepted: {text}")
        compare.assert_same_case(mine, case, text)
print("all refused")
"""


@pytest.mark.gpu
def test_wrong_index_values_on_cuda_where_they_are_checked():
    assert python(CHECKED, GDN_VERIFY_CHECK="1") == "all refused\n"


@pytest.mark.parametrize(("build", "text"), rows(wrong_input.DEVICES))
def test_devices(build, text):
    import gdn_verify.ops  # noqa: F401
    from gdn_verify.arrays import to_tensor

    case = build()
    moved = text.partition(" ")[0]
    tensors = cases.map_arrays(to_tensor, {**case.args, **case.options})
    there = tensors[moved]
    tensors[moved] = [x.to("meta") for x in there] if isinstance(there, list) else there.to("meta")
    mine = [tensors.pop(name) for name in case.args]
    with pytest.raises(RuntimeError, match=sentence(text)):
        getattr(torch.ops.gdn, case.op)(*mine, **tensors)
    compare.assert_same_case(case, build(), "written to")


@pytest.mark.parametrize(("build", "text"), rows(wrong_input.NUMPY))
def test_numpy_arrays(build, text):
    case = build()
    before = {name: x.copy() for name, x in case.arrays().items()}
    with pytest.raises(ValueError, match=sentence(text)):
        case.call("core")
    for name, x in case.arrays().items():
        assert x.tobytes() == before[name].tobytes()


@pytest.mark.skipif(not CSRC.exists(), reason="needs the source tree")
def test_every_check_of_the_core_has_a_row():
    """The formats of the sentences in the C sources, against the sentences of the table."""
    only_in_c = {  # enums and counts that the bindings do not let through: test_c_abi.py
        "op must be", "activation must be", "n_layers must be", "%s must have sizes",
        "%s must have data", "%s must start at a multiple", "%s must hold and span",
        "%s must be [%s], but is absent",
    }  # fmt: skip
    texts = [text for rule in ARGUMENTS for _, text in rule.rows]
    literal = r'((?:\s*(?:"(?:[^"\\]|\\.)*"|PRI\w+))+)'
    found = 0
    for path in (CSRC / "params.c", CSRC / "commit_params.c", CSRC / "check.c"):
        for match in re.finditer(r"INVALID\([\w>.-]+,\s*" + literal, path.read_text()):
            form = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[1].replace("PRId64", '"d"')))
            if form.startswith(tuple(only_in_c)):
                continue
            found += 1
            pattern = ".*".join(map(re.escape, re.split(r"%[a-z]+", form)))
            assert any(re.fullmatch(pattern, text.replace("…", "1 configurations from 0, but is 1"))
                       for text in texts), form  # fmt: skip
    assert found > 20


@pytest.mark.skipif(not wrong_input.PAGE.parent.exists(), reason="needs the documentation")
def test_the_documentation_is_current():
    assert wrong_input.PAGE.read_text() == wrong_input.page(), "run python tests/wrong_input.py"


@pytest.mark.parametrize("name", ["conv_state_indices", "inter_indices", "num_accepted_tokens"])
@pytest.mark.parametrize("of", ["output", "conv_state", "conv_state_inter"])
@pytest.mark.parametrize("implementation", cases.BUILT)
def test_an_index_tensor_in_written_memory(implementation, name, of):
    case = batched(output=new(N, K, D))
    written = case.args[of] = np.zeros(case.args[of].shape, F32)
    case.options[name] = written.reshape(-1).view(I32)[5 : 5 + N]
    with pytest.raises((ValueError, RuntimeError), match=f"^{of} must share no memory with {name}"):
        case.call(implementation)
    assert not written.any()


def test_config_beyond_those_of_the_build(built):
    from gdn_verify import _core

    count = _core.build_info()["num_configs"]
    case = batched(config=count)
    if count == 0:  # a build without CUDA does not know how many there are
        case.call(built)
        return
    with pytest.raises((ValueError, RuntimeError), match=f"^config must be .*, but is {count}$"):
        case.call(built)


# ---- legal calls that look alike ---------------------------------------------------------------


def interleaved_slots() -> Case:
    """State and snapshots of neighbouring layers alternate in one pool."""
    pool = new(N, 2, 1 + K, D, W)
    return batched(conv_state=pool[:, 1, 0], conv_state_inter=pool[:, 1, 1:])


def stride_zero_inputs() -> Case:
    return batched(
        new_input=view(new(D, dtype=BF16), (N, K, D), (0, 0, 1)),
        weight=view(new(W, dtype=BF16), (D, W), (0, 1)),
        bias=view(new(1, dtype=BF16), (D,), (0,)),
        num_accepted_tokens=view(np.full(1, 2, I32), (N,), (0,)),
    )


LEGAL: dict[str, Callable[[], Case]] = {
    "plain": batched,
    "ragged": ragged,
    "stateless": stateless,
    "single": single,
    "update": update,
    "commit": commit,
    "input and output are halves of rows": lambda: batched(**input_and_output_shared(D)),
    "packed input and output are halves of rows": lambda: packed_rows(D),
    "state and snapshots in one pool": lambda: batched(**state_and_snapshots_shared(2)),
    "state and snapshots alternate": interleaved_slots,
    "odd and even channels": lambda: (lambda pool: batched(
        conv_state=pool[:, 0, ::2], conv_state_inter=pool[:, :K, 1::2]))(new(N, K, 2 * D, W)),
    "committing inside of a pool": lambda: commit_in_pool(2),
    "layers interleaved in a pool": lambda: commit(conv_states=layers_shared(D, 3)),
    "inputs with stride 0": stride_zero_inputs,
    "a state that is only read overlaps itself": lambda: batched(
        conv_state=view(new(D, W), (N, D, W), (0, W, 1)), update_state=False),
    "a state that is only read overlaps the weight": lambda: weight_in_state(update_state=False),
    "a state that a tree reads overlaps the weight": lambda: weight_in_state(parent_index=TREE),
    "inputs overlap each other": lambda: (lambda w: batched(weight=w, bias=w[:, 0]))(
        new(D, W, dtype=BF16)),
    "shared index tensors": lambda: (lambda i: batched(
        conv_state_indices=i, inter_indices=i, num_accepted_tokens=i))(np.arange(N, dtype=I32)),
    "more slots, rows and tokens": lambda: batched(
        conv_state=new(N + 2, D, W), conv_state_inter=new(N + 1, K + 3, D, W)),
    "a longer history": lambda: batched(conv_state_inter=new(N + 1, W + K + 2, D)),
    "fewer slots and rows with indices": lambda: batched(
        conv_state=new(2, D, W), conv_state_inter=new(2, K, D, W),
        conv_state_indices=int32(1, -1, 0), inter_indices=int32(0, 9, 1)),
    "no slot at all": lambda: batched(
        conv_state=new(0, D, W), conv_state_inter=new(0, K, D, W),
        conv_state_indices=int32(-1, -1, -1), inter_indices=int32(0, 1, 2)),
    "a small maximum": lambda: ragged(max_num_tokens=4, conv_state_inter=new(N, 9, D, W)),
    "a huge maximum": lambda: ragged(max_num_tokens=2**62, conv_state_inter=None),
    "a maximum of 0 without lengths is none": lambda: batched(max_num_tokens=0),
    "snapshots that hold no token": lambda: ragged(conv_state_inter=new(N, 0, D, W)),
    "a history that holds no token": lambda: ragged(conv_state_inter=new(N, W - 1, D)),
    "S is W - 1": lambda: batched(
        conv_state=new(N, D, W - 1), conv_state_inter=new(N, K, D, W - 1)),
    "no head": lambda: batched(qk_channels=0, head_dim=1000),
    "epsilon 0": lambda: batched(l2_eps=0.0),
    "no sequence": lambda: batched(**{n: x[:0] for n, x in batched().args.items()
                                      if isinstance(x, np.ndarray) and n != "weight"}),
    "no token": lambda: batched(new_input=new(N, 0, D, dtype=BF16),
                                output=new(N, 0, D, dtype=BF16)),
    "no channel": lambda: batched(
        conv_state=new(N, 0, W), new_input=new(N, K, 0, dtype=BF16), weight=new(0, W, dtype=BF16),
        output=new(N, K, 0, dtype=BF16), conv_state_inter=new(N, K, 0, W), qk_channels=0),
    "one channel of any stride": lambda: batched(
        conv_state=new(N, 1, W), new_input=new(N, K, 7, dtype=BF16)[..., ::7],
        weight=new(1, W, dtype=BF16), output=new(N, K, 7, dtype=BF16)[..., ::7],
        conv_state_inter=new(N, K, 1, W), qk_channels=0),
    "no layer": lambda: commit(conv_states=[], snapshots=[]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal_look_alikes(built, name):
    case = LEGAL[name]()
    compare.assert_same_case(cases.run(built, case), cases.run("reference", case), name)
