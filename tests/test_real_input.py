"""A Qwen3-Next layer of transformers and the operator agree, and a wrong operator would be seen."""

import pytest
import torch

from gdn_verify import real_input

pytest.importorskip("transformers")

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def run():
    return real_input.run_layer("tiny", n_seq=4, num_tokens=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 24])
def test_tiny_layer(device, dtype, prompt_tokens):
    """A prompt shorter than the window leaves zeros in the state."""
    run = real_input.run_layer("tiny", dtype=dtype, device=device, prompt_tokens=prompt_tokens)
    comparison = real_input.compare(run, *real_input.run_operator(run))
    assert comparison.ok, comparison


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_width_layer(device, dtype):
    run = real_input.run_layer("full", dtype=dtype, device=device)
    assert run.rows.shape == (8, 17, 8192)
    assert run.qk_channels == 4096
    comparison = real_input.compare(run, *real_input.run_operator(run))
    assert comparison.ok, comparison


def test_state_in_the_layers_own_dtype(run):
    comparison = real_input.compare(run, *real_input.run_operator(run, torch.bfloat16))
    assert comparison.ok, comparison


def test_input_is_real(run):
    """Rows and states differ between sequences and tokens; the run leaves them as they were."""
    assert len(torch.unique(run.rows.flatten(0, 1), dim=0)) > run.rows.shape[0]
    assert len(torch.unique(run.conv_state, dim=0)) == run.conv_state.shape[0]
    before = run.conv_state.clone()
    real_input.run_operator(run, run.conv_state.dtype)
    assert torch.equal(run.conv_state, before)


def test_bound_is_tight(run):
    """A few units in the last place of bfloat16, not a blank cheque."""
    relative = real_input.rounding_bound(run) / run.output.abs().clamp_min(1e-3)
    assert relative.median() < 8 * 2**-8


FAULTS = {
    "taps reversed": lambda run: run._replace(weight=run.weight.flip(1)),
    "no state": lambda run: run._replace(conv_state=torch.zeros_like(run.conv_state)),
    "state one token old": lambda run: run._replace(conv_state=run.conv_state.roll(1, -1)),
    "state of another sequence": lambda run: run._replace(conv_state=run.conv_state.roll(1, 0)),
    "v before q": lambda run: run._replace(rows=run.rows.roll(run.head_dim, -1)),
    "a k head not normalised": lambda run: run._replace(qk_channels=run.qk_channels - run.head_dim),
    "a v head normalised": lambda run: run._replace(qk_channels=run.qk_channels + run.head_dim),
    "norm over half a head": lambda run: run._replace(head_dim=run.head_dim // 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(run, fault):
    results = real_input.run_operator(FAULTS[fault](run))
    assert not real_input.compare(run, *results).ok


def test_wrong_result_is_seen(run):
    output, snapshots, state = real_input.run_operator(run)

    def ok(**changed):
        results = {"output": output, "snapshots": snapshots, "state": state, **changed}
        return real_input.compare(run, **results).ok

    assert ok()
    assert not ok(snapshots=snapshots.roll(1, 1))
    assert not ok(state=snapshots[:, 0])
    assert not ok(output=output.roll(1, 1))
    one = output.clone()
    place = tuple(output.abs().flatten(0, 1).max(0).values.argmax().reshape(1).tolist())
    one[0, 0, place[0]] *= 1.06
    assert not ok(output=one)
    one[0, 0, place[0]] = torch.nan
    assert not ok(output=one)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError(name="transformers"), "transformers is not installed"),
        (ModuleNotFoundError("no qwen3_next", name="transformers.models.x"), "no qwen3_next"),
        (ImportError("another hub is needed"), "another hub is needed"),
    ],
)
def test_absent_transformers_is_one_sentence(monkeypatch, error, sentence):
    def missing(name):
        raise error

    monkeypatch.setattr(real_input.importlib, "import_module", missing)
    with pytest.raises(real_input.Unavailable, match=sentence):
        real_input.run_layer("tiny")
