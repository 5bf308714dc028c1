"""The device's arithmetic over all 2^32 float32, by kernels that include the backend's own headers.

Needs nvcc beside the device. The quick forms of the fast kernel leave out what its 16-bit output
would hide, so that the operator's results cannot show them; here every bit is compared.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gdn_verify import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]

ROOT = Path(__file__).parents[1]
CHUNK = 1 << 26


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    import torch

    major, minor = torch.cuda.get_device_capability()
    target = tmp_path_factory.mktemp("arithmetic") / "arithmetic.so"
    command = ["nvcc", "-O3", "--fmad=false", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
    command += [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"]
    command += ["-I", str(ROOT / "csrc"), str(ROOT / "tests" / "cuda" / "arithmetic.cu")]
    subprocess.run([*command, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def test_silu_of_every_float32(library):
    import torch

    mismatches = torch.zeros(3, dtype=torch.int64, device="cuda")
    for begin in range(0, 2**32, 2**30):
        status = library.launch_compare_silu(
            ctypes.c_uint(begin), ctypes.c_uint(2**30), ctypes.c_void_p(mismatches.data_ptr())
        )
        assert status == 0
    assert mismatches.tolist() == [0, 0, 0]


@pytest.mark.slow
def test_exp_of_every_float32_equals_the_cpu(library):
    import torch

    out = torch.empty(CHUNK, dtype=torch.float32, device="cuda")
    for begin in range(0, 2**32, CHUNK):
        status = library.launch_exp(
            ctypes.c_uint(begin), ctypes.c_uint(CHUNK), ctypes.c_void_p(out.data_ptr())
        )
        assert status == 0
        x = np.arange(begin, begin + CHUNK, dtype=np.uint32).view(np.float32)
        expected, actual = _core.exp(x), out.cpu().numpy()
        equal = (expected.view(np.uint32) == actual.view(np.uint32)) | (x != x)
        assert equal.all(), f"from 0x{begin:08x}"
        assert np.isnan(actual[np.isnan(x)]).all()
