"""The operator in the Gated DeltaNet layers of `transformers` (Qwen3-Next and Qwen3.5).

    from gdn_verify.integrations import transformers as gdn

    gdn.install()    # every model of these classes, those that exist too
    gdn.remove()     # as it was

While it is installed, a layer with a cache that holds a past runs convolution, SiLU and the L2 norm
of q and k in one launch, and its recurrence gets q and k normalised. Everything else, the prompt
among it, is the layer's own code: no cache or an empty one, gradients, packed sequences, a cache
that records its past, dtypes, devices and activations that the operator does not have, and weights
that are elsewhere (offloaded ones).

A model that is called with a `SpeculativeCache` verifies K tokens of each of several sequences at
once, whatever their lengths, and the cache takes back what was not accepted. `transformers` knows
nothing of this: its models ask a cache for what they need, and this one answers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops import verify_conv

__all__ = ["SpeculativeCache", "install", "remove"]

_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

# class: its own forward
_originals: dict[type, Callable[..., Tensor]] = {}


# ---- install and remove --------------------------------------------------------------------------


def install() -> list[str]:
    """Patches the layers and returns the names of their classes; a second call changes nothing."""
    for layer_class in _layer_classes():
        if layer_class not in _originals:
            _originals[layer_class] = layer_class.forward
            modeling = sys.modules[layer_class.__module__]
            layer_class.forward = _patched(layer_class.forward, modeling)
    return [layer_class.__name__ for layer_class in _originals]


def remove() -> None:
    """Undoes `install`; without it, does nothing."""
    while _originals:
        layer_class, forward = _originals.popitem()
        layer_class.forward = forward  # type: ignore[attr-defined]


def _layer_classes() -> list[Any]:
    try:
        version = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "transformers is not installed: pip install 'gdn-verify[examples]'"
        ) from None
    found = []
    for model in _MODELS:
        try:
            modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError:
            continue  # a model that came later
        found += [x for name, x in vars(modeling).items() if name.endswith("GatedDeltaNet")]
        for name in ("torch_recurrent_gated_delta_rule", "apply_mask_to_padding_states"):
            if not hasattr(modeling, name):
                raise ImportError(
                    f"transformers {version} has another {model} than this patch knows"
                    f" (no {name}; tried with 5.17 and 5.24)"
                )
    if not found:
        raise ImportError(f"transformers {version} has no Gated DeltaNet layer (5.17 has)")
    return found


def _patched(original: Callable[..., Tensor], modeling: ModuleType) -> Callable[..., Tensor]:
    """`modeling` is the module of the class; a layer may be of a subclass from anywhere."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        for name in ("cache_params", "past_key_values"):  # the cache, in older versions
            if kwargs.get(name) is not None:
                cache = kwargs.pop(name)
        if isinstance(cache, SpeculativeCache):
            return _verify(self, modeling, hidden_states, cache)
        if _can_decode(self, hidden_states, cache, kwargs):
            return _decode(self, modeling, hidden_states, cache, attention_mask)
        return original(self, hidden_states, cache, attention_mask, **kwargs)

    return forward


# ---- the layer -----------------------------------------------------------------------------------


def _can_decode(layer: Any, hidden_states: Tensor, cache: Any, options: dict[str, Any]) -> bool:
    return (
        cache is not None
        and _can_convolve(layer.conv1d.weight, hidden_states)
        and cache.has_previous_state(layer.layer_idx)
        and not getattr(cache.layers[layer.layer_idx], "record_past", False)
        and options.get("cu_seq_lens_q") is None
        and not torch.is_grad_enabled()
        and hidden_states.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and layer.activation in ("silu", "swish")
        and 2 <= layer.conv_kernel_size <= 8
    )


def _can_convolve(weight: Tensor, hidden_states: Tensor) -> bool:
    device, dtype = hidden_states.device, hidden_states.dtype
    if device.type not in ("cpu", "cuda") or weight.device != device:
        return False
    if torch.is_autocast_enabled(device.type):  # then the projections have another
        dtype = torch.get_autocast_dtype(device.type)
    return weight.dtype in (dtype, torch.float32)


