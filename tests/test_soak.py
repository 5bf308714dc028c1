"""The simulated serving loop of soak.py, for a while; and that it sees one wrong bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import soak
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Nothing here is large; the command asks for the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "steps"), [("cpu", 2500), pytest.param("cuda", 20_000, marks=pytest.mark.gpu)]
)
def test_every_sequence_equals_its_own_run(device: str, steps: int) -> None:
    report = soak.soak(steps, torch.device(device), lanes=4, seed=1)
    assert report.mismatches == 0
    assert report.steps == steps
    assert report.sequences > steps / 20
    before, after = report.memory
    assert before > 0
    assert after - before < soak.MEMORY_GROWTH


@pytest.mark.parametrize("place", ["output", "pool", "snapshots"])
def test_one_wrong_bit_fails_the_command(
    device: str, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = soak.Engine.verify

    def wrong(self: soak.Engine, *call: object) -> torch.Tensor:
        output = right(self, *call)
        x = {"output": output, "pool": self.pool, "snapshots": self.snapshots}[place]
        rows = soak.bits(x).flatten(1)
        if place == "snapshots":  # the second of every row: most sequences have one
            rows = soak.bits(x)[:, 4 if self.kind.history else 1].flatten(1 - self.kind.history)
        rows[..., 7] ^= 1
        return output

    monkeypatch.setattr(soak.Engine, "verify", wrong)
    assert soak.main(["--device", device, "--steps", "60", "--lanes", "3"]) == 1
    assert " 0 mismatches" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--steps=0", "--seconds=nan", "--seconds=-1", "--lanes=0"])
def test_a_run_of_nothing_is_no_success(option: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--device", "cpu", option])
    assert "must be above 0" in capsys.readouterr().err


def test_the_command_ends_in_time(capsys: pytest.CaptureFixture) -> None:
    assert soak.main(["--device", "cpu", "--steps", "99999999", "--seconds", "0.5"]) == 0
    assert "0 mismatches" in capsys.readouterr().out
