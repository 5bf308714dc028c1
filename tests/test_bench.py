"""The benchmark's honesty: what it counts, what it says, and (on a GPU) what its timer shows."""

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdn_verify import timing
from gdn_verify.__main__ import main as gdn_verify_main
from gdn_verify.models import MODELS, Shape

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("needs the source tree", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import bench_verify  # noqa: E402
import compiled  # noqa: E402
import contenders as own  # noqa: E402
import floor  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402

SHAPE = MODELS["qwen3-next-80b-a3b"]
TOY = Shape(1024, 512)


# ---- what is counted -----------------------------------------------------------------------------


def test_required_bytes_of_the_public_case():
    """n = 64, K = 4, D = 8192: input, output, windows, state read and written, and the weight."""
    moved = own.required_bytes(own.Point(SHAPE, 64, 4))
    assert moved >= 58.7e6
    assert moved == 64 * 8192 * (4 * (2 + 2 + 16) + 32) + 8192 * 8


@pytest.mark.parametrize("kind", own.KINDS)
@pytest.mark.parametrize(("c", "k"), [(1, 2), (3, 5)])
def test_required_bytes_are_those_of_the_tensors(kind, c, k):
    point = own.Point(TOY, c, k, kind)
    (b,) = own.make_buffers(point, 1, "cpu")
    size = lambda x: 0 if x is None else x.numel() * x.element_size()  # noqa: E731
    read, written = own.read_written(point)
    assert read == size(b.rows) + size(b.weight) + size(b.state)
    assert written == size(b.output) + size(b.inter) + size(b.state)


def test_baseline_counts_its_copies():
    point = own.Point(SHAPE, 8, 17)
    windows = 8 * 17 * 8192 * 16
    for each in own.BASELINES[:2]:
        # every token reads and writes the state, and its copy reads and writes it again
        assert each.bytes(point) > 4 * windows
        assert each.bytes(point) > own.required_bytes(point)
    operations = {each.name: each.operations(point) for each in own.BASELINES}
    assert operations["per-token path"] == 2 * 17 * 8
    assert operations["per-token path, batched"] == 2 * 17
    assert operations["fused, each sequence"] == 8


def test_rows_are_a_strided_view():
    (b,) = own.make_buffers(own.Point(TOY, 2, 3), 1, "cpu")
    assert b.rows.stride(1) > TOY.d_inner


@pytest.mark.parametrize(
    "name", ["fused, each sequence", "per-token path", "per-token path, batched", "PyTorch"]
)
def test_contenders_do_the_same(monkeypatch, name):
    monkeypatch.setattr(own, "make_buffers", functools.partial(own.make_buffers, device="cpu"))
    (contender,) = (each for each in own.BASELINES if each.name == name)
    assert own.compare(contender, own.Point(TOY, 2, 5)) is None


def test_a_wrong_contender_is_found(monkeypatch):
    monkeypatch.setattr(own, "make_buffers", functools.partial(own.make_buffers, device="cpu"))

    def wrong(b, shape):
        own.run_fused(b, shape)
        b.output[0, 0, 3] += 1

    contender = own.Contender("wrong", "", True, wrong)
    assert own.compare(contender, own.Point(TOY, 2, 5)).startswith("output: 1 of ")
    close = own.Contender("wrong", "", True, wrong, equal="close")
    assert own.compare(close, own.Point(TOY, 2, 5)).startswith("output: ")


def test_plan_measures_once():
    plan = measure.Plan()
    point = own.Point(TOY, 1, 2)
    fused = own.FUSED[own.WINDOWS, False]
    plan.add(point, fused, ("graph_cold",))
    plan.add(point, fused, ("eager",))
    plan.add_copy(point, False)
    assert list(plan.entries.values()) == [
        {"graph_cold", "eager"}, {"graph_cold", "graph_warm"},
    ]  # fmt: skip


def test_targets_plan_has_every_point():
    plan = measure.Plan()
    bench_verify.plan_targets(plan)
    for kind in bench_verify.TARGET_KINDS:
        for c, k in bench_verify.EVERY:
            for pdl in (False, True):
                for name in (report.FUSED, report.COPY):
                    assert measure.Entry(own.Point(SHAPE, c, k, kind), name, pdl) in plan.entries


def test_a_failure_becomes_a_row():
    def broken(b, shape):
        raise ValueError("no such kernel")

    point = own.Point(TOY, 1, 2)
    contender = own.Contender("broken", "", True, broken, equal=None)
    row = measure.run_entry(
        measure.Entry(point, "broken", False), contender, {"graph_cold"}
    )  # fails without a GPU too, which is all that matters here
    assert "error" in row


def test_absent_peers_are_listed(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    found, state = peers.load()
    assert found == []
    assert state == dict.fromkeys(
        ("vllm", "sglang", "causal-conv1d", "flash-linear-attention"), "absent"
    )


def test_own_kernels_compile(tmp_path):
    try:
        compiled.nvcc()
    except RuntimeError:
        pytest.skip("no nvcc")
    for source in ("floor.cu", "serial_walk.cu"):
        command = compiled.compile_command(source, str(tmp_path / "x.so"), "90")
        subprocess.run(command, check=True)


# ---- what is said --------------------------------------------------------------------------------


def timed(us):
    return timing.Timing(us, us * 0.98, us * 1.05, 15)._asdict()


def synthetic(scale=1.0):
    """A result as the benchmark writes it: a copy takes 1 us and 0.2 us a MB, the operator 1.1."""
    plan = measure.Plan()
    bench_verify.plan_targets(plan)
    bench_verify.plan_details(plan, SHAPE, bench_verify.SUBSET)
    bench_verify.plan_full(plan, SHAPE)
    rows = []
    for entry, ways in plan.entries.items():
        point, contender = entry.point, plan.contenders[entry]
        moved = own.required_bytes(point)
        us = 1 + moved / 5e6
        if contender:
            operations = contender.operations(point)
            us *= 1.1 * operations * scale
        row = {
            "contender": entry.name, "kind": point.kind, "pdl": entry.pdl,
            "d_inner": point.shape.d_inner, "c": point.c, "k": point.k,
            "operations": contender.operations(point) if contender else 1,
            "bytes": contender.bytes(point) if contender else moved, "required_bytes": moved,
        }  # fmt: skip
        row |= {way: timed(us) for way in ways}
        if "eager" in ways:
            row["host"] = timed(5.0)
        rows.append(row)
    machine = dict.fromkeys(
        ("command", "time", "gdn_verify", "commit", "torch", "cuda", "device", "clocks"), "x"
    )
    return {
        "machine": machine, "d_inner": 8192, "tuned_entries": 0, "ceiling_gbps": 4300.0,
        "empty": {"plain launch, in a graph": timed(0.6)}, "peers": {"vllm": "absent"},
        "contenders": {"fused": {"does": "x", "norm": True, "snapshot_bytes": 16}},
        "rows": rows, "allocations": 0,
        "sweep": [{"d_inner": 8192, "c": 1, "k": 2, "kind": "float32 windows", "pdl": False,
                   "us": {"-1": 1.1, "0": 1.0, "1": 2.0}}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return json.loads(json.dumps(synthetic()))


def test_targets(result):
    found = {each["target"]: each for each in report.evaluate(result)}
    mean = found[
        "float32 windows, D 8192, C 1 to 8, plain launch, 128 points: at most 1.2 times the copy as"
        " geometric mean"
    ]
    assert (mean["figure"], mean["met"]) == ("1.100", True)
    assert sum("128 points" in text for text in found) == 14
    assert all(each["met"] for text, each in found.items() if "untuned" not in text)
    (untuned,) = (each for text, each in found.items() if "untuned" in text)
    assert (untuned["figure"], untuned["met"]) == ("10.0%, at most 10.0%", False)
    assert not any("vLLM" in text for text in found)


def test_one_slow_point_is_not_met(result):
    slow = copy.deepcopy(result)
    for row in slow["rows"]:
        if (row["contender"], row["kind"], row["c"], row["k"]) == (
            report.FUSED, "float32 windows", 3, 5,
        ) and not row["pdl"]:  # fmt: skip
            row["graph_cold"]["median_us"] *= 2
    missed = [each for each in report.evaluate(slow) if not each["met"]]
    assert len(missed) == 2  # and the untuned choice
    assert "C 3 K 5; 1 points above" in missed[0]["figure"]


def test_targets_are_silent_without_figures(result):
    assert report.evaluate({**result, "rows": [], "sweep": []} | {"allocations": 1}) == [
        report.target("no allocation in the operator", "1 in a call", False)
    ]


@pytest.mark.parametrize("kind", bench_verify.TARGET_KINDS)
def test_cpu_against_memcpy(result, monkeypatch, kind):
    monkeypatch.setattr(measure, "CPU_COLD_BYTES", 1)
    threads = torch.get_num_threads()
    cpu = measure.cpu_against_memcpy(own.Point(TOY, 2, 3, kind), rounds=1)
    assert torch.get_num_threads() == threads
    assert cpu["bytes"] == own.required_bytes(own.Point(TOY, 2, 3, kind))
    assert min(cpu["fused_us"], cpu["memcpy_us"]) > 0
    for ratio, met in ((1.49, True), (1.51, False)):
        measured = result | {"cpu": [cpu | {"fused_us": ratio, "memcpy_us": 1.0}]}
        (target,) = [each for each in report.evaluate(measured) if kind in each["target"]
                     and "memcpy" in each["target"]]  # fmt: skip
        assert (target["met"], target["figure"]) == (met, f"{ratio:.2f}")
    assert f"{kind}, C 2 K 3" in report.show_cpu(cpu)


def test_estimate_is_layers_times_difference(result):
    saved = report.estimate(result)
    times = report.grid_of(result, report.PER_TOKEN, own.WINDOWS)
    fused = report.grid_of(result, report.FUSED, own.WINDOWS)
    assert len(saved) == 128
    assert saved[8, 17] == pytest.approx(36 * (times[8, 17] - fused[8, 17]) / 1000)
    assert "arithmetic" in report.markdown(result)


def test_compare(result):
    text = report.compare(json.loads(json.dumps(synthetic(2.0))), result)
    (line,) = (x for x in text.splitlines() if "fused, float32 windows  " in x and "cold" in x)
    assert " 2.000 over " in line
    (copied,) = (x for x in text.splitlines() if "copy, float32 windows  " in x and "cold" in x)
    assert " 1.000 over " in copied


def test_report_of_a_file(result, tmp_path, capsys):
    path = tmp_path / "a.json"
    bench_verify.save(str(path), result)
    assert bench_verify.main(["--from", str(path), "--compare", str(path)]) == 0
    out = capsys.readouterr().out
    for text in ("peer vllm: absent", "copy ceiling 4300", "targets", "not a measurement",
                 "microseconds to issue a call", "launch configurations"):  # fmt: skip
        assert text in out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    for arguments in (["--from", str(path)], ["--cpu", "--compare", str(path)]):
        with pytest.raises(SystemExit, match=r"x\.json"):
            bench_verify.main(arguments)
    with pytest.raises(SystemExit, match=r"x\.json"):
        plot.main([str(path)])


def test_too_fast_is_said(result, tmp_path, capsys):
    """Case 12: a cold figure under what memory allows is not a cold figure."""
    fast = copy.deepcopy(result)
    rows = [row for row in fast["rows"] if (row["contender"], row["c"], row["k"]) ==
            (report.FUSED, 8, 17) and row["kind"] == own.WINDOWS and not row["pdl"]]  # fmt: skip
    rows[0]["graph_cold"]["median_us"] = rows[0]["required_bytes"] / 4300e3 / 1.1
    text = "so in part from the L2: fused, float32 windows at D 8192 C 8 K 17"
    assert text in report.show(fast, bench_verify.SUBSET)
    assert text not in report.show(result, bench_verify.SUBSET)


def test_a_difference_fails(result, tmp_path, capsys):
    wrong = copy.deepcopy(result)
    wrong["rows"][0]["differs"] = "output: 1 of 2 elements"
    path = tmp_path / "a.json"
    path.write_text(json.dumps(wrong))
    assert bench_verify.main(["--from", str(path)]) == 1
    assert "DIFFERS: " in capsys.readouterr().out


def test_plot_is_deterministic(result, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.json").write_text(json.dumps(result))
    assert plot.main([str(tmp_path / "a.json")]) == 0
    assert plot.main([str(tmp_path / "a.json"), "--to", str(tmp_path / "again")]) == 0
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert {"speedup.png", "roofline.png", "floor-bfloat16-history.png", "tables.md"} <= names
    for name in names:
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_without_a_gpu_it_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gdn_verify_main(["bench"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_bench_command_passes_its_options_on(result, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result))
    assert gdn_verify_main(["bench", "--from", str(path)]) == 0
    assert "copy ceiling" in capsys.readouterr().out


# ---- what the timer shows ------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_empty_kernel_costs_a_launch():
    for name, found in measure.empty_launches().items():
        assert 0.2 < found["median_us"] < (10 if "in a graph" in name else 100)


@pytest.mark.gpu
def test_a_copy_shows_the_memory():
    """A large copy: a plausible rate, the same through torch, and never above the cached one."""
    size = 1 << 28
    cold = floor.time_copy(size, size, False).median_us
    rate = 2 * size / cold / 1e3
    assert 100 < rate < 20_000
    a, b = torch.zeros(2, size, dtype=torch.uint8, device="cuda")
    theirs = timing.time_graph([lambda: a.copy_(b)], replays=5).median_us
    assert cold < 1.25 * theirs
    small = 1 << 20
    assert (
        floor.time_copy(small, small, False, warm=True).median_us
        < 1.1 * floor.time_copy(small, small, False).median_us
    )


@pytest.mark.gpu
def test_no_cold_figure_is_under_the_floor():
    """Case 12: the bytes at the rate of a large copy are a bound for every cold figure."""
    point = own.Point(SHAPE, 64, 4)
    ceiling = floor.copy_ceiling()
    at_least = own.required_bytes(point) / ceiling / 1e3
    for each in (own.FUSED[own.WINDOWS, False], *own.BASELINES[1:4]):
        entry = measure.Entry(point, each.name, False)
        row = measure.run_entry(entry, each, {"graph_cold", "graph_warm"})
        assert "error" not in row, row
        assert row["differs"] is None
        assert row["cold"]
        assert row["graph_warm"]["median_us"] > 0
        assert row["graph_cold"]["median_us"] > 0.97 * at_least
