"""Tensors as the NumPy arrays of the reference and the core, and back; bfloat16 is uint16 there."""

from __future__ import annotations

import numpy as np
import torch


def to_array(x: torch.Tensor) -> np.ndarray:
    """On the memory of a CPU tensor, with its strides; a copy of a CUDA tensor."""
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def to_tensor(a: np.ndarray) -> torch.Tensor:
    """A CPU tensor on the memory of `a`, with its strides."""
    if a.dtype == np.uint16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)
