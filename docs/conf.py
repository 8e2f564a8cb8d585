"""Sphinx: `make docs`, then open docs/_build/index.html."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.writers.html5 import HTML5Translator

project = "g2po-trl"
author = "g2po-trl maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx_design", "sphinx_copybutton"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"  # docstrings have names in single backticks
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = html_short_title = "g2po-trl"
html_logo = html_favicon = "_static/logo.svg"
copybutton_prompt_text = "$ "
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "release", "contributing"]
suppress_warnings = ["misc.highlighting_failure"]  # mermaid: drawn by GitHub, shown as text here
# The pages beside raw values are not of the site: what links to them downloads them.
BESIDE_RAW_VALUES = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)")
# An entry of docs/configuration.md: name, type, rest of the parentheses, text.
FIELD = re.compile(r"^- `(\w+)` \((`[^`]+`), (.*?)\): (.*)$", re.MULTILINE)
NUMBERS = re.compile(r"[−+±]?\d[\d\s.,%±×−+–/\[\]]*(?: ?(?:MB|GB|s|ms|points))?")  # a cell that must not wrap
UNIT = re.compile(r"(?<=\d) (?=%|(?:[MG]?B|M|m?s)\b)")  # a line must not break here
# Docstrings are read in editors and have Markdown's names, links and blocks; autodoc reads reStructuredText.
MARKDOWN = (
    (re.compile(r"\[(`[\w.]+`)\]"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\((https?://[^)\s]+)\)"), r"`\1 <\2>`__"),
    (re.compile(r"\$([^$\n]+)\$"), r":math:`\1`"),
    (re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE), lambda found: block(found[1])),
    (re.compile(r"^Returns:\n(?=    `\w+`: )(?:    .*\n?)*", re.MULTILINE), lambda found: entries(found[0])),
)


def download(found):
    text = found[1].replace("`", "")  # code inside of a role is not read
    return f"{{download}}`{text} <{found[2]}>`"


def link_files(app, name, source):
    text = source[0].replace("](../benchmarks/results)", "](../benchmarks/results/README.md)")  # a folder, on GitHub
    source[0] = BESIDE_RAW_VALUES.sub(download, text)
    if name == "log":  # what did not work is on the site, but not what a search is for
        source[0] = source[0].replace("orphan: true", "orphan: true\nnosearch: true", 1)


def list_fields(app, name, source):
    """Make the fields of a configuration a definition list, each with an anchor: configuration.html#value-lambda."""
    seen = set()

    def definition(found):
        label = found[1] if found[1] not in seen else f"ppo-{found[1]}"
        seen.add(found[1])
        return f"({label})=\n`{found[1]}` ({found[2]}, defaults to {found[3]})\n: {found[4]}\n"

    if name == "configuration":
        source[0] = FIELD.sub(definition, source[0])


def block(code):
    return ".. code-block:: python\n\n" + re.sub(r"^(?=.)", "    ", code, flags=re.MULTILINE)


def entries(section):
    """Return a section of `name: text` entries as a list, which napoleon passes on as it is."""
    lines = [re.sub(r"^ {8}", "      ", line) for line in section.splitlines()]
    return "\n".join(re.sub(r"^ {4}`", "    - `", line) for line in lines) + "\n"


def to_restructured_text(app, what, name, obj, options, lines):
    text = "\n".join(lines)
    for pattern, replacement in MARKDOWN:
        text = pattern.sub(replacement, text)
    lines[:] = text.splitlines()


class Translator(HTML5Translator):
    """Writes formulas as MathML, drawn without a script, also offline; keeps numbers and units on one line."""

    def visit_entry(self, node):
        if NUMBERS.fullmatch(node.astext().strip()):
            node["classes"].append("nowrap")
        super().visit_entry(node)

    def encode(self, text):
        code = getattr(self, "protect_literal_text", True)  # False from the end of __init__ on
        return super().encode(text if code else UNIT.sub("\N{NO-BREAK SPACE}", text))

    def visit_Text(self, node):
        start = len(self.body)
        super().visit_Text(node)
        self.body[start:] = [piece.replace('"pre">-', '"pre nowrap">-') for piece in self.body[start:]]  # flags

    def visit_math(self, node):
        self.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def visit_math_block(self, node):
        self.body.append(convert(node.astext(), display="block"))
        raise nodes.SkipNode


def setup(app):
    app.set_translator("html", Translator)
    app.connect("source-read", link_files)
    app.connect("source-read", list_fields)
    app.connect("autodoc-process-docstring", to_restructured_text, priority=400)  # before napoleon
