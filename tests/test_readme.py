"""The examples of README.md run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_serving_loop(blocks):
    names: dict = {}
    exec(blocks[0], names)
    n_seq, num_tokens, d_inner = 2, 3, 8192
    layers = [
        SimpleNamespace(
            conv_state=torch.randn(5, d_inner, 4),
            snapshots=torch.zeros(n_seq, num_tokens, d_inner, 4),
            conv_weight=torch.randn(d_inner, 4).bfloat16(),
        )
        for _ in range(2)
    ]
    slots = torch.tensor([4, 1], dtype=torch.int32)
    before = [layer.conv_state.clone() for layer in layers]
    for layer in layers:
        qkv = torch.randn(n_seq, num_tokens, d_inner).bfloat16()
        assert names["verify_layer"](layer, qkv, slots).shape == qkv.shape
    names["accept"](layers, torch.tensor([2, 0], dtype=torch.int32), slots)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer.conv_state[4], layer.snapshots[0, 1])
        assert torch.equal(layer.conv_state[1], old[1])


def test_options(blocks):
    exec(blocks[1], {})
