"""A file of the package imports from its own room and from those below.

docs/architecture.md lists the rooms, from the top to the bottom.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "python" / "mpi4jax"
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = "mpi4jax"


def rooms():
    """The rooms of the table, from the bottom to the top."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| Python package |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[::-1]


def place(parts):
    """The room and the module that a path in the package is of."""
    if len(parts) > 1 and parts[0] in ROOMS:
        return parts[0], parts[1]
    return (parts[0], "__init__") if parts[0] in ROOMS else (DOORS, parts[0])


def is_module(parts):
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(text, path):
    """What a file imports of the package, in functions too: rooms with modules."""
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


ROOMS = rooms()


def test_each_room_says_what_it_is_for():
    folders = {f.parent.name for f in FILES} - {"mpi4jax", "experimental"}
    assert {*ROOMS} == folders | {DOORS}
    for room in folders:
        (doc, *rest) = ast.parse((PACKAGE / room / "__init__.py").read_text()).body
        assert isinstance(doc.value.value, str), room
        assert not rest or room == "ops"


def test_no_file_imports_from_a_room_above_its_own():
    uses, circles = 0, {room: TopologicalSorter() for room in ROOMS}
    for path in FILES:
        room, module = place(path.relative_to(PACKAGE).with_suffix("").parts)
        for other, theirs in imports(path.read_text(), path):
            where = f"{path.relative_to(PACKAGE)} imports {other}.{theirs}"
            assert ROOMS.index(other) <= ROOMS.index(room), f"{where}, which is above it"
            if other == room and theirs != module:
                circles[room].add(module, theirs)
            uses += 1
    for circle in circles.values():
        circle.prepare()  # raises an error that names the files, if there is one
    assert uses > 200
    assert len(ROOMS) > 10
