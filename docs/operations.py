"""The generated parts of pages: tables of functions, from docstrings, and commands of outputs.

    python docs/operations.py

writes them into the pages, which are read as they are on the repository's web view. A table stands
between `<!-- operations: cheats -->`, or another name of MAKERS, and `<!-- end -->`. A test fails
where a page differs from what this script writes.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import run_examples
from cheats import CHEATS

from mpi4jax import ops
from mpi4jax._functions import starts
from mpi4jax._op.other_names import public_names

PLACE = re.compile(r"^<!-- operations: (\w+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":\w+:`(?:mpi4jax\.)?([\w.]+)`")
MINOR = {"comm", "status"}  # arguments that all have, or that change no result


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring, each as one line of Markdown, and its first line as `""`."""
    text = inspect.getdoc(function)
    found = {"": text.split("\n", 1)[0]}
    for name, body in re.findall(r"^(\w+):\n((?: .*\n|\n)+)", text, re.MULTILINE):
        found[name] = " ".join(body.split())
    found = {name: ROLE.sub(r"`\1`", text) for name, text in found.items()}
    return {name: text.replace("``", "`") for name, text in found.items()}


def without_section(line: str) -> str:
    """What an operation does, without its name in MPI and the section there."""
    return re.sub(r" \(.*; MPI-4.1, section [\d.]+\)", "", line).rstrip(".")


def shape(text: str) -> str:
    """A shape of the cheat sheet, as Markdown: on the root, and elsewhere."""
    root, where, elsewhere = text.partition(" on the root")
    return f"`{root}`{where}{elsewhere}" if root else "-"


def cheats() -> Iterator[tuple[str, ...]]:
    yield "`MPI_`", "`mpi4jax.`", "`jax.lax.`", "shape in", "shape out", "gradient"
    for name in public_names(ops):
        function, cheat = getattr(ops, name), CHEATS[name]
        mpi = re.search(r"\(MPI_(\w+);", sections(function)[""])
        parameters = inspect.signature(function).parameters.items()
        needed = [p for p, q in parameters if q.kind == q.POSITIONAL_OR_KEYWORD and p not in MINOR]
        yield (
            f"`{mpi[1]}`" if mpi else "-",
            f"`{name}({', '.join(needed)})`",
            f"`{cheat.jax}`" if cheat.jax else "-",
            shape(cheat.operand),
            shape(cheat.result),
            cheat.gradient,
        )


def derivatives() -> Iterator[tuple[str, ...]]:
    """The first part of each section; what `vmap` does is left to the API reference."""
    yield "operation", "derivative"
    for name in public_names(ops):
        said = sections(getattr(ops, name))["Derivative"]
        yield f"`{name}`", said.partition(" Under `vmap`")[0]


def table(rows: Iterator[tuple[str, ...]]) -> str:
    header = next(rows)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(text: str) -> Iterator[tuple[str, ...]]:
    """The functions and classes of the first directives in a text, which the HTML has in full."""
    yield "name", "what it is"
    directives = re.search(r"```{eval-rst}\n(.*?)```", text, re.DOTALL)[1]
    module = ""
    for kind, value in re.findall(r"(auto\w+::|:members:) (.+)", directives):
        if value.removeprefix("mpi4jax.") in STARTS:  # a sentence says what it does
            continue
        if kind == "automodule::":
            module = value
            continue
        names = value.split(", ") if kind == ":members:" else [value.rpartition(".")[2]]
        if kind != ":members:":
            module = value.rpartition(".")[0]
        for name in names:
            shown = f"{module}.{name}".removeprefix("mpi4jax.").removeprefix("notoken.")
            yield f"`{shown}`", described(module, name)
        if kind == "autoclass::":
            module = value


def described(module: str, name: str) -> str:
    """The first line of a docstring, or of the comment above a constant."""
    for depth in range(module.count(".") + 1):
        path = module.rsplit(".", depth)
        try:
            found: Any = importlib.import_module(path[0])
        except ModuleNotFoundError:
            continue
        for part in [*path[1:], name]:
            found = getattr(found, part)
        return without_section(sections(found)[""])
    raise ValueError(f"{module}.{name}")


# What starts an operation.
STARTS = [name for name in public_names(starts) if name.startswith("i")]
MAKERS: dict[str, Callable[[str], str]] = {
    "cheats": lambda _: table(cheats()),
    "derivatives": lambda _: table(derivatives()),
    "summary": lambda after: table(summary(after)),
}


def filled(text: str) -> str:
    """A page with its tables and lists."""

    def place(found: re.Match[str]) -> str:
        made = MAKERS[found[1]](text[found.end() :])
        return f"<!-- operations: {found[1]} -->\n\n{made}\n\n<!-- end -->"

    return run_examples.with_commands(PLACE.sub(place, text))


if __name__ == "__main__":
    for file in run_examples.FILES:
        file.write_text(filled(file.read_text()))
