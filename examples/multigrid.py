"""Recover a conductivity from temperatures, with a multigrid cycle as preconditioner.

    mpiexec -n 4 python examples/multigrid.py

The program solves stationary heat conduction, -div(k grad u) = f, on the unit square with
u = 0 at its walls. Values are at cell centers, and blocks of cells are distributed over the ranks.
One V-cycle is the preconditioner, `mpi4jax.linalg.multigrid`, which calls `operator` for each grid.
The number of iterations hardly depends on the number of cells.

The conductivity k is then recovered from the temperature u that it gives, by gradient descent for
its logarithm in each cell. The misfit is 1/2 int |grad(u - u_observed)|^2. One more solve, of the
adjoint equation, gives its gradient, and each rank gets the gradient of its own cells.
"""

import argparse

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

jax.config.update("jax_enable_x64", True)  # float32 rounds residuals of fine grids away

comm = MPI.COMM_WORLD
CART = comm.Create_cart(MPI.Compute_dims(comm.size, 2), periods=[False, False])
COARSEST = 8  # cells along each axis


def operator(block, k):
    """Return the function u -> -div(k grad u) of this rank's cells, and its diagonal."""
    k = mpi4jax.halo_exchange(block.with_ghosts(k), block, border="edge")
    x_faces = (k[1:, 1:-1] + k[:-1, 1:-1]) / 2
    y_faces = (k[1:-1, 1:] + k[1:-1, :-1]) / 2
    # A wall is only half a cell away from the center of a cell.
    (west, east), (south, north) = block.neighbors
    x_faces = x_faces.at[0].multiply(1 + (west is None)).at[-1].multiply(1 + (east is None))
    y_faces = y_faces.at[:, 0].multiply(1 + (south is None)).at[:, -1].multiply(1 + (north is None))
    cells = block.global_shape[0] ** 2

    def apply(u):
        u = mpi4jax.halo_exchange(block.with_ghosts(u), block, border=0.0, corners=False)
        x_flux = x_faces * jnp.diff(u[:, 1:-1], axis=0)
        y_flux = y_faces * jnp.diff(u[1:-1], axis=1)
        return -cells * (jnp.diff(x_flux, axis=0) + jnp.diff(y_flux, axis=1))

    return apply, cells * (x_faces[1:] + x_faces[:-1] + y_faces[:, 1:] + y_faces[:, :-1])


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--levels", type=int, default=4, help="each has twice the cells of the next"
    )
    parser.add_argument("--steps", type=int, default=40, help="of gradient descent")
    options = parser.parse_args()
    n = COARSEST * 2 ** (options.levels - 1)
    block = mpi4jax.grids.Block((n, n), CART, width=1)
    x, y = block.make(lambda i, j: ((i + 0.5) / n, (j + 0.5) / n))
    x, y = block.without_ghosts((x, y))
    laplace, _ = operator(block, jnp.ones_like(x))

    def total(x):
        return mpi4jax.allreduce(x.sum(), comm=comm) / n**2

    def temperature(log_k, preconditioned=True):
        k = jnp.exp(log_k)
        cycle = mpi4jax.linalg.multigrid(block, operator, k, levels=options.levels)
        M = cycle if preconditioned else None
        apply, _ = operator(block, k)
        return mpi4jax.linalg.cg(apply, jnp.ones_like(x), M=M, comm=comm, maxiter=1000)

    solve = jax.jit(temperature, static_argnums=1)
    truth = jnp.log(3.0) * jnp.exp(-20 * ((x - 0.3) ** 2 + (y - 0.4) ** 2))
    for name, preconditioned in (("none", False), ("multigrid", True)):
        observed, info = solve(truth, preconditioned)
        if comm.rank == 0:
            reason = mpi4jax.linalg.Reason(int(info.reason)).name
            print(f"{n} x {n} cells, {name}: {info.iterations} iterations, {reason}")

    @jax.jit
    @jax.value_and_grad
    def misfit(log_k):
        difference = temperature(log_k)[0] - observed
        return total(difference * laplace(difference)) / 2

    log_k = jnp.zeros_like(x)
    first, gradient = misfit(log_k)
    last = first
    slope = total(n**2 * gradient * truth)  # each rank has the gradient of its own cells
    (above, _), (below, _) = misfit(1e-3 * truth), misfit(-1e-3 * truth)
    for _ in range(options.steps):
        log_k -= 25 * n**2 * gradient
        last, gradient = misfit(log_k)
    error = (total((log_k - truth) ** 2) / total(truth**2)) ** 0.5
    if comm.rank == 0:
        print(f"gradient {slope:.4e}, finite difference {(above - below) / 2e-3:.4e}")
        print(f"misfit {first:.3e} -> {last:.3e}, error of the conductivity {error:.4f}")


if __name__ == "__main__":
    main()
