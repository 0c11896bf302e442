"""A type checker sees every op's arguments, with tokens and without."""

import re
from pathlib import Path

import pytest
from table import ROWS

ROOT = Path(__file__).resolve().parent.parent.parent

api = pytest.importorskip("mypy.api")

PROGRAM = "import mpi4jax\nfrom mpi4jax import notoken\n" + "".join(
    f"reveal_type({module}.{name})\n" for module in ("mpi4jax", "notoken") for name in ROWS
)
WRONG = """
notoken.send([1.0])
mpi4jax.bcast([1.0], "0")
notoken.nothing
"""


def test_a_type_checker_sees_arguments(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)  # for mypy's settings
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + WRONG)
    output, _, _ = api.run([str(program)])
    notes = [line for line in output.splitlines() if "Revealed type" in line]
    assert len(notes) == 2 * len(ROWS), output
    for note, row in zip(notes, [*ROWS.values()] * 2, strict=True):
        parameters = re.findall(r"(?:, |def \()(\*|\w+(?=: ))", note)
        assert parameters == row.signature.strip("()").split(", ")
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert len(errors) == 3, output
    expected = ('"dest"', 'expected "int"', '"nothing"')
    for error, word in zip(errors, expected, strict=True):
        assert word in error
