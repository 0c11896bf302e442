"""Precondition conjugate gradients with a coarse problem on one rank.

    mpiexec -n 4 python examples/two_level.py

Conjugate gradients solve the equation of heat conduction in a rod, -u'' = f, whose points are
distributed over the ranks. In an iteration, information travels from one point to the next, or,
with the inverses of small blocks (block Jacobi), from one block to the next. The coarse problem has
a few points for each rank, and carries information across the whole rod: residuals go to rank 0,
which has the inverse of the small coarse matrix, and corrections come back. The other ranks wait
for them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
UP = [(r, r + 1) for r in range(size - 1)]
DOWN = [(b, a) for a, b in UP]


def laplacian(x):
    """Return this rank's part of the product with the matrix of -1, 2, -1."""
    below, above = mpi4jax.permute(x[-1:], UP, comm=comm), mpi4jax.permute(x[:1], DOWN, comm=comm)
    z = jnp.concatenate([below, x, above])
    return 2 * x - z[:-2] - z[2:]


def two_level(smooth, n, points):
    """Add a correction from a coarse problem to another preconditioner.

    Args:
        smooth: the other one.
        n: how many rows this rank has.
        points: how many points of the coarse problem each rank has.
    """
    # Each point stands for some neighboring rows, which it averages and adds to.
    rows = np.arange(n) * points // n
    prolong = lambda coarse: coarse[rows]  # noqa: E731
    restrict = lambda fine: jax.ops.segment_sum(fine, rows, points)  # noqa: E731

    # The coarse matrix, a column for each point of each rank; rank 0 keeps its inverse.
    def column(k):
        mine = (k // points == rank) * jax.nn.one_hot(k % points, points)
        return mpi4jax.gather(restrict(laplacian(prolong(mine))), comm=comm)

    columns = jax.lax.map(column, jnp.arange(points * size))
    inverse = jnp.linalg.inv(columns.reshape(points * size, -1).T) if rank == 0 else None

    def coarse(residual):
        """Solve the coarse problem on rank 0, while the other ranks wait."""
        parts = mpi4jax.gather(residual, comm=comm)
        if rank == 0:
            parts = (inverse @ parts.ravel()).reshape(parts.shape)
        return mpi4jax.scatter(parts, comm=comm)

    return lambda r: smooth(r) + prolong(coarse(restrict(r)))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=32, help="of 4 rows, of each rank")
    parser.add_argument("--points", type=int, default=16, help="coarse ones of each rank")
    options = parser.parse_args()
    n = 4 * options.blocks
    block = np.float32(2 * np.eye(4) - np.eye(4, k=1) - np.eye(4, k=-1))
    jacobi = mpi4jax.linalg.block_jacobi(np.stack([block] * options.blocks))
    f = jnp.sin(jnp.arange(n) + n * rank)
    methods = {
        "none": None,
        "block Jacobi": jacobi,
        "two levels": two_level(jacobi, n, options.points),
    }
    for name, M in methods.items():
        solve = jax.jit(
            lambda f, M=M: mpi4jax.linalg.cg(laplacian, f, M=M, maxiter=1000, comm=comm)
        )
        _, info = solve(f)
        if rank == 0:
            print(f"{name}: {info.iterations} iterations, converged: {info.converged}")


if __name__ == "__main__":
    main()
