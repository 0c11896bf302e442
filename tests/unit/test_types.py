"""A type checker sees every op's arguments, with tokens and without."""

import re
from pathlib import Path

import pytest
from table import ROWS

ROOT = Path(__file__).resolve().parent.parent.parent

api = pytest.importorskip("mypy.api")

PROGRAM = "import mpi4jax\nfrom mpi4jax import notoken\n" + "".join(
    f"reveal_type({module}.{name})\n"
    for module, names in (
        ("notoken", ROWS),
        ("notoken", [f"i{name}" for name in ROWS]),
        ("mpi4jax", ROWS),
    )
    for name in names
)
WRONG = """
notoken.send([1.0])
notoken.bcast([1.0], "0")
notoken.nothing
notoken.barrier(token=None)
"""


def test_a_type_checker_sees_arguments(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)  # for mypy's settings
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + WRONG)
    # A cache of its own: `make test` runs mypy at the same time.
    output, _, _ = api.run(["--cache-dir", ".cache/mypy-of-tests", str(program)])
    notes = [line for line in output.splitlines() if "Revealed type" in line]
    assert len(notes) == 3 * len(ROWS), output
    without, nonblocking, with_tokens = (
        notes[i * len(ROWS) : (i + 1) * len(ROWS)] for i in range(3)
    )
    for note, row in zip([*without, *nonblocking], [*ROWS.values()] * 2, strict=True):
        parameters = re.findall(r"(?:, |\] |def )\(?(\*|\w+(?=: ))", note)
        assert [*parameters, "token"] == row.signature.strip("()").split(", "), note
    assert all("Request" in note for note in nonblocking)
    assert all('"def (*Any, **Any) -> Any"' in note for note in with_tokens), with_tokens
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert len(errors) == 4, output
    expected = ('"dest"', 'expected "int"', '"nothing"', '"token"')
    for error, word in zip(errors, expected, strict=True):
        assert word in error


def test_what_is_waited_for_has_the_type_of_what_was_given(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    program = tmp_path / "program.py"
    program.write_text("""
from typing import NamedTuple
import jax
import mpi4jax.notoken as mpi4jax

class Params(NamedTuple):
    w: jax.Array

def f(x: jax.Array, p: Params) -> None:
    reveal_type(mpi4jax.wait(mpi4jax.iallreduce(x)))
    reveal_type(mpi4jax.wait(mpi4jax.ibcast(p)))
    reveal_type(mpi4jax.waitall([mpi4jax.iallreduce(x)]))
    reveal_type(mpi4jax.after(mpi4jax.ibarrier(), p))
    reveal_type(mpi4jax.recv_with_status(p))
""")
    output, _, _ = api.run(["--cache-dir", ".cache/mypy-of-tests", str(program)])
    found = re.findall(r'Revealed type is "(.*)"', output)
    short = [re.sub(r"\w+(?:\.\w+)*\.(?=\w)", "", x).replace("builtins.", "") for x in found]
    params = "tuple[Array, fallback=Params]"
    assert short == [
        "Array",
        params,
        "list[Array]",
        params,
        f"tuple[{params}, tuple[Array, Array, Array, fallback=Received]]",
    ], output
