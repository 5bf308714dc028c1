"""CUDA graphs: what is captured, cold or warm, runs again on other values; what a graph holds.

A capture may be the first thing that a process does with the operators; that is tried in processes
of their own, which run `main`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from calls import BASE, CALLS, HEADS, Mirror, batched, change, commit, equal
from cases import PAD, Case, default_case, make_case, map_arrays, normal
from processes import python

from gdn_verify import _core, tuned, verify_conv
from gdn_verify.arrays import to_tensor

MODES = ["cpu", *(pytest.param(mode, marks=pytest.mark.gpu) for mode in ("eager", "graph"))]
"""On the CPU, on CUDA, and on CUDA in a graph that is captured once."""
each_mode = pytest.mark.parametrize("mode", MODES)


def device_of(mode: str) -> str:
    return "cpu" if mode == "cpu" else "cuda"


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    """The replay of a graph of `step`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def repeated(mode: str, step: Callable[[], Any]) -> Callable[[], Any]:
    """`step`, or in mode "graph" the replay of its capture."""
    return captured(step) if mode == "graph" else step


# ---- every operator, cold and warm -------------------------------------------------------------


def replays(case: Case, mirror: Mirror, replay: Callable[[], None]) -> Iterator[str]:
    """Replays on other values in all tensors, each to be compared with the case."""
    rng = np.random.default_rng(0)
    for i in range(4):
        change(case, rng)
        mirror.upload()
        replay()
        case.call("core")
        yield f"replay {i} of {case!r}"


def check_replays(case: Case, warm: bool = False, **options: Any) -> None:
    mirror = Mirror(case, "cuda")
    if warm:
        mirror.run(**options)
    for label in replays(case, mirror, captured(lambda: mirror.run(**options))):
        mirror.assert_same(label)


def check_wrapper(snapshots: Any, warm: bool = False) -> None:
    """The same for verify_conv, which allocates inside the capture."""
    case = batched(snapshots=snapshots)
    mirror = Mirror(case, "cuda")
    state, x, weight = (mirror.given[name] for name in ("conv_state", "new_input", "weight"))
    results: list[Any] = []

    def step() -> None:
        results[:] = verify_conv(state, x, weight, snapshots=snapshots, **HEADS)

    if warm:
        step()
    for label in replays(case, mirror, captured(step)):
        for name, found in zip(("output", "conv_state_inter"), results, strict=True):
            equal(found, case.args[name], f"{label}: {name}")
        equal(state, case.args["conv_state"], f"{label}: state")


