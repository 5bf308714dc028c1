"""Sphinx configuration: Markdown pages (MyST), the API from docstrings, pictures of the benchmark.

`make docs` builds into build/docs with nitpicks and warnings as errors, so that a dead internal
link or a name that does not exist ends the build. Needs the built package, no network.
"""

import re
import sys
from pathlib import Path

import torch
from docutils import nodes
from docutils.parsers.rst import Directive

import gdn_verify

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "gdn-verify"
author = "The gdn-verify developers"
copyright = author
release = version = gdn_verify.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gdn-verify {version}"
html_copy_source = False
html_show_sourcelink = False

# ---- Markdown ----

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "substitution"]


def pictures() -> str:
    """The pictures that benchmarks/plot.py has left, as Markdown."""
    folder = HERE.parent / "benchmarks" / "results"
    found = sorted(p for p in folder.glob("*") if p.suffix in (".svg", ".png"))
    links = [f"![{p.stem.replace('_', ' ').replace('-', ' ')}]({p})" for p in found]
    links = [link.replace(str(HERE.parent), "..") for link in links]
    return "\n\n".join(links) or "*This checkout holds no pictures.*"


myst_substitutions = {"pictures": pictures()}

# ---- the API ----

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature in the docstring's own words; types stand in the text
autodoc_preserve_defaults = True
default_role = "code"  # docstrings write `name`
nitpick_ignore_regex = [(r"py:.*", r"(torch|numpy|typing|collections)\..*")]


def literal_blocks(app, what, name, obj, options, lines):
    """Docstrings introduce indented examples by one colon; reStructuredText wants two."""
    for i, line in enumerate(lines[:-2]):
        margin = len(line) - len(line.lstrip())
        indented = lines[i + 2][margin:].startswith("    ")
        if line.endswith(":") and not lines[i + 1].strip() and indented:
            lines[i] = line + ":"


class Schema(Directive):
    """```{schema} name```: the schema of torch.ops.gdn.<name>, one argument a line."""

    required_arguments = 1

    def run(self):
        schema = str(getattr(torch.ops.gdn, self.arguments[0]).default._schema)
        text = re.sub(r"\((.*)\) -> \(\)", lambda m: "(\n    " + m[1] + ") -> ()", schema)
        text = re.sub(r", (?![^\[]*\])", ",\n    ", text)
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    app.connect("autodoc-process-docstring", literal_blocks)
    app.add_directive("schema", Schema)
