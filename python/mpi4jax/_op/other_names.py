"""Errors for names of other packages, such as JAX and PyTorch: they say what to write instead."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from mpi4py import MPI

from .._setup.loader import page

# Names of collectives in JAX, PyTorch and mpi4py.
_FUNCTIONS = {
    "all_gather": "allgather(x), whose result has an axis for the ranks in front; "
    "allgatherv(x) joins rows, as tiled=True does",
    "all_reduce": "allreduce(x, op=MPI.SUM)",
    "all_to_all": "alltoall(x), where x[r] goes to rank r",
    "argmax": "maxloc(x, index), which also returns the maximum",
    "argmin": "minloc(x, index), which also returns the minimum",
    "axis_index": "comm.Get_rank() of mpi4py",
    "axis_size": "comm.Get_size() of mpi4py",
    "broadcast": "bcast(x, root)",
    "halo": "halo_exchange(x, cart)",
    "pbroadcast": "bcast(x, root)",
    "pmax": "allreduce(x, op=MPI.MAX)",
    "pmean": "allreduce(x, op=mpi4jax.MEAN)",
    "pmin": "allreduce(x, op=MPI.MIN)",
    "ppermute": "permute(x, perm)",
    "psum": "allreduce(x, op=MPI.SUM)",
    "psum_scatter": "reduce_scatter(x, op=MPI.SUM), where x[r] goes to rank r",
    "pvarying": "pvary(x)",
    "send_recv": "sendrecv(sendbuf, recvbuf, source, dest)",
}
_KEYWORDS = {
    "axis_index_groups": "pass comm=comm.Split(color)",
    "axis_name": "operations are over the ranks of a communicator; pass comm=..., or nothing for "
    "all ranks",
    "dst": "the argument is 'dest'",
    "src": "the argument is 'source', or 'root'",
    "tiled": "allgatherv joins the rows of all ranks, reduce_scatterv cuts rows, and alltoallv "
    "does both",
    "token": "leave it out, because these operations run in program order. To keep tokens, write "
    "'import mpi4jax' instead of 'import mpi4jax.notoken as mpi4jax', without MPI4JAX_NOTOKEN=1",
}
PREDEFINED = (
    *("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"),
    *("MINLOC", "MAXLOC"),
)
_REDUCTIONS = {
    "add": "MPI.SUM",
    "avg": "mpi4jax.MEAN",
    "maximum": "MPI.MAX",
    "mean": "mpi4jax.MEAN",
    "minimum": "MPI.MIN",
    "mul": "MPI.PROD",
    "multiply": "MPI.PROD",
    "product": "MPI.PROD",
}
_LATER = ("output", "sharding", "training")  # public modules that are loaded when they are used


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module."""
    return [name for name in vars(module) if not name.startswith("_")]


def missing_from(module: str, public: Iterable[str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, whose error translates names of other packages."""
    ours = frozenset(public)

    def missing(name: str) -> Any:
        if name in _LATER:
            return importlib.import_module(f"mpi4jax.{name}")
        words = f"module {module!r} has no attribute {name!r}"
        if name in _FUNCTIONS:
            words += f"; use {_FUNCTIONS[name]} (see {page('from-shard-map.md')})"
        elif name in (*PREDEFINED, "COMM_WORLD", "Op", "ANY_SOURCE", "ANY_TAG", "PROC_NULL"):
            words += f"; use MPI.{name}, with: from mpi4py import MPI"
        elif name.lower() in ours:  # mpi4py's names for arrays
            words += f"; use {name.lower()}"
        raise AttributeError(words, name=name, obj=sys.modules.get(module))

    return missing


def _called(op: str, signature: inspect.Signature) -> str:
    """Return how a function is called: its arguments without types and defaults."""
    names: list[str] = []
    for q in signature.parameters.values():
        if q.kind is q.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(q.name)
    return f"{op}({', '.join(names)})"


def check_call(
    op: str, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise an error that names the function if arguments do not fit its signature."""
    check_keywords(op, kwargs)
    names = [q.name for q in signature.parameters.values() if q.kind is not q.KEYWORD_ONLY]
    unknown = [name for name in kwargs if name not in signature.parameters]
    missing = [
        name
        for name in names[len(args) :]
        if name not in kwargs and signature.parameters[name].default is inspect.Parameter.empty
    ]
    if unknown:
        close = difflib.get_close_matches(unknown[0], signature.parameters, 1)
        advice = f"; did you mean '{close[0]}'?" if close else ""
        raise TypeError(
            f"{op}: there is no argument '{unknown[0]}'; expected {_called(op, signature)}{advice}"
        ) from None
    if len(args) > len(names):
        others = [q for q in signature.parameters if q not in names]
        advice = f"pass the others by name: {', '.join(f'{q}=...' for q in others)}"
        if isinstance(args[len(names)], MPI.Comm) and "comm" in others:
            advice = "pass a communicator as comm=..."
        raise TypeError(
            f"{op}: takes {len(names)} positional arguments ({', '.join(names)}), got {len(args)}; "
            f"{advice}"
        ) from None
    if missing:
        raise TypeError(
            f"{op}: argument '{missing[0]}' is missing; expected {_called(op, signature)}"
        ) from None


def rename(error: Exception, op: str, name: str) -> None:
    """Let an error that begins with the name of an operation begin with another function's name.

    The function prepares a call of the operation, whose checks name the operation.
    """
    words = str(error)
    if words.startswith(f"{op}: "):
        error.args = (f"{name}{words.removeprefix(op)}",)


def check_keywords(op: str, given: dict[str, Any]) -> None:
    """Raise an error for an argument that only other packages have."""
    name = next((name for name in given if name in _KEYWORDS), None)
    if name is not None:
        raise TypeError(
            f"{op}: there is no argument '{name}' here: {_KEYWORDS[name].format(op=op)}"
        ) from None


def reduction_named(given: Any) -> str | None:
    """Return how to write the reduction that a name, or a function of NumPy or JAX, means."""
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if name.upper() in PREDEFINED:
        return f"MPI.{name.upper()}"
    return _REDUCTIONS.get(name.lower())
