"""Sphinx: notebooks run while the site is built, and its pages fetch nothing from elsewhere."""

import re
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.errors import SphinxError

project = "vlm-circuits"
author = "vlm-circuits contributors"
copyright = f"2026, {author}"
version = release = installed(project)

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings write `name`

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["circuitsvis.css"]
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
html_sidebars = {page: [] for page in ("quickstart", "glossary", "decisions/*")}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"  # a cache knows the page, not the package that it runs
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_ipywidgets_js = {}  # the default loads scripts from content delivery networks
nb_mime_priority_overrides = [("html", "text/html", 1)]  # static HTML beats a live widget

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 70
napoleon_google_docstring = True
napoleon_numpy_docstring = False

OUTSIDE = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="(?:canonical|search|next|prev)"))\b
        [^>]*\b(?:src|href)=["'](?:https?:)?//[^"']+
        | (?:@import\s+|url\()["']?(?:https?:)?//[^"')]+""",
    re.VERBOSE,
)


def refuse_outside_requests(app, failure):
    """Fails the build when a page or a style sheet loads something from another host."""
    if failure or app.builder.name != "html":
        return
    built = Path(app.outdir)
    for page in [*built.rglob("*.html"), *built.rglob("*.css")]:
        for request in OUTSIDE.findall(page.read_text(encoding="utf-8")):
            raise SphinxError(f"{page.relative_to(built)} loads from another host: {request}")


def setup(app):
    app.connect("build-finished", refuse_outside_requests)
