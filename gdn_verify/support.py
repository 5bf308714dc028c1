"""`supported`: whether `verify_conv` takes a call, without making it.

The C core checks what describes the tensors: shapes, strides, dtypes, and who shares memory with
whom. Only that last one needs addresses, so they are made up: each storage gets a range of its own.
No data is touched, which is why meta and fake tensors will do, and why a stream that is being
captured does not notice.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import _core
from .errors import GdnVerifyError
from .ops import allocate_snapshots, refuse_grad, refuse_indices

__all__ = ["Supported", "supported"]


@dataclass(frozen=True)
class Supported:
    """True where the call is taken; otherwise `reason` is the sentence that it would raise."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def supported(
    conv_state: Tensor | None,
    new_input: Tensor,
    weight: Tensor,
    *,
    qk_channels: int,
    head_dim: int,
    l2_eps: float = 1e-6,
    output: Tensor | None = None,
    conv_state_inter: Tensor | None = None,
    snapshots: Literal["windows", "history", "none"] = "windows",
    bias: Tensor | None = None,
    activation: Literal["silu", "none"] = "silu",
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inter_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_num_tokens: int | None = None,
    parent_index: Tensor | None = None,
    update_state: bool = True,
    config: int = -1,
    pdl: bool = False,
) -> Supported:
    """Whether `verify_conv` takes a call with these arguments, which are its own:

        if not (answer := gdn_verify.supported(state, x, weight, qk_channels=0, head_dim=1)):
            print(answer.reason)

    Nothing runs, is allocated on the device or waits for it, so that it may be asked while a graph
    is being captured. Tensors may be on "meta": they stand for some of the same shape, strides and
    dtype on a device that does it. The values of index tensors are not looked at, and memory that
    two storages share is not noticed. Not for the inside of torch.compile.
    """
    floats = {
        "conv_state": conv_state,
        "new_input": new_input,
        "weight": weight,
        "output": output,
        "conv_state_inter": conv_state_inter,
        "bias": bias,
    }
    indices = {
        "conv_state_indices": conv_state_indices,
        "inter_indices": inter_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "cu_seqlens": cu_seqlens,
        "parent_index": parent_index,
    }
    tensors = {**floats, **indices}
    try:
        refuse_grad(**floats)
        _check_devices(tensors)
        if conv_state_inter is None:
            refuse_indices(inter_indices, num_accepted_tokens)
            tensors["conv_state_inter"] = allocate_snapshots(
                snapshots, conv_state, new_input, cu_seqlens, max_num_tokens, "meta"
            )
        if output is None:
            tensors["output"] = torch.empty(new_input.shape, dtype=new_input.dtype, device="meta")
        _core.check_batched(
            _describe(tensors),
            qk_channels,
            head_dim,
            l2_eps,
            activation,
            pad_slot_id,
            max_num_tokens,
            update_state,
            config,
            pdl,
        )
    except ValueError as error:
        return Supported(str(error))
    return Supported()


# ---- descriptions --------------------------------------------------------------------------------

# gdn_verify_dtype; 4 is any other
_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int32: 3,
    torch.int64: 5,
    torch.float64: 6,
}
_OTHER = 4
_RANGE = 1 << 56  # bytes between the made-up addresses of two storages


def _describe(tensors: dict[str, Tensor | None]) -> dict[str, tuple[Any, ...]]:
    """As `_core.check_batched` wants them."""
    ranges: dict[int, int] = {}
    described = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            storage = tensor.untyped_storage()._cdata
            start = ranges.setdefault(storage, _RANGE * (len(ranges) + 1))
            address = start + tensor.storage_offset() * tensor.element_size()
            dtype = _DTYPES.get(tensor.dtype, _OTHER)
            described[name] = (address, tuple(tensor.shape), tensor.stride(), dtype)
    return described


# ---- devices -------------------------------------------------------------------------------------


def _check_devices(tensors: dict[str, Tensor | None]) -> None:
    first = tensors["new_input"]
    assert first is not None
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise GdnVerifyError(
                f"{name} is on {tensor.device}, but new_input is on {first.device}:"
                " all tensors must be on one device"
            )
    if first.device.type == "cuda":
        reason = _why_not_on_cuda(first.device.index)
        if reason:
            raise GdnVerifyError(reason)
    elif first.device.type not in ("cpu", "meta"):
        raise GdnVerifyError(f"new_input is on {first.device}, but it must be on CPU or CUDA")


@functools.cache
def _why_not_on_cuda(index: int) -> str:
    build = _core.build_info()
    if not build["has_cuda"]:
        return "tensors are on a CUDA device, but gdn-verify was built without CUDA"
    capability = torch.cuda.get_device_capability(index)
    if runs_on(build["cuda_archs"], *capability):
        return ""
    device = "{}.{}".format(*capability)
    return (
        f"gdn_verify was built for the architectures {build['cuda_archs']}, but device {index} is"
        f" {device}: rebuild with TORCH_CUDA_ARCH_LIST={device}"
    )


def runs_on(archs: str, major: int, minor: int) -> bool:
    """Whether a build for `archs` ("8.0 9.0a 12.0+PTX") has code for compute capability
    major.minor: of the same major version and no later minor one, of exactly that one with an "a",
    or as PTX of any earlier one."""
    for arch_major, arch_minor, only, ptx in re.findall(r"(\d+)\.(\d)([af]?)(\+PTX)?", archs):
        built, device = (int(arch_major), int(arch_minor)), (major, minor)
        if built == device or (built[0] == major and built <= device and only != "a"):
            return True
        if ptx and not only and built <= device:
            return True
    return False
