"""The documentation is complete. Its examples are tests of tests/ranks and tests/jobs."""

import ast
import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import api_pages
import jax
import operations
import pictures as drawn
import pytest
import run_examples
import transformations
import transforms
from mpi4py import MPI
from table import ROWS

import mpi4jax
from mpi4jax import notoken
from mpi4jax._op.operation import OPERATIONS
from mpi4jax._op.other_names import public_names
from mpi4jax._setup import loader
from mpi4jax._tokens import functions as _functions_with_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
ONE_IMPORT = "import mpi4jax.notoken as mpi4jax"


PUBLIC = [
    f"{module.__name__}.{name}"
    for module in (mpi4jax, notoken)
    for name in module.__all__
    if callable(getattr(module, name))
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_are_documented(name):
    """Each says what it does and shows how; ops also name their arguments and results."""
    module, _, function = name.rpartition(".")
    doc = getattr(sys.modules[module], function).__doc__
    assert doc, name
    if function in ROWS:
        with_tokens = module == "mpi4jax"
        for section in ("Args:", "Returns:", "Raises:", *([] if with_tokens else ["Example:"])):
            assert section in doc, (name, section)
        if with_tokens:
            assert f":func:`mpi4jax.notoken.{function}`" in doc
            return
        assert ROWS[function].mpi in doc
        assert "token" not in doc.replace("notoken", ""), doc
        returns = re.search(r"Returns:\n +(.*)", doc)[1]
        assert (returns == "None.") == (not OPERATIONS[function].returns), returns


def test_decisions_are_dated_and_listed():
    """Each stands beside its subsystem, with a date, and architecture.md links to its file."""
    architecture = (DOCS / "architecture.md").read_text()
    files = [f for f in ROOT.rglob("DECISIONS.md") if not {".venv", "target"} & {*f.parts}]
    assert len(files) >= 11
    for file in files:
        assert f"(../{file.relative_to(ROOT)})" in architecture, file
        for title, after in re.findall(r"^\*\*(.+?)\*\*(.{0,40})", file.read_text(), re.M):
            assert re.match(r":? \((rejected, )?20\d\d-\d\d-\d\d\)", after), (file, title)


def test_pages_have_the_tables_and_lists_of_operations():
    """Each table has a row for each op, without an empty cell."""
    places = [place[1] for file in FILES for place in operations.PLACE.finditer(file.read_text())]
    assert set(places) == set(operations.MAKERS)
    tables = (operations.derivatives(), 0), (operations.cheats(), 1)
    for rows, column in ((list(rows), column) for rows, column in tables):
        assert [re.match(r"\[?`(\w+)", row[column])[1] for row in rows[1:]] == list(ROWS)
        assert all(cell and "|" not in cell for row in rows for cell in row)
        assert {len(row) for row in rows} == {len(rows[0])}


def shape_of(text, **known):
    """A shape of the cheat sheet, as the root has it."""
    return tuple(eval(text.partition(" on the root")[0], {**known, "sum": sum}))


@pytest.mark.parametrize("name", ROWS)
def test_shapes_of_the_cheat_sheet(name):
    """On one rank, which is the root: the shapes are what the operation takes and returns."""
    cheat, function = ROWS[name].cheat, getattr(notoken, name)
    known = dict.fromkeys(("counts", "send_counts", "recv_counts"), (3,))
    known |= {"n": 1, "r": 0, "S": (2,), "rows": 4, "capacity": 5}
    if name in ("barrier", "halo_exchange", "send"):  # no result, or a grid's
        return
    x = jax.ShapeDtypeStruct(shape_of(cheat.operand, **known), "float32")
    others = inspect.signature(function).parameters
    given = {k: known[k] for k in ("counts", "recv_counts", "capacity") if k in others}
    given |= {"root": 0} if "root" in others else {}
    given |= {"send_counts": known["send_counts"]} if name == "alltoallv" else {}
    given |= {"perm": [(0, 0)]} if name == "permute" else {}
    given |= {"source": 0, "dest": 0} if name == "sendrecv" else {}
    given |= {"source": 0} if name == "recv" else {}
    given |= {"op": MPI.SUM} if "op" in others else {}
    arrays = [x, x] if name == "sendrecv" else [x]
    if name == "ragged_alltoall":
        arrays.append(jax.ShapeDtypeStruct((1,), "int32"))
    result = jax.eval_shape(functools.partial(function, **given), *arrays)
    result = result[0] if name == "ragged_alltoall" else result
    assert result.shape == shape_of(cheat.result, **known)


@pytest.mark.parametrize("file", run_examples.FILES, ids=lambda file: file.name)
def test_code_fits_the_column_of_a_page(file):
    """`docs/check_pages.py` measures it where Chromium is installed: 736 pixels."""
    code = [line for block in run_examples.blocks(file) for line in block.code.splitlines()]
    assert [line for line in code if len(line) > 90] == []


@pytest.mark.parametrize("file", run_examples.FILES, ids=lambda file: file.name)
def test_generated_parts_of_pages_are_written(file):
    """Tables of operations, and the command of each output: pages are read as they are, too."""
    text = file.read_text()
    assert text == operations.filled(text), "run `python docs/operations.py`"
    assert text.count("<!-- operations:") == len(operations.PLACE.findall(text))


def test_tested_environments_are_recorded(monkeypatch, tmp_path):
    """Each replaces its own line, in the order of the tables; the page names what was found."""
    matrix = operations.matrix
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "tested.csv")
    asked = [*operations.tested()]
    last, first = matrix.MATRIX[-1], matrix.MATRIX[0]
    for passed, row in (7, last), (3, first), (1234, last):
        results = matrix.Results(passed=[(f"{row} n=2", "a")] * passed, failed=[("n=2", "a")])
        results.failed += [(f"{row} n=0", "b")] * (row is first)
        matrix.record("test-matrix", [(row, sys.executable)], results)
    rows = [*operations.tested()]
    assert len(rows) == len(asked) == 1 + len(matrix.MATRIX) + len(matrix.WHEELS)
    assert rows[1][1] == jax.__version__
    assert rows[1][3] == "3 (1 failed)"
    assert rows[len(matrix.MATRIX)][3] == "1,234"
    assert rows[-1] == asked[-1]
    assert asked[1][3] == "not recorded"
    assert len(matrix.RECORD.read_text().splitlines()) == 3
    with monkeypatch.context() as newer:  # the page is the same under each Python
        newer.setattr(sys, "version_info", (3, 99))
        assert [*operations.tested()] == rows


