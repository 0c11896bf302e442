"""Examples in docstrings, in the README and in docs/ run as they stand."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest
import run_examples
from reference import SPECS

import mpi4jax
from mpi4jax import _comm, _flush, _jit, notoken

ROOT = Path(__file__).resolve().parent.parent.parent

# ---- Docstrings


def doctests():
    """Every docstring of the package that has examples, once."""
    finder, seen = doctest.DocTestFinder(recurse=False), {}
    places = [mpi4jax, notoken, _comm, _flush, _jit]
    for module in places:
        for name, value in [("", module), *vars(module).items()]:
            own = getattr(value, "__module__", "").startswith("mpi4jax") or value is module
            if own and getattr(value, "__doc__", None) and ">>>" in value.__doc__:
                for test in finder.find(value, name or module.__name__, globs={}):
                    seen.setdefault(test.docstring, test)
    return list(seen.values())


@pytest.mark.parametrize("example", doctests(), ids=lambda example: example.name)
def test_docstring(example, capsys):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 0


@pytest.mark.parametrize("name", [n for n in mpi4jax.__all__ if callable(getattr(mpi4jax, n))])
def test_public_functions_are_documented(name):
    """Each says what it does and shows how; ops also name their arguments and results."""
    f = getattr(mpi4jax, name)
    assert f.__doc__, name
    if name in SPECS:
        for section in ("Args:", "Returns:", "Raises:", "Example:"):
            assert section in f.__doc__, (name, section)
        assert SPECS[name].mpi in f.__doc__
        assert SPECS[name].name in getattr(notoken, name).__doc__


def test_doctests_are_found():
    assert {test.name for test in doctests()} >= {*SPECS, "jit", "pvary", "mpi4jax"}


# ---- Markdown: what the comments around a block mean is said in docs/run_examples.py

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for file in FILES for block in run_examples.blocks(file)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_markdown(mpirun, tmp_path, block):
    file = tmp_path / "example.py"
    file.write_text(block.code)
    job = mpirun(block.ranks, file)
    if absent := re.search(r"No module named '(equinox|flax)'", job.stderr):
        pytest.skip(f"there is no {absent[1]}")
    assert job.returncode == 0, job.stdout + job.stderr
    assert not block.differs(job.stdout), block.differs(job.stdout)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_pages_say_on_how_many_ranks_examples_run(file):
    text = file.read_text()
    for ranks in {block.ranks for block in run_examples.blocks(file)} - {1}:
        assert f"mpiexec -n {ranks} python" in text, ranks


def test_every_block_is_found():
    """A block that the pattern misses would not be run."""
    assert len(BLOCKS) == sum(file.read_text().count("```python\n") for file in FILES) > 0


@pytest.mark.ranks(1)
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


@pytest.mark.ranks(1)
def test_architecture_names_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {file.name for file in (ROOT / "python" / "mpi4jax").glob("*.py")} - {"__init__.py"}
    places = {f"src/{place.name}" for place in (ROOT / "src").iterdir()}
    for name in files | places:
        assert f"`{name}`" in text, name


@pytest.mark.ranks(1)
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
