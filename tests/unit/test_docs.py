"""The documentation is complete. Its examples are tests of tests/ranks and tests/jobs."""

import re
import tomllib
from pathlib import Path

import pytest
import run_examples
import transforms
from table import ROWS

import mpi4jax
from mpi4jax import notoken

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", [n for n in mpi4jax.__all__ if callable(getattr(mpi4jax, n))])
def test_public_functions_are_documented(name):
    """Each says what it does and shows how; ops also name their arguments and results."""
    f = getattr(mpi4jax, name)
    assert f.__doc__, name
    if name in ROWS:
        for section in ("Args:", "Returns:", "Raises:", "Example:"):
            assert section in f.__doc__, (name, section)
        assert ROWS[name].mpi in f.__doc__
        assert name in getattr(notoken, name).__doc__


# ---- Markdown: what the comments around a block mean is said in docs/run_examples.py

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for file in FILES for block in run_examples.blocks(file)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_pages_say_on_how_many_ranks_examples_run(file):
    text = file.read_text()
    for ranks in {block.ranks for block in run_examples.blocks(file)} - {1}:
        assert f"mpiexec -n {ranks} python" in text, ranks


def test_every_block_is_found():
    """A block that the pattern misses would not be run."""
    assert len(BLOCKS) == sum(file.read_text().count("```python\n") for file in FILES) > 0


def test_installation_names_what_is_needed():
    text = (ROOT / "docs" / "installation.md").read_text()
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"`cargo` {cargo['rust-version']} or newer" in text
    assert f"{project['requires-python'].removeprefix('>=')} or newer" in text
    assert f"mpi4jax-{cargo['version']}-cp" in text
    (examples,) = re.findall(r"what the scripts in `examples/` need: (.*)\.", text)
    needed = project["optional-dependencies"]["examples"]
    assert sorted(examples.lower().split(", ")) == sorted(needed)


def test_architecture_names_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {file.name for file in (ROOT / "python" / "mpi4jax").glob("*.py")} - {"__init__.py"}
    places = {f"src/{place.name}" for place in (ROOT / "src").iterdir()}
    for name in files | places:
        assert f"`{name}`" in text, name


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "environment.md").read_text()
    sources = [
        *(ROOT / "src").rglob("*.rs"),
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "build_support").glob("*.py"),
    ]
    used = {name for file in sources for name in re.findall(r"MPI4JAX_[A-Z_]+", file.read_text())}
    assert len(used) > 10
    for name in used:
        assert f"`{name}`" in text or name.startswith("MPI4JAX_TEST_"), name


def test_table_of_transformations_is_complete():
    """It has a row for each transformation, and a column for each op."""
    rows = [
        line.split("|")[1:-1]
        for line in (ROOT / "docs" / "transformations.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    header, _, *body = [[cell.strip() for cell in row] for row in rows]
    assert sorted(header[1:]) == sorted(map(transforms.title, transforms.ROWS)), "run `make table`"
    assert [row[0] for row in body] == list(transforms.CHECKS), "run `make table`"
    assert {cell for row in body for cell in row[1:]} <= {"yes", "-"}
