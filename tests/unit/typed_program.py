"""A program that uses each public function, for the strict rules of pyright: it is never run.

`make lint-python` fails if the type of an expression is unknown, or if a result does not have the
type of the argument. `test_types.py` compares the names that this program uses with `__all__`.
"""

# pyright: strict

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import mpi4jax as with_tokens
import mpi4jax.notoken as mpi4jax
from mpi4jax import checkpoints, fft, ghosts, grids, linalg, output, sharding, training


class Fields(NamedTuple):
    u: Array
    v: Array


World = MPI.COMM_WORLD


def collectives(x: Array, f: Fields) -> None:
    assert_type(mpi4jax.allgather(f), Fields)
    assert_type(mpi4jax.allgatherv(x, [1]), Array)
    assert_type(mpi4jax.allreduce(f, op=mpi4jax.MEAN), Fields)
    assert_type(mpi4jax.allreduce(x, op=MPI.MAX), Array)
    assert_type(mpi4jax.alltoall(f), Fields)
    assert_type(mpi4jax.alltoallv(x, [1], [1]), Array)
    assert_type(mpi4jax.maxloc(x, 1), tuple[Array, Array])
    assert_type(mpi4jax.minloc(x, 1), tuple[Array, Array])
    assert_type(mpi4jax.assert_equal(f), Fields)
    assert_type(mpi4jax.bcast(f), Fields)
    assert_type(mpi4jax.exscan(f), Fields)
    assert_type(mpi4jax.gather(f), Fields)
    assert_type(mpi4jax.gatherv(x, [1]), Array)
    assert_type(mpi4jax.pvary(f), Fields)
    assert_type(mpi4jax.ragged_alltoall(f, x, 3), tuple[Fields, Array])
    assert_type(mpi4jax.reduce(f), Fields)
    assert_type(mpi4jax.reduce_scatter(f), Fields)
    assert_type(mpi4jax.reduce_scatterv(x, [1]), Array)
    assert_type(mpi4jax.reproducible_sum(f), Fields)
    assert_type(mpi4jax.scan(f), Fields)
    assert_type(mpi4jax.scatter(f), Fields)
    assert_type(mpi4jax.scatterv(x, [1], comm=mpi4jax.default_comm()), Array)
    mpi4jax.barrier()
    mpi4jax.flush()
    mpi4jax.flush("save")
    assert_type(mpi4jax.transport_info(), mpi4jax.TransportInfo)
    gpus = mpi4jax.has_cuda_support(), mpi4jax.has_hip_support(), mpi4jax.has_sycl_support()
    assert_type(gpus, tuple[bool, bool, bool])


def messages(f: Fields) -> None:
    mpi4jax.send(f, 0, tag=1)
    assert_type(mpi4jax.recv(f, 0, status=MPI.Status()), Fields)
    assert_type(mpi4jax.sendrecv(f, f, 0, 0), Fields)
    assert_type(mpi4jax.permute(f, [(0, 0)]), Fields)
    assert_type(mpi4jax.recv_with_status(f), tuple[Fields, mpi4jax.Received])
    assert_type(mpi4jax.sendrecv_with_status(f, f, 0, 0), tuple[Fields, mpi4jax.Received])


def nonblocking(x: Array, f: Fields) -> None:
    request = mpi4jax.iallreduce(f)
    assert_type(request, mpi4jax.Request[Fields])
    x = mpi4jax.after(request, x)
    assert_type(mpi4jax.wait(request, after=x), Fields)
    assert_type(mpi4jax.waitall([mpi4jax.ibcast(x), mpi4jax.ipvary(x)]), list[Array])
    mpi4jax.wait(mpi4jax.isend(x, 0))
    mpi4jax.wait(mpi4jax.ibarrier())
    for started in (mpi4jax.iallgather, mpi4jax.ialltoall, mpi4jax.iexscan, mpi4jax.igather):
        assert_type(mpi4jax.wait(started(f)), Fields)
    for started in (mpi4jax.ireduce, mpi4jax.ireduce_scatter, mpi4jax.iscan, mpi4jax.iscatter):
        assert_type(mpi4jax.wait(started(f)), Fields)
    for started in (mpi4jax.iallgatherv, mpi4jax.igatherv, mpi4jax.ireduce_scatterv):
        assert_type(mpi4jax.wait(started(x, [1])), Array)
    assert_type(mpi4jax.wait(mpi4jax.iscatterv(x, [1])), Array)
    assert_type(mpi4jax.wait(mpi4jax.ialltoallv(x, [1], [1])), Array)
    assert_type(mpi4jax.wait(mpi4jax.ipermute(f, [(0, 0)])), Fields)
    assert_type(mpi4jax.wait(mpi4jax.irecv(f, 0)), Fields)
    assert_type(mpi4jax.wait(mpi4jax.isendrecv(f, f, 0, 0)), Fields)
    assert_type(mpi4jax.wait(mpi4jax.iragged_alltoall(f, x, 3)), tuple[Fields, Array])
    token = with_tokens.barrier()
    with_tokens.allreduce(x, op=MPI.SUM, token=token)
    assert_type(with_tokens.create_token(), Array)


@mpi4jax.auto_tokenize
def unchanged(x: Array, f: Fields) -> Fields:
    return f


def with_decorators(x: Array, f: Fields) -> None:
    assert_type(unchanged(x, f), Fields)
    # `mpi4jax.jit` is `jax.jit`, whose annotations leave types open.
    mpi4jax.jit(unchanged)  # pyright: ignore[reportUnknownMemberType]


