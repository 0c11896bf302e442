"""The pages can be read on the repository's web view: every link leads somewhere, in two clicks."""

import builtins
import importlib.util
import re
import subprocess
import sys
import urllib.parse
from collections import deque
from pathlib import Path

import jax
import pytest
from api_pages import slug
from mpi4py import MPI

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
# Directories with a README of their own, and decisions beside the code.
OTHERS = [
    file
    for folder in (
        "benches",
        "build_support",
        "docs",
        "examples",
        "python",
        "src",
        "tests",
        "tools",
    )
    for name in ("README.md", "DECISIONS.md")
    for file in (ROOT / folder).rglob(name)
    if not {"_build", "node_modules"} & {*file.parts}
]


def text_of(page):
    """A page without its fenced blocks, in which nothing is a link or a heading."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)


def links(page):
    """The relative links of a page: the file, and the anchor in it."""
    for address in re.findall(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)", text_of(page)):
        if not re.match(r"https?:|mailto:", address):
            file, _, anchor = address.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {slug(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)) for heading in headings}


def clicks():
    """How many clicks away from README.md each page is that can be reached."""
    found = {ROOT / "README.md": 0}
    queue = deque(found)
    while queue:
        page = queue.popleft()
        for target, _ in links(page):
            if target.suffix == ".md" and target.exists() and target not in found:
                found[target] = found[page] + 1
                queue.append(target)
    return found


def test_every_page_is_two_clicks_away():
    found = clicks()
    far = {str(p.relative_to(ROOT)): found.get(p) for p in PAGES if found.get(p, 99) > 2}
    assert far == {}


def test_the_contents_list_every_page():
    listed = {target for target, _ in links(ROOT / "docs" / "index.md")}
    pages = {
        page
        for page in PAGES
        if page.parent == ROOT / "docs" and page.name not in ("index.md", "README.md")
    }
    assert pages - listed == set()
    assert len(pages) <= 48


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = [
        f"{target.name}#{anchor}"
        for target, anchor in links(page)
        if not target.exists()
        or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_directive_shows(page):
    """Directives of a documentation generator are code on the repository's web view."""
    text = page.read_text()
    assert (
        re.findall(r"^ *(?:```|:::)\{[\w-]+\}|^\.\. [\w-]+::|(?<!`)\{[\w:]+\}`\w", text, re.M) == []
    )


def test_one_file_has_the_address_of_the_project():
    """The repository of this name on GitHub is the older package's: a page that names it sends
    readers to the wrong program. `build_support/address.py` has the address, once there is one."""
    hosts = re.compile(rb"(github|gitlab|codeberg|bitbucket|sr\.ht)[\w./:-]*[/:~]mpi4jax", re.I)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    assert len(files) > 400
    found = {
        str(file.relative_to(ROOT))
        for file in files
        if file.suffix not in (".png", ".webp", ".gif") and hosts.search(file.read_bytes())
    }
    assert found <= {"build_support/address.py"}


