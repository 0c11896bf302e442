"""Sphinx configuration: `make docs`, or `python -m sphinx -W docs docs/_build/html`.

The API reference is made from the docstrings, so mpi4jax must be importable.
"""

import importlib.util
import sys
from pathlib import Path

import mpi4jax

sys.path.insert(0, str(Path(__file__).resolve().parent))
import operations
import run_examples

project = "mpi4jax"
author = "The mpi4jax authors"
copyright = author
release = version = mpi4jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more
autodoc_preserve_defaults = True  # `op=MPI.SUM`
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # autodoc describes the fields of named tuples, too
napoleon_custom_sections = ["Derivative"]

html_theme = "furo" if importlib.util.find_spec("furo") else "alabaster"
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_title = f"mpi4jax {release}"


def read(app, name, pages):
    pages.append(run_examples.with_commands(operations.filled(pages.pop())))


def setup(app):
    app.connect("source-read", read)
