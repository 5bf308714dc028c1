"""A plugin of vLLM (0.33): the operator where a Qwen3-Next or Qwen3.5 model verifies its drafts.

    GDN_VERIFY_VLLM=1 vllm serve ...

vLLM finds `register` by its entry point (`vllm.general_plugins`) in each of its processes. Without
the variable it does nothing, so that installing this package changes no server; with it, it waits
until vLLM imports the module, since that import initialises CUDA, which processes that only talk
to the model must not (vLLM cannot fork after it).

What is replaced is the convolution of speculative steps alone, in `QwenGatedDeltaNetAttention`:

- `causal_conv1d_update` of the module, where it is called with `num_accepted_tokens`: x `[tokens,
  D]`, packed by `query_start_loc`; the pool `(blocks, D, W-1 + drafts)`, in which channels have
  stride 1 (or tokens: `VLLM_SSM_CONV_STATE_LAYOUT=DS`), is a history that is its own state; the
  block of each sequence is the first column of `spec_state_indices_tensor`; block 0 is padding.
- Inside `_forward_core` the same launch normalises q and k, and
  `fused_sigmoid_gating_delta_rule_update` is told not to. The fused CUDA kernel that vLLM has for a
  step's recurrence cannot be told: on the way to it (`_forward_core_decode_spec_fused_norm`) the
  operator leaves q and k as they are.

Prompts and steps without drafts go where they went, and so does a call that the operator refuses,
with one warning in the log.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..compat import causal_conv1d_update_vllm

__all__ = ["install", "register", "remove"]

MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_LAYER = "QwenGatedDeltaNetAttention"
_UPDATE, _RULE = "causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"

_log = logging.getLogger("gdn_verify")

# (object, name of the attribute): what it was
_originals: dict[tuple[Any, str], Any] = {}


class _Step(threading.local):
    """What the forward of this thread is in."""

    layer: Any = None
    normalised = False  # whether q and k left the convolution with their norm


_step = _Step()


class _OnImport(importlib.abc.MetaPathFinder):
    """Installs when vLLM has imported its module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _install_or_warn()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_on_import = _OnImport()


def register() -> None:
    """The entry point: where `GDN_VERIFY_VLLM` is 1, installs now or when vLLM imports its module.

    It never ends the server.
    """
    if os.environ.get("GDN_VERIFY_VLLM") != "1":
        return
    try:
        waits = MODULE not in sys.modules and importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:  # a package of it is missing: install says so
        waits = False
    if not waits:
        _install_or_warn()
    elif _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)


def _install_or_warn() -> None:
    try:
        install()
    except ImportError as error:
        _log.warning("GDN_VERIFY_VLLM=1 has no effect: %s", error)


def install() -> None:
    """Patches vLLM's module in this process; a second call changes nothing."""
    if _originals:
        return
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise ImportError("vLLM is not installed") from None
        raise ImportError(f"this vLLM has no {MODULE} that loads ({error}); 0.33 has") from None
    layer: Any = getattr(module, _LAYER, None)
    known = hasattr(module, _UPDATE) and hasattr(module, _RULE)
    if not (known and hasattr(layer, "_forward_core")):
        raise ImportError(f"this vLLM has another {MODULE} than 0.33")
    for owner, name, patched in (
        (module, _UPDATE, _update(getattr(module, _UPDATE))),
        (module, _RULE, _rule(getattr(module, _RULE))),
        (layer, "_forward_core", _forward_core(layer._forward_core)),
    ):
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, patched)


def remove() -> None:
    """Undoes `install` and `register`."""
    if _on_import in sys.meta_path:
        sys.meta_path.remove(_on_import)
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _forward_core(original: Any) -> Any:
    def forward_core(self: Any, *args: Any, **kwargs: Any) -> Any:
        _step.layer, _step.normalised = self, False
        try:
            return original(self, *args, **kwargs)
        finally:
            _step.layer = None

    return forward_core


def _update(original: Any) -> Any:
    refused = False

    def causal_conv1d_update(*args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        if kwargs.get("num_accepted_tokens") is None:
            return original(*args, **kwargs)
        layer = _step.layer
        norm: dict[str, Any] = {}
        if layer is not None:
            qk_channels = 2 * layer.key_dim // layer.tp_size
            norm = {"qk_channels": qk_channels, "head_dim": layer.head_k_dim}
        try:
            output = causal_conv1d_update_vllm(*args, **(kwargs | norm))
        except ValueError as error:  # nothing was written
            if not refused:
                _log.warning("vLLM's own convolution runs: %s", error)
            refused, _step.normalised = True, False
            return original(*args, **kwargs)
        _step.normalised = bool(norm)
        return output

    return causal_conv1d_update


def _rule(original: Any) -> Any:
    def fused_sigmoid_gating_delta_rule_update(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_accepted_tokens") is not None and _step.normalised:
            kwargs["use_qk_l2norm_in_kernel"] = False
        return original(*args, **kwargs)

    return fused_sigmoid_gating_delta_rule_update