def _decode(
    layer: Any,
    modeling: Any,
    hidden_states: Tensor,
    cache: Any,
    attention_mask: Tensor | None,
) -> Tensor:
    """The next tokens, none of which will be taken back."""
    hidden_states = modeling.apply_mask_to_padding_states(hidden_states, attention_mask)
    rows, z, b, a = _project(layer, hidden_states)
    states = cache.layers[layer.layer_idx]
    rows, _ = verify_conv(states.conv_states[0], rows, snapshots="none", **_convolution(layer))
    single = rows.shape[1] == 1
    rule = "torch_recurrent_gated_delta_rule" if single else "torch_chunk_gated_delta_rule"
    output, state = getattr(modeling, rule)(
        *_heads(layer, rows),
        **_gates(layer, b, a),
        initial_state=states.recurrent_states[0],
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    cache.update_recurrent_state(state, layer.layer_idx)
    return _finish(layer, output, z)


def _verify(layer: Any, modeling: Any, hidden_states: Tensor, cache: SpeculativeCache) -> Tensor:
    """The next K tokens of each sequence, some of which may be taken back."""
    rows, z, b, a = _project(layer, hidden_states)
    rows = cache.convolve(layer.layer_idx, rows, **_convolution(layer))
    output = cache.recur(
        layer.layer_idx,
        modeling.torch_recurrent_gated_delta_rule,
        *_heads(layer, rows),
        **_gates(layer, b, a),
    )
    return _finish(layer, output, z)


def _project(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The q|k|v rows `[C, K, D]` in the operator's order, and z, b, a by value head."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next: grouped by key head
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        )
        return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z, b, a
    z = layer.in_proj_z(hidden_states).unflatten(-1, (-1, layer.head_v_dim))
    rows = layer.in_proj_qkv(hidden_states)
    return rows, z, layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)


def _convolution(layer: Any) -> dict[str, Any]:
    return {
        "weight": layer.conv1d.weight.squeeze(1),
        "bias": layer.conv1d.bias,
        "qk_channels": 2 * layer.key_dim,
        "head_dim": layer.head_k_dim,
    }


def _heads(layer: Any, rows: Tensor) -> list[Tensor]:
    """q, k, v `[C, K, value heads, head dimension]`."""
    q, k, v = rows.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
    repeats = layer.num_v_heads // layer.num_k_heads
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    return [q, k, v.unflatten(-1, (-1, layer.head_v_dim))]


def _gates(layer: Any, b: Tensor, a: Tensor) -> dict[str, Tensor]:
    decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias)
    return {"g": decay, "beta": b.sigmoid()}


