"""The operator inside transformers, vLLM and SGLang; of the last two there are stand-ins.

Where vLLM or SGLang is installed, the stand-ins and the drop-ins are compared with it, so that none
of them can fall behind: another version than the one they are written for fails where it differs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import logging
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standins
import torch
from torch import Tensor

from gdn_verify import compat
from gdn_verify.integrations import vllm as vllm_plugin

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- vLLM ----------------------------------------------------------------------------------------

DRAFTS = 3


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield standins.put_vllm(monkeypatch)
    vllm_plugin.remove()


def spec_step(
    layer: standins.VllmLayer, device: str, lengths: list[int], accepted: list[int]
) -> SimpleNamespace:
    """A step in which sequence i owns blocks 1 + 4 i and on; one request of padding at the end."""
    n = len(lengths)
    blocks = torch.zeros(n + 1, DRAFTS + 1, dtype=torch.int32)  # block 0 is padding
    blocks[:n] = 1 + torch.arange(n * (DRAFTS + 1)).view(n, -1)
    starts = [0, *itertools.accumulate(lengths)]
    return SimpleNamespace(
        spec_sequence_masks=torch.ones(n + 1, dtype=torch.bool, device=device),
        num_spec_decodes=n + 1,
        num_decodes=0,
        num_prefills=0,
        num_actual_tokens=starts[-1],
        spec_state_indices_tensor=blocks.to(device),
        spec_query_start_loc=ints(device, *starts, starts[-1], starts[-1]),
        num_accepted_tokens=ints(device, *accepted, 1, 1),
    )


def plain_step(device: str, blocks: list[int]) -> SimpleNamespace:
    n = len(blocks)
    return SimpleNamespace(
        spec_sequence_masks=None,
        num_decodes=n,
        num_actual_tokens=n,
        non_spec_state_indices_tensor=ints(device, *blocks),
        non_spec_query_start_loc=ints(device, *range(n + 1)),
    )


def vllm_run(module: Any, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of steps with and without drafts, and both states."""
    layer = module.QwenGatedDeltaNetAttention(module, DRAFTS, device, dtype)
    torch.manual_seed(1)
    outputs, accepted = [], [1, 1]
    for step in range(10):
        if step in (0, 6):  # both sequences go on from the window of one accepted token
            meta, tokens, accepted = plain_step(device, [1, 5]), 2, [1, 1]
        else:
            lengths = [4, 1 + step % 4]
            meta, tokens = spec_step(layer, device, lengths, accepted), sum(lengths)
            accepted = [1 + (step * 7 + i) % length for i, length in enumerate(lengths)]
        rows = torch.randn(tokens, layer.d_inner + 32).to(dtype).to(device)[:, : layer.d_inner]
        gates = torch.randn(2, tokens, layer.v_heads).to(device)
        outputs.append(layer.forward(meta, rows, *gates))
    return outputs, *layer.kv_cache


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_vllm_step(vllm, device, dtype, bound, dim_first):
    vllm.is_conv_state_dim_first = lambda: dim_first
    expected = vllm_run(vllm, device, dtype)
    vllm_plugin.install()
    found = vllm_run(vllm, device, dtype)
    assert torch.equal(found[1], expected[1])  # the pool: inputs, as they came
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)
    torch.testing.assert_close(found[2], expected[2], rtol=bound, atol=bound)


