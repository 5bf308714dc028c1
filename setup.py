"""Builds the three shared objects of the package, beside its Python files.

    libgdn_verify.so   the C core (csrc/*.c, C11) with the CUDA backend (csrc/*.cu, nvcc) or without
                       it (csrc/no_cuda.c); knows neither torch nor Python
    _core.<abi>.so     pybind_core.cpp: NumPy view of the core; no torch at run time
    _torch_ops.so      torch_ops.cpp: the operators, on the stable ABI of torch alone

The compilers are called directly: setuptools knows no nvcc, and torch's builder compiles C as C++
and cannot be imported in an isolated build. What is needed of torch is found without importing it:
its headers (they include pybind11's), its version and the CUDA version that it was built for.

Environment: FORCE_CUDA, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, CC, CXX, CFLAGS, CXXFLAGS.
Whatever is missing ends the build with one sentence that says what to do, never with a traceback.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
OBJECTS = ROOT / "build" / "objects"  # kept between builds: only what changed is compiled again
MIN_TORCH = (2, 10)  # the stable ABI that torch_ops.cpp is written for
DEFAULT_ARCHS = ("8.0", "9.0", "10.0", "12.0")
INSTALL = "pip install --no-build-isolation ."

HARDEN = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
# No contraction: the bits of the result are defined operation by operation (csrc/numerics.h).
# The two -fno flags let loops vectorise and change no value (csrc/cpu_levels.c).
C_FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
C_FLAGS += ["-fPIC", *HARDEN]
C_FLAGS += ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wc++-compat"]
CXX_FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *HARDEN]
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-cudart=static"]
NVCC_FLAGS += ["-Xcompiler=" + ",".join(["-fPIC", "-ffp-contract=off", *HARDEN])]
HARDEN_LINK = "-z,relro,-z,now,-z,noexecstack"
LINK_FLAGS = [f"-Wl,{HARDEN_LINK}", "-Wl,-rpath,$ORIGIN"]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")  # in one piece, as threads speak too
    sys.stdout.flush()


def stop(sentence: str) -> NoReturn:
    raise SystemExit(f"gdn-verify: {sentence}")


def version() -> str:
    """The version has one source, the public header."""
    text = (CSRC / "gdn_verify.h").read_text()
    return re.findall(r'^#define GDN_VERIFY_VERSION "(.+)"$', text, re.M)[0]


# ---- what there is to build with -------------------------------------------------------------


class Torch(NamedTuple):
    version: str
    cuda: str | None  # CUDA version that it was built for
    folder: Path


class Nvcc(NamedTuple):
    path: str
    version: str
    archs: frozenset[str]  # "8.0", ..


def find_torch() -> Torch:
    """The torch of the environment that the package is installed into.

    An isolated build hides it by PYTHONPATH, so a second Python without that variable is asked too.
    """
    spec = find_spec("torch")
    init = spec.origin if spec else None
    if not init:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
        ask = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
        done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True)
        init = done.stdout.strip()
    wanted = ".".join(map(str, MIN_TORCH))
    if not init:
        stop(
            f"the build needs torch and found none in {sys.prefix}; "
            f'run: pip install "torch>={wanted}" "setuptools>=77" && {INSTALL}'
        )
    folder = Path(init).parent
    facts = runpy.run_path(str(folder / "version.py"))
    found = facts["__version__"]
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < MIN_TORCH:
        stop(f'torch {found} is too old; run: pip install "torch>={wanted}" && {INSTALL}')
    return Torch(found, facts.get("cuda"), folder)


def find_nvcc() -> Nvcc | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    named = [os.path.join(home, "bin", "nvcc")] if home else []  # a toolkit that is named stands
    for path in named or [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]:
        if not os.access(path, os.X_OK):
            continue
        try:
            about = subprocess.check_output([path, "--version"], text=True)
            listed = subprocess.check_output([path, "--list-gpu-arch"], text=True)
        except (OSError, subprocess.CalledProcessError):  # not an nvcc that runs here
            continue
        release = re.search(r"release (\d+\.\d+)", about)
        archs = frozenset(f"{n[:-1]}.{n[-1]}" for n in re.findall(r"compute_(\d+)", listed))
        if release and archs:
            return Nvcc(path, release[1], archs)
    return None


def searched() -> str:
    """Where find_nvcc looked."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"in {home}/bin (CUDA_HOME)" if home else "on PATH or in /usr/local/cuda"


def find_compiler(variable: str, names: tuple[str, ...]) -> list[str]:
    """As a command line, since CC and CXX may hold one ("ccache gcc")."""
    command = shlex.split(os.environ.get(variable, "")) or [n for n in names if shutil.which(n)][:1]
    if not command or not shutil.which(command[0]):
        tried = command[0] if command else ", ".join(names)
        stop(f"no compiler found ({variable}: {tried}); install gcc and g++ or set {variable}.")
    return command


# ---- what is built ---------------------------------------------------------------------------


