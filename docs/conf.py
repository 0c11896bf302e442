"""Sphinx configuration: `make docs`, or `python -m sphinx -W docs docs/_build/html`.

The API reference is made from the docstrings, so mpi4jax must be importable.
"""

import importlib.util
import re

from docutils import nodes
from sphinx.util.nodes import make_refnode

import mpi4jax

project = "mpi4jax"
author = "The mpi4jax authors"
copyright = author
release = version = mpi4jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
if importlib.util.find_spec("sphinx_copybutton"):
    extensions.append("sphinx_copybutton")
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
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
html_logo = html_favicon = "static/logo.svg"
html_theme_options = (
    {
        "source_repository": "https://github.com/mpi4jax/mpi4jax",
        "source_branch": "main",
        "source_directory": "docs/",
    }
    if html_theme == "furo"
    else {}
)
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_title = f"mpi4jax {release}"

# ---- Links from the API reference. The build needs no network: other packages' names follow rules.

nitpicky = True
nitpick_ignore = [("py:mod", "mpi4jax")]

JAX = "https://docs.jax.dev/en/latest"
ELSEWHERE = [
    (r"pytree", f"{JAX}/pytrees.html"),
    (r"jax\.jaxlib\._jax\.Array", f"{JAX}/_autosummary/jax.Array.html"),
    (r"jax\.errors\.\w+", f"{JAX}/errors.html"),
    (r"jax\.scipy\.sparse\.linalg", f"{JAX}/jax.scipy.html"),
    (r"(jax\..+)", f"{JAX}/_autosummary/\\1.html"),
    (r"numpy\.fft", "https://numpy.org/doc/stable/reference/routines.fft.html"),
    (r"(numpy\..+)", "https://numpy.org/doc/stable/reference/generated/\\1.html"),
    (r"(mpi4py\.MPI\.\w+)", "https://mpi4py.readthedocs.io/en/stable/reference/\\1.html"),
]


def reference(app, env, node, content):
    """What a name refers to that the reference does not have under it.

    That is a public name of this package, without its module, or one of another package.
    """
    if node.get("refdomain") != "py":
        return None
    name, known = node["reftarget"], env.get_domain("py").objects
    last = name.rpartition(".")[2]
    if "." not in name or name.startswith("mpi4jax."):
        for public in (f"mpi4jax.notoken.{last}", f"mpi4jax.{last}"):
            if public in known:
                place = known[public]
                where = node["refdoc"], place.docname, place.node_id
                return make_refnode(app.builder, *where, content, public)
    for pattern, address in ELSEWHERE:
        if found := re.fullmatch(pattern, name):
            return nodes.reference("", "", content, internal=False, refuri=found.expand(address))
    return None


def setup(app):
    app.connect("missing-reference", reference)
