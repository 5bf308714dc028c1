"""The code blocks of README.md and docs/*.md run as they stand.

The python blocks of a page run in order and share their names; sh blocks run in a folder that holds
copies of csrc and examples, with `python` as the interpreter of the tests; rust blocks are whole
programs, compiled where rustc is found. A comment above a block says where it does not run:
`<!-- test: gpu -->` needs a CUDA device, `<!-- test: no (reason) -->` is shown only.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import gdn_verify

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = {"text", "json", "toml", "yaml", "c", "cpp", "make", "diff"}  # languages that do not run
BLOCK = re.compile(r"^(?:<!-- test: ([^\n]*) -->\n)?```(\S+)[^\n]*\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    language: str
    code: str
    mark: str  # "", "gpu" or "no (reason)"
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m[2], m[3], m[1] or "", text.count("\n", 0, m.start(3)) + 1)
        for m in BLOCK.finditer(text)
    ]


def pages_with(*languages: str, mark: str | None = None) -> list:
    """Those that have a block in one of the languages (and with the mark) that runs."""
    found = [
        page
        for page in PAGES
        for b in blocks_of(page)
        if b.language in languages and not b.mark.startswith("no") and mark in (None, b.mark)
    ]
    return [pytest.param(page, id=page.stem) for page in dict.fromkeys(found)]


# ---- running -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with copies of the sources, `python` on PATH, and caches of its own."""
    for name in ("csrc", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("build"))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"  # a link would lose its virtual environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    # the package of the tests, wherever it lies, but not this file's folder
    monkeypatch.setenv("PYTHONPATH", str(Path(gdn_verify.__file__).parents[1]))
    monkeypatch.setenv("GDN_VERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(page: Path, marks: tuple[str, ...]) -> dict:
    """The page's blocks in order, as one program; returns its names."""
    names: dict = {"__name__": "__main__"}
    for b in blocks_of(page):
        if b.language == "python" and b.mark in marks:
            exec(compile("\n" * (b.line - 1) + b.code, str(page), "exec"), names)
    return names


def run_shell(page: Path, mark: str) -> None:
    script = "".join(b.code for b in blocks_of(page) if b.language == "sh" and b.mark == mark)
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_marked(page):
    text = page.read_text(encoding="utf-8")
    found = blocks_of(page)
    around = BLOCK.sub("", text)
    assert not re.search(r"^```", around, re.M), "a block without a language or an end"
    assert "<!-- test:" not in around.replace("`<!-- test:", ""), "a comment without a block"
    for b in found:
        assert re.fullmatch(r"|gpu|no \(.+\)", b.mark), f"{page.name}:{b.line}: {b.mark}"
        runs = b.language in ("python", "sh", "rust")
        assert runs or b.language in SHOWN or b.language.startswith("{"), f"{page}:{b.line}"
        assert runs or not b.mark, f"{page.name}:{b.line}: {b.language} does not run anyway"


@pytest.mark.parametrize("page", pages_with("python"))
def test_python(page, folder):
    run_python(page, ("",))


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_with_a_gpu(page, folder):
    run_python(page, ("", "gpu"))


@pytest.mark.parametrize("page", pages_with("sh", mark=""))
def test_shell(page, folder):
    run_shell(page, "")


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages_with("sh", mark="gpu"))
def test_shell_with_a_gpu(page, folder, monkeypatch):
    # the example in C builds CUDA for this device alone
    monkeypatch.setenv("ARCHS", "{}.{}".format(*torch.cuda.get_device_capability()))
    run_shell(page, "gpu")


@pytest.mark.skipif(not shutil.which("rustc"), reason="needs rustc")
def test_rust(folder):
    (program,) = (b.code for b in blocks_of(ROOT / "docs" / "c.md") if b.language == "rust")
    (folder / "example.rs").write_text(program)
    library = Path(gdn_verify.__file__).parent
    command = ["rustc", "-D", "warnings", "-L", library, "-C", f"link-arg=-Wl,-rpath,{library}"]
    subprocess.run([*command, "example.rs"], check=True)
    assert "first head of q" in subprocess.check_output(["./example"], text=True)


# ---- what the examples show ----------------------------------------------------------------------


def test_serving_loop():
    names: dict = {}
    (loop,) = (b.code for b in blocks_of(ROOT / "README.md") if "def verify_layer" in b.code)
    exec(loop, names)
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


@pytest.mark.parametrize("command", ["from gdn_verify import verify_conv", "import gdn_verify.ops"])
def test_a_checkout_that_is_not_built(tmp_path, command):
    """Says so in the words that the troubleshooting page looks up."""
    (tmp_path / "gdn_verify").mkdir()
    for path in Path(gdn_verify.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path / "gdn_verify")
    env = {**os.environ, "PYTHONPATH": ""}
    python = [sys.executable, "-c", command]
    done = subprocess.run(
        python, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (before, after) = re.findall(r"\*\*`(gdn_verify in) \.\. (is not built [^`]*)`", page)[0]
    assert f"{before} {tmp_path / 'gdn_verify'} {after}" in done.stderr


def test_every_option_has_an_example():
    schema = torch.ops.gdn.verify_fused_conv_kn_batched.default._schema
    options = [argument.name for argument in schema.arguments if argument.kwarg_only]
    code = "".join(b.code for b in blocks_of(ROOT / "docs" / "options.md"))
    assert options
    for name in (*options, "snapshots"):
        assert re.search(rf"\b{name}=", code), name
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    for name in options:
        assert re.search(rf"`{name}[`=]", contract), name


def test_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "windows_picture.py"))["draw"]()
    assert (ROOT / "docs" / "windows.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files(page):
    """Those that Sphinx does not see: of pages that are read outside the documents too."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
