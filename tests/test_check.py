"""`python -m gdn_verify`: equal bytes pass, any difference fails, and every command ends well."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from compare import difference

from gdn_verify import check, compare, info, real_input, timing
from gdn_verify.__main__ import main
from gdn_verify.arrays import to_array
from gdn_verify.models import MODELS

MODEL = "toy-16"
SHAPE = MODELS[MODEL]
CPU = torch.device("cpu")


@pytest.fixture
def no_layer(monkeypatch):
    """Leaves out the real input, which has its own tests."""

    def unavailable(*args, **options):
        raise real_input.Unavailable("left out here")

    monkeypatch.setattr(real_input, "run_layer", unavailable)


@pytest.fixture
def small_grid(monkeypatch, no_layer):
    monkeypatch.setattr(check, "QUICK_GRID", [(1, 1), (2, 3)])


ARGUMENTS = ["check", "--quick", "--device", "cpu", "--model", MODEL]


def test_grid_is_the_promised_one():
    assert {(c, k) for c in range(1, 9) for k in range(1, 18)} == set(check.GRID)
    assert set(check.QUICK_GRID) < set(check.GRID)


def test_check_passes(no_layer, capsys, tmp_path):
    path = tmp_path / "check.json"
    assert main([*ARGUMENTS, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS" not in out
    assert "real input: skipped, left out here" in out
    report = json.loads(path.read_text())
    assert report["ok"]
    (device,) = report["devices"]
    assert len(device["rows"]) == len(check.QUICK_GRID)
    for row in device["rows"]:
        assert row["output_equal"]
        assert row["snapshots_equal"]
        assert row["state_equal"]
        assert row["operations_replaced"] == 2 * row["n_seq"] * row["num_tokens"]
        assert row["fused_us"] > 0
        assert row["ratio"] == pytest.approx(row["per_token_us"] / row["fused_us"])


def test_check_runs_the_layer(capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(check, "QUICK_GRID", [(1, 1)])
    assert main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert out.count("real input: Qwen3-Next layer of transformers") == 2
    assert "FAILED" not in out


@pytest.mark.parametrize("part", check.PARTS)
@pytest.mark.parametrize("path", ["run_fused", "run_per_token", "run_reference"])
def test_one_changed_bit_fails(small_grid, monkeypatch, capsys, part, path):
    right = getattr(check, path)

    def wrong(tensors, shape):
        result = right(tensors, shape) or tensors
        # the last snapshot is the reference's state
        name = {"output": "output", "snapshots": "conv_state_inter", "state": "conv_state"}[part]
        if path == "run_reference" and part == "state":
            name = "conv_state_inter"
        values = getattr(result, name)
        index = (1, 2, 5) if values.dim() == 3 and part == "output" else (1, 2, 5, 3)
        if part == "state" and path != "run_reference":
            index = (1, 5, 3)
        if values.shape[0] > 1:
            bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
            bits[index] ^= 1
        return result

    monkeypatch.setattr(check, path, wrong)
    assert main(ARGUMENTS) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out
    assert f"{part} against the " in out
    assert "1 of 2 equal in every byte" in out


def test_failing_layer_fails(monkeypatch, capsys, small_grid):
    result = {"ok": False, "dtype": "bfloat16", "size": "tiny", "source": "x", "d_inner": 1}
    result |= {"n_seq": 1, "num_tokens": 1, "windows_equal": False, "state_equal": True}
    result |= {"largest_difference": 1.0, "largest_share": 9.0}
    monkeypatch.setattr(check, "check_real_input", lambda *args: result)
    assert main(ARGUMENTS) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "_run_device", None)
    assert main([*ARGUMENTS, "--json", str(tmp_path / "no folder" / "check.json")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_a_range_that_nobody_means(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--sequences", "1..2147483647"])
    assert "is more than 10000 numbers" in capsys.readouterr().err


def test_json_on_stdout_is_only_json(small_grid, capsys):
    assert main([*ARGUMENTS, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == MODEL
    assert "equal in every byte" in captured.err


def test_reference_corner_is_the_smaller_result():
    """What the check takes for granted about the reference."""
    (everything,) = check.make_tensors(SHAPE, 3, 5, CPU)
    whole = check.run_reference(everything.corner(3, 5), SHAPE)
    small = check.run_reference(everything.corner(2, 3), SHAPE)
    assert compare.same_bytes(small.output, whole.output[:2, :3])
    assert compare.same_bytes(small.conv_state_inter, whole.conv_state_inter[:2, :3])
    assert compare.same_bytes(small.conv_state, whole.conv_state_inter[:2, 2])


def test_input_rows_are_strided():
    (tensors,) = check.make_tensors(SHAPE, 2, 3, CPU)
    assert tensors.new_input.stride(1) > SHAPE.d_inner
    assert not tensors.new_input.is_contiguous()


def test_absent_device_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["check", "--model", "no-such"], ["no-such"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "no-such" in capsys.readouterr().err


def test_without_a_command_it_says_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ("check", "tune", "info", "bench", "verify_conv", "compat", "integrations"):
        assert name in out


def test_comparison_is_of_bytes():
    zero, minus_zero = torch.zeros(2), torch.tensor([0.0, -0.0])
    assert "1 of 2 elements, first at [1]: 0.0 instead of -0.0" in str(
        compare.first_difference(zero, minus_zero)
    )


@pytest.mark.parametrize("bits", [torch.int16, torch.int32])
def test_comparison_is_that_of_the_tests(bits):
    """Of tensors and of arrays there are two, of one rule: only the payload of a NaN is free."""
    info = torch.iinfo(bits)
    values = [0, info.min, 1, 2, info.max, info.max - 1, -1, -2]  # +-0, denormals, NaN
    pairs = list(itertools.product(torch.tensor(values, dtype=bits), repeat=2))
    dtypes = (torch.float16, torch.bfloat16) if bits == torch.int16 else (torch.float32,)
    for dtype, (a, b) in itertools.product(dtypes, pairs):
        a, b = a.reshape(1).view(dtype), b.reshape(1).view(dtype)
        same = bool(a.isnan()) if b.isnan() else torch.equal(a.view(bits), b.view(bits))
        assert compare.same_bytes(a, b) == (compare.first_difference(a, b) is None) == same
        assert (not difference(to_array(a), to_array(b))) == same


def test_info(capsys):
    assert main(["info"]) == 0
    assert "gdn::verify_fused_conv_kn_batched" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["build"]["cpu_level"]
    cuda = "CPU and CUDA: " if found["build"]["has_cuda"] else "CPU only: "
    assert found["build"]["decision"].startswith(cuda)
    assert "unknown" not in str({k: v for k, v in found.items() if k != "cuda_driver"})


def test_info_never_fails(monkeypatch, capsys):
    def broken(*args):
        raise OSError("broken")

    for name in ("_build", "_operators", "_cpu", "_cuda_runtime", "_cuda_driver", "_devices"):
        monkeypatch.setattr(info, name, broken)
    monkeypatch.setattr(info.importlib.metadata, "version", broken)
    assert main(["info"]) == 0
    assert "unknown: OSError: broken" in capsys.readouterr().out


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "gdn_verify", "info"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gdn_verify" in done.stdout


def test_wall_timer():
    calls = []
    result = timing.time_wall(lambda: calls.append(1), min_seconds=0, min_samples=7)
    assert result.samples == 7
    assert len(calls) == 8
    assert result.min_us <= result.median_us <= result.max_us


@pytest.mark.gpu
def test_graph_timer_sees_memory_not_cache():
    """Copies through a rotation are slower than a copy that stays in the L2."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = 1 << 20
    sets, cold = timing.cold_sets(2 * size, device)
    assert cold
    assert timing.cold_sets(1, device) == (timing.MAX_OPERATIONS, False)
    properties = torch.cuda.get_device_properties(device)
    assert sets * 2 * size >= timing.COLD_FACTOR * properties.L2_cache_size
    pairs = torch.zeros(sets, 2, size, dtype=torch.uint8, device=device)
    cold = timing.time_graph([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])
    warm = timing.time_graph([lambda: pairs[0, 0].copy_(pairs[0, 1])])
    assert 0 < warm.median_us <= 1.1 * cold.median_us


@pytest.mark.gpu
def test_check_passes_on_cuda(small_grid):
    model = "qwen3-next-80b-a3b-tp8"
    assert main(["check", "--quick", "--device", "cuda", "--model", model]) == 0