CAPTURES: dict[str, Callable[..., None]] = {
    **{name: lambda warm=False, make=make: check_replays(make(), warm)
       for name, make in CALLS.items()},
    "dependent": lambda warm=False: check_replays(CALLS["batched-pool"](), warm, pdl=True),
    "dependent-general": lambda warm=False: check_replays(make_case(head_dim=32), warm, pdl=True),
    "commit-channels": lambda warm=False: check_replays(
        commit(snapshot_layout="transposed"), warm
    ),
    "wrapper": lambda warm=False: check_wrapper("windows", warm),
    "wrapper-history": lambda warm=False: check_wrapper("history", warm),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", CAPTURES)
def test_replays_see_what_changed(name: str, warm: bool) -> None:
    CAPTURES[name](warm)


# ---- what a graph holds ------------------------------------------------------------------------


def nodes_of(step: Callable[[], Any]) -> list[int]:
    """The kinds of the nodes that a capture of `step` makes: 0 is a kernel, others copy or set."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes, kinds = (ctypes.c_void_p * count.value)(), []
    if count.value:
        assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_kernel_and_allocates_nothing(name: str) -> None:
    mirror = Mirror(CALLS[name](), "cuda")
    for options in ({}, {"pdl": True}):
        if not options or mirror.case.op.startswith("verify"):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            mirror.run(**options)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            assert nodes_of(lambda options=options: mirror.run(**options)) == [0]


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "launches"), [(0, 0), (1, 1), (48, 1), (64, 1), (65, 2)])
def test_a_commit_is_one_kernel_for_64_layers(layers: int, launches: int) -> None:
    states = list(torch.zeros(layers, 2, 64, 4, device="cuda"))
    snapshots = list(torch.ones(layers, 2, 3, 64, 4, device="cuda"))
    one = torch.ones(2, dtype=torch.int32, device="cuda")
    commits = nodes_of(lambda: torch.ops.gdn.commit_conv_state(states, snapshots, one))
    assert commits == [0] * launches
    torch.ops.gdn.commit_conv_state(states, snapshots, one)
    assert all(bool((state == 1).all()) for state in states)


@pytest.mark.gpu
def test_empty_calls_launch_nothing() -> None:
    given = Mirror(batched(), "cuda").given
    x, y = given["new_input"], given["output"]
    op = torch.ops.gdn.verify_fused_conv_kn_batched

    def step() -> None:
        for some in ((slice(0), slice(4)), (slice(3), slice(0))):
            op(**{**given, "new_input": x[some], "output": y[some]})

    assert nodes_of(step) == []


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_step_of_48_layers_is_49_kernels(pdl: bool) -> None:
    model = map_arrays(lambda x: to_tensor(np.ascontiguousarray(x)).cuda(), draw_model(2, 3))
    assert nodes_of(lambda: decode(torch.ops.gdn, model, pdl)) == [0] * (LAYERS + 1)


# ---- the first call of a process ---------------------------------------------------------------

FIRST_OF_A_PROCESS = [
    ("batched", {}),
    ("batched", {"GDN_VERIFY_CHECK": "1"}),
    ("batched-tree", {}),
    ("single", {"CUDA_MODULE_LOADING": "EAGER"}),
    ("update", {}),
    ("commit", {}),
    ("dependent", {}),
    ("dependent-general", {}),
    ("wrapper", {}),
]


MAIN = "import test_graphs; test_graphs.main()"


def main() -> None:
    assert not torch.cuda.is_initialized()
    for name in sys.argv[1:]:
        CAPTURES[name]()
    print(len(tuned.entries()), "tuned")


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "env"), FIRST_OF_A_PROCESS)
def test_the_first_call_of_a_process_is_captured(first: str, env: dict[str, str]) -> None:
    python(MAIN, first, *(name for name in CAPTURES if name != first), **env)


@pytest.mark.gpu
def test_a_capture_loads_the_tuned_table_and_tunes_nothing(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path))
    shape = tuned.CallShape(BASE.d_inner, BASE.qk_channels, 3, 4)
    entry = {(tuned.device_name(0), shape): tuned.Tuned(0, 1.0, 2.0)}
    assert tuned.save(entry) == entry
    before = (tmp_path / "tuned.json").read_bytes()
    said = python(MAIN, "wrapper", GDN_VERIFY_CACHE=str(tmp_path))
    assert said == "1 tuned\n"
    assert (tmp_path / "tuned.json").read_bytes() == before


# ---- graph-padded batches ----------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "windows": {"rows": "permuted"},
    "rollback": {"rows": "permuted", "accepted": "mixed", "snapshots": "history"},
    "history-only": {"state": None, "rows": "permuted", "accepted": "mixed",
                     "snapshots": "history"},
    "general": {"head_dim": 32, "tree": True, "rows": "permuted"},
}  # fmt: skip


@each_mode
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_padded_batch_with_changing_live_sequences(form: str, pdl: bool, mode: str) -> None:
    """State and snapshots live on from replay to replay; padding's other indices are garbage."""
    n_seq, num_tokens = 8, 4
    chosen = {"slots": None if form == "history-only" else "permuted", "spare": 2, **FORMS[form]}
    case = make_case(n_seq, num_tokens, **{"head_dim": 128, "qk": "all", **chosen})
    mirror = Mirror(case, device_of(mode))
    step = repeated(mode, lambda: mirror.run(pdl=pdl))
    rng = np.random.default_rng(1)
    padding = "inter_indices" if form == "history-only" else "conv_state_indices"
    moving = [name for name in ("conv_state_indices", "inter_indices", "num_accepted_tokens",
                                "parent_index") if name in case.options]  # fmt: skip
    for i, share in enumerate((0.5, 0, 1, 0.2, 0.8)):
        live = rng.random(n_seq) < share
        for name in moving:
            values = case.options[name]
            if name == "num_accepted_tokens":
                values[...] = rng.integers(1, num_tokens + 1, n_seq)
            elif name == "parent_index":
                values[...] = rng.integers(-1, np.arange(num_tokens), (n_seq, num_tokens))
            else:
                values[...] = rng.permutation(n_seq + 2)[:n_seq]
            values[~live] = -1 if name == padding else rng.choice([PAD, -PAD])
        x = case.args["new_input"]
        x[...] = normal(rng, x.shape, x.dtype.type)
        x[~live] = 0x7FC0  # NaN
        mirror.upload("new_input", *moving)
        step()
        case.call("core")
        mirror.assert_same(f"{form}, step {i}")
        assert not case.args["output"][~live].any()


# ---- a model of 48 layers ----------------------------------------------------------------------

LAYERS = 48


def draw_model(n_seq: int, num_tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    layers = [default_case(BASE, n_seq, num_tokens, seed=i, slots="permuted", spare=1)
              for i in range(LAYERS)]  # fmt: skip
    rows = normal(rng, (n_seq, num_tokens, BASE.d_inner), np.uint16)
    return {
        "states": [layer.args["conv_state"] for layer in layers],
        "weights": [layer.args["weight"] for layer in layers],
        "snapshots": [layer.args["conv_state_inter"] for layer in layers],
        "rows": [rows, rows.copy(), rows.copy()],
        "slots": np.arange(n_seq, dtype=np.int32),
        "accepted": np.zeros(n_seq, np.int32),
    }


def decode(operators: Any, model: dict[str, Any], pdl: bool) -> None:
    """One step: each layer verifies what the one before put out, then all commit."""
    rows = model["rows"]
    x = rows[0]
    for i in range(LAYERS):
        y = rows[1 + i % 2]
        operators.verify_fused_conv_kn_batched(
            model["states"][i], x, model["weights"][i], y, model["snapshots"][i],
            BASE.qk_channels, BASE.head_dim, conv_state_indices=model["slots"],
            update_state=False, pdl=pdl,
        )  # fmt: skip
        x = y
    operators.commit_conv_state(
        model["states"], model["snapshots"], model["accepted"], conv_state_indices=model["slots"]
    )


@each_mode
@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_48_layers(pdl: bool, mode: str) -> None:
    n_seq, num_tokens = 4, 3
    model = draw_model(n_seq, num_tokens)
    device = device_of(mode)
    theirs = map_arrays(lambda x: to_tensor(np.ascontiguousarray(x).copy()).to(device), model)
    step = repeated(mode, lambda: decode(torch.ops.gdn, theirs, pdl))
    rng = np.random.default_rng(3)
    for i in range(4):
        model["rows"][0][...] = normal(rng, model["rows"][0].shape, np.uint16)
        model["slots"][...] = rng.permutation(n_seq + 1)[:n_seq]
        model["slots"][rng.random(n_seq) < 0.3] = -1
        model["accepted"][...] = rng.integers(0, num_tokens + 1, n_seq)
        for name in ("slots", "accepted"):
            theirs[name].copy_(to_tensor(model[name]))
        theirs["rows"][0].copy_(to_tensor(model["rows"][0]))
        step()
        decode(_core, model, pdl)
        for name, values in model.items():
            mine = values if isinstance(values, list) else [values]
            other = theirs[name] if isinstance(values, list) else [theirs[name]]
            for layer, (a, e) in enumerate(zip(other, mine, strict=True)):
                equal(a, np.ascontiguousarray(e), f"step {i}: {name} {layer}")
    assert np.count_nonzero(model["rows"][2]) > 0