def test_vllm_calls(vllm, monkeypatch):
    """Drafts alone go to the operator, with the norm of this rank's heads; it is not done twice."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []

    def note(into: list[dict[str, Any]], function: Any) -> Any:
        return lambda *args, **kwargs: (into.append(kwargs), function(*args, **kwargs))[1]

    monkeypatch.setattr(
        vllm_plugin, "causal_conv1d_update_vllm", note(ours, compat.causal_conv1d_update_vllm)
    )
    vllm.causal_conv1d_update = note(theirs, vllm.causal_conv1d_update)
    rule = "fused_sigmoid_gating_delta_rule_update"
    setattr(vllm, rule, note(rules, getattr(vllm, rule)))
    vllm_plugin.install()
    vllm_run(vllm, "cpu", torch.float32)
    assert (len(ours), len(theirs), len(rules)) == (8, 2, 10)
    assert all(call["qk_channels"] == 64 and call["head_dim"] == 16 for call in ours)
    assert [call["use_qk_l2norm_in_kernel"] for call in rules].count(True) == 2
    assert rules[0]["use_qk_l2norm_in_kernel"]
    assert rules[6]["use_qk_l2norm_in_kernel"]


def test_vllm_kernel_with_its_own_norm(vllm):
    """Outside `_forward_core` nothing tells the recurrence: convolution and SiLU alone."""
    layer = vllm.QwenGatedDeltaNetAttention(vllm, DRAFTS, "cpu", torch.float32)
    meta = spec_step(layer, "cpu", [4, 4], [1, 2])

    def update() -> Tensor:
        torch.manual_seed(1)
        return vllm.causal_conv1d_update(
            torch.randn(8, layer.d_inner),
            layer.kv_cache[0].clone().transpose(1, 2),
            layer.conv1d.weight.squeeze(1),
            None,
            "silu",
            conv_state_indices=meta.spec_state_indices_tensor[:3, 0],
            num_accepted_tokens=meta.num_accepted_tokens[:3],
            query_start_loc=meta.spec_query_start_loc[:4],
            max_query_len=4,
            validate_data=False,
        )

    expected = update()
    vllm_plugin.install()
    torch.testing.assert_close(update(), expected, rtol=1e-5, atol=1e-5)


def test_vllm_goes_on_where_the_operator_refuses(vllm, caplog):
    expected = vllm_run(vllm, "cpu", torch.float64)
    vllm_plugin.install()
    with caplog.at_level(logging.WARNING, "gdn_verify"):
        found = vllm_run(vllm, "cpu", torch.float64)
    assert all(map(torch.equal, found[0], expected[0]))
    assert torch.equal(found[1], expected[1])
    assert len(caplog.records) == 1
    assert "vLLM's own convolution runs" in caplog.text


def test_vllm_install_and_remove(vllm):
    layer = vllm.QwenGatedDeltaNetAttention
    before = dict(vars(vllm)), layer._forward_core
    vllm_plugin.install()
    patched = dict(vars(vllm))
    vllm_plugin.install()
    assert dict(vars(vllm)) == patched != before[0]
    vllm_plugin.remove()
    assert (dict(vars(vllm)), layer._forward_core) == before
    vllm_plugin.remove()


def test_vllm_entry_point(vllm, monkeypatch):
    """Found by vLLM, and silent unless it is asked for."""
    found = metadata.entry_points(group="vllm.general_plugins")
    if "gdn_verify" not in found.names:
        pytest.skip("needs an installation that is as new as this test")
    register = found["gdn_verify"].load()
    assert register is vllm_plugin.register
    before = vllm.causal_conv1d_update
    monkeypatch.delenv("GDN_VERIFY_VLLM", raising=False)
    register()
    assert vllm.causal_conv1d_update is before
    monkeypatch.setenv("GDN_VERIFY_VLLM", "1")
    register()
    assert vllm.causal_conv1d_update is not before


@pytest.fixture
def vllm_not_imported() -> Iterator[None]:
    def take() -> dict[str, Any]:
        names = [name for name in sys.modules if name.split(".")[0] == "vllm"]
        return {name: sys.modules.pop(name) for name in names}

    kept = take()
    yield
    vllm_plugin.remove()
    take()
    sys.modules.update(kept)


def test_vllm_register_waits_for_the_import(vllm_not_imported, monkeypatch, tmp_path):
    """That of the module would initialise CUDA where nothing else does."""
    path = tmp_path.joinpath(*vllm_plugin.MODULE.split("."))
    path.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    path.with_suffix(".py").write_text(
        "causal_conv1d_update = fused_sigmoid_gating_delta_rule_update = min\n"
        "class QwenGatedDeltaNetAttention:\n"
        "    _forward_core = max\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GDN_VERIFY_VLLM", "1")
    finders = list(sys.meta_path)
    vllm_plugin.register()
    vllm_plugin.register()
    assert vllm_plugin.MODULE not in sys.modules
    module = importlib.import_module(vllm_plugin.MODULE)
    assert module.causal_conv1d_update is not min
    assert module.QwenGatedDeltaNetAttention._forward_core is not max
    vllm_plugin.remove()
    assert module.causal_conv1d_update is min
    assert sys.meta_path == finders


@pytest.mark.parametrize("missing", ["vllm", "module", "rule", "layer"])
def test_vllm_that_is_another(vllm_not_imported, monkeypatch, caplog, missing):
    """One sentence; the server goes on."""
    sentence = {"vllm": "not installed", "module": "0.33 has"}.get(missing, "another")
    if missing == "vllm":

        def find_spec(name: str, *_: Any) -> None:
            if name == "vllm":
                raise ModuleNotFoundError(name=name)

        finders = [SimpleNamespace(find_spec=find_spec), *sys.meta_path]
        monkeypatch.setattr(sys, "meta_path", finders)
    elif missing == "module":
        standins.put_module(monkeypatch, "vllm.model_executor")
    else:
        module: Any = standins.put_vllm(monkeypatch)
        name = "fused_sigmoid_gating_delta_rule_update"
        delattr(module, name if missing == "rule" else "QwenGatedDeltaNetAttention")
    with pytest.raises(ImportError, match=sentence):
        vllm_plugin.install()
    monkeypatch.setenv("GDN_VERIFY_VLLM", "1")
    with caplog.at_level(logging.WARNING, "gdn_verify"):
        vllm_plugin.register()
    assert "GDN_VERIFY_VLLM=1 has no effect" in caplog.text
    assert not vllm_plugin._originals


# ---- SGLang --------------------------------------------------------------------------------------

D, K = 96, 4


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    return standins.put_sglang(monkeypatch)


def the_guide() -> str:
    page = ROOT / "docs" / "integration-sglang.md"
    if not page.exists():
        pytest.skip("needs the documents of the source tree")
    return page.read_text("utf-8")


def run_the_guide() -> None:
    (code,) = re.findall(r"```python\n(# my_plugins.py\n.*?)```", the_guide(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    names["register"]()


def sglang_run(module: Any, device: str, shared: bool) -> tuple[list[Tensor], standins.SglangPool]:
    torch.manual_seed(0)
    backend, pool = standins.SglangBackend(module), standins.SglangPool(3, K, D, device, shared)
    weight = torch.randn(D, 4).bfloat16().to(device)
    layer = SimpleNamespace(conv_weights=weight, bias=None, activation="silu")
    slots = ints(device, 7, 2, -1)
    outputs = []
    for step in range(6):
        rows = torch.randn(3 * K, D).bfloat16().to(device)
        out = backend.verify(layer, pool, rows, K, slots)
        outputs.append(out[: 2 * K])  # the rest is padding
        pool.accept(slots, ints(device, step % K, (3 * step + 1) % K, -1))
        rows = torch.randn(2, D).bfloat16().to(device)
        outputs.append(backend.decode(layer, pool, rows, slots[:2]))
    return outputs, pool


@pytest.mark.parametrize("shared", [True, False])
def test_sglang_chain(sglang, device, shared):
    expected, their_pool = sglang_run(sglang, device, shared)
    original = sglang.causal_conv1d_update
    run_the_guide()
    assert sglang.causal_conv1d_update is not original
    found, pool = sglang_run(sglang, device, shared)
    assert torch.equal(pool.conv, their_pool.conv)
    assert torch.equal(pool.windows, their_pool.windows)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm", [False, True])
def test_sglang_windows_that_overlap(device, norm):
    """The same bits as windows of their own, whatever the width."""
    for width in (2, 3, 4, 8):
        past = width - 1
        buffer = torch.zeros(2, D, K + past - 1, device=device)
        strides = (buffer.stride(0), 1, buffer.stride(1), 1)
        overlapping = buffer.as_strided((2, K, D, past), strides)
        own = torch.zeros(2, K, D, past, device=device)
        state = torch.randn(5, D, past).to(device)
        x = torch.randn(2, K, D).to(device).transpose(1, 2)
        weight = torch.randn(D, width).to(device)
        results = []
        for windows in (overlapping, own):
            slots = state.clone()
            out = compat.causal_conv1d_update_sglang(
                x,
                slots,
                weight,
                activation="silu",
                conv_state_indices=ints(device, 3, 1),
                intermediate_conv_window=windows,
                intermediate_state_indices=ints(device, 1, 0),
                **({"qk_channels": 64, "head_dim": 32} if norm else {}),
            )
            results.append((out, slots, windows.clone()))
        assert all(map(torch.equal, *results)), width
        assert overlapping.any()


def test_sglang_tree_needs_windows_of_its_own(device):
    buffer = torch.zeros(1, D, K + 2, device=device)
    with pytest.raises(ValueError, match="parent_index"):
        compat.causal_conv1d_update_sglang(
            torch.randn(1, K, D).to(device).transpose(1, 2),
            torch.zeros(1, D, 3, device=device),
            torch.randn(D, 4).to(device),
            conv_state_indices=ints(device, 0),
            intermediate_conv_window=buffer.as_strided((1, K, D, 3), (D * (K + 2), 1, K + 2, 1)),
            retrieve_next_token=ints(device, 1, 2, 3, -1)[None],
            retrieve_next_sibling=ints(device, -1, -1, -1, -1)[None],
        )


# ---- what is installed, beside the stand-ins -----------------------------------------------------


def source(module: str) -> ast.Module:
    """Of a module that need not be importable here."""
    package, *path = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"needs {package}")
    place = Path(next(iter(spec.submodule_search_locations))).joinpath(*path)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def definition(module: str, name: str) -> tuple[str, Any]:
    """Where a module has `name` from, and the function, class or value that it is there."""
    for node in source(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            package = f"{module}." if node.level else ""  # relative ones are those of packages
            return definition(f"{package}{node.module}", name)
    raise AssertionError(f"{module} has no {name}")


def their_parameters(module: str, name: str) -> list[tuple[str, Any]]:
    """Names and defaults in order, None where there is no default."""
    home, function = definition(module, name)
    given = function.args.defaults
    values = [
        definition(home, x.id)[1] if isinstance(x, ast.Name) else ast.literal_eval(x) for x in given
    ]
    names = [x.arg for x in function.args.args]
    return list(zip(names, [None] * (len(names) - len(values)) + values, strict=True))


def our_parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [
        (p.name, None if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]


def calls(tree: ast.AST, name: str, keyword: str) -> list[tuple[int, list[str | None]]]:
    """How `name` is called with `keyword`: how many arguments by position, and those by name."""
    return [
        (len(node.args), names)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
        if keyword in (names := [x.arg for x in node.keywords])
    ]


def test_vllm_installed_signatures():
    module = vllm_plugin.MODULE
    theirs = their_parameters(module, "causal_conv1d_update")
    assert our_parameters(compat.causal_conv1d_update_vllm) == theirs
    assert our_parameters(standins.vllm_update) == theirs
    rule = "fused_sigmoid_gating_delta_rule_update"
    assert our_parameters(standins.vllm_rule) == their_parameters(module, rule)
    assert definition("vllm.plugins", "DEFAULT_PLUGINS_GROUP")[1] == "vllm.general_plugins"


@pytest.mark.parametrize("dim_first", [False, True])
def test_vllm_installed_layer(monkeypatch, dim_first):
    """Its own methods and the stand-in's call the same functions with the same bits; patched, its
    own go on from the operator's."""
    try:
        module: Any = importlib.import_module(vllm_plugin.MODULE)
        backend = importlib.import_module("vllm.v1.attention.backends.gdn_attn")
    except ImportError as error:
        pytest.skip(f"needs vLLM: {error}")
    layer_class = module.QwenGatedDeltaNetAttention
    functions = {
        "causal_conv1d_update": standins.vllm_update,
        "fused_sigmoid_gating_delta_rule_update": standins.vllm_rule,
        "is_conv_state_dim_first": lambda: dim_first,
    }
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function)

    def metadata(step: SimpleNamespace) -> Any:
        counts = ("prefill", "decode", "spec_decode")
        zeros = [f"num_{count}{of}" for count in counts for of in ("s", "_tokens")]
        return backend.GDNAttentionMetadata(**dict.fromkeys(zeros, 0) | vars(step))

    class Layer(standins.VllmLayer):
        prefix = "layer"
        enable_packed_recurrent_decode = False
        rearrange_mixed_qkv = layer_class.rearrange_mixed_qkv

        def _forward_core(self, *args: Any, **kwargs: Any) -> None:
            context = SimpleNamespace(attn_metadata={"layer": metadata(self.attn_metadata)})
            monkeypatch.setattr(module, "get_forward_context", lambda: context)
            layer_class._forward_core(self, *args, **kwargs)

    def run(layer: type) -> tuple[list[Tensor], Tensor, Tensor]:
        stand_in = SimpleNamespace(**functions, QwenGatedDeltaNetAttention=layer)
        return vllm_run(stand_in, "cpu", torch.float32)

    def convolved() -> Tensor:
        """What the kernel with its own norm is given."""
        layer: Any = Layer(SimpleNamespace(**functions), DRAFTS, "cpu", torch.float32)
        found: list[Tensor] = []
        name = "_forward_core_decode_spec_post_conv_fused_norm"
        setattr(layer, name, lambda **given: found.append(given["mixed_qkv"]))
        step, rows = metadata(spec_step(layer, "cpu", [4, 4], [1, 2])), torch.randn(8, 128)
        others = dict.fromkeys(("b", "a", "output_gate", "core_attn_out"), rows)
        layer_class._forward_core_decode_spec_fused_norm(
            layer, mixed_qkv=rows.clone(), attn_metadata=step, **others
        )
        return found[0]

    expected, theirs, kernel = run(standins.VllmLayer), run(Layer), convolved()
    for i in (1, 2):
        assert torch.equal(theirs[i], expected[i])
    assert all(map(torch.equal, theirs[0], expected[0]))
    try:
        vllm_plugin.install()
        ours, our_kernel = run(Layer), convolved()
    finally:
        vllm_plugin.remove()
    assert torch.equal(ours[1], expected[1])
    assert not all(map(torch.equal, ours[0], expected[0]))  # it was the operator
    bound = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close((ours[0], ours[2]), (expected[0], expected[2]), **bound)
    torch.testing.assert_close(our_kernel, kernel, **bound)