def _finish(layer: Any, output: Tensor, z: Tensor) -> Tensor:
    gated = layer.norm(output.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(gated.reshape(*z.shape[:2], -1))


# ---- the cache -----------------------------------------------------------------------------------


class SpeculativeCache:
    """What a model knows of up to `slots` sequences, and how it forgets drafts.

        cache = SpeculativeCache(model.config, slots=8, num_tokens=4, max_length=512, ...)
        cache.load(3, prompt_cache)                      # a DynamicCache after a prompt, batch 1
        logits = cache.verify(model, tokens, [3, 5])     # tokens [C, K], K up to num_tokens
        cache.accept([1, 4])                             # how many of the K stay, 1 or more; once

    Nothing is copied when tokens are rejected:

    - attention: keys and values lie at their positions; what is beyond a sequence's length is
      masked, and written over later;
    - convolution, `rollback="accepted"`: a history of `num_tokens` rows a slot, from which the next
      verify starts by `num_accepted_tokens`;
    - convolution, `rollback="commit"`: windows, of which `accept` makes the accepted one the state,
      for all layers in one launch of `gdn::commit_conv_state`;
    - recurrence: the state after every token, from which the next verify picks.
    """

    def __init__(
        self,
        config: Any,
        *,
        slots: int,
        num_tokens: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rollback: str = "accepted",
    ) -> None:
        if rollback not in ("accepted", "commit"):
            raise ValueError(f'rollback is {rollback!r}, but it must be "accepted" or "commit"')
        config = config.get_text_config()
        self.rollback, self.num_tokens, self.max_length = rollback, num_tokens, max_length
        self.launches = 0  # of the convolution and its commit
        self._lengths = [0] * slots
        self._accepted = torch.zeros(slots, dtype=torch.int32, device=device)
        self._slots: list[int] = []  # of the verify under way
        self._pending: set[int] = set()  # slots verified, whose tokens nobody has accepted
        # of the verify under way too: see _begin
        self._rows = self._positions = torch.empty(0, dtype=torch.int64, device=device)
        self._starts = torch.empty(0, dtype=torch.int32, device=device)  # num_accepted_tokens
        self._end = 0  # positions of attention

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        d_inner, d_conv = (
            2 * key_heads * key_dim + value_heads * value_dim,
            config.linear_conv_kernel_dim,
        )
        snapshots = (
            (d_conv - 1 + num_tokens, d_inner)  # history
            if rollback == "accepted"
            else (num_tokens, d_inner, d_conv)  # windows
        )
        # by layer
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._conv_states: dict[int, Tensor] = {}
        self._conv_snapshots: dict[int, Tensor] = {}
        # snapshot 0 is the state that the verify started from, t + 1 that after token t
        self._recurrent: dict[int, Tensor] = {}
        for layer, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self._conv_states[layer] = zeros(d_inner, d_conv)
                self._conv_snapshots[layer] = zeros(*snapshots)
                self._recurrent[layer] = zeros(
                    num_tokens + 1, value_heads, key_dim, value_dim, dtype=torch.float32
                )
            else:
                shape = (config.num_key_value_heads, max_length, config.head_dim)
                self._keys[layer], self._values[layer] = zeros(*shape), zeros(*shape)

    def load(self, slot: int, cache: Any) -> None:
        """Takes over what a cache of `transformers` holds after the prompt of one sequence."""
        self._check_slots([slot])
        length, batch = cache.get_seq_length(), len(_first_state(cache))
        if batch != 1 or length > self.max_length:
            raise ValueError(
                f"the prompt's cache has {batch} sequences of {length} tokens, but it must have one"
                f" of at most {self.max_length}"
            )
        self._pending.discard(slot)
        self._lengths[slot] = length
        self._accepted[slot] = 0  # start from the states, not from snapshots
        for layer, states in enumerate(cache.layers):
            if layer in self._keys:
                self._keys[layer][slot, :, :length] = states.keys[0]
                self._values[layer][slot, :, :length] = states.values[0]
            else:
                self._conv_states[layer][slot] = states.conv_states[0][0]
                self._recurrent[layer][slot, 0] = states.recurrent_states[0][0]

    def verify(self, model: Any, tokens: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits `[C, K, vocabulary]` of `tokens` `[C, K]`, which follow what slot i holds."""
        self._check_slots(slots)
        if tokens.dim() != 2 or len(tokens) != len(slots):
            raise ValueError(
                f"tokens is {list(tokens.shape)}, but it must be [C, K] for the {len(slots)} slots"
            )
        if not self._pending.isdisjoint(slots):
            raise ValueError(
                f"slots is {list(slots)}, but of {sorted(self._pending)} the last verify's tokens"
                " were not accepted yet: their snapshots would be lost"
            )
        num_tokens = tokens.shape[1]
        longest = max(self._lengths[slot] for slot in slots)
        if num_tokens > self.num_tokens or longest + num_tokens > self.max_length:
            raise ValueError(
                f"{num_tokens} tokens after {longest} do not fit: the cache takes"
                f" {self.num_tokens} at a time and holds {self.max_length}"
            )
        self._begin(slots, num_tokens)
        positions = torch.arange(self._end, device=self._rows.device)
        future = positions > self._positions[:, None, :, None]  # [C, 1, K, positions]
        dtype = model.get_input_embeddings().weight.dtype
        mask = torch.zeros(future.shape, dtype=dtype, device=future.device)
        mask.masked_fill_(future, torch.finfo(dtype).min)
        masks = {"full_attention": mask, "linear_attention": None}
        # by position: the cache has another name in older versions
        return model(tokens, masks, self._positions, self).logits

    def _begin(self, slots: Sequence[int], num_tokens: int) -> None:
        """What every layer needs to know of a verify."""
        device = self._accepted.device
        lengths = [self._lengths[slot] for slot in slots]
        self._slots = list(slots)
        self._pending.update(slots)
        self._rows = torch.tensor(self._slots, dtype=torch.int32, device=device)
        self._starts = self._accepted[self._rows]
        self._positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(
            num_tokens, device=device
        )
        self._end = max(lengths) + num_tokens

    def accept(self, num_accepted: Sequence[int]) -> None:
        """Keeps the first `num_accepted[i]` tokens of the last verify's sequence i."""
        num_tokens = self._positions.shape[-1]
        known = len(num_accepted) == len(self._slots) > 0
        if not known or min(num_accepted) < 1 or max(num_accepted) > num_tokens:
            raise ValueError(
                f"num_accepted is {list(num_accepted)}, but it must be 1 or more for each sequence"
                f" of the last verify and at most its {num_tokens} tokens, once"
            )
        accepted = torch.tensor(num_accepted, dtype=torch.int32, device=self._accepted.device)
        self._accepted[self._rows] = accepted
        for slot, n in zip(self._slots, num_accepted, strict=True):
            self._lengths[slot] += n
        if self.rollback == "commit":
            torch.ops.gdn.commit_conv_state(
                list(self._conv_states.values()),
                list(self._conv_snapshots.values()),
                accepted,
                conv_state_indices=self._rows,
                inter_indices=self._rows,
            )
            self.launches += 1
        self._pending.difference_update(self._slots)
        self._slots = []

    def _check_slots(self, slots: Sequence[int]) -> None:
        n = len(self._lengths)
        if not slots or len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= n:
            raise ValueError(
                f"slots is {list(slots)}, but it must be different ones from 0 to {n - 1}"
            )

    # ---- what the layers ask for ----

    def convolve(self, layer: int, rows: Tensor, weight: Tensor, **shape: Any) -> Tensor:
        """Convolution, SiLU and norm of `rows` `[C, K, D]`; every position can be gone back to."""
        follow = self.rollback == "accepted"
        output, _ = verify_conv(
            self._conv_states[layer],
            rows,
            weight,
            conv_state_inter=self._conv_snapshots[layer],
            conv_state_indices=self._rows,
            inter_indices=self._rows,
            num_accepted_tokens=self._starts if follow else None,
            update_state=False,
            **shape,
        )
        self.launches += 1
        return output

    def recur(
        self,
        layer: int,
        rule: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
    ) -> Tensor:
        """The gated delta rule, token by token, with the state after each."""
        states = self._recurrent[layer]
        state = states[self._rows, self._starts]
        states[self._rows, 0] = state
        outputs = []
        for t in range(query.shape[1]):
            output, state = rule(
                *(x[:, t : t + 1] for x in (query, key, value)),
                g=g[:, t : t + 1],
                beta=beta[:, t : t + 1],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=False,
            )
            states[self._rows, t + 1] = state
            outputs.append(output)
        return torch.cat(outputs, 1)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[C, heads, K, d]` at their positions, and all there are."""
        found = []
        for store, new in ((self._keys[layer], key), (self._values[layer], value)):
            store[self._rows[:, None], :, self._positions] = new.transpose(1, 2)
            found.append(store[self._rows, :, : self._end])
        return found[0], found[1]


def _first_state(cache: Any) -> Tensor:
    """The keys or windows `[batch, ..]` of a prompt's first layer."""
    states = cache.layers[0]
    return states.conv_states[0] if hasattr(states, "conv_states") else states.keys
