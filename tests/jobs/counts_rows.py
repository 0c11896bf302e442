"""What the tables of counts are made of: the number of ranks, and the class of a row."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
IS_ROOT = RANK == 0
OTHERS = SIZE - 1
# Of a periodic row of ranks: with two ranks, both neighbors are one rank.
NEIGHBORS = len({(RANK - 1) % SIZE, (RANK + 1) % SIZE} - {RANK})
# Of a row of ranks that is not periodic.
LINE = (RANK > 0) + (RANK < SIZE - 1)
CART = WORLD.Create_cart([SIZE], periods=[True])

ANY = -1  # bytes that are not compared


class AtMost(int):
    """A number of bytes, at most: of Python objects, whose pickles depend on paths and versions."""


class Row(NamedTuple):
    """What one call sends, on this rank.

    `calls` has the calls of each function of MPI, and the bytes that the rank hands to it.
    `formula` gives the number of messages, in `P` (the number of ranks), `log(P)` (base 2, rounded
    up), `neighbors` (of this rank), `line` (the same in a row of ranks that is not periodic) and
    `root` (whether this rank is it). If it grows as `P`, `why`
    says why.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    calls: dict[str, tuple[int, int]]
    formula: str
    why: str = ""

    @property
    def function(self) -> str:
        """The function that the row is about."""
        return re.match(r"[\w.]+", self.name)[0]  # type: ignore[index]

    def messages(self) -> int:
        names = {"P": SIZE, "log": lambda P: (P - 1).bit_length(), "neighbors": NEIGHBORS}
        names |= {"line": LINE, "root": IS_ROOT}
        assert self.why or "P" not in self.formula.replace("log(P)", ""), f"{self.name}: why P?"
        return int(eval(self.formula, names))


ROWS: list[Row] = []


def row(
    name: str, calls: dict[str, tuple[int, int]], formula: str, why: str = ""
) -> Callable[[Any], None]:
    """Add a row. The decorated function returns a function, and the arguments to jit it with."""

    def add(make: Any) -> None:
        ROWS.append(Row(name, make, calls, formula, why))

    return add


def simple(name: str, f: Any, x: Any, calls: dict[str, tuple[int, int]], *rest: Any) -> None:
    row(name, calls, *rest)(lambda: (f, (x,)))


# Operands: N elements of 4 bytes.
N = 1000
BYTES = 4 * N
X = jnp.ones(N, jnp.float32)
BLOCKS = jnp.ones((SIZE, N), jnp.float32)
SUM = MPI.SUM