def decide_cuda(torch: Torch, nvcc: Nvcc | None, force: str | None) -> tuple[bool, str]:
    """Whether to build the CUDA backend, and why. Never asks for a visible GPU: images are built
    where there is none."""
    if force not in (None, "", "0", "1"):
        stop(f"FORCE_CUDA is {force!r} and must be 0 or 1.")
    if force == "0":
        return False, "FORCE_CUDA=0"
    if force == "1":
        if nvcc is None:
            stop(f"FORCE_CUDA=1, but no nvcc is {searched()}; set CUDA_HOME to a CUDA toolkit.")
        return True, f"FORCE_CUDA=1, nvcc {nvcc.version} at {nvcc.path}, torch {torch.version}"
    if torch.cuda is None:
        return False, f"torch {torch.version} is not a CUDA build; FORCE_CUDA=1 overrides"
    if nvcc is None:
        where = f"no nvcc is {searched()}"
        return False, f"torch {torch.version} is for CUDA {torch.cuda}, but {where}"
    found = f"nvcc {nvcc.version} at {nvcc.path}"
    return True, f"{found}, torch {torch.version} is for CUDA {torch.cuda}"


def choose_archs(requested: str | None, known: frozenset[str]) -> list[str]:
    """Architectures as in TORCH_CUDA_ARCH_LIST: "8.0", "9.0a", "12.0+PTX". Without a request those
    of the default that nvcc knows, with the PTX of the last for GPUs to come."""
    archs = re.split(r"[;,\s]+", requested.strip("; ,")) if requested and requested.strip() else []
    for arch in archs:
        number = re.fullmatch(r"(\d+\.\d)[af]?(\+PTX)?", arch)
        if not number:
            example = "such as '8.0 9.0+PTX'"
            stop(f"TORCH_CUDA_ARCH_LIST has {arch!r}; write compute capabilities, {example}.")
        if number[1] not in known:
            stop(f"TORCH_CUDA_ARCH_LIST has {arch}, which this nvcc does not know.")
    if archs:
        return archs
    archs = [arch for arch in DEFAULT_ARCHS if arch in known]
    if not archs:
        stop("this nvcc knows none of the default architectures; set TORCH_CUDA_ARCH_LIST.")
    return [*archs[:-1], archs[-1] + "+PTX"]


def gencode(arch: str) -> list[str]:
    number = arch.removesuffix("+PTX").replace(".", "")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    if arch.endswith("+PTX"):
        flags += [f"-gencode=arch=compute_{number},code=compute_{number}"]
    return flags


def max_jobs() -> int:
    value = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not value.isdigit() or int(value) < 1:
        stop(f"MAX_JOBS is {value!r} and must be a whole number, 1 or more.")
    return int(value)


def cxx_standard(torch: Torch) -> str:
    """The C++ standard of torch's headers: what torch's own builder passes, which has no name in
    its interface and cannot be imported where setuptools is missing."""
    text = (torch.folder / "utils" / "cpp_extension.py").read_text()
    return max(re.findall(r"['\"]-std=(c\+\+\d\d)['\"]", text), default="c++20")


# ---- building --------------------------------------------------------------------------------


