"""Real input: the Qwen3-Next layer of `transformers`, its own code against this operator.

A `Qwen3NextGatedDeltaNet` with random weights reads the bytes of a text as token ids, through an
embedding and its RMS norm, as a decoder layer does: first a prompt, then token by token with its
cache. Recorded on the way are the projected q|k|v rows, the convolution state before and after
every token, and the q, k and v that the layer hands to its recurrence, q and k after the layer's
`l2norm`. The operator then gets the state after the prompt and all further rows at once, and must
leave the same windows, byte for byte, and the same q, k and v within the layer's own rounding
(`rounding_bound`).
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from . import ops
from .compare import same_bytes

TEXT = """\
A language model that drafts its own next words saves time only while checking a draft is cheaper
than writing it. The check reads every drafted word at once, and for most of the network that is
what the hardware likes best. A recurrent layer is the exception: it carries a state from word to
word, and when the third of four words turns out to be wrong, the state has to be what it was after
the second. Whoever kept a copy after each word can go back; whoever did not has to start over.
"""

PROMPT_TOKENS = 24

# name: hidden size, key heads, value heads, head dimension
SIZES = {"tiny": (64, 2, 4, 16), "full": (2048, 16, 32, 128)}


class Unavailable(Exception):
    """Why there is no real input here, in one sentence."""


class LayerRun(NamedTuple):
    """What the layer did with K tokens of C sequences after their prompts."""

    weight: torch.Tensor  # [D, W]
    conv_state: torch.Tensor  # [C, D, S] after the prompt
    rows: torch.Tensor  # [C, K, D] projected q|k|v
    windows: torch.Tensor  # [C, K, D, S] after each token
    output: torch.Tensor  # [C, K, D] float32: q and k normalised, v
    qk_channels: int
    head_dim: int
    source: str  # "transformers 5.17.0", say


class Comparison(NamedTuple):
    """The operator's result against the layer's."""

    windows_equal: bool
    state_equal: bool
    largest_difference: float
    largest_share: float  # of the rounding bound

    @property
    def ok(self) -> bool:
        return self.windows_equal and self.state_equal and self.largest_share <= 1.0


def run_layer(
    size: str = "full",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    n_seq: int = 8,
    num_tokens: int = 17,
    prompt_tokens: int = PROMPT_TOKENS,
) -> LayerRun:
    """Runs the layer of `SIZES[size]` and returns what it did. Raises `Unavailable`."""
    transformers, modeling = _transformers()
    hidden, key_heads, value_heads, head_dim = SIZES[size]
    config = transformers.Qwen3NextConfig(
        hidden_size=hidden,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet(transformers):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(256, hidden)
        layer = modeling.Qwen3NextGatedDeltaNet(config, 0)
        norm = modeling.Qwen3NextRMSNorm(hidden)
        for module in (embedding, layer, norm):
            module.to(device=device, dtype=dtype).eval()
        tokens = _tokens(n_seq, prompt_tokens + num_tokens).to(device)
        hidden_states = norm(embedding(tokens))
        # torch's own kernels: cuDNN may round a float32 convolution to TF32
        with torch.backends.cudnn.flags(enabled=False), _record(modeling) as record:
            cache = transformers.DynamicCache(config=config)
            layer(hidden_states[:, :prompt_tokens], cache)
            for t in range(prompt_tokens, prompt_tokens + num_tokens):
                layer(hidden_states[:, t : t + 1], cache)
        if len(record["conv"]) != num_tokens or len(record["rule"]) != num_tokens:
            raise Unavailable(_changed(transformers))
        conv = {key: [step[key] for step in record["conv"]] for key in record["conv"][0]}
        return LayerRun(
            weight=layer.conv1d.weight.detach().squeeze(1),
            conv_state=conv["before"][0],
            rows=torch.stack(conv["rows"], 1),
            windows=torch.stack(conv["after"], 1),
            output=torch.stack(
                [_handed_over(modeling, step, key_heads) for step in record["rule"]], 1
            ),
            qk_channels=2 * key_heads * head_dim,
            head_dim=head_dim,
            source=f"transformers {transformers.__version__}",
        )


def run_operator(
    run: LayerRun, state_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, snapshots, state) of the operator on the layer's input."""
    state = run.conv_state.to(state_dtype, copy=True)
    output, snapshots = ops.verify_conv(
        state, run.rows, run.weight, qk_channels=run.qk_channels, head_dim=run.head_dim
    )
    assert snapshots is not None  # windows, unless asked otherwise
    return output, snapshots, state


def compare(
    run: LayerRun, output: torch.Tensor, snapshots: torch.Tensor, state: torch.Tensor
) -> Comparison:
    """Windows and state must be the layer's; the output may differ by the rounding bound."""
    difference = (output.double() - run.output.double()).abs()
    # NaN must not pass as small
    share = torch.nan_to_num(difference / rounding_bound(run), nan=torch.inf)
    return Comparison(
        # a state that is wider than the layer's dtype holds the same numbers
        windows_equal=same_bytes(snapshots, run.windows.to(snapshots.dtype)),
        state_equal=same_bytes(state, run.windows[:, -1].to(state.dtype)),
        largest_difference=torch.nan_to_num(difference, nan=torch.inf).max().item(),
        largest_share=share.max().item(),
    )