def test_one_import_has_all():
    """`notoken` lacks only what is about tokens; pages and examples import it, under one name."""
    about_tokens = {"create_token", "gen_token", "experimental", "notoken"}
    assert {*mpi4jax.__all__} - about_tokens <= {*notoken.__all__}
    for name in {*mpi4jax.__all__} & {*notoken.__all__} - {*public_names(_functions_with_tokens)}:
        assert getattr(mpi4jax, name) is getattr(notoken, name), name
    codes = {block.name: block.code for block in BLOCKS if "token=" not in block.code}
    codes |= {file.name: file.read_text() for file in (ROOT / "examples").glob("*.py")}
    for name, code in codes.items():
        lines = re.findall(r"^ *((?:import|from) mpi4jax\b.*)$", code, re.MULTILINE)
        assert {re.sub(" *#.*", "", line) for line in lines} <= {ONE_IMPORT}, name
    assert all(ONE_IMPORT in help.partition("\n")[0] for help in (mpi4jax.__doc__, notoken.__doc__))


def test_the_reference_names_every_function():
    """Each has a heading, or for nonblocking operations its signature."""
    page = "".join((DOCS / f"{name}.md").read_text() for name in api_pages.PAGES)
    for name in {*mpi4jax.__all__, *notoken.__all__}:
        assert re.search(rf"\b{name}\b", page) or name in ("jit", "experimental"), name
    assert {"allreduce", "linalg.cg", "grids.Block", "ghosts.Plan"} <= {*api_pages.places()}


@pytest.mark.parametrize("name", api_pages.PAGES)
def test_the_reference_is_written(name):
    assert (DOCS / f"{name}.md").read_text() == api_pages.pages()[name], "run docs/operations.py"


# ---- Markdown: what the comments around a block mean is said in docs/run_examples.py

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for file in FILES for block in run_examples.blocks(file)]