def test_links_of_the_readme_on_pypi(monkeypatch):
    """PyPI shows README.md alone: its links are absolute, or plain text without an address."""
    monkeypatch.syspath_prepend(ROOT / "build_support")
    import address

    text = (ROOT / "README.md").read_text()
    for repository in (None, "https://example.org/project"):
        monkeypatch.setattr(address, "REPOSITORY", repository)
        targets = re.findall(r"\]\(([^)]*)\)", address.absolute_links(text))
        assert targets
        assert all(target.startswith(("https://", "#")) for target in targets)
        assert any(target.startswith("https://example.org") for target in targets) == bool(
            repository
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_at_its_top_what_its_programs_need(page):
    """Besides what `pip install mpi4jax` brings."""
    text = page.read_text()
    brought = {"jax", "numpy", "mpi4py", "mpi4jax", *sys.stdlib_module_names}
    programs = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    imported = re.findall(r"^ *(?:import|from) (\w+)", "\n".join(programs), re.M)
    top = "".join(text.splitlines(keepends=True)[:6])
    assert "installation.md" in top or not programs or page.name == "README.md"
    for package in {*imported} - brought:
        assert re.search(rf"pip install[^\n`]*\b{package}\b", top), package


def test_the_first_bug_of_contributing_can_be_brought_back():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert page.count("tests/first_bug.patch") == 2
    patch = ROOT / "tests" / "first_bug.patch"
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
    removed = re.findall(r"^-  +(.*)$", patch.read_text(), re.M)
    assert len(removed) == 2
    assert all(line in page for line in removed)


EXCEPTION = re.compile(
    r"(?<![\w.])(?:(\w+(?:\.\w+)*)\.)?([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit))\b"
)


def exceptions(text):
    """The names of exceptions and warnings in a text, with the module if it is given."""
    for module, name in EXCEPTION.findall(text):
        yield f"{module}.{name}" if module else name


def is_exception(name):
    """Whether a program can catch it by this name: Python's, JAX's or mpi4py's."""
    module, _, short = name.rpartition(".")
    places = {"": builtins, "jax.errors": jax.errors, "MPI": MPI}
    found = getattr(places.get(module), short, None)
    return isinstance(found, type) and issubclass(found, BaseException)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_exceptions_exist(page):
    """Programs catch what a page says; the pages of the reference have the docstrings."""
    assert [name for name in {*exceptions(page.read_text())} if not is_exception(name)] == []


def test_what_is_no_exception_is_found():
    text = "raises `ValueError`, jax.errors.JaxRuntimeError, `XlaRuntimeError` or MPI.Exception"
    assert [name for name in exceptions(text) if not is_exception(name)] == ["XlaRuntimeError"]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_addresses_are_well_formed(page):
    """Each is encrypted and complete, and no sentence's mark is a part of it."""
    for address in re.findall(r"\bhttps?://[^\s)>`\"'|\]}]+", page.read_text()):
        parts = urllib.parse.urlsplit(address)
        assert parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1"), address
        assert re.fullmatch(r"[\w.-]+\.[a-z]{2,}", parts.hostname or "") or parts.port, address
        assert not address.endswith((",", ";", ":")), address


def commands(text):
    """The lines of the shell's blocks of a page; README.md indents them."""
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.S | re.M):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"^ {4}((?:make|pip|mpiexec|python|\.venv/bin/python) .*)", text, re.M)
    yield from re.findall(r"`((?:make|mpiexec|(?:\.venv/bin/)?python) [^`]*)`", text)


def missing(command):
    """What a command names that does not exist: a target, a program, an option of it, a module."""
    words = re.sub(r"(?<!\S)#.*|[;|&].*", "", command).split()
    programs = [word for word in words if re.match(r"(tools|examples|benches|docs)/.*\.py$", word)]
    for word in programs:
        if not (ROOT / word).exists():
            yield word
    if programs and (ROOT / programs[0]).exists() and "run_tests" not in programs[0]:
        known = (ROOT / programs[0]).read_text()
        after = words[words.index(programs[0]) :]
        yield from (
            w for w in after if re.match(r"--\w", w) and f'"{w.partition("=")[0]}"' not in known
        )
    if words[:1] == ["make"]:
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)
        yield from (word for word in words[1:] if "=" not in word and word not in targets)
    for module in re.findall(r"-m (mpi4jax[\w.]*)", command):
        if importlib.util.find_spec(module) is None:
            yield module
    if words[:1] == ["mpi4jax"] and words[1:]:
        known = (ROOT / "python" / "mpi4jax_command.py").read_text()
        if f'"{words[1]}"' not in known:
            yield words[1]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    """Each target of make, program, option, module and subcommand that a page's commands name."""
    found = [*commands(page.read_text())]
    assert [(c, name) for c in found for name in missing(c)] == []


def test_commands_are_found():
    text = "`make tset`\n```bash\npython tools/matrix.py --recrod\npython -m mpi4jax.reprot\n```\n"
    found = [name for command in commands(text) for name in missing(command)]
    assert found == ["--recrod", "mpi4jax.reprot", "tset"]
