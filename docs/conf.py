"""Sphinx: MyST pages, nothing generated from the code."""

project = "ppdiag"
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1040px", "sidebar_width": "240px"}
