"""A file of the package imports from its own layer and from those below.

docs/architecture.md lists the layers, from the top to the bottom.
"""

import ast
import re
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


# Above the public interface: a program could contain them.
NUMERICS = (
    *("linalg", "fft", "ghosts", "grids", "layouts", "checkpoints"),
    *("output", "sharding", "training"),
)
# What of this package they see besides public names.
BASE = "_numerics.base"


def test_the_numerics_use_public_names_and_one_module():
    public = {*mpi4jax.notoken.__all__}
    files = [PACKAGE / f"{name}.py" for name in NUMERICS]
    files += [f for f in (PACKAGE / "_numerics").glob("*.py") if f.stem not in ("__init__", "base")]
    allowed = {*NUMERICS, *(f"_numerics.{f.stem}" for f in files), BASE}
    uses = 0
    for path in files:
        package = path.relative_to(PACKAGE).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *filter(None, [node.module])])
                for alias in node.names:
                    at = f"{module}.{alias.name}".removeprefix(".")
                    is_allowed = {module, at} & allowed or alias.name in public
                    assert is_allowed, f"{path.relative_to(PACKAGE)} imports {at}"
                    uses += 1
    assert uses > 20
