"""One row per op: what JAX's rules need to know about it.

`_primitive.define` makes a JAX primitive of a row. The rows here and the native table are
compared when the package is imported (:func:`check`), so that neither can be forgotten.

Operands of every primitive: ``(*arrays, envelope?, token?)``; results: ``(*arrays, envelope?,
token?)``. The envelope is the int32 pair (source, tag) of a message; it is only there where a
derivative needs to know what a wildcard matched. The token is a float32 scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from . import _native

Params = dict[str, Any]


def is_root(p: Params) -> bool:
    return bool(p["root"] == p["comm"].rank)


@dataclass(frozen=True)
class Spec:
    """One op.

    Attributes:
        name: the op, as in ``mpi4jax.<name>``.
        mpi: the MPI function that it calls.
        params: names of its static parameters, beside ``comm``.
        arrays: how many arrays it takes; None: any number, and it returns as many.
        returns: whether it returns an array.
        stacked: given the parameters, whether the input and the result hold one block per rank,
            along a new first axis.
        transpose: how its transpose is made: ``adjoint`` flips the parameter of that name,
            ``self`` repeats it, ``reversed`` exchanges the two ends of a message.
    """

    name: str
    mpi: str
    params: tuple[str, ...]
    arrays: int | None
    returns: bool
    stacked: Callable[[Params], tuple[bool, bool]]
    transpose: str

    @property
    def all_params(self) -> tuple[str, ...]:
        adjoint = ("adjoint",) if self.transpose == "adjoint" else ()
        envelope = ("env_in", "env_out") if self.transpose == "reversed" else ()
        return ("comm", *self.params, *adjoint, *envelope)

    @property
    def has_reduction(self) -> bool:
        return "reduction" in self.params


def _flat(p: Params) -> tuple[bool, bool]:
    return False, False


SPECS = {
    spec.name: spec
    for spec in (
        Spec("allgather", "MPI_Allgather", (), 1, True, lambda p: (False, True), "adjoint"),
        Spec("allreduce", "MPI_Allreduce", ("reduction",), 1, True, _flat, "adjoint"),
        Spec("alltoall", "MPI_Alltoall", (), 1, True, lambda p: (True, True), "self"),
        Spec("barrier", "MPI_Barrier", (), 0, False, _flat, "self"),
        Spec("bcast", "MPI_Bcast", ("root",), 1, True, _flat, "adjoint"),
        Spec("gather", "MPI_Gather", ("root",), 1, True, lambda p: (False, is_root(p)), "adjoint"),
        Spec(
            "halo_exchange",
            "MPI_Wait",
            ("axes", "widths", "neighbours"),
            None,
            True,
            _flat,
            "adjoint",
        ),
        Spec("recv", "MPI_Recv", ("source", "recvtag", "status"), 1, True, _flat, "reversed"),
        Spec("reduce", "MPI_Reduce", ("reduction", "root"), 1, True, _flat, "adjoint"),
        Spec("scan", "MPI_Scan", ("reduction",), 1, True, _flat, "adjoint"),
        Spec(
            "scatter", "MPI_Scatter", ("root",), 1, True, lambda p: (is_root(p), False), "adjoint"
        ),
        Spec("send", "MPI_Send", ("dest", "sendtag"), 1, False, _flat, "reversed"),
        Spec(
            "sendrecv",
            "MPI_Sendrecv",
            ("source", "dest", "sendtag", "recvtag", "status"),
            2,
            True,
            _flat,
            "reversed",
        ),
    )
}


def op_of(eqn: Any) -> str | None:
    """The op that an equation of a jaxpr is, if it is one."""
    name: str = eqn.primitive.name.removeprefix("mpi4jax_")
    return name if name in SPECS and name != eqn.primitive.name else None


def stacked(spec: Spec, p: Params) -> tuple[bool, bool]:
    """Whether input and result hold one block per rank; a transpose exchanges the two."""
    before, after = spec.stacked(p)
    return (after, before) if p.get("adjoint") else (before, after)


def wildcard(p: Params) -> bool:
    """Whether the receiving side of a message leaves its source or its tag open.

    What is received from nobody is not: it has no sender to learn anything from.
    """
    source, tag = p.get("source"), p.get("recvtag")
    return source != MPI.PROC_NULL and (source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG)


def check() -> None:
    """Compare this table with the native one.

    Raises:
        ImportError: they differ; the installation mixes two builds.
    """
    here = sorted(
        (s.name, s.mpi, s.has_reduction, "root" in s.params, s.transpose == "reversed")
        for s in SPECS.values()
    )
    native = sorted(tuple(row) for row in _native.ops_table())
    if here != native:
        raise ImportError(
            "mpi4jax: the ops of the Python package and of the native module differ; "
            f"reinstall mpi4jax. Differences: {sorted(set(here) ^ set(native))}"
        )
