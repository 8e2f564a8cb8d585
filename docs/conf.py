"""Sphinx: `make docs`, then open docs/_build/index.html."""

project = "g2po-trl"
author = "g2po-trl maintainers"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "g2po-trl"
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]  # mermaid: drawn by GitHub, shown as text here
