"""A type checker sees every op's arguments, with tokens and without."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from table import ROWS
from test_layers import NUMERICS

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


def test_the_typed_program_uses_each_public_function():
    program = ast.parse((ROOT / "tests" / "unit" / "typed_program.py").read_text())
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(program)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    used |= {
        ("mpi4jax", alias.name)
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and node.module == "mpi4jax"
        for alias in node.names
    }
    # The modules of the numerics whose names a program writes with the name of the module.
    modules = {
        name: importlib.import_module(f"mpi4jax.{name}") for name in NUMERICS if name != "layouts"
    }
    modules["mpi4jax"] = importlib.import_module("mpi4jax.notoken")
    public = {(module, name) for module, has in modules.items() for name in has.__all__}
    assert len(public) > 100
    assert sorted(public - used) == []


SHARDED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpi4jax

mesh = mpi4jax.Mesh((1, 1), ("i", "j"))
ranks: int = mesh.comm("i").Get_size()


@mpi4jax.shard_map(mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
def scaled(x: jax.Array, scale: float) -> jax.Array:
    return x * scale


def double(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, 2 * x


with mesh:
    doubled = mpi4jax.shard_map(double, in_specs=P("i"), out_specs=P("i"))
one, two = doubled(scaled(jnp.ones(3), scale=2.0))
scaled("x", 2.0)  # wrong
mesh.devices  # wrong
"""


@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright"]], ids=lambda c: c[0])
def test_shard_map_keeps_the_signature_of_a_function(checker, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    cache = ["--cache-dir", str(ROOT / ".cache" / "mypy-of-tests")] if checker[0] == "mypy" else []
    command = [sys.executable, "-m", *checker, *cache, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert "No module named" not in found.stderr
    wrong = [k for k, line in enumerate(SHARDED.splitlines(), 1) if "# wrong" in line]
    lines = re.findall(r"program\.py:(\d+):.*error", found.stdout)
    assert [*map(int, lines)] == wrong, found.stdout
