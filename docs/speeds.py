"""Figures of speed on the pages, from the data of the last run of `make bench`.

`benchmarks-times.csv` and `benchmarks-ratios.csv` are the only source of these figures. A page
quotes one between `<!-- figure: NAME -->` and `<!-- end -->`, where NAME is a name of FIGURES, and
has a whole table between `<!-- operations: large_arrays -->` and `<!-- end -->`. `operations.py`
fills both in, and a test fails if a page differs from what it writes.
"""

import csv
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PLACE = re.compile(r"<!-- figure: (\w+) -->[^<]*<!-- end -->")
MIB = 2**20


@functools.cache
def _rows(name: str) -> list[dict[str, str]]:
    with (DOCS / f"benchmarks-{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def seconds(operation: str, size: int, call: str, ranks: int = 2) -> float:
    """Return the median time of an operation on one host, in seconds."""
    (row,) = (
        row
        for row in _rows("times")
        if (row["operation"], row["bytes"], row["call"]) == (operation, str(size), call)
        and (row["ranks"], row["hosts"]) == (str(ranks), "one host")
    )
    return float(row["seconds"])


def _digits(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _ms(operation: str, mib: int, call: str) -> str:
    return _digits(seconds(operation, mib * MIB, call) * 1e3)


def _ratio(operation: str, size: int, over: str, under: str) -> str:
    return _digits(seconds(operation, size, over) / seconds(operation, size, under))


FIGURES: dict[str, Callable[[], str]] = {
    "loop_overhead": lambda: _digits(
        (seconds("allreduce", 4, "in a loop", 1) - seconds("allreduce", 4, "raw loop", 1)) * 1e6
    ),
    "jitted_us": lambda: _digits(seconds("allreduce", 4, "jitted") * 1e6),
    "older_over_jitted": lambda: _ratio("allreduce", 4, "0.9.1 jitted", "jitted"),
    "gloo_over_jitted": lambda: _ratio("allreduce", 4, "gloo jitted", "jitted"),
    "large_allreduce": lambda: _ratio("allreduce", 64 * MIB, "jitted", "raw loop"),
    "large_sendrecv": lambda: _ratio("sendrecv", 64 * MIB, "jitted", "raw loop"),
    "large_allgather": lambda: _ratio("allgather", 64 * MIB, "jitted", "raw loop"),
    "medium_ms": lambda: _ms("allreduce", 16, "jitted"),
    "medium_donated_ms": lambda: _ms("allreduce", 16, "jitted, donated"),
}


def large_arrays() -> Iterator[tuple[str, ...]]:
    """Yield the times of jitted calls on 64 MiB."""
    operations = ("allgather", "sendrecv", "allreduce")
    yield ("2 ranks, 64 MiB, ms", *(f"`{name}`" for name in operations))
    for label, call in (
        ("raw MPI, in a loop in C", "raw loop"),
        ("mpi4jax 0.9.1, jitted", "0.9.1 jitted"),
        ("mpi4jax, jitted", "jitted"),
        ("mpi4jax, in a compiled loop", "in a loop"),
    ):
        yield (label, *(_ms(name, 64, call) for name in operations))


def filled(text: str) -> str:
    """Return a page with its figures."""
    return PLACE.sub(lambda m: f"<!-- figure: {m[1]} -->{FIGURES[m[1]]()}<!-- end -->", text)
