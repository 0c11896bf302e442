"""Which ops may return before they have ended.

XLA then goes on with computation that does not depend on them, while they wait for other ranks.
Another thread carries them out, which takes some 20 microseconds more. So an op is only marked
where the function that it stands in has much more than that to compute which neither needs the op
nor is needed by it.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from . import _compat
from ._in_place import CALLS
from ._primitive import effect
from ._spec import op_of

# So many operations on numbers take some milliseconds.
WORTH = 10**8

# How often a `while` is thought to run.
_TURNS = 10

# Primitives whose work on matrices of n rows is that of so many elements for each of n.
_CUBIC = {
    "cholesky": 1,
    "eig": 25,
    "eigh": 10,
    "geqrf": 2,
    "hessenberg": 3,
    "householder_product": 2,
    "lu": 1,
    "schur": 25,
    "svd": 15,
    "triangular_solve": 1,
    "tridiagonal": 2,
}

# Other primitives, and how much more work they are for each element than an addition.
_SLOW = {"fft": 30, "sort": 50, "top_k": 20, "erf_inv": 20, "lgamma": 50, "digamma": 50}


def mark(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Set the parameter ``detached`` of each op beside which there is much to compute.

    Args:
        closed: what is about to be lowered, and transformed no more.

    Raises:
        ValueError: the environment variable ``MPI4JAX_DETACH`` is neither 1 nor 0.
    """
    setting = os.environ.get("MPI4JAX_DETACH") or "1"
    if setting not in ("0", "1"):
        raise ValueError(f"MPI4JAX_DETACH={setting} is not understood: it takes 1 and 0")
    return _Pass().closed(closed, 0) if setting == "1" else closed


class _Pass:
    """One pass over a program. A function that is called often stays one object, lowered once."""

    def __init__(self) -> None:
        self.marked: dict[tuple[int, bool], Any] = {}
        self.known: dict[int, tuple[Any, int]] = {}

    def closed(self, closed: ClosedJaxpr, beside: float) -> ClosedJaxpr:
        """The same; ``beside`` is the work around it that does not depend on it."""
        key = id(closed), beside >= WORTH
        if key not in self.marked:
            self.marked[key] = closed, ClosedJaxpr(self.open(closed.jaxpr, beside), closed.consts)
        return self.marked[key][1]

    def open(self, jaxpr: Jaxpr, beside: float) -> Jaxpr:
        if effect not in jaxpr.effects:
            return jaxpr
        eqns = jaxpr.eqns
        works = [0 if effect in eqn.effects else self.work(eqn) for eqn in eqns]
        free = _independent(jaxpr, works) if sum(works) >= WORTH else {}

        def replaced(i: int, eqn: Any) -> Any:
            return self.eqn(eqn, beside + free.get(i, 0)) if effect in eqn.effects else eqn

        return jaxpr.replace(eqns=[replaced(i, eqn) for i, eqn in enumerate(eqns)])

    def eqn(self, eqn: Any, beside: float) -> Any:
        """The same, where so much work neither needs nor is needed by this equation."""
        p = eqn.params
        if op_of(eqn) is not None:
            return eqn.replace(params={**p, "detached": True}) if _may(eqn, beside) else eqn
        # A loop may be one of many small ops, and what is beside it is so only once. XLA goes on
        # beside what is in a branch only where it goes on beside the whole conditional.
        inside = beside if eqn.primitive.name in CALLS else 0
        new = dict(p)
        for name, value in p.items():
            if isinstance(value, ClosedJaxpr):
                new[name] = self.closed(value, inside)
            elif isinstance(value, Jaxpr):
                new[name] = self.open(value, inside)
            elif name == "branches":
                new[name] = tuple(self.closed(branch, inside) for branch in value)
        return eqn.replace(params=new)

    def work(self, eqn: Any) -> int:
        """About how many operations on numbers an equation takes."""
        p, name = eqn.params, eqn.primitive.name
        inner = [self.total(jaxpr) for _, jaxpr in _compat.inner_jaxprs(p)]
        if name == "cond":
            return max(inner, default=0)
        if inner:
            turns = p["length"] if eqn.primitive is _compat.scan_p else 1
            return sum(inner) * (_TURNS if name == "while" else turns)
        size = sum(_size(v) for v in eqn.outvars)
        if name == "dot_general":
            (contracted, _), _ = p["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            return 2 * size * math.prod(shape[axis] for axis in contracted)
        if name == "conv_general_dilated":
            features = p["rhs_shape"][p["dimension_numbers"].rhs_spec[0]] if "rhs_shape" in p else 1
            return 2 * size * _size(eqn.invars[1]) // max(features, 1)
        if name in _CUBIC:
            shape = eqn.invars[0].aval.shape
            return _CUBIC[name] * size * (shape[-1] if shape else 1)
        return size * _SLOW.get(name, 1)

    def total(self, jaxpr: Jaxpr) -> int:
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = jaxpr, sum(self.work(eqn) for eqn in jaxpr.eqns)
        return self.known[id(jaxpr)][1]


def _may(eqn: Any, beside: float) -> bool:
    """Whether an op is to return before it has ended."""
    reduction = eqn.params.get("reduction")
    # A reduction of the user's is a function of Python's, whose thread should not change.
    return beside >= WORTH and not (reduction is not None and reduction.user)


def _size(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def _independent(jaxpr: Jaxpr, works: list[int]) -> dict[int, float]:
    """For each equation that communicates, the work that neither needs it nor is needed by it."""
    # Sets of equations are the bits of numbers.
    eqns = jaxpr.eqns
    ours = [i for i, eqn in enumerate(eqns) if effect in eqn.effects]
    needs, needed_by = [0] * len(eqns), [0] * len(eqns)
    makers: dict[int, int] = {}
    before: list[int] = []
    of: list[set[int]] = []
    for i, eqn in enumerate(eqns):
        direct = {makers[id(v)] for v in eqn.invars if id(v) in makers}
        if effect in eqn.effects:
            direct.update(before)
            before = [i]
        of.append(direct)
        for j in direct:
            needs[i] |= needs[j] | 1 << j
        makers.update((id(v), i) for v in eqn.outvars)
    for i in reversed(range(len(eqns))):
        for j in of[i]:
            needed_by[j] |= needed_by[i] | 1 << i
    weights, size = np.array(works, float), -(-len(eqns) // 8)

    def work(equations: int) -> float:
        bits = np.frombuffer(equations.to_bytes(size, "little"), np.uint8)
        chosen = np.unpackbits(bits, count=len(eqns), bitorder="little")
        return float(weights[chosen.astype(bool)].sum())

    total = float(weights.sum())
    return {i: total - work(needs[i] | needed_by[i]) for i in ours}