class Builder:
    """Compiles and links into a folder. Knows nothing of setuptools."""

    def __init__(self, folder: Path, force: bool = False):
        self.folder = folder  # of the package, where the shared objects go
        self.force = force
        self.jobs = max_jobs()
        self.torch = find_torch()
        nvcc = find_nvcc()
        use_cuda, why = decide_cuda(self.torch, nvcc, os.environ.get("FORCE_CUDA"))
        self.nvcc = nvcc if use_cuda else None
        self.archs: list[str] = []
        if self.nvcc:
            self.archs = choose_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"), self.nvcc.archs)
            why += f"; architectures {' '.join(self.archs)}"
        self.decision = f"{'CPU and CUDA' if use_cuda else 'CPU only'}: {why}"
        say(f"gdn-verify: building for {self.decision}")
        self.cc = find_compiler("CC", ("cc", "gcc", "clang"))
        self.cxx = find_compiler("CXX", ("c++", "g++", "clang++"))
        self.headers = sorted(p for p in CSRC.iterdir() if p.suffix in (".h", ".cuh"))

    def call(self, command: list[str], what: str) -> None:
        to_pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=ROOT, text=True, errors="replace", **to_pipe)
        say(f"{shlex.join(command)}\n{done.stdout}".rstrip())
        if done.returncode:
            stop(f"{what} failed; the compiler's message is above.")

    def compile(self, source: Path, command: list[str]) -> str:
        """Runs `command` with source and object unless the object is up to date; returns it."""
        target = OBJECTS / (source.name + ".o")
        note = target.with_suffix(".cmd")  # the command that made the object
        command = [*command, "-c", str(source), "-o", str(target)]
        newest = max(path.stat().st_mtime for path in (source, *self.headers))
        same = target.exists() and note.exists() and note.read_text() == shlex.join(command)
        if self.force or not same or target.stat().st_mtime < newest:
            note.unlink(missing_ok=True)
            self.call(command, f"compiling {source.name}")
            note.write_text(shlex.join(command))
        return str(target)

    def compile_all(self) -> dict[str, str]:
        """Every source file's object, by name."""
        c_sources = sorted(CSRC.glob("*.c"))
        cu_sources = []
        if self.nvcc:
            c_sources.remove(CSRC / "no_cuda.c")
            cu_sources = sorted(CSRC.glob("*.cu"))
        c_flags = C_FLAGS + shlex.split(os.environ.get("CFLAGS", ""))
        cxx_flags = CXX_FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))
        torch_include = self.torch.folder / "include"
        python_include = sysconfig.get_path("include")
        if not os.path.exists(os.path.join(python_include, "Python.h")):
            stop(f"Python.h is not in {python_include}; install Python's headers (python3-dev).")

        tasks = []
        if self.nvcc:
            threads = max(1, self.jobs // max(1, len(cu_sources)))
            nvcc = [self.nvcc.path, *NVCC_FLAGS, f"--threads={threads}"]
            nvcc += [flag for arch in self.archs for flag in gencode(arch)]
            nvcc += [f'-DGDN_VERIFY_CUDA_ARCHS="{" ".join(self.archs)}"']
            tasks += [(source, nvcc) for source in cu_sources]  # first: they take longest
        python = ["-std=c++17", "-isystem", str(torch_include), "-isystem", python_include]
        python += [f"-DGDN_VERIFY_DECISION={json.dumps(self.decision)}"]  # a C string
        tasks += [(CSRC / "pybind_core.cpp", [*self.cxx, *cxx_flags, *python])]
        stable = [f"-std={cxx_standard(self.torch)}", "-isystem", str(torch_include)]
        stable += ["-isystem", str(torch_include / "torch" / "csrc" / "api" / "include")]
        tasks += [(CSRC / "torch_ops.cpp", [*self.cxx, *cxx_flags, *stable])]
        tasks += [(source, [*self.cc, *c_flags]) for source in c_sources]
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda task: self.compile(*task), tasks))
        return {source.name: made for (source, _), made in zip(tasks, objects, strict=True)}

    def build(self, core_module: str) -> None:
        """Makes the three shared objects; `core_module` is the file name of _core."""
        objects = self.compile_all()
        self.folder.mkdir(parents=True, exist_ok=True)
        core = self.folder / "libgdn_verify.so"
        parts = [made for name, made in objects.items() if not name.endswith(".cpp")]
        if self.nvcc:  # nvcc knows where its runtime lies
            linker = [self.nvcc.path, "-shared", "-cudart=static", f"-Xlinker={HARDEN_LINK}"]
            linker += ["-Xlinker=-soname,libgdn_verify.so,--exclude-libs,ALL"]
        else:
            linker = [*self.cc, "-shared", *LINK_FLAGS, "-Wl,-soname,libgdn_verify.so"]
        self.call(
            [*linker, *parts, "-lm", "-lpthread", "-o", str(core)], "linking libgdn_verify.so"
        )

        link = [*self.cxx, "-shared", *LINK_FLAGS]
        use_core = [f"-L{self.folder}", "-lgdn_verify"]
        # Of torch the umbrella library alone: its dependencies bring the stable ABI's functions
        # into scope, those of libtorch_cuda too where there is one; no other name is depended on.
        use_torch = [f"-L{self.torch.folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch"]
        module = str(self.folder / core_module)
        self.call([*link, objects["pybind_core.cpp"], *use_core, "-o", module], "linking _core")
        module = str(self.folder / "_torch_ops.so")
        command = [*link, objects["torch_ops.cpp"], *use_core, *use_torch, "-o", module]
        self.call(command, "linking _torch_ops.so")


PLAIN_NAMES = ("libgdn_verify", "_torch_ops")  # shared objects that are no Python modules


class BuildExt(build_ext):
    def build_extensions(self) -> None:
        if sys.platform != "linux":
            stop(f"builds on Linux only, and this is {sys.platform}.")
        folder = Path(self.build_lib).resolve() / "gdn_verify"
        core_module = os.path.basename(self.get_ext_filename("gdn_verify._core"))
        Builder(folder, bool(self.force)).build(core_module)
        (folder / "include").mkdir(exist_ok=True)  # for C programs that link libgdn_verify.so
        shutil.copy(CSRC / "gdn_verify.h", folder / "include")

    def copy_extensions_to_source(self) -> None:  # of an editable build
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "gdn_verify" / "include"
        shutil.copytree(built, ROOT / "gdn_verify" / "include", dirs_exist_ok=True)

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in PLAIN_NAMES:
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)


class Build(build):
    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # a wheel holds all that lies there
        super().run()


if __name__ == "__main__":
    if int(setuptools.__version__.partition(".")[0]) < 77:
        advice = f'run: pip install "setuptools>=77" && {INSTALL}'
        stop(f"setuptools {setuptools.__version__} is too old; {advice}")
    names = ("libgdn_verify", "_core", "_torch_ops")
    setuptools.setup(
        version=version(),
        ext_modules=[setuptools.Extension(f"gdn_verify.{name}", []) for name in names],
        cmdclass={"build": Build, "build_ext": BuildExt},
    )
