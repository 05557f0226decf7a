"""How Sphinx builds these pages. Run `make docs`; warnings are errors."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "ckptrt"
copyright = "the ckptrt authors"  # the name that Sphinx asks for
version = release = metadata.version("ckptrt")

extensions = ["myst_parser", "sphinx.ext.autodoc", "plain_docstrings"]
exclude_patterns = ["_build", "generate.py"]

html_theme = "furo"
html_title = f"ckptrt {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"
