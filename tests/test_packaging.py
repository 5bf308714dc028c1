"""What setup.py decides, and what the package holds."""

import importlib.util
import os
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="needs the source tree that was built"
)


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    """setup.py as a module; importing it builds nothing."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("gdn_verify_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def torch_for(setup_py: ModuleType, cuda: str | None):
    return setup_py.Torch("2.11.0", cuda, Path("/nowhere/torch"))


def some_nvcc(setup_py: ModuleType):
    archs = frozenset({"7.5", "8.0", "8.6", "9.0", "10.0", "12.0"})
    return setup_py.Nvcc("/usr/local/cuda/bin/nvcc", "13.0", archs)


@pytest.mark.parametrize(
    ("cuda", "nvcc", "force", "with_cuda", "reason"),
    [
        ("13.0", True, None, True, "nvcc 13.0 at /usr/local/cuda/bin/nvcc"),
        ("13.0", False, None, False, "no nvcc is"),
        (None, True, None, False, "not a CUDA build"),
        (None, False, None, False, "not a CUDA build"),
        (None, True, "1", True, "FORCE_CUDA=1"),
        ("13.0", True, "0", False, "FORCE_CUDA=0"),
        ("13.0", False, "0", False, "FORCE_CUDA=0"),
        ("13.0", True, "", True, "nvcc 13.0"),
    ],
)
def test_decision(setup_py, cuda, nvcc, force, with_cuda, reason):
    found = some_nvcc(setup_py) if nvcc else None
    decided, why = setup_py.decide_cuda(torch_for(setup_py, cuda), found, force)
    assert decided is with_cuda
    assert reason in why


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_forced_without_nvcc_is_one_sentence(setup_py, cuda):
    with pytest.raises(SystemExit, match=r"^gdn-verify: FORCE_CUDA=1, but no nvcc is .*\.$"):
        setup_py.decide_cuda(torch_for(setup_py, cuda), None, "1")


def test_no_nvcc_where_cuda_home_has_none(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup_py.find_nvcc() is None
    assert str(tmp_path) in setup_py.searched()


def test_no_torch_names_the_command(setup_py, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_py, "find_spec", lambda name: None)
    (tmp_path / "python").write_text("#!/bin/sh\n")  # a Python that finds nothing
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit, match=r"pip install --no-build-isolation \.$"):
        setup_py.find_torch()


def test_torch_is_found_behind_build_isolation(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "find_spec", lambda name: None)  # as in an isolated build
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    found = setup_py.find_torch()
    assert (found.version, found.cuda) == (str(torch.__version__), torch.version.cuda)
    assert found.folder == Path(torch.__file__).parent
    assert re.fullmatch(r"c\+\+\d\d", setup_py.cxx_standard(found))


@pytest.mark.parametrize(
    ("requested", "archs"),
    [
        (None, ["8.0", "9.0", "10.0", "12.0+PTX"]),
        (" ", ["8.0", "9.0", "10.0", "12.0+PTX"]),
        ("9.0", ["9.0"]),
        ("8.0;9.0a+PTX", ["8.0", "9.0a+PTX"]),
        ("8.6 9.0, 10.0;", ["8.6", "9.0", "10.0"]),
    ],
)
def test_architectures(setup_py, requested, archs):
    assert setup_py.choose_archs(requested, some_nvcc(setup_py).archs) == archs


def test_architectures_of_an_older_nvcc(setup_py):
    assert setup_py.choose_archs(None, frozenset({"8.0", "8.6", "9.0"})) == ["8.0", "9.0+PTX"]


@pytest.mark.parametrize("requested", ["native", "Hopper", "90", "6.0", "9.0 13.0"])
def test_wrong_architectures(setup_py, requested):
    with pytest.raises(SystemExit, match=r"^gdn-verify: TORCH_CUDA_ARCH_LIST has "):
        setup_py.choose_archs(requested, some_nvcc(setup_py).archs)


def test_gencode(setup_py):
    assert setup_py.gencode("9.0a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    ptx = "-gencode=arch=compute_120,code=compute_120"
    assert setup_py.gencode("12.0+PTX") == ["-gencode=arch=compute_120,code=sm_120", ptx]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_wrong_max_jobs(setup_py, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(SystemExit, match=r"^gdn-verify: MAX_JOBS is "):
        setup_py.max_jobs()


def test_one_version(setup_py):
    import gdn_verify
    from gdn_verify import _core

    version = setup_py.version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert gdn_verify.__version__ == metadata.version("gdn-verify") == version
    assert _core.build_info()["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_header_lies_beside_the_library():
    """In an editable build too."""
    from gdn_verify import _core

    folder = Path(_core.__file__).parent
    assert (folder / "libgdn_verify.so").exists()
    header = (folder / "include" / "gdn_verify.h").read_bytes()
    assert header == (ROOT / "csrc" / "gdn_verify.h").read_bytes()


@pytest.mark.skipif("GDN_VERIFY_DIST" not in os.environ, reason="needs a wheel: make package")
def test_wheel_holds_the_package_alone():
    (wheel,) = Path(os.environ["GDN_VERIFY_DIST"]).glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    sources = [*(ROOT / "gdn_verify").rglob("*.py"), *(ROOT / "gdn_verify").rglob("*.pyi")]
    python = {str(path.relative_to(ROOT)) for path in sources}
    binaries = {name for name in package if name.endswith(".so")}
    kinds = sorted(re.sub(r"\.cpython.*|\.abi3.*|\.so", "", name) for name in binaries)
    assert kinds == ["gdn_verify/_core", "gdn_verify/_torch_ops", "gdn_verify/libgdn_verify"]
    header = "gdn_verify/include/gdn_verify.h"
    tables = {name for name in package if name.endswith(".json")}
    assert package == {*python, "gdn_verify/py.typed", header, *binaries, *tables}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
