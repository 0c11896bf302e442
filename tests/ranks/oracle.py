"""The Jacobian of the whole job: of the results of all ranks, by the operands of all ranks."""

import numpy as np
from reference import COMM, RANK, SIZE


def flatten(arrays):
    return np.concatenate([np.ravel(np.asarray(a)) for a in arrays])


def basis(shapes, dtype):
    """All lists of arrays of these shapes that hold a single 1."""
    out = []
    for r, shape in enumerate(shapes):
        for i in np.ndindex(*shape):
            zeros = [np.zeros(s, dtype) for s in shapes]
            zeros[r][i] = 1
            out.append(zeros)
    return out


def distinct(case, ys):
    """The results, a global one once."""
    return ys[:1] if case.row.replicated else ys


def model_jacobian(case, xs):
    """Rows: the distinct results. Columns: all ranks' inputs."""
    columns = basis([x.shape for x in xs], xs[0].dtype)
    pushed = [flatten(distinct(case, case.pushforward(xs, ts))) for ts in columns]
    return np.stack(pushed, axis=1)


def collect(local):
    """For each of the arrays that every rank has got: all ranks' side by side."""
    mine = [np.asarray(a) for a in local]
    return [flatten(list(parts)) for parts in zip(*COMM.allgather(mine), strict=True)]


def jacobian_from_jvp(case, push, xs):
    """Column by column: one rank has a tangent, the others have zeros."""
    columns = collect([push(ts[RANK]) for ts in basis([x.shape for x in xs], xs[0].dtype)])
    whole = np.stack(columns, axis=1)
    if case.row.replicated:  # every rank has the same copy
        copies = np.split(whole, SIZE)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
        return copies[0]
    return whole


def jacobian_from_vjp(case, pull, xs):
    """Row by row: one rank has a cotangent; of a global result, all ranks have the same one."""
    shapes = [y.shape for y in distinct(case, case.model(np, xs))]
    rows = basis(shapes, xs[0].dtype)
    return np.stack(collect([pull(cs[0] if case.row.replicated else cs[RANK]) for cs in rows]))
