"""Sphinx: `make docs`, then open docs/_build/index.html."""

import re

project = "g2po-trl"
author = "g2po-trl maintainers"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "g2po-trl"
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]  # mermaid: drawn by GitHub, shown as text here
# The pages beside raw values are not of the site: what links to them downloads them.
BESIDE_RAW_VALUES = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)")


def link_files(app, name, source):
    source[0] = BESIDE_RAW_VALUES.sub(r"{download}`\1 <\2>`", source[0])


def setup(app):
    app.connect("source-read", link_files)
