"""Figures of speed on the pages, which have one source: the data of the last run of `make bench`
(`benchmarks-times.csv`), and for what other programs measured the tables of measurements.md.

A page quotes a figure between `<!-- figure: NAME -->` and `<!-- end -->`, where NAME is a name of
FIGURES, and has a whole table between `<!-- operations: large_arrays -->` and `<!-- end -->`.
`operations.py` fills both in, and a test fails if a page differs from what it writes.
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


def cell(section: str, row: str, column: str) -> str:
    """Return what a table of a section of measurements.md says, without ranges and marks."""
    text = (DOCS / "measurements.md").read_text()
    (found,) = re.findall(rf"^##+ {re.escape(section)}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    header: list[str] = []
    values = []
    for line in found.splitlines():
        cells = [part.strip() for part in line.strip("|").split("|")] if line[:1] == "|" else []
        header = (header or cells) if cells else []
        if cells and cells[0] == row and column in header:
            values.append(cells[header.index(column)])
    (value,) = values
    return value.lstrip("~").partition(" (")[0]


def _digits(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _ms(operation: str, mib: int, call: str) -> str:
    return _digits(seconds(operation, mib * MIB, call) * 1e3)


def _ratio(operation: str, size: int, over: str, under: str) -> str:
    return _digits(seconds(operation, size, over) / seconds(operation, size, under))


GLOO = "psum, by gloo and by mpi4jax"
IDLE, SHARED = "Idle cores", "Cores that other jobs used too"

FIGURES: dict[str, Callable[[], str]] = {
    "loop_overhead": lambda: _digits(
        (seconds("allreduce", 4, "in a loop", 1) - seconds("allreduce", 4, "raw loop", 1)) * 1e6
    ),
    "jitted_us": lambda: _digits(seconds("allreduce", 4, "jitted") * 1e6),
    "older_over_jitted": lambda: _ratio("allreduce", 4, "0.9.1 jitted", "jitted"),
    "gloo_over_jitted": lambda: _ratio("allreduce", 4, "gloo jitted", "jitted"),
    "gloo_over_jitted_large": lambda: _ratio("allreduce", 64 * MIB, "gloo jitted", "jitted"),
    "port_small": lambda: cell("A port from mpi4py", "8 x 8", "mpi4jax"),
    "port_small_numpy": lambda: cell("A port from mpi4py", "8 x 8", "NumPy and mpi4py"),
    "port_large": lambda: cell("A port from mpi4py", "2048 x 2048", "mpi4jax"),
    "port_large_numpy": lambda: cell("A port from mpi4py", "2048 x 2048", "NumPy and mpi4py"),
    "overlap_hidden": lambda: cell("Overlap", "with the progress thread", "16 MiB"),
    "overlap_training": lambda: cell("Overlap", "training, 8 layers of 4 MiB", "without / with"),
    "gradients_two_hosts": lambda: cell(GLOO, "two hosts, TCP", "40 apart"),
    "gradients_slow_network": lambda: cell(GLOO, "two hosts, packets 50 us late", "40 apart"),
    "reproducible": lambda: cell("Reproducible sums", "2", "float32"),
    "sleep_idle": lambda: cell(IDLE, "`allreduce`", "ratio"),
    "sleep_idle_sendrecv": lambda: cell(IDLE, "`sendrecv`", "ratio"),
    "sleep_shared": lambda: cell(SHARED, "`allreduce`", "ratio"),
    "sleep_shared_sendrecv": lambda: cell(SHARED, "`sendrecv`", "ratio"),
    "sleep_late": lambda: cell(SHARED, "`allreduce`, one rank 10 ms late", "ratio"),
    "sleep_late_sendrecv": lambda: cell(SHARED, "`sendrecv`, one rank 10 ms late", "ratio"),
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


def gloo() -> Iterator[tuple[str, ...]]:
    """Yield the times of a sum by JAX's own collectives and by mpi4jax."""
    sizes = {"4 B": 4, "1 MiB": MIB, "64 MiB": 64 * MIB}
    yield ("ms", *sizes)
    for label, call in (("`psum`, by gloo", "gloo jitted"), ("`allreduce` of mpi4jax", "jitted")):
        times = (seconds("allreduce", size, call) * 1e3 for size in sizes.values())
        yield (label, *map(_digits, times))


def filled(text: str) -> str:
    """Return a page with its figures."""
    return PLACE.sub(lambda m: f"<!-- figure: {m[1]} -->{FIGURES[m[1]]()}<!-- end -->", text)
