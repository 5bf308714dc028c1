"""`causal_conv1d_update` as causal-conv1d, vLLM and SGLang call it, on this project's operator.

A stack swaps the import and adds `qk_channels` and `head_dim` to get the L2 norm of q and k out of
the same launch; without them the convolution and its activation are what they were:

    from gdn_verify.compat import causal_conv1d_update                      # causal-conv1d
    from gdn_verify.compat import causal_conv1d_update_vllm as causal_conv1d_update
    from gdn_verify.compat import causal_conv1d_update_sglang as causal_conv1d_update

Arguments have the names, order, defaults and layouts of the original; what is added is keyword
only. In all three:

- `x` is `(batch, dim)` or `(batch, dim, seqlen)` with channels at stride 1: a transposed view of
  rows `[batch, seqlen, dim]`, as engines have it. Nothing is copied; another layout is an error.
- The result has the shape and dtype of `x` and is new memory, its channels at stride 1 too. vLLM
  writes it over `x` unless `out` is given; here `x` keeps its values.
- `conv_state` is updated in place, with any strides and of any of the operator's dtypes. A
  convolution takes the newest input as it came, where vLLM rounds it to the state's dtype first.
- A slot that is negative or the padding id is padding: its state is left alone and its output is
  zero, where vLLM leaves `x` and SGLang whatever the memory held.
- `weight` and `bias` have the dtype of `x` or float32; W is 2 to 8. There is no backward.

What the operator cannot do is refused in one sentence that names the argument. Sentences of the
operator itself name its own arguments: `new_input` is `x`, `output` is `out`, `cu_seqlens` is
`query_start_loc`, and `conv_state_inter` with `inter_indices` is the sliding state or the window
buffer with its index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ops import verify_conv

__all__ = ["causal_conv1d_update", "causal_conv1d_update_sglang", "causal_conv1d_update_vllm"]


# ---- what the three share ------------------------------------------------------------------------


def _rows(x: Tensor, name: str = "x") -> Tensor:
    """`x` as the operator's rows `[batch, seqlen, dim]`, without a copy."""
    if x.dim() not in (2, 3):
        raise ValueError(
            f"{name} has {x.dim()} dimensions, but it must be (batch, dim) or (batch, dim, seqlen)"
        )
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(
            f"{name} has strides {tuple(x.stride())}, but its channels (dimension 1) must have"
            " stride 1, as in a transposed view of rows [batch, seqlen, dim]: nothing is copied"
        )
    return x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)


def _shaped_like(x: Tensor, output: Tensor) -> Tensor:
    """What the operator wrote for `_rows(x)`, in the shape of `x`."""
    return output.squeeze(1) if x.dim() == 2 else output.transpose(1, 2)


def _refuse(reason: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is given, but {reason}")


def _update(
    conv_state: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    activation: bool | str | None,
    qk_channels: int,
    head_dim: int | None,
    **options: Any,
) -> Tensor:
    if activation not in (None, False, True, "silu", "swish"):
        raise ValueError(f'activation is {activation!r}, but it must be None, "silu" or "swish"')
    if head_dim is None and qk_channels != 0:
        raise ValueError(
            f"head_dim must be given with qk_channels, which is {qk_channels}:"
            " the norm is taken over each head"
        )
    output, _ = verify_conv(
        conv_state,
        rows,
        weight,
        qk_channels=qk_channels,
        head_dim=1 if head_dim is None else head_dim,
        activation="silu" if activation else "none",
        snapshots="none",
        **options,
    )
    return output


def _window(conv_state: Tensor, weight: Tensor) -> Tensor:
    """The W-1 columns that vLLM and SGLang use of a state without `num_accepted_tokens`."""
    return conv_state[..., : weight.shape[1] - 1]


def _history(conv_state: Tensor, weight: Tensor, num_tokens: int) -> Tensor:
    """The sliding state of vLLM as the history that is the operator's only state.

    Before a call, the window after a accepted tokens is the W-1 columns from a-1 on. The call puts
    the W-2 newest entries of that window at the front and its K inputs behind them. These are the
    rows of a history with S = W-1, column j being row j, so the same view serves to read and write.
    """
    past = weight.shape[1] - 2
    needed = past + num_tokens
    if conv_state.dim() == 3 and conv_state.shape[2] < needed:
        raise ValueError(
            f"conv_state has {conv_state.shape[2]} columns, but with accepted counts it must have"
            f" at least {needed}: {past} of the past and one for each of {num_tokens} tokens"
        )
    return conv_state.transpose(1, 2)


# ---- causal-conv1d -------------------------------------------------------------------------------


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    qk_channels: int = 0,
    head_dim: int | None = None,
    l2_eps: float = 1e-6,
    conv_state_inter: Tensor | None = None,
    update_state: bool = True,
) -> Tensor:
    """causal-conv1d's `causal_conv1d_update`; see the module for what holds for all.

    `conv_state` `(slots, dim, W-1 or W)` is the last inputs, oldest first, and ends with those of
    this call. Longer ones and the circular buffer of `cache_seqlens` are refused.

    Added: the norm (`qk_channels`, `head_dim`, `l2_eps`), the snapshots after every token
    (`conv_state_inter`, `[batch, seqlen, dim, columns of conv_state]` or a history) and
    `update_state`, as in `gdn_verify.verify_conv`.
    """
    _refuse("a circular conv_state has no counterpart here", cache_seqlens=cache_seqlens)
    width = weight.shape[1]
    if conv_state.shape[-1] > width:
        raise ValueError(
            f"conv_state has {conv_state.shape[-1]} columns, but it must have {width - 1} or"
            f" {width}: inputs that the convolution no longer reaches are not kept here"
        )
    output = _update(
        conv_state,
        _rows(x),
        weight,
        activation,
        qk_channels,
        head_dim,
        l2_eps=l2_eps,
        bias=bias,
        conv_state_indices=conv_state_indices,
        conv_state_inter=conv_state_inter,
        update_state=update_state,
    )
    return _shaped_like(x, output)