def rounding_bound(run: LayerRun) -> torch.Tensor:
    """[C, K, D] float64: how far the operator may be from the layer, by rounding alone.

    With u the layer's unit roundoff and f that of float32, to first order, everything in float64:

    - The sum over the taps, a: both sides add in float32, in any order: W f sum|x w| each. The
      layer rounds a to its dtype: u |a|.
    - y = silu(a), whose slope is at most 1.1: 1.1 times that; both evaluate it within 8 f |y|,
      the layer rounds once more: u |y|.
    - n = y / N with N = sqrt(sum y^2 + eps) moves by at most (e + |n| ||e||) / N' where y moves by
      e and N' is the smallest N that e allows; both sum head_dim squares in float32.
    - The operator rounds its result once: u times it.
    """
    d_conv = run.weight.shape[1]
    u = torch.finfo(run.rows.dtype).eps / 2
    f = torch.finfo(torch.float32).eps / 2
    products = run.windows[..., -d_conv:].double() * run.weight.double()
    a = products.sum(-1)
    a_error = u * a.abs() + 2 * d_conv * f * products.abs().sum(-1)
    y = a * torch.sigmoid(a)
    y_error = 1.1 * (1 + u) * a_error + (u + 16 * f) * y.abs()

    heads = (*y.shape[:2], -1, run.head_dim)
    q_k = y[..., : run.qk_channels].reshape(heads)
    q_k_error = y_error[..., : run.qk_channels].reshape(heads)
    norm = (q_k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    norm_error = q_k_error.norm(dim=-1, keepdim=True)
    smallest = (norm - norm_error).clamp_min(1e-3)  # eps alone leaves sqrt(1e-6)
    n = (q_k / norm).abs()
    n_error = (q_k_error + n * norm_error) / smallest + (run.head_dim + 8) * f * n

    value = torch.cat([n.flatten(2), y[..., run.qk_channels :].abs()], -1)
    error = torch.cat([n_error.flatten(2), y_error[..., run.qk_channels :]], -1)
    return error + u * (value + error)


# ---- the layer ----------------------------------------------------------------------------------


def _transformers() -> tuple[Any, Any]:
    try:
        transformers = importlib.import_module("transformers")
        modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise Unavailable("transformers is not installed (pip install transformers)") from None
        raise Unavailable(f"transformers has no Qwen3-Next layer that loads: {error}") from None
    except ImportError as error:
        raise Unavailable(f"transformers has no Qwen3-Next layer that loads: {error}") from None
    for name in ("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "l2norm"):
        if not hasattr(modeling, name):
            raise Unavailable(_changed(transformers))
    return transformers, modeling


def _changed(transformers: Any) -> str:
    return (
        f"transformers {transformers.__version__} has another Qwen3-Next layer than this check "
        "knows (tried with 5.17 and 5.24)"
    )


@contextmanager
def _quiet(transformers: Any) -> Any:
    """Without the advice to install faster kernels: here the layer's own code is wanted."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _tokens(n_seq: int, length: int) -> torch.Tensor:
    """[n_seq, length] token ids: the bytes of TEXT, from another place for every sequence."""
    text = TEXT.encode()
    starts = [i * len(text) // max(1, n_seq) for i in range(n_seq)]
    return torch.tensor([[text[(s + t) % len(text)] for t in range(length)] for s in starts])


@contextmanager
def _record(modeling: Any) -> Any:
    """Notes what the layer's single-token path hands to its convolution and its recurrence."""
    record: dict[str, list[Any]] = {"conv": [], "rule": []}
    conv, rule = modeling.causal_conv1d_update, modeling.torch_recurrent_gated_delta_rule

    def conv_and_note(rows: torch.Tensor, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = state.clone()
        result = conv(rows, state, *args, **kwargs)
        # rows is [C, D, 1]; the state was updated in place
        record["conv"].append(
            {"rows": rows.squeeze(-1).clone(), "before": before, "after": state.clone()}
        )
        return result

    def rule_and_note(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> Any:
        record["rule"].append((query, key, value, kwargs))
        return rule(query, key, value, **kwargs)

    with mock.patch.multiple(
        modeling, causal_conv1d_update=conv_and_note, torch_recurrent_gated_delta_rule=rule_and_note
    ):
        yield record


def _handed_over(modeling: Any, step: Any, key_heads: int) -> torch.Tensor:
    """[C, D] float32: q and k as the recurrence normalises them (without its 1/sqrt(d)), and v."""
    query, key, value, options = step
    if not options["use_qk_l2norm_in_kernel"]:
        raise RuntimeError("the layer no longer asks its recurrence for the L2 norm")
    # some versions repeat the q and k heads for the value heads that they serve
    repeats = query.shape[2] // key_heads
    normalised = (
        modeling.l2norm(x[:, :, ::repeats].float(), dim=-1, eps=1e-6) for x in (query, key)
    )
    return torch.cat([x.flatten(1) for x in (*normalised, value.float())], -1)
