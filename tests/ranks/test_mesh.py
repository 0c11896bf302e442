"""`mpi4jax.Mesh`: equal meshes are one object; which communicators it makes, and frees."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mpi4py import MPI
from reference import COMM, RANK, SIZE

import mpi4jax


def test_equal_meshes_are_one_object():
    mesh = mpi4jax.Mesh((1, SIZE), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    assert mesh is mpi4jax.Mesh((1, -1), ("i", "j"))
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
    assert (
        len({mesh, mpi4jax.Mesh((1, SIZE), ["i", "j"]), mpi4jax.Mesh((1, SIZE), ("j", "i"))}) == 2
    )
    assert mpi4jax.Mesh((1, SIZE), ("i", "j"), comm=MPI.COMM_WORLD) != mesh
    with pytest.raises(TypeError, match=r"Mesh\('i': 1, 'j': .* cannot be pickled.*axis_sizes"):
        pickle.dumps(mesh)


def test_names_of_a_mesh_of_jax():
    mesh = mpi4jax.Mesh((1, SIZE), ("i", "j"), (AxisType.Auto,) * 2)
    assert not mesh.empty
    assert mesh.devices.shape == (1, SIZE)
    assert mesh.devices[0, mesh.coordinates["j"]] == RANK


def test_communicators_are_freed_with_that_of_the_mesh():
    comm = COMM.Dup()
    mesh = mpi4jax.Mesh((1, SIZE, 1), ("a", "b", "c"), comm=comm)
    assert mesh.comm("a") is mesh.comm(["c", "a"])
    assert mesh.comm(("b", "c")) is mesh.comm(("a", "b", "c"))
    assert len(mesh._comms) == min(2, SIZE)
    others = [c for axes, c in mesh._comms.items() if c.Get_size() < SIZE]
    comm.Free()
    assert all(c == MPI.COMM_NULL for c in others)


@pytest.mark.ranks(4)
def test_a_communicator_is_made_by_a_collective_that_is_traced():
    mesh = mpi4jax.Mesh((2, 2), ("i", "j"), comm=COMM.Dup())
    assert {*mesh._comms} == {("i",), ("j",), ("i", "j")}
    mesh._comms.pop(("i",)).Free()  # not made before, as for two axes of three
    f = mpi4jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    assert jax.jit(f)(jnp.ones(1)) == 2
    assert mesh.comm("i").Get_size() == 2


@pytest.mark.ranks(3, 4)
def test_a_mesh_of_fewer_ranks_leaves_the_others_out():
    """As in programs for JAX that make several meshes of different sizes."""
    comm = COMM.Dup()
    mesh = mpi4jax.Mesh((2,), ("i",), comm=comm)
    assert mesh is mpi4jax.Mesh((2,), ("i",), comm=comm)
    assert mesh.coordinates == ({"i": RANK} if RANK < 2 else {})
    how = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": (P(), P("i"))}

    def blocks(w, x):
        return lax.psum(jnp.sum(w * x), "i"), x + lax.axis_index("i")

    x = jnp.arange(4.0)
    eager = mpi4jax.shard_map(blocks, **how)(2.0, x[2 * RANK :][:2])
    found = [eager, jax.jit(mpi4jax.shard_map(blocks, **how))(2.0, x[2 * RANK :][:2])]
    whole = mpi4jax.sharding.global_shard_map(blocks, **how)(2.0, x)
    if RANK < 2:
        for loss, rest in found:
            assert loss == 12
            np.testing.assert_array_equal(rest, x[2 * RANK :][:2] + RANK)
        assert whole[0] == 12
        np.testing.assert_array_equal(whole[1], [0, 1, 3, 4])
        loss = mpi4jax.shard_map(lambda w, x: blocks(w, x)[0], **{**how, "out_specs": P()})
        assert jax.grad(loss)(2.0, x[2 * RANK :][:2]) == 6
    else:
        assert [*found, whole] == [(None, None)] * 3
        with pytest.raises(ValueError, match=r"not in Mesh\('i': 2\), which has the first 2 ranks"):
            mesh.comm("i")
    # The next collective of all ranks is in step.
    assert mpi4jax.allreduce(jnp.ones(()), op=MPI.SUM, comm=comm)[0] == SIZE
    of_mesh = mesh.comm("i") if RANK < 2 else None
    comm.Free()
    assert of_mesh is None or of_mesh == MPI.COMM_NULL


@pytest.mark.ranks(4)
def test_axes_of_a_users_communicator():
    mesh = mpi4jax.Mesh((2, 2), ("i", "j"))
    i, j = mesh.coordinates.values()
    for color, axes in ((j, {"i"}), (i, {"j"}), (0, {"i", "j"}), (i == j, None), (RANK == 0, None)):
        comm = COMM.Split(color)
        found = mesh.axes_of(mpi4jax._op.comm.as_comm("test", comm))
        assert found == axes or (comm.size == 1 and found == set()), (color, axes)
        comm.Free()


def test_the_mesh_of_a_with_statement():
    outer, inner = (mpi4jax.Mesh((SIZE,), (name,)) for name in "ij")
    index = lambda name: mpi4jax.shard_map(
        lambda: lax.axis_index(name)[None], in_specs=(), out_specs=P(name)
    )
    with outer:
        with inner:
            assert index("j")() == RANK
        assert index("i")() == RANK
    with pytest.raises(TypeError, match=r"got NoneType; pass mesh=.*with mesh:"):
        index("i")()


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="jit has no contexts")
@pytest.mark.parametrize("kind", ["blocks", "global"])
def test_a_function_without_a_mesh_takes_the_mesh_of_its_calls(kind):
    make = mpi4jax.shard_map if kind == "blocks" else mpi4jax.sharding.global_shard_map

    @jax.jit
    @make(in_specs=P("i"), out_specs=P())  # like a function of a module: no mesh is made yet
    def size(x):
        return lax.psum(jnp.ones_like(x), "i")

    x = jnp.ones(1 if kind == "blocks" else SIZE)
    whole, pairs = mpi4jax.Mesh((SIZE,), ("i",)), mpi4jax.Mesh((SIZE, 1), ("j", "i"))
    for mesh in (whole, pairs, whole):
        with mesh:  # what jit has traced for one mesh is not used for another
            assert size(x)[0] == mesh.shape["i"]
    assert SIZE == 1 or size._cache_size() == 2


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="JAX has no set_mesh")
def test_an_error_names_the_mesh_of_devices_that_is_set():
    f = mpi4jax.shard_map(lambda x: x, mesh=mpi4jax.Mesh(), in_specs=P("i"), out_specs=P("i"))
    mesh = jax.make_mesh((1,), ("devices",), devices=jax.local_devices()[:1])
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"mesh of devices, .'devices': 1.; make it with mpi4jax"),
    ):
        f(jnp.ones(2))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (lambda: mpi4jax.Mesh((SIZE, 2, -1), ("a", "b", "c")), ValueError, "multiply to the size"),
        (lambda: mpi4jax.Mesh((SIZE, 2), ("a", "b")), ValueError, "multiply to at most the size"),
        (lambda: mpi4jax.Mesh((0,), ("a",)), ValueError, "multiply to at most the size"),
        (lambda: mpi4jax.Mesh((-1, -1), ("a", "b")), ValueError, "multiply to the size"),
        (lambda: mpi4jax.Mesh(axis_types=(AxisType.Manual,)), NotImplementedError, "AxisType.Auto"),
        (lambda: mpi4jax.Mesh(np.array(jax.devices())), TypeError, r"use mpi4jax.Mesh\(\(1,\), "),
        (lambda: mpi4jax.Mesh(jax.devices(), ("x",)), TypeError, r"use mpi4jax.Mesh\(\(1,\), "),
        (lambda: mpi4jax.Mesh(np.arange(4), ("x",)), TypeError, r"use mpi4jax.Mesh\(\(4,\), "),
        (lambda: mpi4jax.Mesh().comm("k"), ValueError, r"axes of the mesh, \('i',\); got 'k'"),
        (lambda: NamedSharding(mpi4jax.Mesh(), P("i")), AttributeError, "not devices"),
    ],
)  # fmt: skip
def test_wrong_meshes(wrong, kind, words):
    with pytest.raises(kind, match=words):
        wrong()
