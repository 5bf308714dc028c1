"""What the built libraries need and offer, only what stays the same between versions of torch, and
what they are protected by."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gdn_verify
from gdn_verify import _core

FOLDER = Path(gdn_verify.__file__).parent
PLAIN = ("libgdn_verify.so", "_torch_ops.so")

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")

# Symbols of the C and C++ runtimes carry the version of their interface.
RUNTIME = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$")
SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))\.so\.\d+$")
TOOLCHAIN = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}


def readelf(*arguments: str | Path) -> str:
    command = ["readelf", "--wide", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """Names of the undefined and of the defined dynamic symbols, with their versions."""
    undefined, defined = set(), set()
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            (undefined if fields[6] == "UND" else defined).add(fields[7].replace("@@", "@"))
    assert undefined
    return undefined, defined


def foreign(path: Path) -> set[str]:
    """Undefined symbols that are neither the runtimes' nor the C core's."""
    names = {name for name in symbols(path)[0] if not RUNTIME.search(name)}
    return {name for name in names - TOOLCHAIN if not name.startswith("gdn_verify_")}


def needed(path: Path) -> set[str]:
    found = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", path))
    return {name for name in found if not SYSTEM.match(name)}


def core_module() -> Path:
    (found,) = FOLDER.glob("_core.*.so")
    return found


def test_torch_operators_need_the_stable_abi_alone():
    include = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    headers = ("inductor/aoti_torch/c/shim.h", "stable/c/shim.h")
    declared = set(re.findall(r"\w+", "".join((include / each).read_text() for each in headers)))
    names = foreign(FOLDER / "_torch_ops.so")
    assert "aoti_torch_library_def" in names
    assert {name for name in names if not name.startswith(("aoti_torch_", "torch_"))} == set()
    assert names <= declared  # of the torch that runs; the build had that of its own


def test_torch_operators_need_two_libraries():
    assert needed(FOLDER / "_torch_ops.so") == {"libgdn_verify.so", "libtorch.so"}


def test_the_core_needs_the_c_library_alone():
    core = library("libgdn_verify.so")
    assert foreign(core) == set()
    assert needed(core) == set()
    if not _core.build_info()["has_cuda"]:  # nvcc's objects are C++
        assert not any("GLIBCXX" in name or "CXXABI" in name for name in symbols(core)[0])


def test_the_module_needs_python_and_the_core():
    names = foreign(core_module())
    assert {name for name in names if not re.match(r"_?Py", name)} == set()
    assert needed(core_module()) <= {"libgdn_verify.so"}


@pytest.mark.parametrize("name", PLAIN)
def test_only_the_c_interface_is_exported(name):
    defined = symbols(FOLDER / name)[1]
    own = {each for each in defined if each.startswith("gdn_verify_")}
    if name == "libgdn_verify.so":
        assert defined == own
        assert "gdn_verify_conv_cpu" in own
    else:
        assert own == set()


def library(name: str) -> Path:
    return core_module() if name == "_core" else FOLDER / name


each_library = pytest.mark.parametrize("name", [*PLAIN, "_core"])


@each_library
def test_libraries_are_found_beside_each_other(name):
    """And nobody's folder is searched but the package's own."""
    dynamic = readelf("--dynamic", library(name))
    paths = re.findall(r"\((RUNPATH|RPATH)\).*\[(.+)\]", dynamic)
    assert paths == [("RUNPATH", "$ORIGIN")] or (name == "libgdn_verify.so" and not paths)


# ---- protection --------------------------------------------------------------------------------


def test_there_are_three_libraries():
    assert {library(name) for name in (*PLAIN, "_core")} == set(FOLDER.glob("*.so"))


@each_library
def test_libraries_are_hardened(name):
    found = re.findall(
        r"^ +(LOAD|GNU_STACK|GNU_RELRO) .* ([R ][W ][E ]) +0x\w+$",
        readelf("--segments", library(name)), re.M,
    )  # fmt: skip
    flags = dict(found)
    assert flags["GNU_STACK"] == "RW ", "the stack is executable"
    assert "GNU_RELRO" in flags, "relocations stay writeable"
    dynamic = readelf("--dynamic", library(name))
    assert re.search(r"BIND_NOW|Flags:.* NOW", dynamic)
    assert "TEXTREL" not in dynamic
    assert "LOAD" in flags
    assert ("LOAD", "RWE") not in found, "writeable code"
    assert "__stack_chk_fail" in {each.partition("@")[0] for each in symbols(library(name))[0]}


def test_the_core_is_fortified():
    """Its formatted writes are the checked ones of the C library."""
    undefined, _ = symbols(FOLDER / "libgdn_verify.so")
    assert any(re.match(r"__v?snprintf_chk@", each) for each in undefined)
