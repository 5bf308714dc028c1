"""The speculative decoding of examples/ says what plain greedy decoding says, and would show it if
it did not.

Small models of transformers with random weights, float32; the planned drafter makes every pattern
of accepted counts occur.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gdn_verify.integrations import transformers as gdn

SCRIPT = Path(__file__).parents[1] / "examples" / "speculative_decoding.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the examples of the source tree")

ROLLBACKS = ["accepted", "commit"]
NEW_TOKENS = 41  # what 16 patterns of two sequences take, and one


def load_script() -> ModuleType:
    name = "speculative_decoding"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> Iterator[None]:
    """No TF32, no atomics, new memory full of NaN; and one thread, as for the script: products this
    small only wait for others."""
    threads = torch.get_num_threads()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, device), marks=marks, id=f"{kind}-{device}")
        for kind in ("qwen3_next", "qwen3_5")
        for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    ],
)
def world(script: ModuleType, request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(model, prompts of two sequences, what greedy decoding says)."""
    model = script.build_model(request.param[0], device=request.param[1])
    prompts = script.make_prompts(2)
    return model, prompts, script.decode_greedily(model, prompts, NEW_TOKENS)


@pytest.fixture
def installed() -> Iterator[None]:
    gdn.install()
    yield
    gdn.remove()


# ---- the tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_every_pattern(script, world, installed, rollback):
    model, prompts, greedy = world
    plan = script.patterns(2, 3)
    assert plan == list(itertools.product(range(4), repeat=2))
    drafter = script.planned(prompts, greedy.tokens, plan)
    result = script.decode(model, prompts, NEW_TOKENS, 3, drafter, rollback)
    assert result.tokens == greedy.tokens
    assert result.accepted == plan  # as planned, to the last step
    # three GDN layers; commits are one launch for all
    steps = len(plan)
    assert result.launches == steps * (3 if rollback == "accepted" else 4)
    assert result.launches_per_token == steps * 3 * 2 * 2 * 4


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("drafter", ["lookup", "random"])
def test_real_drafters(script, world, installed, rollback, drafter):
    """Sequences end at different steps, so that slots are left and the batch shrinks."""
    model, prompts, greedy = world
    draft = script.lookup if drafter == "lookup" else script.random_drafter()
    result = script.decode(model, prompts, NEW_TOKENS, 4, draft, rollback)
    assert result.tokens == greedy.tokens
    if drafter == "lookup":
        assert any(map(any, result.accepted))


def test_one_draft(script, world, installed):
    model, prompts, greedy = world
    result = script.decode(model, prompts, NEW_TOKENS, 1, script.lookup)
    assert result.tokens == greedy.tokens


@pytest.mark.parametrize("rollback", ROLLBACKS)
@torch.no_grad()
def test_a_slot_is_used_again(script, world, installed, rollback):
    """A sequence comes while another goes on: one starts from its state, one from its snapshots."""
    import transformers

    model, prompts, greedy = world
    cache = gdn.SpeculativeCache(
        model.config,
        slots=3,
        num_tokens=3,
        max_length=64,
        device=model.device,
        rollback=rollback,
    )
    texts: dict[int, list[int]] = {}

    def load(sequence: int, slot: int) -> None:
        prompt_cache = transformers.DynamicCache(config=model.config)
        ids = torch.tensor([prompts[sequence]], device=model.device)
        texts[slot] = [int(model(ids, None, None, prompt_cache).logits[0, -1].argmax())]
        cache.load(slot, prompt_cache)

    def step(truths: dict[int, int], right: list[int]) -> None:
        """Sequences by slot, each with two drafts of which the first ones are right."""
        rows = []
        for (slot, sequence), n in zip(truths.items(), right, strict=True):
            done = len(texts[slot])
            drafts = greedy.tokens[sequence][done : done + 2]
            rows.append([texts[slot][-1], *drafts[:n], *[(t + 1) % 256 for t in drafts[n:]]])
        tokens = torch.tensor(rows, device=model.device)
        wanted = cache.verify(model, tokens, list(truths)).argmax(-1).tolist()
        for slot, n, words in zip(truths, right, wanted, strict=True):
            texts[slot] += words[: n + 1]
        cache.accept([n + 1 for n in right])

    load(0, 2)
    load(1, 0)
    for right in ([1, 2], [0, 1], [2, 0]):
        step({2: 0, 0: 1}, right)
    load(1, 0)  # the same prompt again, over what the slot held
    for right in ([1, 1], [2, 0], [0, 2]):
        step({0: 1, 2: 0}, right)
    assert texts[2] == greedy.tokens[0][: len(texts[2])]
    assert texts[0] == greedy.tokens[1][: len(texts[0])]
    assert (len(texts[2]), len(texts[0])) == (1 + 6 + 6, 1 + 6)


def test_gap_leaves_room_for_rounding(world):
    """Otherwise equal tokens would be luck: logits here are of size 1, rounding is 1e-6 of that."""
    assert world[2].gap > 1e-4


# ---- that it would be seen -----------------------------------------------------------------------


def _keep_all(cache: Any, num_accepted: Any, original: Any) -> None:
    original(cache, num_accepted)
    cache._accepted[cache._rows] = cache.num_tokens


