"""Comparing what the ranks are going to do, before a compiled function first runs."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from mpi4py import MPI

from .. import _native
from .._jax import compat
from .._op.comm import Comm
from .._op.primitive import start_p
from .._op.spec import SPECS, first_axes, op_of


class ScheduleError(RuntimeError):
    """The ranks are going to do different things."""


def _words(name: str, eqn: Any) -> str:
    """What all ranks must agree on."""
    p, details = eqn.params, []
    if "root" in p:
        details.append(f"root {p['root']}")
    if p.get("reduction") is not None:
        details.append("a user's reduction" if p["reduction"].user else p["reduction"].name)
    if SPECS[name].has_any_size:
        widths = [f"{low} and {high}" for low, high in p.get("widths", ())]
        details += [f"width {w}" for w in widths] + [str(eqn.invars[0].aval.dtype)]
    elif eqn.invars and SPECS[name].arrays:
        aval = eqn.invars[0].aval
        # One rank's block: with a root, one of them may hold all.
        blocks = first_axes(SPECS[name], p)[0] or 1
        details.append(f"{int(np.prod(aval.shape, dtype=np.int64)) // blocks} x {aval.dtype}")
    words = f"{name}{' (transposed)' if p.get('adjoint') else ''}"
    return f"{words} ({', '.join(details)})" if details else words


Entry = tuple[Comm | None, str, str]  # None: control flow, which concerns all communicators


def schedule(jaxpr: Jaxpr | ClosedJaxpr) -> list[Entry]:
    """The collectives of a function in program order, with the control flow around them: the
    communicator, what all its ranks must agree on, and the user's line."""
    entries: list[Entry] = []
    for eqn in jaxpr.eqns:
        starts = eqn.primitive is start_p
        name = eqn.params["of"] if starts else op_of(eqn)
        if name is not None:
            spec = SPECS[name]
            if not spec.has_peer and not (spec.is_uniform and eqn.params.get("adjoint")):
                words = "i" * starts + _words(name, eqn)
                entries.append((eqn.params["comm"], words, compat.eqn_line(eqn)))
            continue
        loops = eqn.primitive.name in ("scan", "while", "cond")
        for label, function in compat.inner_jaxprs(dict(sorted(eqn.params.items()))):
            inside = schedule(function)
            if inside and loops:
                times = f" {eqn.params['length']} times" if "length" in eqn.params else ""
                begin = (None, f"begin {eqn.primitive.name} {label}{times}", compat.eqn_line(eqn))
                inside = [begin, *inside, (None, f"end {eqn.primitive.name}", "")]
            entries += inside
    return entries


def _of(comm: Comm, entries: list[Entry]) -> list[tuple[str, str]]:
    """The entries that concern a communicator, without empty control flow."""
    out: list[tuple[str, str]] = []
    for owner, words, line in entries:
        if owner is comm:
            out.append((words, line))
        elif owner is None:
            if words.startswith("end ") and out and out[-1][0].startswith("begin "):
                out.pop()
            else:
                out.append((words, line))
    return out


def _everyones(comm: Comm, text: str) -> list[str]:
    """The text of every rank. Bytes only: nothing is unpickled."""
    mine = np.frombuffer(text.encode(), np.uint8)
    counts = np.empty(comm.size, np.int32)
    comm.mpi.Allgather(np.array([mine.size], np.int32), counts)
    everything = np.empty(counts.sum(), np.uint8)
    comm.mpi.Allgatherv(mine, [everything, counts, np.cumsum([0, *counts[:-1]]), MPI.BYTE])
    ends = np.cumsum(counts)
    return [everything[e - c : e].tobytes().decode() for e, c in zip(ends, counts, strict=True)]


def _equal(comm: Comm, text: str) -> bool:
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    everyones = np.empty((comm.size, mine.size), np.uint8)
    comm.mpi.Allgather(mine, everyones)
    return bool((everyones == everyones[0]).all())


def compare(name: str, jaxpr: ClosedJaxpr) -> None:
    """Compare the schedule of a function between the ranks of each communicator that it uses.

    Raises:
        ScheduleError: they differ; on all ranks.
    """
    entries = schedule(jaxpr)
    comms = {comm.key: comm for comm, *_ in entries if comm is not None}
    for key, comm in sorted(comms.items()):
        mine = _of(comm, entries)
        _native.watch_enter(f"the comparison of schedules of {name} on {key}")
        try:
            if _equal(comm, "\n".join(words for words, _ in mine)):
                continue
            lines = [f"{words}\t{line}" for words, line in mine]
            everyones = [text.splitlines() for text in _everyones(comm, "\n".join(lines))]
        finally:
            _native.watch_leave()
        raise ScheduleError(_difference(name, key, everyones))


def _difference(name: str, key: str, everyones: list[list[str]]) -> str:
    """Where the ranks' schedules begin to differ."""
    headline = f"mpi4jax.jit(check=True): the ranks' versions of {name} differ on {key}"
    longest = max(len(lines) for lines in everyones)
    end = "nothing more\t"
    padded = [lines + [end] * (longest - len(lines)) for lines in everyones]
    for number, step in enumerate(zip(*padded, strict=True)):
        words = [line.partition("\t")[0] for line in step]
        if len(set(words)) == 1:
            continue
        report = f"{headline}, at step {number + 1}:"
        for rank, line in enumerate(step):
            what, _, where = line.partition("\t")
            report += f"\n  rank {rank} of {key}: {what}" + (f", {where}" if where else "")
        if number:
            report += f"\n  before, on all ranks: {padded[0][number - 1].partition(chr(9))[0]}"
        return report
    return headline
