"""A file of the package imports from its own layer and from those below.

docs/architecture.md lists the layers, from the top to the bottom.
"""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import mpi4jax

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "python" / "mpi4jax"
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = "mpi4jax"


def layers():
    """The layers of the table, from the bottom to the top."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| Python package |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[::-1]


def place(parts):
    """The layer and the module that a path in the package is of."""
    if len(parts) > 1 and parts[0] in LAYERS:
        return parts[0], parts[1]
    return (parts[0], "__init__") if parts[0] in LAYERS else (DOORS, parts[0])


def is_module(parts):
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(text, path):
    """What a file imports of the package, in functions too: layers with modules."""
    package = ("mpi4jax", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            named = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for _, *parts in (name for name in named if name[0] == "mpi4jax"):
            while parts and not is_module(parts):
                parts.pop()  # a name in a module
            if parts:
                found.add(place(parts))
    return found


LAYERS = layers()


def test_each_room_says_what_it_is_for():
    folders = {f.parent.name for f in FILES} - {"mpi4jax", "experimental"}
    assert {*LAYERS} == folders | {DOORS}
    for layer in folders:
        (doc, *rest) = ast.parse((PACKAGE / layer / "__init__.py").read_text()).body
        assert isinstance(doc.value.value, str), layer
        assert not rest or layer == "ops"


def test_no_file_imports_from_a_room_above_its_own():
    uses, circles = 0, {layer: TopologicalSorter() for layer in LAYERS}
    for path in FILES:
        layer, module = place(path.relative_to(PACKAGE).with_suffix("").parts)
        for other, theirs in imports(path.read_text(), path):
            where = f"{path.relative_to(PACKAGE)} imports {other}.{theirs}"
            assert LAYERS.index(other) <= LAYERS.index(layer), f"{where}, which is above it"
            if other == layer and theirs != module:
                circles[layer].add(module, theirs)
            uses += 1
    for circle in circles.values():
        circle.prepare()  # raises an error that names the files, if there is one
    assert uses > 200
    assert len(LAYERS) > 10


# Above the public interface: these modules could be a distribution of their own.
NUMERICS = (
    *("linalg", "fft", "ghosts", "grids", "layouts", "checkpoints"),
    *("output", "sharding", "training"),
)
# The module through which they import what is private to the core, and all that it may import.
BASE = PACKAGE / "_numerics" / "base.py"
_ARGUMENTS = "errors name the function and the argument, in the words of the operations' errors"
PRIVATE = {
    "Uncopied": "a copy of what holds a communicator is the object itself, as for a `Mesh`",
    "as_arrays": _ARGUMENTS,
    "as_comm": "`default_comm()` tells the watchdog that the program may use the communicator",
    "cart": "arguments `cart`, `axes` and `width` mean the same as for `halo_exchange`",
    "current": "a `PartitionSpec` means the mesh of the program's `with mesh:`",
    "fail_at_exit": "Python ends with status 0 if a function called at exit raises an error",
    "of_whole_arrays": "only the core knows whether a call is inside of a `shard_map`",
    "rank_of": _ARGUMENTS,
    "static_int": _ARGUMENTS,
    "waits_in": "reports of the watchdog name the function in which a rank waits",
}


def imported(path):
    """What a file imports of the package: pairs of a module and a name in it."""
    package = ("mpi4jax", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("mpi4jax") for alias in node.names), path
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                yield ".".join([*base, *filter(None, [node.module])]), alias.name


def files_of_the_numerics():
    files = [PACKAGE / f"{name}.py" for name in NUMERICS]
    return files + [f for f in (PACKAGE / "_numerics").glob("*.py") if f.stem != "__init__"]


def test_the_numerics_import_public_names_of_the_core():
    files = files_of_the_numerics()
    numerics = {".".join(["mpi4jax", *f.relative_to(PACKAGE).with_suffix("").parts]) for f in files}
    doors = [mpi4jax.notoken, *(importlib.import_module(f"mpi4jax.{name}") for name in NUMERICS)]
    public = [getattr(door, name) for door in doors for name in door.__all__]
    uses = 0
    for path in files:
        for module, name in imported(path):
            if {module, f"{module}.{name}"} & numerics:
                continue
            value = getattr(importlib.import_module(module), name)
            is_public = name[0] != "_" and any(value is other for other in public)
            assert is_public or path == BASE, f"{path.relative_to(PACKAGE)}: {module}.{name}"
            assert not (is_public and path == BASE), f"{name} is public"
            uses += 1
    assert uses > 40
    assert {name for _, name in imported(BASE)} == {*PRIVATE}


# The core offers the names of the numerics beside its own, and does nothing else with them.
OFFERING = {"_common.py", "notoken.py", "__init__.py", "_tokens/functions.py"}
EMPTY = "def __getattr__(name):\n    return lambda: None\n"
WITHOUT_THE_NUMERICS = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

assert mpi4jax.__file__.startswith({directory!r})
comm = MPI.COMM_SELF
x = jnp.arange(4.0)
squares = jax.jit(jax.grad(lambda x: mpi4jax.allreduce(x**2, comm=comm).sum()))
np.testing.assert_array_equal(squares(x), 2 * x)
np.testing.assert_array_equal(mpi4jax.sendrecv(x, x, 0, 0, comm=comm), x)
np.testing.assert_array_equal(mpi4jax.wait(mpi4jax.iallgather(x, comm=comm)), [x])
cart = comm.Create_cart([1], periods=[True])
np.testing.assert_array_equal(mpi4jax.halo_exchange(x, cart), [2, 1, 2, 1])
mesh = mpi4jax.Mesh(comm=comm)
total = mpi4jax.shard_map(
    lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
)
np.testing.assert_array_equal(jax.jit(total)(x), x)
"""


def test_the_core_works_without_the_numerics(tmp_path):
    """Each of their files is replaced by an empty one, which has every name."""
    numerics = [f.relative_to(PACKAGE) for f in files_of_the_numerics()]
    theirs = {place(path.with_suffix("").parts) for path in numerics}
    for path in {f.relative_to(PACKAGE) for f in FILES} - {*numerics}:
        uses = imports((PACKAGE / path).read_text(), PACKAGE / path) & theirs
        assert not uses or str(path) in OFFERING, f"{path} imports {uses}"

    copy = tmp_path / "mpi4jax"
    shutil.copytree(Path(mpi4jax.__file__).parent, copy, ignore=shutil.ignore_patterns("__pyc*"))
    for path in numerics:
        (copy / path).write_text(EMPTY)
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_THE_NUMERICS.format(directory=str(copy)))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