def on_grids(x: Array, f: Fields) -> None:
    cart = World.Create_cart([World.size], periods=[True])
    block = grids.Block((8, 8), cart, width=1)
    assert_type(mpi4jax.redistribute(x, block, block.layout), Array)
    for grid in (cart, block):
        assert_type(mpi4jax.halo_exchange(f, grid, border="edge"), Fields)
        assert_type(mpi4jax.wait(mpi4jax.ihalo_exchange(f, grid)), Fields)
        assert_type(mpi4jax.halo_add(f, grid), Fields)
        assert_type(mpi4jax.scatter_blocks(f, grid), Fields)
        assert_type(mpi4jax.gather_blocks(f, grid), Fields)
        assert_type(grids.overlapped(lambda y: y.u + y.v, f, grid), Array)
    assert_type(mpi4jax.neighbor_allgather(f, cart), Fields)
    assert_type(mpi4jax.wait(mpi4jax.ineighbor_alltoall(f, cart)), Fields)
    assert_type(mpi4jax.wait(mpi4jax.ineighbor_allgather(f, cart)), Fields)
    assert_type(mpi4jax.neighbor_alltoall(f, cart), Fields)
    grids.regions((8, 8), [(1, 1)])
    assert_type(grids.balanced([1.0], 1), list[int])
    borders = [grids.neumann(), grids.dirichlet(0.0)]
    mpi4jax.halo_exchange(f, cart, border=borders)
    assert_type(block.without_ghosts(block.with_ghosts(f)), Fields)
    assert_type(block.indices(), tuple[Array, ...])
    layout = mpi4jax.Layout((8, 8), {0: 1})
    assert_type(fft.ifftn(fft.fftn(x, layout), layout), Array)
    assert_type(fft.dctn(x, layout), Array)
    assert_type(fft.idctn(x, layout) + fft.dstn(x, layout) + fft.idstn(x, layout), Array)
    assert_type(fft.irfftn(fft.rfftn(x, layout), layout), Array)
    assert_type(fft.frequencies(layout), tuple[Array, ...])
    other = fft.spectral_layout(layout)
    assert_type(mpi4jax.redistribute(f, layout, other), Fields)
    assert_type(mpi4jax.migrate(f, x, 10), tuple[Fields, Array])
    plan = ghosts.Plan([1], [2])
    assert_type(plan.add(plan.fill(f)), Fields)
    assert_type(mpi4jax.wait(plan.ifill(f)), Fields)


def solvers(b: Fields) -> None:
    def twice(v: Fields) -> Fields:
        return Fields(2 * v.u, 2 * v.v)

    assert_type(linalg.cg(twice, b, M=twice), tuple[Fields, linalg.Info])
    assert_type(linalg.bicgstab(twice, b), tuple[Fields, linalg.Info])
    assert_type(linalg.gmres(twice, b, b), tuple[Fields, linalg.Info])
    assert_type(linalg.minres(twice, b)[1].converged, Array)
    # The unknowns of a least-squares problem do not have the structure of `b`.
    assert_type(linalg.lsmr(twice, b, b), tuple[Any, linalg.Info])
    assert_type(linalg.vdot(b, b) + linalg.norm(b), Array)
    assert_type(linalg.Reason(1), linalg.Reason)
    assert_type(linalg.host_solve(np.sqrt, b.u), Array)
    linalg.cg(twice, b, M=linalg.block_jacobi(b.u))
    cart = World.Create_cart([World.size], periods=[True])

    def operator(block: grids.Block) -> tuple[Callable[[Array], Array], Array]:
        return lambda v: 2 * v, b.u

    assert_type(
        linalg.multigrid(grids.Block((8,), cart, width=1), operator), Callable[[Array], Array]
    )


def files(f: Fields) -> None:
    checkpoints.save("state", f)
    assert_type(checkpoints.load("state", f), Fields)
    with checkpoints.AsyncCheckpointer() as checkpointer:
        checkpointer.save("state", f)
    assert_type(checkpoints.latest("state"), Path | None)
    output.append("fields.zarr", {"u": f.u}, time=0.0, dims={"u": ["x"]})


def sharded(f: Fields, xs: list[Array]) -> None:
    mesh: sharding.Mesh = mpi4jax.Mesh((1,), ("i",))
    layout = sharding.NamedSharding(mesh, sharding.PartitionSpec("i"))
    part = sharding.cut(f, layout)
    assert_type(sharding.join(part, layout), Fields)
    assert_type(sharding.device_put(f, layout), Fields)
    assert_type(mpi4jax.redistribute(f, layout, layout.layout((8,))), Fields)
    assert_type(fft.fftn(f.u, layout), Array)
    assert_type(training.clip_by_global_norm(f, P(), 1.0), Fields)
    assert_type(training.unshard(f, P(), "i"), Fields)
    assert_type(training.global_norm(f, P()), Array)
    assert_type(training.specs_for(f, training.fsdp_specs(f, mesh, "i")), Any)

    def layer(weights: Array, x: Array) -> Array:
        return weights * x

    assert_type(sharding.make_mesh((1,), ("i",)), mpi4jax.Mesh)
    assert_type(sharding.with_sharding_constraint(f, layout), Fields)
    assert_type(sharding.make_array_from_callback((2,), layout, lambda index: f.u), Array)
    sharding.jit(layer, in_shardings=layout, out_shardings=layout)
    for batch, weight in training.batches(xs):
        assert_type((batch, weight), tuple[Array, float])

    @mpi4jax.shard_map(mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    def doubled(x: Array) -> Array:
        return 2 * x

    assert_type(doubled(f.u), Array)

    @sharding.global_shard_map(mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    def of_whole_arrays(x: Array) -> Array:
        return 2 * x

    assert_type(of_whole_arrays(f.u), Array)
    with mpi4jax.time_limit(5.0):
        mpi4jax.barrier()
