"""CUDA graphs and dependent launches: what is captured cold or warm runs again on other values.

A capture may be the first thing that a process does with the operators; that is tried in processes
of their own, which run `main`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calls import BASE, CALLS, HEADS, Mirror, batched, change, commit, equal  # noqa: E402
from cases import PAD, Case, _map, default_case, make_case, normal  # noqa: E402

from gdn_verify import _core, tuned, verify_conv  # noqa: E402
from gdn_verify.arrays import to_tensor  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ["cpu", *(pytest.param(mode, marks=pytest.mark.gpu) for mode in ("eager", "graph"))]
"""On the CPU, on CUDA, and on CUDA in a graph that is captured once."""
each_mode = pytest.mark.parametrize("mode", MODES)


def device_of(mode: str) -> str:
    return "cpu" if mode == "cpu" else "cuda"


def repeated(mode: str, step: Callable[[], Any]) -> Callable[[], Any]:
    """`step`, or in mode "graph" the replay of its capture."""
    if mode != "graph":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---- every operator, cold and warm -------------------------------------------------------------


def check_replays(case: Case, warm: bool = False, **options: Any) -> None:
    """Captures the call, then replays it on other values in all tensors."""
    mirror = Mirror(case, "cuda")
    if warm:
        mirror.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mirror.run(**options)
    rng = np.random.default_rng(0)
    for i in range(4):
        change(case, rng)
        mirror.upload()
        graph.replay()
        case.call("core")
        mirror.assert_same(f"replay {i} of {case!r}")


def check_wrapper(snapshots: Any, warm: bool = False) -> None:
    """The same for verify_conv, which allocates inside the capture."""
    case = batched(snapshots=snapshots)
    mirror = Mirror(case, "cuda")
    state, x, weight = (mirror.given[name] for name in ("conv_state", "new_input", "weight"))
    if warm:
        verify_conv(state, x, weight, snapshots=snapshots, **HEADS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, inter = verify_conv(state, x, weight, snapshots=snapshots, **HEADS)
    rng = np.random.default_rng(0)
    for i in range(4):
        change(case, rng)
        mirror.upload()
        graph.replay()
        case.call("core")
        equal(output, case.args["output"], f"replay {i} output")
        equal(state, case.args["conv_state"], f"replay {i} state")
        equal(inter, case.args["conv_state_inter"], f"replay {i} snapshots")


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


MAIN = "import sys; sys.path.insert(0, sys.argv[1]); import test_graphs; test_graphs.main()"


def main() -> None:
    assert not torch.cuda.is_initialized()
    for name in sys.argv[2:]:
        CAPTURES[name]()
    print(len(tuned.entries()), "tuned")


def captures_in_a_process(names: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, os.path.dirname(__file__), *names],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "env"), FIRST_OF_A_PROCESS)
def test_the_first_call_of_a_process_is_captured(first: str, env: dict[str, str]) -> None:
    captures_in_a_process([first, *(name for name in CAPTURES if name != first)], env)


@pytest.mark.gpu
def test_a_capture_loads_the_tuned_table_and_tunes_nothing(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path))
    shape = tuned.CallShape(BASE.d_inner, BASE.qk_channels, 3, 4)
    entry = {(tuned.device_name(0), shape): tuned.Tuned(0, 1.0, 2.0)}
    assert tuned.save(entry) == entry
    before = (tmp_path / "tuned.json").read_bytes()
    said = captures_in_a_process(["wrapper"], {"GDN_VERIFY_CACHE": str(tmp_path)})
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
    theirs = _map(lambda x: to_tensor(np.ascontiguousarray(x).copy()).to(device), model)
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


# ---- dependent launches that have nothing to do ------------------------------------------------


def idle(kind: str, device: str) -> Callable[[], None]:
    """A dependent launch of blocks that end at once."""
    head_dim = 64 if kind.startswith("general") else 128
    chosen: dict[str, Any] = {"head_dim": head_dim, "qk": "all", "slots": "permuted", "spare": 1}
    if kind.endswith(("empty", "unowned", "short")):
        chosen["ragged"] = "max_num_tokens"
    if kind.endswith("tree"):
        chosen["tree"] = True
    case = make_case(4, 17, **chosen)
    if kind.endswith("empty"):
        case.options["cu_seqlens"][:] = 0
        for name in ("new_input", "output"):
            case.args[name] = case.args[name][:0]
    elif kind.endswith("unowned"):
        case.options["cu_seqlens"][:] = 0
    elif kind.endswith("short"):
        case.options["cu_seqlens"][:] = np.arange(5)
        case.options["conv_state_indices"][:] = np.arange(4)
    elif kind.endswith("nothing"):
        for name in ("new_input", "output"):
            case.args[name] = case.args[name][:0]
        case.options["conv_state_indices"] = case.options["conv_state_indices"][:0]
    elif not kind.endswith("wrong") or device == "cpu":
        case.options["conv_state_indices"][:] = -1
    else:
        case.options["conv_state_indices"][:] = PAD
    mirror = Mirror(case, device)
    return lambda: mirror.run(pdl=True)


IDLE = ["padded", "empty", "unowned", "short", "nothing", "wrong", "general-padded",
        "general-empty", "general-tree"]  # fmt: skip


@each_mode
@pytest.mark.parametrize("kind", IDLE)
def test_idle_launches_between_two_live_ones(kind: str, mode: str) -> None:
    """The last launch of each round reads what the first writes. Blocks between them that end
    before the first has would let it start too early and see the round before."""
    device = device_of(mode)
    n_seq, num_tokens, rounds = (256, 17, 10) if device == "cuda" else (8, 3, 4)
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, BASE.d_inner, generator=generator).bfloat16().to(device)

    inputs = [rows(n_seq, num_tokens) for _ in range(2)]
    state = torch.randn(n_seq, BASE.d_inner, 4, generator=generator).to(device)
    weight = torch.randn(BASE.d_inner, 4, generator=generator).bfloat16().to(device)
    between = torch.empty_like(inputs[0])
    results = torch.empty(rounds, 2, num_tokens, BASE.d_inner, device=device, dtype=between.dtype)
    wait = idle(kind, device)

    def operate(x: torch.Tensor, y: torch.Tensor, pdl: bool) -> None:
        head_dim = 64 if y is between else 128  # the first launch has blocks that run for long
        torch.ops.gdn.verify_fused_conv_kn_batched(
            state, x, weight, y, None, BASE.qk_channels, head_dim, update_state=False, pdl=pdl
        )

    expected = torch.empty_like(results)
    for i in range(rounds):
        for x, y in ((inputs[i % 2], between), (between[-2:], expected[i])):
            operate(x, y, pdl=False)
            if device == "cuda":
                torch.cuda.synchronize()

    def all_rounds() -> None:
        for i in range(rounds):
            operate(inputs[i % 2], between, pdl=True)
            for _ in range(1 + i % 3):
                wait()
            operate(between[-2:], results[i], pdl=True)

    assert not torch.equal(expected[0], expected[1])
    run = repeated(mode, all_rounds)
    for i in range(1 if device == "cpu" else 10):
        results.zero_()
        run()
        equal(results, expected, f"repetition {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("before", ["copy", "fill", "kernel", "two streams", "commit", "nothing"])
def test_dependent_launch_after_anything(before: str, mode: str) -> None:
    """What runs before it on the stream need not be a kernel of ours, or a kernel, or one thing."""
    case = batched(n_seq=16, num_tokens=17, snapshots="history", input_layout="contiguous")
    mirror = Mirror(case, "cuda")
    x, state = mirror.given["new_input"], mirror.given["conv_state"]
    source = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    states = torch.empty_like(state)
    one = torch.ones(16, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    windows = torch.empty(16, 1, *state.shape[1:], device="cuda")

    def step() -> None:
        here = torch.cuda.current_stream()
        if before == "copy":
            x.copy_(source)
        elif before == "kernel":
            torch.mul(source, 1, out=x)
        elif before == "fill":
            x.copy_(source)
            state.fill_(0.5)
        elif before == "two streams":
            side.wait_stream(here)
            with torch.cuda.stream(side):
                x.copy_(source)
            state.copy_(states)
            here.wait_stream(side)
        elif before == "commit":
            x.copy_(source)
            windows[:, 0].copy_(states)
            torch.ops.gdn.commit_conv_state([state], [windows], one)
        mirror.run(pdl=True)
        if before == "two streams":  # and two that wait for it
            side.wait_stream(here)
            with torch.cuda.stream(side):
                states.copy_(state)
            here.wait_stream(side)

    run = repeated(mode, step)
    rng = np.random.default_rng(4)
    for i in range(5):
        change(case, rng)
        mirror.upload()
        source.copy_(x)
        states.copy_(state)
        if before in ("copy", "kernel", "two streams", "commit"):
            x.fill_(float("nan"))
        if before in ("two streams", "commit"):
            state.fill_(float("nan"))
        if before == "fill":
            case.args["conv_state"][...] = 0.5
        run()
        case.call("core")
        mirror.assert_same(f"{before}, step {i}")
        if before == "two streams":
            equal(states, case.args["conv_state"], f"{before}, step {i}")
