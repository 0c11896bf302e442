"""The tables and lists of operations, made when the documentation is built: tables from docstrings.

A page has a comment where one goes: `<!-- operations: results -->`, or another name of MAKERS.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from mpi4jax import ops
from mpi4jax._functions.nonblocking import __all__ as NONBLOCKING

PLACE = re.compile(r"^<!-- operations: (\w+) -->$", re.MULTILINE)
MINOR = {"comm", "status"}  # arguments that all have, or that change no result


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring, each as one line of Markdown, and its first line as `""`."""
    text = inspect.getdoc(function)
    found = {"": text.split("\n", 1)[0]}
    for name, body in re.findall(r"^(\w+):\n((?: .*\n|\n)+)", text, re.MULTILINE):
        found[name] = " ".join(body.split())
    return {name: re.sub(r":func:`(\w+)`", r"`\1`", text) for name, text in found.items()}


def argument(text: str, name: str) -> str:
    """What `Args` says of the shape of an argument."""
    return re.search(rf"(?:^| ){name}: (.*?)(?:[;:]|\. | \w+: )", text + " ")[1].rstrip(".")


def results() -> Iterator[tuple[str, ...]]:
    yield "operation", "what it does", "operand", "result"
    for name in ops.__all__:
        function = getattr(ops, name)
        said, parameters = sections(function), inspect.signature(function).parameters
        shown = [p if q.kind == q.POSITIONAL_OR_KEYWORD else f"{p}=" for p, q in parameters.items()]
        call = ", ".join(p for p in shown if p.strip("=") not in MINOR)
        given = [p for p in ("x", "sendbuf") if p in parameters]
        operand = argument(said["Args"], given[0]) if given else "-"
        _, _, result = said["Returns"].rstrip(".").partition(": ")
        does = re.sub(r" \(.*; MPI-4.1, section [\d.]+\)", "", said[""]).rstrip(".")
        yield f"`{name}({call})`", does, operand, result or "-"


def derivatives() -> Iterator[tuple[str, ...]]:
    yield "operation", "derivative"
    for name in ops.__all__:
        yield f"`{name}`", sections(getattr(ops, name))["Derivative"]


def table(rows: Iterator[tuple[str, ...]]) -> str:
    header = next(rows)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What starts an operation.
STARTS = [name for name in NONBLOCKING if name.startswith("i")]
MAKERS: dict[str, Callable[[], str]] = {
    "results": lambda: table(results()),
    "derivatives": lambda: table(derivatives()),
    "started": lambda: ", ".join(f"`{name}`" for name in STARTS),
    # In a directive of the API reference.
    "members": lambda: f"   :members: {', '.join(ops.__all__)}",
    "starts": lambda: "\n".join(f".. autofunction:: mpi4jax.{name}" for name in STARTS),
}


def filled(text: str) -> str:
    """A page with its tables and lists."""
    return PLACE.sub(lambda place: MAKERS[place[1]](), text)
