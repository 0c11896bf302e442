"""Transport a tracer on a random triangulation, and find by the adjoint where it came from.

    mpiexec -n 4 python examples/finite_volumes.py --save-figure tracer.png

The square is divided into triangles with random corners (finite volumes). Each rank owns some
triangles, and needs the values of those that share a side with its own: `mpi4jax.ghosts` fetches
them. A vortex carries the tracer (upwind). Then the tracer diffuses in an implicit step, whose
linear equations `mpi4jax.linalg` solves by conjugate gradients. Both are sums over the three sides
of each triangle; the second one is a product with a sparse matrix.

The goal is the tracer in a disc at the end. Its gradient with respect to the tracer at the
beginning is computed backwards through all steps: `plan.fill` becomes `plan.add`, and the solves
become solves. The model is linear, so the inner product of the gradient with the initial tracer
must equal the goal.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from scipy.spatial import Delaunay

import mpi4jax.notoken as mpi4jax

DIFFUSIVITY = 2e-4


def bisect(places, parts: int):
    """Return which part each place is in: cut across the longer direction, as equally as can be."""
    part = np.zeros(len(places), int)
    if parts == 1 or not len(places):
        return part
    axis = np.argmax(np.ptp(places, axis=0))
    order = np.argsort(places[:, axis], kind="stable")
    low, high = np.split(order, [len(places) * (parts // 2) // parts])
    part[low] = bisect(places[low], parts // 2)
    part[high] = parts // 2 + bisect(places[high], parts - parts // 2)
    return part


class Mesh:
    """This rank's triangles, and their sides.

    All ranks make the whole triangulation here, as it is small. From then on they know their own
    triangles and the ids of those beside them, as if each had read its part of a file.
    """

    def __init__(self, comm: MPI.Intracomm, corners: int):
        rng = np.random.default_rng(4)
        edge = np.linspace(0, 1, max(4, int(corners**0.5)))
        points = np.concatenate(
            [rng.random((corners, 2)), *([[t, 0], [t, 1], [0, t], [1, t]] for t in edge)]
        )
        points = np.unique(points, axis=0)
        whole = Delaunay(points)
        centers = points[whole.simplices].mean(axis=1)
        self.ids = np.nonzero(bisect(centers, comm.size) == comm.rank)[0]

        corners_of = points[whole.simplices[self.ids]]
        beside = whole.neighbors[self.ids]  # the triangle opposite to each corner, -1 for none
        needed = np.setdiff1d(beside[beside >= 0], self.ids)
        self.plan = mpi4jax.ghosts.Plan(self.ids, needed, comm=comm)
        local = {id_: place for place, id_ in enumerate(np.concatenate([self.ids, needed]))}
        self.beside = np.array([[local.get(b, 0) for b in row] for row in beside]).reshape(-1, 3)

        sides = np.roll(corners_of, -2, axis=1) - np.roll(corners_of, -1, axis=1)
        a, b = corners_of[:, 1] - corners_of[:, 0], corners_of[:, 2] - corners_of[:, 0]
        turn = np.sign(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0])[:, None, None]
        self.area = np.abs(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2
        self.center = centers[self.ids]
        self.corners = corners_of
        normals = turn * np.stack([sides[..., 1], -sides[..., 0]], axis=-1)  # as long as the side
        inside = beside >= 0
        # The flow through a side is the difference of the stream function at its ends, so the flows
        # into a triangle add up to zero.
        ends = [self.stream(np.roll(corners_of, -k, axis=1)) for k in (1, 2)]
        self.flow = np.where(inside, turn[..., 0] * (ends[1] - ends[0]), 0)
        apart = np.linalg.norm(centers[beside] - self.center[:, None], axis=-1)
        self.conductance = np.where(inside, np.linalg.norm(normals, axis=-1) / apart, 0)

    @staticmethod
    def stream(places):
        return np.prod(np.sin(np.pi * places), axis=-1) ** 2

    def step_length(self, comm: MPI.Intracomm) -> float:
        """Return 0.9 times the longest step in which no triangle gives away more than it has."""
        outflow = np.maximum(self.flow, 0).sum(axis=1) / self.area
        return float(0.9 / comm.allreduce(outflow.max(initial=1e-9), MPI.MAX))


def make_model(mesh: Mesh, step: float, steps: int, comm: MPI.Intracomm):
    """Return a function that computes the final tracer from the initial one."""
    flow, conductance, area = (
        jnp.asarray(a, jnp.float32) for a in (mesh.flow, mesh.conductance, mesh.area)
    )

    def across(tracer):
        """Return the values across the three sides of each triangle."""
        return jnp.concatenate([tracer, mesh.plan.fill(tracer)])[mesh.beside]

    def implicit(tracer):
        loss = jnp.sum(conductance * (tracer[:, None] - across(tracer)), axis=1)
        return area * tracer + step * DIFFUSIVITY * loss

    def one_step(tracer, _):
        upwind = jnp.where(flow > 0, tracer[:, None], across(tracer))
        tracer = tracer - step / area * jnp.sum(flow * upwind, axis=1)
        tracer, _ = mpi4jax.linalg.cg(implicit, area * tracer, tracer, tol=1e-6, comm=comm)
        return tracer, None

    return lambda tracer: jax.lax.scan(jax.checkpoint(one_step), tracer, None, length=steps)[0]


def draw(path: Path, corners, fields):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection

    figure, axes = plt.subplots(1, len(fields), figsize=(15, 5), dpi=80, layout="constrained")
    for axis, (title, values) in zip(axes, fields.items(), strict=True):
        triangles = PolyCollection(corners, array=values, cmap="viridis")
        figure.colorbar(axis.add_collection(triangles), ax=axis)
        axis.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal")
    figure.savefig(path)
    print("wrote", path)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corners", type=int, default=4000, metavar="N")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", type=Path, metavar="PATH", help="fields and gradient, a .npz")
    parser.add_argument("--save-figure", type=Path, metavar="PATH", help="a PNG")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    mesh = Mesh(comm, args.corners)
    model = make_model(mesh, mesh.step_length(comm), args.steps, comm)
    area = jnp.asarray(mesh.area, jnp.float32)
    to_drop, to_disc = (np.linalg.norm(mesh.center - at, axis=1) for at in ([0.3, 0.5], [0.6, 0.6]))
    first = jnp.asarray(np.exp(-((to_drop / 0.1) ** 2)), jnp.float32)
    disc = jnp.asarray(to_disc < 0.15, jnp.float32)

    def goal(tracer):
        last = model(tracer)
        return mpi4jax.allreduce(jnp.sum(disc * area * last), comm=comm), last

    (value, last), gradient = jax.jit(jax.value_and_grad(goal, has_aux=True))(first)
    sums = jnp.stack([jnp.sum(area * first), jnp.sum(area * last), jnp.sum(gradient * first)])
    mass, final_mass, product = (float(v) for v in mpi4jax.allreduce(sums, comm=comm))

    gathered = comm.gather([mesh.ids, mesh.corners, *map(np.asarray, (first, last, gradient))])
    if gathered is None:  # not on rank 0
        return
    ids, *rest = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    corners, first, last, gradient = (part[np.argsort(ids)] for part in rest)
    print(
        f"{len(ids)} triangles on {comm.size} ranks, {args.steps} steps: goal {float(value):.6f}, "
        f"gradient times tracer {product:.6f}, mass changed by {abs(final_mass / mass - 1):.0e}"
    )
    if args.save:
        np.savez(args.save, last=last, gradient=gradient, goal=float(value), product=product)
    if args.save_figure:
        titles = "the tracer", "at the end", "what the disc at the end is made of"
        fields = dict(zip(titles, (first, last, gradient), strict=True))
        draw(args.save_figure, corners, fields)


if __name__ == "__main__":
    main()