# ---- vLLM ----------------------------------------------------------------------------------------


def causal_conv1d_update_vllm(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
    *,
    pad_slot_id: int | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    qk_channels: int = 0,
    head_dim: int | None = None,
    l2_eps: float = 1e-6,
) -> Tensor:
    """vLLM's `causal_conv1d_update` (0.33.0); see the module for what holds for all.

    `conv_state` `(slots, dim, columns)` has W-1 columns, and one more for each speculative token.

    - Without `num_accepted_tokens` the first W-1 columns are the window, and the others are left
      alone.
    - With it, the state is the sliding one of speculative decoding, rolled back without a copy:
      the window starts at column `num_accepted_tokens - 1`, which must be 0 or more, and afterwards
      the first W-2+K columns hold its W-2 newest entries and the K inputs. This is bit for bit the
      history of `gdn_verify.verify_conv(None, ...)`: `conv_state.transpose(1, 2)`.

    With `query_start_loc`, `x` is `(num_tokens, dim)`, packed; `conv_state_indices` and
    `max_query_len` must be given, and entries of `query_start_loc` beyond the batch are not looked
    at. A sequence shorter than `max_query_len` commits its own window also where vLLM, without
    `num_accepted_tokens`, does not. Of `conv_state_indices` `(batch, blocks)` the first column
    counts.

    The result goes to `out`, where that is given: memory of its own, of the shape, dtype and layout
    of `x`. Slot 0 is the null block (None means that only negative slots are padding).
    `validate_data` changes nothing: what can be checked is.

    Arguments of older versions are keyword only: `pad_slot_id` is `null_block_id`, whose default
    was -1; `block_idx_last_scheduled_token` and `initial_state_idx` are refused, since the block
    that is read cannot be another than the one written.

    Added: the norm (`qk_channels`, `head_dim`, `l2_eps`). The sliding state holds the snapshots.
    """
    _refuse(
        "one block cannot be read and another written here",
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )
    slots = conv_state_indices
    if slots is not None and slots.dim() == 2:
        slots = slots[:, 0]
    options: dict[str, Any] = {"bias": bias, "l2_eps": l2_eps}
    rows, output = _rows(x), None if out is None else _rows(out, "out")
    if query_start_loc is None:
        batch, num_tokens = rows.shape[0], rows.shape[1]
    else:
        if slots is None:
            raise ValueError("conv_state_indices must be given with query_start_loc")
        if max_query_len < 0:
            raise ValueError(
                f"max_query_len is {max_query_len}, but with query_start_loc it must be the most"
                " tokens of a sequence"
            )
        rows, output, batch, num_tokens = x, out, slots.shape[0], max_query_len
        options["cu_seqlens"] = query_start_loc[: batch + 1]
        options["max_num_tokens"] = max_query_len
    padding = null_block_id if pad_slot_id is None else pad_slot_id
    options["pad_slot_id"] = -1 if padding is None else padding

    state: Tensor | None
    if num_accepted_tokens is None:
        state = _window(conv_state, weight)
        options["conv_state_indices"] = slots
    else:
        state = None
        options["conv_state_inter"] = _history(conv_state, weight, num_tokens)
        options["inter_indices"] = slots
        options["num_accepted_tokens"] = num_accepted_tokens[:batch]
    output = _update(
        state, rows, weight, activation, qk_channels, head_dim, output=output, **options
    )
    return output if query_start_loc is not None else _shaped_like(x, output)


# ---- SGLang --------------------------------------------------------------------------------------