def test_commands_of_outputs():
    """Both kinds of output get the command of the block before, once, and a rank's line stays."""
    text = "<!-- ranks: 3, file: solver.py -->\n```python\nf()\n```\n<!-- {} -->\n```text\n{}```\n"
    for mark in ("output", "errors"):
        plain = text.format(mark, "r0 | $ 1\n")
        full = text.format(mark, "$ mpiexec -n 3 python solver.py\nr0 | $ 1\n")
        assert [run_examples.with_commands(t) for t in (plain, full)] == [full, full]
        page = SimpleNamespace(name="page.md", read_text=lambda full=full: full)
        (block,) = run_examples.blocks(page)
        assert getattr(block, mark) == "r0 | $ 1\n"
    shown = (ROOT / "docs" / "debugging.md").read_text()
    assert "```text\n$ mpiexec -n 3 python solver.py\nr0 | mpi4jax: allreduce #3" in shown


def test_outputs_are_told_apart():
    """What a job printed is held against the page, in words; times and paths may differ."""
    text = (
        "<!-- ranks: 2, file: a.py, with: X=1, status: 97 -->\n```python\nf()\n```\n"
        "<!-- output -->\n```text\n1\n2\n```\n<!-- errors -->\n```text\nfor 4.3 s in /tmp/x\n```\n"
    )
    (block,) = run_examples.blocks(SimpleNamespace(name="page.md", read_text=lambda: text))
    assert block.command == "X=1 mpiexec -n 2 python a.py"
    job = {"returncode": 97, "stdout": "2\n1\n", "stderr": "?\nfor 12.0 s in /tmp/y\n."}
    assert block.differs(SimpleNamespace(**job)) is None
    for wrong in ({"returncode": 0}, {"stdout": "1\n"}, {"stderr": "since 4.3 s in /tmp/x\n"}):
        assert block.differs(SimpleNamespace(**{**job, **wrong})), wrong


def test_pictures_are_described():
    """For those who cannot see them; and each is there."""
    pictures = 0
    for file in FILES:
        for words, picture in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", file.read_text()):
            assert (len(words) > 10, (file.parent / picture).is_file()) == (True, True), picture
            pictures += 1
    assert pictures >= 6


@pytest.mark.parametrize("name", drawn.DRAWN)
def test_pictures_are_those_of_the_script(name):
    assert (ROOT / "docs" / name).read_text() == drawn.DRAWN[name](), "run docs/pictures.py"
    assert any(f"({name})" in file.read_text() for file in FILES), name


def test_every_block_is_found():
    """A block that the pattern misses would not be run."""
    assert len(BLOCKS) == sum(file.read_text().count("```python\n") for file in FILES) > 0


def test_readme_counts_checks():
    (checks,) = re.findall(r"(\d+) checks passed", (ROOT / "docs" / "autodiff.md").read_text())
    assert (
        f"{int(checks):,} [checks](docs/autodiff.md#tested-transformations)"
        in (ROOT / "README.md").read_text()
    )


def test_installation_names_what_is_needed():
    text = (ROOT / "docs" / "installation.md").read_text()
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"`cargo` {cargo['rust-version']} or newer" in text
    assert f"{project['requires-python'].removeprefix('>=')} or newer" in text
    for page in (text, (ROOT / "README.md").read_text()):
        assert f"{mpi4jax.__version__} is not on PyPI yet" in page
    assert f"'mpi4jax>={mpi4jax.__version__}'" in text
    for file in FILES:
        for version in re.findall(r"'mpi4jax(?:\[\w+\])?>=([^']+)'", file.read_text()):
            assert version == mpi4jax.__version__, file.name
    assert f"version = {{{mpi4jax.__version__}}}" in (ROOT / "README.md").read_text()
    for abi in loader._ABIS.values():
        assert f"| `_native_{abi}` |" in text
    (examples,) = re.findall(r"what the scripts in `examples/` need: (.*)\.", text)
    extras = project["optional-dependencies"]
    needed = {name for name in extras["examples"] if "[" not in name} | {*extras["output"]}
    assert sorted(examples.lower().split(", ")) == sorted(needed)


def test_architecture_names_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M))
    package = ROOT / "python" / "mpi4jax"
    for file in package.rglob("*.py"):
        where = file.parent.name
        if file.name != "__init__.py" and where not in ("ops", "experimental"):
            assert f"`{file.name}`" in rows[where], file
    places = {f"src/{p.name}" for p in (ROOT / "src").iterdir() if p.suffix != ".md"}
    for name in places:
        assert f"`{name}`" in text, name