def _one_more(cache: Any, num_accepted: Any, original: Any) -> None:
    original(cache, num_accepted)
    cache._accepted[cache._rows] += 1
    cache._accepted.clamp_(max=cache.num_tokens)


def _other_sequence(cache: Any, num_accepted: Any, original: Any) -> None:
    original(cache, num_accepted)
    cache._accepted[cache._rows] = cache._accepted[cache._rows].flip(0)


@pytest.mark.parametrize("fault", [_keep_all, _one_more, _other_sequence])
def test_wrong_rollback_is_seen(script, world, installed, monkeypatch, fault):
    model, prompts, greedy = world
    original = gdn.SpeculativeCache.accept
    monkeypatch.setattr(
        gdn.SpeculativeCache, "accept", lambda self, n: fault(self, n, original), raising=True
    )
    drafter = script.planned(prompts, greedy.tokens, script.patterns(2, 3))
    assert script.decode(model, prompts, NEW_TOKENS, 3, drafter).tokens != greedy.tokens


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_convolution_that_forgets_to_go_back_is_seen(
    script, world, installed, monkeypatch, rollback
):
    """The windows alone: recurrence and attention go back as they should."""
    model, prompts, greedy = world
    if rollback == "accepted":
        original = gdn.SpeculativeCache.convolve

        def convolve(self: Any, layer: int, rows: Any, **shape: Any) -> Any:
            starts = self._starts
            self._starts = torch.where(starts > 0, self.num_tokens, starts)
            output = original(self, layer, rows, **shape)
            self._starts = starts
            return output

        monkeypatch.setattr(gdn.SpeculativeCache, "convolve", convolve)
    else:
        original = gdn.SpeculativeCache.accept

        def accept(self: Any, num_accepted: Any) -> None:
            self.rollback = "accepted"  # no commit
            original(self, num_accepted)
            self.rollback = "commit"

        monkeypatch.setattr(gdn.SpeculativeCache, "accept", accept)
    drafter = script.planned(prompts, greedy.tokens, script.patterns(2, 3))
    result = script.decode(model, prompts, NEW_TOKENS, 3, drafter, rollback)
    assert result.tokens != greedy.tokens


# ---- the script ----------------------------------------------------------------------------------


def test_script(script, capsys):
    assert script.main(["--sequences", "3", "--drafts", "2", "--new-tokens", "9"]) == 0
    text = capsys.readouterr().out
    assert text.count("tokens equal") == 6
    assert "3 sequences, prompts of 8, 13, 18 tokens, 9 more each, 2 drafts a step" in text
    saved = re.findall(r"(\d+) launches for .*, (\d+) launches and copies .*: (\d+) saved", text)
    assert len(saved) == 6
    assert all(int(there) - int(here) == int(less) > 0 for here, there, less in saved)
    assert "drafts accepted" in text
    assert "ms a step" in text


@pytest.mark.gpu
def test_script_on_cuda(script, capsys):
    arguments = ["--sequences", "8", "--drafts", "3", "--new-tokens", "24", "--device", "cuda"]
    assert script.main(arguments) == 0
    assert capsys.readouterr().out.count("tokens equal") == 6


def test_script_fails_on_a_difference(script, capsys, monkeypatch):
    true = script.decode_greedily

    def other(*args: Any) -> Any:
        greedy = true(*args)
        greedy.tokens[0][-1] ^= 1
        return greedy

    monkeypatch.setattr(script, "decode_greedily", other)
    assert script.main(["--sequences", "1", "--drafts", "1", "--new-tokens", "3"]) == 1
    assert "tokens DIFFER" in capsys.readouterr().out
    assert not gdn._originals  # the patch is gone all the same


def test_script_says_what_is_missing(script, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert script.main([]) == 2
    assert "transformers" in capsys.readouterr().err


def test_script_of_one_token(script, capsys):
    """It comes with the prompt: there is nothing to draft."""
    assert script.main(["--sequences", "1", "--new-tokens", "1"]) == 0
    assert capsys.readouterr().out.count("tokens equal; 0 of 0 drafts accepted (0%)") == 6


@pytest.mark.parametrize("device", ["nope", "cuda:99", "meta"])
def test_script_says_where_it_cannot_run(script, capsys, device):
    with pytest.raises(SystemExit, match="2"):
        script.main(["--device", device])
    assert f"'{device}' cannot be used here: " in capsys.readouterr().err


def test_script_has_help(script, capsys):
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in ("--sequences", "--drafts", "--device"))
    with pytest.raises(SystemExit, match="2"):
        script.main(["--drafts", "0"])


# ---- drafters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "proposal"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),  # three tokens came before
        ([7, 9, 8, 9], [8, 9, 9]),  # one did; the last is repeated
        ([1, 2, 3], [3, 3, 3]),  # none
        ([5], [5, 5, 5]),
    ],
)
def test_lookup(script, context, proposal):
    assert script.lookup(0, context, 3) == proposal


@pytest.mark.parametrize(("sequences", "drafts"), [(1, 5), (2, 3), (3, 3), (8, 3), (4, 16)])
def test_patterns(script, sequences, drafts):
    """All combinations, or at least each count at each sequence."""
    plan = script.patterns(sequences, drafts)
    assert len(plan) <= script.MOST_PATTERNS
    for i in range(sequences):
        assert {step[i] for step in plan} == set(range(drafts + 1))