def _parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parent of each token of a tree that is given by first children and next siblings.

    Tokens that nothing links to, the root among them, get 0, as in SGLang.
    """
    n_seq, num_tokens = next_token.shape
    tokens = torch.arange(num_tokens, device=next_token.device).repeat(n_seq, 1)

    def backwards(links: Tensor, unlinked: Tensor) -> Tensor:
        """For each token the one that links to it; column `num_tokens` takes the absent links."""
        found = torch.cat([unlinked, unlinked[:, :1]], 1)
        target = links.long().clamp(max=num_tokens)
        return found.scatter_(1, target.where(target >= 0, num_tokens), tokens)[:, :num_tokens]

    parent_of_first = backwards(next_token, torch.zeros_like(tokens))
    first = backwards(next_sibling, tokens)  # the sibling before, then the 2nd, 4th, ... before
    for _ in range((num_tokens - 1).bit_length()):
        first = first.gather(1, first)
    return parent_of_first.gather(1, first).int()


def _snapshots(windows: Tensor) -> Tensor:
    """Windows as they are, or the history of which they are overlapping views.

    Those of a chain SGLang keeps in one buffer `[dim, seqlen + W-2]` a row, where window t is the
    columns t to t + W-2: a step in time and a column are the same stride.
    """
    if windows.dim() != 4 or windows.shape[1] < 2 or windows.shape[3] < 2:
        return windows
    row, step, channel, column = windows.stride()
    if step != column:
        return windows
    n_rows, num_tokens, d_inner, state_len = windows.shape
    return windows.as_strided((n_rows, state_len - 1 + num_tokens, d_inner), (row, column, channel))


def causal_conv1d_update_sglang(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int | None = -1,
    metadata: Any = None,
    validate_data: bool = False,
    *,
    qk_channels: int = 0,
    head_dim: int | None = None,
    l2_eps: float = 1e-6,
) -> Tensor:
    """SGLang's `causal_conv1d_update` (0.5.23); see the module for what holds for all.

    - `conv_state` `(slots, dim, W-1 columns or more)`: the first W-1 are the window.
    - `intermediate_conv_window` `[rows, seqlen or more, dim, W-1]` takes the window after every
      token; `intermediate_state_indices` is the row of each sequence, by default its slot. SGLang
      keeps the windows of a chain as overlapping views of one buffer: that is written as the
      history that it is.
    - `retrieve_next_token` and `retrieve_next_sibling` `(batch, seqlen)` make the tokens a tree
      (first child and next sibling, -1 for none, later than the token), whose parents are written
      to `retrieve_parent_token`, as there. A tree leaves `conv_state` alone, where SGLang's kernel
      puts the last tokens there until the accepted window replaces them; without the first two,
      `retrieve_parent_token` is not looked at.
    - `num_accept_tokens` is vLLM's `num_accepted_tokens`, which is its name in SGLang 0.5.10 too;
      its sliding state holds every window, so that it is refused together with
      `intermediate_conv_window` or a tree.
    - The circular buffer of `cache_seqlens` is refused (SGLang's kernel ignores it). `metadata` and
      `validate_data` change nothing: what can be checked is.

    Added: the norm (`qk_channels`, `head_dim`, `l2_eps`). The windows are the snapshots.
    """
    _refuse("a circular conv_state has no counterpart here", cache_seqlens=cache_seqlens)
    if num_accept_tokens is not None:
        _refuse(
            "with num_accept_tokens the sliding conv_state holds all there is",
            intermediate_conv_window=intermediate_conv_window,
            retrieve_next_token=retrieve_next_token,
        )
        return causal_conv1d_update_vllm(
            x,
            conv_state,
            weight,
            bias,
            activation,
            conv_state_indices,
            num_accept_tokens,
            null_block_id=pad_slot_id,
            qk_channels=qk_channels,
            head_dim=head_dim,
            l2_eps=l2_eps,
        )
    rows = _rows(x)
    options: dict[str, Any] = {"bias": bias, "l2_eps": l2_eps}
    if intermediate_conv_window is not None:
        options["conv_state_inter"] = _snapshots(intermediate_conv_window)
        options["inter_indices"] = (
            conv_state_indices if intermediate_state_indices is None else intermediate_state_indices
        )
    if retrieve_next_token is not None:
        if retrieve_next_sibling is None:
            raise ValueError("retrieve_next_sibling must be given with retrieve_next_token")
        parents = _parents(retrieve_next_token, retrieve_next_sibling)
        if retrieve_parent_token is not None:
            retrieve_parent_token.copy_(parents)
        parents[:, :1] = -1  # the root follows the state
        options["parent_index"] = parents
    output = _update(
        _window(conv_state, weight),
        rows,
        weight,
        activation,
        qk_channels,
        head_dim,
        conv_state_indices=conv_state_indices,
        pad_slot_id=-1 if pad_slot_id is None else pad_slot_id,
        **options,
    )
    return _shaped_like(x, output)
