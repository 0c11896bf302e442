"""Independent collectives of one kind in a function become one, of several operands.

As XLA's `AllReduceCombiner` does it. Other than XLA's instructions, the collectives here have an
order, the same on all ranks. It changes only in that a collective moves to another one of its kind:

- up, if its operands are there already;
- otherwise the earlier one moves down, if no other collective needs its results before. What is
  computed from these on this rank alone moves down with it.

Nothing moves past another operation with an ordered effect: ranks may differ in those.

Large gathers are combined only if their results are needed together, as the three projections of
an attention are. Sharded parameters (FSDP) save memory because the layers are gathered one after
another: the parameters of the next layer are applied to the result of this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax._src import effects
from jax.extend.core import JaxprEqn, Literal

# Bytes of what is combined. XLA has 30 MiB for GPUs; here the operands are copied side by side,
# which costs more than a message where they are long.
LIMIT = 4 << 20
# Bytes from which the result of a gather is large.
LARGE = 64 << 10


class _Group:
    """Collectives that become one.

    Attributes:
        place: the index of the equation that they move to.
        is_movable: whether they may move down: no other collective needs their results yet.
        depth: when the large gathers among them are needed, as `_depths` counts; None if there are
            none.
    """

    def __init__(self, index: int, eqn: JaxprEqn):
        self.members, self.place, self.is_movable = [eqn], index, True
        self.depth: int | None = None

    def equation(self, same: dict[Any, Any]) -> JaxprEqn:
        """Return all of them. Of an operand that several have, there is one result: in ``same``."""
        if len(self.members) == 1:
            return self.members[0]
        results: dict[Any, Any] = {}
        for eqn in self.members:
            for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                same[y] = results.setdefault(id(x), (x, y))[1]
        ins, outs = map(list, zip(*results.values(), strict=True))
        return self.members[0].replace(invars=ins, outvars=outs)


def combined(
    eqns: Sequence[JaxprEqn],
    kind_of: Callable[[JaxprEqn], Hashable | None],
    communicates: Callable[[JaxprEqn], bool],
    limit: int = LIMIT,
) -> tuple[Sequence[JaxprEqn], dict[Any, Any]]:
    """Return the equations of a function, where collectives are combined.

    Args:
        eqns: the equations of the function.
        kind_of: what collectives have alike that become one; None for other equations.
        communicates: whether other ranks wait for an equation, or for something inside of it.
        limit: bytes of what is combined.

    Returns:
        tuple: the equations; and a mapping from each variable that is no longer computed to the
        variable with the same value.
    """
    # By kind; and by kind and depth for those with large gathers.
    latest: dict[Hashable, _Group] = {}
    depths = _depths(eqns)
    group_of: dict[int, _Group] = {}  # by the indices of their members
    made: dict[Any, int] = {}  # the index where a variable is made
    after: dict[Any, frozenset[_Group]] = {}  # the groups that a variable is made from
    nothing: frozenset[_Group] = frozenset()

    for i, eqn in enumerate(eqns):
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        needs = nothing.union(*(after.get(v, nothing) for v in operands))
        kind = kind_of(eqn)
        if any(map(effects.ordered_effects.contains, eqn.effects)):
            latest.clear()
        elif needs and communicates(eqn):
            for group in needs:
                group.is_movable = False
        if kind is not None:
            at = max([-1, *(made.get(v, -1) for v in operands), *(g.place for g in needs)])
            found, depth = latest.get(kind), depths.get(i)
            if depth is not None:
                is_free = found is not None and found.depth is None
                found = latest.get((kind, depth), found if is_free else None)
            if found is None or not _joins(found, i, eqn, at, limit):
                found = latest[kind] = _Group(i, eqn)
            if depth is not None:
                found.depth = depth
                latest[kind, depth] = found
            group_of[i] = found
            needs = frozenset((found,))
        for v in eqn.outvars:
            made[v] = i
            if needs:
                after[v] = needs
    return _ordered(eqns, group_of)


def _depths(eqns: Sequence[JaxprEqn]) -> dict[int, int]:
    """Return when the result of each large gather is first needed, by the index of its equation.

    That is the number of large gathers in the longest chain of equations, in which each is applied
    to what the one before has led to. Gathers of one depth are needed together. What is computed of
    gathered values alone, such as another dtype, is no use of them. A gather that the function only
    returns has no entry.
    """
    depth_of: dict[Any, int] = {}  # of a variable
    gathered: dict[Any, frozenset[int]] = {}  # variables that are made of large gathers alone
    needed: dict[int, int] = {}
    for i, eqn in enumerate(eqns):
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        depth = max((depth_of.get(v, 0) for v in operands), default=0)
        gathers = frozenset[int]().union(*(gathered.get(v, ()) for v in operands))
        is_gather = _is_large_gather(eqn)
        if is_gather or (gathers and all(v in gathered for v in operands)):
            gathered.update(dict.fromkeys(eqn.outvars, gathers | ({i} if is_gather else set())))
        elif first := gathers - needed.keys():
            depth += 1
            needed.update(dict.fromkeys(first, depth))
        depth_of.update(dict.fromkeys(eqn.outvars, depth))
    return needed


def _joins(group: _Group, i: int, eqn: JaxprEqn, at: int, limit: int) -> bool:
    """Add a collective to a group, if it can be a member. Its operands are there from ``at`` on."""
    if sum(map(_bytes, group.members)) + _bytes(eqn) > limit:
        return False
    if at >= group.place:
        if not group.is_movable:
            return False
        group.place = i
    group.members.append(eqn)
    return True


def _ordered(
    eqns: Sequence[JaxprEqn], group_of: dict[int, _Group]
) -> tuple[list[JaxprEqn], dict[Any, Any]]:
    """Return the equations, each group in its place, and behind it what has waited for its
    results."""
    out: list[JaxprEqn] = []
    same: dict[Any, Any] = {}
    missing: set[Any] = set()  # variables that are made later
    waiting: list[JaxprEqn] = []

    def add(eqn: JaxprEqn, results: Sequence[Any]) -> None:
        if any(v in missing for v in eqn.invars if not isinstance(v, Literal)):
            waiting.append(eqn)
            missing.update(results)
        else:
            out.append(eqn)
            missing.difference_update(results)

    for i, eqn in enumerate(eqns):
        group = group_of.get(i)
        if group is None:
            add(eqn, eqn.outvars)
        elif group.place > i:
            missing.update(eqn.outvars)
        elif group.place == i:
            add(group.equation(same), [v for member in group.members for v in member.outvars])
            again, waiting[:] = list(waiting), []
            for waits in again:
                add(waits, waits.outvars)
    return out, same


def _bytes(eqn: JaxprEqn) -> int:
    return max(
        sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)
        for variables in (eqn.invars, eqn.outvars)
    )


def _is_large_gather(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith("all_gather") and _bytes(eqn) >= LARGE