def test_extending_names_the_files_of_an_op():
    """All that have the example, but for those that call it."""
    text = (ROOT / "docs" / "extending.md").read_text()
    section = text.partition("## An operation\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert f"in {len(files)} files" in section
    sources = [*(ROOT / "src").rglob("*.rs"), *(ROOT / "python" / "mpi4jax").rglob("*.py")]
    having = {str(f.relative_to(ROOT)) for f in sources if "exscan" in f.read_text().lower()}
    tests = {"tests/rust/model.rs", "tests/ranks/table.py", "tests/jobs/counts_operations.py"}
    assert {*files} == having - {"python/mpi4jax/_numerics/files.py"} | tests
    assert section.count("| only if ") == len(files) - 9


def names_of_jax(file):
    """The names of JAX's that a file takes from `jax._src`: of modules, what it uses of them."""
    tree = ast.parse(file.read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    private = [n for n in imports if (n.module or "").startswith("jax._src")]
    bound = {a.asname or a.name: a.name for n in private for a in n.names}
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    members = {
        (n.value.id, n.attr) for n in used if isinstance(n.value, ast.Name) and n.value.id in bound
    }
    calls = [n.args[:2] for n in ast.walk(tree) if isinstance(n, ast.Call)]
    members |= {  # wrap(pxla, "lower_sharding_computation", ...)
        (args[0].id, args[1].value)
        for args in calls
        if len(args) == 2 and isinstance(args[0], ast.Name) and args[0].id in bound
        if isinstance(args[1], ast.Constant)
    }
    modules = {name for name, _ in members if not bound[name].endswith("_p")}
    return {bound[name] for name in bound.keys() - modules} | {
        attribute for name, attribute in members if name in modules
    }


def test_architecture_lists_what_is_touched_of_jax():
    """Each name that is taken from JAX's internals, and tests that there are."""
    rows = (ROOT / "docs" / "jax-internals.md").read_text().splitlines()
    rows = [row.split("|")[1:-1] for row in rows if row.startswith("| ") and row.count("|") > 3]
    touched = " ".join(row[0] for row in rows)
    files = {f: names_of_jax(f) for f in (ROOT / "python" / "mpi4jax").rglob("*.py")}
    assert {f.parent.name for f in files if files[f]} == {"_jax"}
    missing = {n for found in files.values() for n in found if not re.search(rf"\b{n}\b", touched)}
    assert missing == set()
    sources = {f.name: f.read_text() for f in (ROOT / "tests").rglob("test_*.py")}
    ours = sources["test_internals.py"] + sources["test_internals_ad.py"]
    for row in rows:
        for file, test in re.findall(r"`(?:(\w+\.py)::)?(test_\w+)`", row[-1]):
            assert f"def {test}(" in (sources[file] if file else ours), test
        assert "test_" in row[-1] or row[-1].strip() in ("the same", "Test", "---"), row


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "environment.md").read_text()
    sources = [
        *(ROOT / "src").rglob("*.rs"),
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "build_support").glob("*.py"),
    ]
    # What the build script passes to the compiler (`env!`) is not the user's.
    pattern = r'(?<!env!\(")MPI4JAX_[A-Z_]+'
    used = {name for file in sources for name in re.findall(pattern, file.read_text())}
    assert len(used) > 10
    for name in used:
        assert f"`{name}`" in text or name.startswith("MPI4JAX_TEST_"), name


def test_table_of_transformations_is_complete():
    """It names each transformation once, and has a column for each kind of op."""
    text = (ROOT / "docs" / "autodiff.md").read_text().partition(transformations.BEGIN)[2]
    text = text.partition(transformations.END)[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line[:1] == "|"]
    _, _, *body = [[cell.strip() for cell in row] for row in rows]
    names = [name for row in body for name in row[0].split("; ")]
    assert sorted(names) == sorted(transforms.CHECKS), "run `make table`"
    assert {(linear, other) for _, linear, other in body} <= {("yes", "yes"), ("yes", "-")}


def test_the_table_of_transformations_says_what_fails():
    kinds = {"scan-SUM": {"yes"}, "bcast": {"-"}, "scan-MAX": {"-"}}
    found = transformations.table({"vmap": kinds, "jit": kinds})
    assert found.endswith("| vmap; jit | yes, but for bcast | - |")
    kinds = {"scan-SUM": {"yes", "**no**"}, "scan-MAX": {"yes"}}
    assert transformations.table({"vmap": kinds}).endswith("| vmap | **no** (scan-SUM) | yes |")
