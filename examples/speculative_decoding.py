"""Speculative decoding of a Qwen3-Next or Qwen3.5 model, checked against plain greedy decoding.

A model of `transformers` (small, random weights; nothing is downloaded) continues a few prompts of
different lengths: first one token at a time by its own code, then with drafts. A step drafts some
tokens for each sequence, verifies them all in one forward, keeps what the model would have said
itself, and takes the rest back. In its GDN layers the operator does the convolution; going back
costs nothing (`num_accepted_tokens`) or one launch for all layers (`gdn::commit_conv_state`).

    pip install 'gdn-verify[examples]'
    python examples/speculative_decoding.py --sequences 3 --drafts 3 --device cuda

Three drafters: "lookup" proposes what followed the last words when they came before, "random" has
no idea, and "planned" knows the answer and is told how many drafts to get right, so that every
pattern of accepted counts occurs. Exits with 1 where a token differs.

What is exact: the convolution's result and its windows have the same bits for one token and for K,
in any batch. Matrix products do not promise that, so the logits of both ways differ by rounding
(float32 here, no TF32), and the *tokens* are equal as long as the best two logits are further
apart. The script prints the smallest gap that it met.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdn_verify.integrations import transformers as gdn
from gdn_verify.real_input import TEXT

# A drafter gets the number of a sequence and its tokens so far, and returns `drafts` tokens.
Drafter = Callable[[int, list[int], int], list[int]]

VOCABULARY = 256  # a token is a byte
# hidden size, key heads, value heads, head dimension of the GDN layers; "full" has a layer's true
# width
SIZES = {"tiny": (64, 2, 4, 16), "full": (2048, 16, 32, 128)}
MOST_PATTERNS = 64


# ---- the model -----------------------------------------------------------------------------------


def build_model(kind: str = "qwen3_next", size: str = "tiny", device: str = "cpu") -> Any:
    """Three GDN layers and one of attention, as the shipped models have them in turn."""
    import transformers

    hidden, key_heads, value_heads, head_dim = SIZES[size]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "max_position_embeddings": 4096,
        # random, but neither the same word for ever nor a new one each time
        "initializer_range": 0.5 / hidden**0.5,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    if kind == "qwen3_5":
        config: Any = transformers.Qwen3_5TextConfig(**sizes)
        model: Any = transformers.Qwen3_5ForCausalLM(config)
    else:
        sizes |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden,
        }
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes))
    return model.to(device=device, dtype=torch.float32).eval()


def make_prompts(sequences: int) -> list[list[int]]:
    """Pieces of a text, each longer than the one before."""
    text = TEXT.encode()
    starts = [i * len(text) // (2 * sequences) for i in range(sequences)]
    return [list(text[start : start + 8 + 5 * i]) for i, start in enumerate(starts)]


class Greedy(NamedTuple):
    tokens: list[list[int]]
    gap: float  # smallest distance of the two best logits
    seconds: float  # a token of one sequence


@torch.no_grad()
def decode_greedily(model: Any, prompts: list[list[int]], new_tokens: int) -> Greedy:
    """What `transformers` itself says, a sequence at a time."""
    tokens, gap, start = [], float("inf"), time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(result.sequences[0, len(prompt) :].tolist())
        best = torch.stack(result.logits).topk(2).values
        gap = min(gap, (best[..., 0] - best[..., 1]).min().item())
        show(f"greedy decoding: sequence {len(tokens)} of {len(prompts)}")
    return Greedy(tokens, gap, (time.perf_counter() - start) / (len(prompts) * new_tokens))


# ---- drafters ------------------------------------------------------------------------------------


def lookup(sequence: int, context: list[int], drafts: int) -> list[int]:
    """What followed the longest ending (3 tokens or fewer) that occurred before."""
    for n in (3, 2, 1):
        for start in range(len(context) - n - 1, -1, -1):
            if context[start : start + n] == context[-n:]:
                found = context[start + n : start + n + drafts]
                return found + found[-1:] * (drafts - len(found))
    return context[-1:] * drafts


def random_drafter(seed: int = 0) -> Drafter:
    generator = torch.Generator().manual_seed(seed)

    def draft(sequence: int, context: list[int], drafts: int) -> list[int]:
        return torch.randint(VOCABULARY, (drafts,), generator=generator).tolist()

    return draft


def patterns(sequences: int, drafts: int) -> list[tuple[int, ...]]:
    """How many drafts each sequence gets right, a step: every combination, where they are few."""
    counts = range(drafts + 1)
    if len(counts) ** sequences <= MOST_PATTERNS:
        return list(itertools.product(counts, repeat=sequences))
    # each count at each sequence, beside different neighbours
    steps = range(min(MOST_PATTERNS, len(counts) ** 2))
    return [
        tuple((s + i * (1 + s // len(counts))) % len(counts) for i in range(sequences))
        for s in steps
    ]


def planned(
    prompts: list[list[int]], greedy: list[list[int]], plan: list[tuple[int, ...]]
) -> Drafter:
    """Gets as many right as `plan` says, and the next one wrong."""
    steps = [0] * len(prompts)

    def draft(sequence: int, context: list[int], drafts: int) -> list[int]:
        right = plan[steps[sequence] % len(plan)][sequence]
        steps[sequence] += 1
        done = len(context) - len(prompts[sequence])
        truth = greedy[sequence][done : done + drafts]
        truth += [0] * (drafts - len(truth))
        return [t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(truth)]

    return draft


# ---- decoding ------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    tokens: list[list[int]]
    accepted: list[tuple[int, ...]]  # drafts that were right, a step; of the unfinished sequences
    drafted: int
    launches: int  # of the operator and its commit
    launches_per_token: int  # that the path token by token would take: a launch and a copy each
    seconds: float  # a step


@torch.no_grad()
def decode(
    model: Any,
    prompts: list[list[int]],
    new_tokens: int,
    drafts: int,
    drafter: Drafter,
    rollback: str = "accepted",
    name: str = "",
) -> Decoded:
    """Decodes all sequences together, `drafts` drafts of each a step."""
    import transformers

    cache = gdn.SpeculativeCache(
        model.config,
        slots=len(prompts),
        num_tokens=drafts + 1,
        max_length=max(map(len, prompts)) + new_tokens + drafts,
        device=model.device,
        rollback=rollback,
    )
    # The first token comes with the prompt; it is not in the cache yet, as the last one never is.
    texts = []
    for slot, prompt in enumerate(prompts):
        prompt_cache = transformers.DynamicCache(config=model.config)
        ids = torch.tensor([prompt], device=model.device)
        logits = model(ids, None, None, prompt_cache).logits
        cache.load(slot, prompt_cache)
        texts.append([*prompt, int(logits[0, -1].argmax())])

    ends = [len(prompt) + new_tokens for prompt in prompts]
    gdn_layers = model.config.layer_types.count("linear_attention")
    accepted, per_token, drafted, start = [], 0, 0, time.perf_counter()
    while running := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
        proposals = [drafter(i, texts[i], drafts) for i in running]
        rows = [texts[i][-1:] + proposal for i, proposal in zip(running, proposals, strict=True)]
        tokens = torch.tensor(rows, device=model.device)
        wanted = cache.verify(model, tokens, running).argmax(-1).tolist()
        right = [
            sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(p, w)))  # noqa: B905
            for p, w in zip(proposals, wanted, strict=True)
        ]
        cache.accept([n + 1 for n in right])  # the token before the drafts, and what was right
        for i, n, w in zip(running, right, wanted, strict=True):
            texts[i] += w[: n + 1]  # what was right, and the model's own word after it
        accepted.append(tuple(right))
        drafted += drafts * len(running)
        per_token += gdn_layers * 2 * len(running) * (drafts + 1)
        done = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True))
        show(
            f"{name}: {min(done, new_tokens * len(prompts))} of {new_tokens * len(prompts)} tokens"
        )
    seconds = (time.perf_counter() - start) / max(1, len(accepted))
    found = [
        text[len(prompt) : end] for text, prompt, end in zip(texts, prompts, ends, strict=True)
    ]
    return Decoded(found, accepted, drafted, cache.launches, per_token, seconds)


# ---- the script ----------------------------------------------------------------------------------


def show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


def say(line: str) -> None:
    show("")
    print(line, flush=True)


def run(options: argparse.Namespace) -> bool:
    """Whether all tokens were equal."""
    import transformers

    transformers.logging.set_verbosity_error()  # no advice about faster kernels
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if options.size == "tiny" and torch.device(options.device).type == "cpu":
        torch.set_num_threads(1)  # products this small only wait for other threads
    model = build_model(options.model, options.size, options.device)
    prompts = make_prompts(options.sequences)
    plan = patterns(options.sequences, options.drafts)
    # as many tokens as the plan takes
    longest = max(sum(step[i] + 1 for step in plan) for i in range(options.sequences))
    new_tokens = options.new_tokens or longest + 1

    greedy = decode_greedily(model, prompts, new_tokens)
    say(
        f"{options.model} on {options.device}: {options.sequences} sequences, prompts of "
        f"{', '.join(str(len(prompt)) for prompt in prompts)} tokens, {new_tokens} more each, "
        f"{options.drafts} drafts a step"
    )
    say(f"plain greedy decoding by transformers: {1e3 * greedy.seconds:.2f} ms a token")
    say(f"smallest gap between the two best logits: {greedy.gap:.1e}")

    equal = True
    gdn.install()
    try:
        for rollback in ("accepted", "commit"):
            by = "num_accepted_tokens" if rollback == "accepted" else "commit_conv_state"
            drafters: dict[str, Drafter] = {
                "lookup": lookup,
                "random": random_drafter(),
                "planned": planned(prompts, greedy.tokens, plan),
            }
            for drafter_name, drafter in drafters.items():
                name = f"{drafter_name}, {by}"
                result = decode(model, prompts, new_tokens, options.drafts, drafter, rollback, name)
                same = result.tokens == greedy.tokens
                equal = equal and same
                say(describe(name, result, same))
    finally:
        gdn.remove()
    return equal


def describe(name: str, result: Decoded, same: bool) -> str:
    right, drafted = sum(map(sum, result.accepted)), result.drafted
    steps = len(result.accepted)  # none where the prompt's own token is the only one
    return (
        f"{name}:\n"
        f"    tokens {'equal' if same else 'DIFFER'}; {right} of {drafted} drafts accepted "
        f"({right / max(1, drafted):.0%}), {len(set(result.accepted))} patterns in {steps} steps\n"
        f"    {result.launches} launches for the convolution, {result.launches_per_token} launches "
        f"and copies token by token: {result.launches_per_token - result.launches} saved\n"
        f"    {1e3 * result.seconds:.2f} ms a step, "
        f"{sum(map(len, result.tokens)) / max(1, steps):.1f} tokens a step"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be 1 or more")
    return value


def usable_device(text: str) -> str:
    try:
        torch.zeros(1, device=text).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {reason}") from None
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=positive, default=3, metavar="C")
    parser.add_argument(
        "--drafts", type=positive, default=3, metavar="N", help="a step; N + 1 tokens are verified"
    )
    parser.add_argument(
        "--device", type=usable_device, default="cpu", help="cpu (default), cuda or cuda:N"
    )
    parser.add_argument("--model", default="qwen3_next", choices=["qwen3_next", "qwen3_5"])
    parser.add_argument("--size", default="tiny", choices=SIZES, help="of the layers")
    parser.add_argument(
        "--new-tokens", type=positive, metavar="N", help="a sequence; default: all patterns occur"
    )
    options = parser.parse_args(arguments)
    try:
        return 0 if run(options) else 1
    except ImportError as error:
        advice = "; run: pip install transformers" if error.name == "transformers" else ""
        print(f"{error}{advice}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
