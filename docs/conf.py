"""The documentation site: Sphinx, MyST pages, the Furo theme. `make site` builds it without a network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]

from pygments.lexers.special import TextLexer  # noqa: E402
from sphinx.highlighting import lexers  # noqa: E402

import ckptcore  # noqa: E402

lexers["mermaid"] = TextLexer()  # a forge draws these blocks; here `entity_pictures` does

project = "ckptcore"
author = "the ckptcore authors"
copyright = author
release = version = ckptcore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cli_reference", "entity_pictures"]
exclude_patterns = ["pictures/README.md"]
smartquotes = False  # `--` in prose is an option
nitpicky = False  # annotations name classes of torch and numpy, whose pages are elsewhere

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"ckptcore {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_search_scorer = str(HERE / "_static/scorer.js")
highlight_language = "text"  # a block without a language is no Python
html_show_sphinx = False
html_copy_source = False
# Nothing from another host: fonts are the system's, scripts and styles are stored beside the pages.
html_theme_options = {"navigation_with_keys": True}