def test_sglang_installed_signatures():
    module, name = "sglang.srt.layers.attention.linear.gdn_backend", "causal_conv1d_update"
    theirs = their_parameters(module, name)
    assert our_parameters(compat.causal_conv1d_update_sglang) == theirs
    assert our_parameters(standins.sglang_update) == theirs
    verify = ast.parse(textwrap.dedent(inspect.getsource(standins.SglangBackend.verify)))
    backend = definition(module, "GDNAttnBackend")[1]
    keyword = "intermediate_conv_window"
    assert calls(backend, name, keyword) == calls(verify, name, keyword)
    group = definition("sglang.srt.plugins", "GENERAL_PLUGINS_GROUP")[1]
    assert f'[project.entry-points."{group}"]' in the_guide()


# ---- transformers --------------------------------------------------------------------------------

KINDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.fixture
def gdn() -> Iterator[Any]:
    pytest.importorskip("transformers")
    module = importlib.import_module("gdn_verify.integrations.transformers")
    yield module
    module.remove()


def make_layer(kind: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A GDN layer with random weights, and the configuration of a model that has it alone."""
    transformers = importlib.import_module("transformers")
    name = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config_name = "Qwen3NextConfig" if kind == "qwen3_next" else f"{name}TextConfig"
    config = getattr(transformers, config_name)(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
    )
    torch.manual_seed(0)
    layer = getattr(modeling, f"{name}GatedDeltaNet")(config, 0)
    return layer.to(device=device, dtype=dtype).eval(), config


def prompted(layer: Any, config: Any, hidden: Tensor, record: bool = False) -> Any:
    """A cache of transformers after a prompt."""
    cache = importlib.import_module("transformers").DynamicCache(config=config)
    if record:
        cache.layers[0].activate_past_recording()
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        layer(hidden, cache)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_layer_decodes(gdn, device, kind, dtype, bound, num_tokens):
    """The same windows, byte for byte, and the same output within rounding, patched or not."""
    layer, config = make_layer(kind, device, dtype)
    hidden = torch.randn(3, 5 + 2 * num_tokens, 32).to(dtype).to(device)
    results = []
    for patched in (False, True):
        cache = prompted(layer, config, hidden[:, :5])
        if patched:
            assert type(layer).__name__ in gdn.install()
        outputs = []
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
            for start in (5, 5 + num_tokens):
                outputs.append(layer(hidden[:, start : start + num_tokens], cache))
        states = cache.layers[0]
        results.append((*outputs, states.recurrent_states[0], states.conv_states[0]))
    *expected, window = results[0]
    *found, our_window = results[1]
    assert torch.equal(our_window, window)
    for ours, theirs in zip(found, expected, strict=True):
        scale = bound * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=scale)
    assert dtype == torch.bfloat16 or not all(map(torch.equal, found, expected))  # it was ours


@pytest.mark.parametrize(
    "case", ["prompt", "no cache", "gradients", "recording", "float64", "autocast"]
)
def test_layer_is_left_alone(gdn, monkeypatch, case):
    """Autocast: the projections are bfloat16 then, beside which the operator has no float16."""
    dtypes = {"float64": torch.float64, "autocast": torch.float16}
    layer, config = make_layer("qwen3_next", "cpu", dtypes.get(case))
    dtype = layer.out_proj.weight.dtype
    hidden = torch.randn(2, 6, 32).to(dtype)

    def run() -> Tensor:
        if case == "no cache":
            return layer(hidden)
        if case == "prompt":
            cache = importlib.import_module("transformers").DynamicCache(config=config)
            return layer(hidden, cache)
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            cache = prompted(layer, config, hidden[:, :5], record=case == "recording")
            with torch.set_grad_enabled(case == "gradients"):
                output = layer(hidden[:, 5:], cache)
        assert output.requires_grad is (case == "gradients")
        return output.detach()

    expected = run()
    gdn.install()

    def never(*args: Any) -> None:
        raise AssertionError("the operator ran")

    monkeypatch.setattr(gdn, "_decode", never)
    assert torch.equal(run(), expected)


def test_layer_whose_weight_is_elsewhere(gdn, monkeypatch):
    """Its own code calls the hooks that bring an offloaded weight back."""
    layer, config = make_layer("qwen3_next", "cpu", torch.float32)
    hidden = torch.randn(2, 6, 32)
    cache = prompted(layer, config, hidden[:, :5])
    monkeypatch.setattr(type(layer), "forward", lambda *args, **kwargs: "its own")
    gdn.install()
    with torch.no_grad():
        assert isinstance(layer(hidden[:, 5:], cache), Tensor)
        layer.conv1d.weight = torch.nn.Parameter(layer.conv1d.weight.to("meta"))
        assert layer(hidden[:, 5:], cache) == "its own"
    gdn.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_layer_of_a_subclass(gdn, kind):
    """As FSDP and parametrizations make them, in their own modules."""
    layer, config = make_layer(kind, "cpu", torch.float32)
    hidden = torch.randn(2, 6, 32)
    gdn.install()
    found = []
    for layer_class in (type(layer), type("Sharded", (type(layer),), {"__module__": "elsewhere"})):
        layer.__class__ = layer_class
        cache = prompted(layer, config, hidden[:, :5])
        with torch.no_grad():
            found.append(layer(hidden[:, 5:], cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("rollback", ["accepted", "commit"])
@pytest.mark.parametrize("accepted", [[1, 1, 1, 1], [4], [2, 2], [1, 3]])
def test_layer_verifies(gdn, device, rollback, accepted):
    """Steps of four tokens of which some are accepted, against a token at a time: the convolution
    has the same bits, whatever came after the accepted tokens."""
    layer, config = make_layer("qwen3_next", device, torch.float32)
    gdn.install()
    d_inner, d_conv = layer.conv_dim, layer.conv_kernel_size
    torch.manual_seed(2)
    rows = torch.randn(2, 8, d_inner).to(device)
    shape = gdn._convolution(layer)
    states = torch.randn(2, d_inner, d_conv).to(device)
    expected = []
    state = states.clone()
    for t in range(4):
        row, output = rows[:, t].contiguous(), torch.empty_like(rows[:, 0])
        torch.ops.gdn.conv1d_update_l2norm(
            state, row, shape["weight"], output, shape["qk_channels"], shape["head_dim"]
        )
        expected.append(output)

    cache = gdn.SpeculativeCache(
        config, slots=5, num_tokens=4, max_length=64, device=device, rollback=rollback
    )
    slots = [3, 1]
    cache._conv_states[0][slots] = states
    done = 0
    with torch.no_grad():
        for n in accepted:
            cache._begin(slots, 4)
            wrong = torch.randn(2, 4, d_inner).to(device)
            wrong[:, :n] = rows[:, done : done + n]
            output = cache.convolve(0, wrong, **shape)
            for t in range(n):
                assert torch.equal(output[:, t], expected[done + t])
            cache.accept([n, n])
            done += n
    assert done == 4


def test_install_and_remove(gdn):
    layer, _ = make_layer("qwen3_next", "cpu", torch.float32)
    forward = type(layer).forward
    names = gdn.install()
    assert {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet"} <= set(names)
    patched = type(layer).forward
    assert patched is not forward
    assert gdn.install() == names
    assert type(layer).forward is patched
    gdn.remove()
    assert type(layer).forward is forward
    gdn.remove()


def test_cache_refuses(gdn):
    _, config = make_layer("qwen3_next", "cpu", torch.float32)
    sizes = {"slots": 2, "num_tokens": 2, "max_length": 4}
    with pytest.raises(ValueError, match="rollback is 'none'"):
        gdn.SpeculativeCache(config, rollback="none", **sizes)
    cache = gdn.SpeculativeCache(config, **sizes)
    for tokens in (3, 5):
        with pytest.raises(ValueError, match="do not fit"):
            cache.verify(None, torch.zeros(1, tokens, dtype=torch.int64), [0])
    with pytest.raises(ValueError, match="must be 1 or more"):
        cache.accept([1])


def test_cache_refuses_what_it_would_mix_up(gdn):
    """Slots that are not there or twice, other batches, counts beyond K, a verify without its
    accept and an accept too many: each would go on with another sequence's past."""
    layer, config = make_layer("qwen3_next", "cpu", torch.float32)
    prompt, prompts = (prompted(layer, config, torch.randn(n, 5, 32)) for n in (1, 2))
    prompt.get_seq_length = prompts.get_seq_length = lambda: 5  # which attention's layers tell
    cache = gdn.SpeculativeCache(config, slots=2, num_tokens=3, max_length=20)

    def call(tokens: Tensor, *_: Any) -> SimpleNamespace:
        with torch.no_grad():
            return SimpleNamespace(logits=layer(torch.randn(*tokens.shape, 32), cache))

    class Model:
        get_input_embeddings = staticmethod(lambda: layer.out_proj)
        __call__ = staticmethod(call)

    gdn.install()
    model = Model()
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    for slots in ([0, 2], [-1, 0], [1, 1], []):
        with pytest.raises(ValueError, match="different ones from 0 to 1"):
            cache.verify(model, tokens, slots)
    for wrong in (tokens[:1], tokens[0]):
        with pytest.raises(ValueError, match="for the 2 slots"):
            cache.verify(model, wrong, [0, 1])
    cache.verify(model, tokens, [1, 0])
    for accepted in ([1], [0, 1], [1, 3]):
        with pytest.raises(ValueError, match="at most its 2 tokens, once"):
            cache.accept(accepted)
    with pytest.raises(ValueError, match=r"of \[0, 1\] the last"):
        cache.verify(model, tokens[:1], [1])
    cache.accept([2, 1])
    with pytest.raises(ValueError, match="once"):
        cache.accept([2, 1])
    cache.verify(model, tokens, [0, 1])
    cache.load(1, prompt)  # another sequence takes the slot
    cache.verify(model, tokens[:1], [1])

    with pytest.raises(ValueError, match="2 sequences"):
        cache.load(0, prompts)
    with pytest.raises(ValueError, match="from 0 to 1"):
        cache.load(2, prompt)


@pytest.mark.parametrize("case", ["transformers", "layers", "rule"])
def test_transformers_that_is_another(gdn, monkeypatch, case):
    real = importlib.import_module
    sentence = {"transformers": "not installed", "layers": "no Gated", "rule": "has another"}[case]

    def other(path: str) -> Any:
        if case == "transformers":
            raise ModuleNotFoundError(name="transformers")
        if case == "layers" and path != "transformers":
            raise ModuleNotFoundError(name=path)
        module = real(path)
        if case == "rule" and path != "transformers":
            return SimpleNamespace(**{k: v for k, v in vars(module).items() if "rule" not in k})
        return module

    monkeypatch.setattr(gdn.importlib, "import_module", other)
    with pytest.raises(ImportError, match=sentence):
        gdn.install()
    assert not gdn._originals
