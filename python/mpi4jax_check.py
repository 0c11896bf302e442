"""Name the lines of a program that ask JAX about the job: ``mpi4jax check PROGRAM...``.

Without `jax.distributed`, JAX tells each rank that it is alone. Only the source is read: nothing is
imported or run, and no name of JAX is replaced.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

START = "jax.distributed.initialize"
_MULTIHOST = "jax.experimental.multihost_utils"
_OF_MESH = "sees the devices of this rank alone: XLA distributes nothing over ranks"

# What a name means on each rank without jax.distributed.
NAMES = {
    "jax.process_index": "is 0 on every rank",
    "jax.process_count": "is 1",
    "jax.process_indices": "is [0]",
    "jax.host_id": "is 0 on every rank",
    "jax.host_count": "is 1",
    "jax.device_count": "counts the devices of this rank",
    "jax.devices": "lists the devices of this rank",
    "jax.pmap": _OF_MESH,
    "jax.make_mesh": _OF_MESH,
    "jax.experimental.mesh_utils": _OF_MESH,
    "jax.make_array_from_process_local_data": "returns this rank's block, not a global array",
    f"{_MULTIHOST}.process_allgather": "returns this rank's value alone",
    f"{_MULTIHOST}.broadcast_one_to_all": "returns this rank's own value",
    f"{_MULTIHOST}.assert_equal": "compares nothing",
    f"{_MULTIHOST}.sync_global_devices": "waits for no other rank",
    _MULTIHOST: "sees this rank alone",
}
# Arguments of jax.jit that distribute work over a mesh of devices.
_SHARDINGS = ("in_shardings", "out_shardings")


class Use(NamedTuple):
    """A use of a name that asks JAX about the job.

    Attributes:
        line: number of the line.
        name: full name of what is used.
        meaning: what it means on a rank without `jax.distributed`.
    """

    line: int
    name: str
    meaning: str


class _Reader(ast.NodeVisitor):
    """Find names of JAX, whatever the program calls them."""

    def __init__(self) -> None:
        self.full = dict[str, str]()  # by the name in the program
        self.found = set[Use]()
        self.starts = list[int]()

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            first = name.name.partition(".")[0]
            self.full[name.asname or first] = name.name if name.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.level == 0:
            for name in node.names:
                self.full[name.asname or name.name] = f"{node.module}.{name.name}"

    def _name(self, node: ast.AST) -> str | None:
        """Return the full name of an expression, such as ``jax.jit``."""
        if isinstance(node, ast.Name):
            return self.full.get(node.id)
        if isinstance(node, ast.Attribute) and (of := self._name(node.value)) is not None:
            return f"{of}.{node.attr}"
        return None

    def _use(self, node: ast.Name | ast.Attribute) -> None:
        name = self._name(node)
        if name == START:
            self.starts.append(node.lineno)
        elif name is not None:
            # A module stands for its functions.
            known = next((n for n in (name, name.rpartition(".")[0]) if n in NAMES), None)
            if known is not None and name != _MULTIHOST:
                self.found.add(Use(node.lineno, name, NAMES[known]))

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        given = [word.arg for word in node.keywords if word.arg in _SHARDINGS]
        # functools.partial(jax.jit, in_shardings=...) too
        if given and "jax.jit" in map(self._name, (node.func, *node.args[:1])):
            name = f"jax.jit with {given[0]}"
            self.found.add(Use(node.lineno, name, _OF_MESH))
        self.generic_visit(node)


def read(source: str) -> tuple[list[Use], list[int]]:
    """Return what asks JAX about the job, and the lines that start `jax.distributed`.

    Raises:
        SyntaxError: if the source is not Python.
    """
    reader = _Reader()
    tree = ast.parse(source)
    # A name may be used in a function before the line that imports it.
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            reader.visit(node)
    reader.visit(tree)
    return sorted(reader.found), sorted(reader.starts)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: list[str]) -> int:
    """Print the lines, and return 1 if `jax.distributed` is needed and not started."""
    parser = argparse.ArgumentParser(
        prog="mpi4jax check",
        description="Name the lines of a program that ask JAX about the job.",
    )
    parser.add_argument(
        "paths", metavar="program", nargs="+", type=Path, help="files or directories of a program"
    )
    uses: list[str] = []
    starts: list[str] = []
    for path in _files(parser.parse_args(arguments).paths):
        try:
            found, started = read(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            print(f"mpi4jax check: cannot read {path}: {error}", file=sys.stderr)
            return 2
        uses += [f"{path}:{use.line}: {use.name} {use.meaning}" for use in found]
        starts += [f"{path}:{line}: {START} tells JAX about all ranks" for line in started]
    if starts or not uses:
        print("\n".join([*starts, f"{len(uses)} uses of names that ask JAX about the job"]))
        return 0
    print("\n".join(uses))
    print(
        f"{len(uses)} uses of names that ask JAX about the job, which are told about one rank. "
        "Start the program with mpi4jax run --jax-distributed or with MPI4JAX_JAX_DISTRIBUTED=1, "
        f'or call {START}(cluster_detection_method="mpi4py") in it. The page "Coming from '
        'shard_map" has a table of these names'
    )
    return 1
