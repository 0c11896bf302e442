"""Sphinx configuration: `make docs`, or `python -m sphinx -W docs docs/_build/html`.

The pages are plain Markdown without directives, because most readers see them on the repository's
web view. What Sphinx needs in addition is added here when a page is read: the table of contents,
from the links of index.md, and addresses of files outside of docs/.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_support"))

import api_pages
import docutils.nodes
import searches
import sphinx.addnodes
from address import REPOSITORY

import mpi4jax
from mpi4jax import notoken

project = "mpi4jax"
author = "The mpi4jax authors"
copyright = author
release = version = importlib.metadata.version("mpi4jax")

extensions = ["myst_parser"]
if importlib.util.find_spec("sphinx_copybutton"):
    extensions.append("sphinx_copybutton")
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build", "README.md"]
myst_heading_anchors = 4

html_theme = "furo" if importlib.util.find_spec("furo") else "alabaster"
html_logo = html_favicon = "static/logo.svg"
html_theme_options = (
    {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
    if html_theme == "furo" and REPOSITORY
    else {}
)
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_title = f"mpi4jax {release}"


def contents(text: str) -> str:
    """Return a hidden toctree for each section of index.md that links to pages."""
    made = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        pages = dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", body))
        if pages:
            made.append("```{toctree}\n:hidden:\n" + f":caption: {title}\n\n" + "\n".join(pages))
            made[-1] += "\n```"
    return "\n\n".join([text, *made])


def read(app, docname, source):
    text = source[0]
    # Files outside of docs/ are not part of the HTML. Without an address, their names remain.
    outside = r"\]\(\.\./(?!examples/notebooks)"
    if REPOSITORY:
        text = re.sub(outside, f"]({REPOSITORY}/blob/main/", text)
    else:
        text = re.sub(rf"(?<!!)\[([^\[\]]*){outside}[^)]*\)", r"\1", text)
    source[0] = contents(text) if docname == "index" else text


def kind_of(name):
    """Return what a name of the reference is: a class, a method, a property, or a function."""
    *modules, last = name.split(".")
    parent = notoken if not modules and hasattr(notoken, last) else mpi4jax
    for part in modules:
        found = getattr(parent, part, None)
        parent = importlib.import_module(f"mpi4jax.{part}") if found is None else found
    if inspect.isclass(getattr(parent, last, None)):
        return "class"
    if not inspect.isclass(parent):
        return "function" if callable(getattr(parent, last)) else "data"
    found = inspect.getattr_static(parent, last, None)
    kinds = {
        staticmethod: "staticmethod",
        classmethod: "classmethod",
        property: "property",
        functools.cached_property: "property",
    }
    return kinds.get(type(found), "method" if callable(found) else "attribute")


def note_objects(app, doctree):
    """Make each name of the reference an object of the Python domain: it is then in the index, in
    `objects.inv`, and among the first results of a search."""
    docname = app.env.docname
    if not docname.startswith("reference-"):
        return
    names = {place: name for name, place in api_pages.places().items()}
    domain = app.env.get_domain("py")
    for section in doctree.findall(docutils.nodes.section):
        for identifier in section["ids"]:
            name = names.get(f"{docname}.md#{section[0].astext().lower().replace('.', '')}")
            if name is None or identifier != section["ids"][0]:
                continue
            full = f"mpi4jax.{name}"
            domain.note_object(full, kind_of(name), identifier, location=section)
            index = sphinx.addnodes.index(entries=[("single", full, identifier, "", None)])
            section.insert(1, index)


def note_searches(app, doctree):
    """Add index entries for what readers search for, which a search finds before other words."""
    for words, docname, anchor in searches.SEARCHES:
        if docname == app.env.docname:
            sections = doctree.findall(docutils.nodes.section)
            section = next(s for s in sections if not anchor or anchor in s["ids"])
            entry = ("single", words, section["ids"][0], "", None)
            section.insert(1, sphinx.addnodes.index(entries=[entry]))


def setup(app):
    app.add_config_value("readers_searches", searches.SEARCHES, "env")  # a change reads pages again
    app.connect("source-read", read)
    app.connect("doctree-read", note_objects)
    app.connect("doctree-read", note_searches)
