"""How Sphinx builds the site: `make docs`.

Sphinx with MyST, not MkDocs: MkDocs 1 gets no more releases, Material for MkDocs only security fixes until May 2027, and its
successor Zensical is at version 0.1. pydata-sphinx-theme, as in NumPy and pandas, brings its own fonts, icons and search, so
the site loads nothing from other hosts.
"""

import os
from importlib.metadata import version as version_of

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

# Autodoc imports TensorFlow, which has much to say.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}

project = "growcache"
author = "The growcache authors"
version = release = version_of("growcache")

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# The pages are read on a code host too, so links between them are those of plain Markdown.
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run the notebooks; the site shows what they kept

autoclass_content = "both"  # the arguments stand in the docstring of __init__
autodoc_typehints = "none"  # signatures stay readable; docstrings say what an argument is
autodoc_member_order = "bysource"
default_role = "py:obj"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "growcache"
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}  # light or dark, as the system has it
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"evidence": [], "faq": []}  # pages without a chapter have no navigation
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["sphinx-version"],
    "footer_end": [],
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    app.add_lexer("csv", TextLexer)
