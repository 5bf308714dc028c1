"""Sphinx configuration: Markdown pages (MyST), the API from docstrings, pictures of the benchmark.

`make docs` builds into build/docs with nitpicks and warnings as errors, so that a dead internal
link or a name that does not exist ends the build. Needs the built package, no network.
"""

import inspect
import re
from pathlib import Path

import torch
from docutils import nodes
from docutils.parsers.rst import Directive

import gdn_verify

HERE = Path(__file__).parent

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
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
default_role = "code"  # docstrings write `name`
smartquotes = False
# Names of other projects, whose documents are not fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|typing|collections|np)\..*"),
    ("py:.*", r"Any|Array(Like)?|Callable|DTensor|Float32|Iterable|Literal|Report|Tensor|ndarray"),
]


def literal_blocks(app, what, name, obj, options, lines):
    """Docstrings introduce indented examples by one colon; reStructuredText wants two."""
    for i, line in enumerate(lines[:-2]):
        margin = len(line) - len(line.lstrip())
        indented = lines[i + 2][margin:].startswith("    ")
        if line.endswith(":") and not lines[i + 1].strip() and indented:
            lines[i] = line + ":"


def signature_as_written(app, what, name, obj, options, signature, annotation):
    """Annotations by the names of the source, `Array` say, not by what they stand for."""
    if what != "function":
        return None
    text = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(obj)))
    arguments, _, returns = text.rpartition(" -> ")
    return arguments, returns


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
    app.connect("autodoc-process-signature", signature_as_written)
    app.add_directive("schema", Schema)
