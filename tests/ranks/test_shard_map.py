"""`mpi4jax.shard_map`: the same functions on devices of one process, and on ranks."""

import re

import devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spmd_programs
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from mpi4py import MPI
from reference import COMM, RANK as R, SIZE as N
from spmd import PROGRAMS, SLOW, SPECS, Program, arguments, meshes, results, ring, vary

import mpi4jax
from mpi4jax import notoken

ROWS = P("i")
CONGRUENT = COMM.Dup()
CASES = [(name, mesh) for name, p in PROGRAMS.items() for mesh in meshes(p, N)]
# What JAX, too, refuses outside of `jit`: mutable arrays.
EAGERLY = [
    (name, mesh)
    for name, mesh in CASES
    if PROGRAMS[name].f.__module__ in ("spmd_collectives", "spmd_inside")
    and name != "mutable_arrays"
    and PROGRAMS[name].kind == "lines"
]
ON_LINES = [case for case in CASES if PROGRAMS[case[0]].kind == "lines"]
CHECKED = ON_LINES[::8]
# Those that depend most on how many ranks there are: `make test` runs them on 1 and 4, too.
ON_GRIDS = [case for case in CASES if PROGRAMS[case[0]].kind == "grids"]
# Random functions, each for a mesh of its own; those for `make test-matrix` alone.
ON_MESHES = [case for case in CASES if PROGRAMS[case[0]].kind == "meshes"]
MORE = [case for case in CASES if PROGRAMS[case[0]].kind == "more meshes"]


@pytest.fixture(scope="module")
def on_devices(request):
    """What JAX gives on virtual devices of one process, by programs and meshes; made once."""
    return devices.on_devices(spmd_programs.__file__, request.param, N, sources="spmd*.py")


def part(mesh, tree, specs):
    """What this rank has of global arrays."""

    def of_leaf(x, spec):
        for axis, names in enumerate(spec):
            if names is not None:
                names = names if isinstance(names, tuple) else (names,)
                k = int(np.prod([mesh.shape[name] for name in names]))
                x = np.split(np.asarray(x), k, axis)[mesh.index_along(names)]
        return x if x.dtype == jax.dtypes.float0 else jnp.asarray(x)

    is_spec = lambda s: isinstance(s, P)
    return jax.tree.map(
        lambda s, t: jax.tree.map(lambda x: of_leaf(x, s), t), specs, tree, is_leaf=is_spec
    )


def cases(kind, found):
    return [
        pytest.param(name, grid, kind, id=f"{name}-{grid}".replace(" ", "")) for name, grid in found
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, grid, on_devices", cases("lines", ON_LINES), indirect=["on_devices"]
)
def test_ranks_as_devices(name, grid, on_devices):
    compare(name, grid, on_devices)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, grid, on_devices", cases("grids", ON_GRIDS), indirect=["on_devices"]
)
def test_ranks_of_a_grid_as_devices(name, grid, on_devices):
    compare(name, grid, on_devices)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, grid, on_devices", cases("lines", EAGERLY), indirect=["on_devices"])
def test_ranks_as_devices_outside_of_jit(name, grid, on_devices):
    """Evaluated equation by equation, values and the derivatives that are taken outside."""
    compare(name, grid, on_devices, jit=lambda f: f)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, grid, on_devices", cases("meshes", ON_MESHES), indirect=["on_devices"]
)
def test_random_functions_over_a_mesh(name, grid, on_devices):
    compare(name, grid, on_devices)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, grid, on_devices", cases("meshes", ON_MESHES[::2]), indirect=["on_devices"]
)
def test_random_functions_over_a_mesh_outside_of_jit(name, grid, on_devices):
    compare(name, grid, on_devices, jit=lambda f: f)


@pytest.mark.one_in(2**33)  # none, but with -k or MPI4JAX_TEST_ALL
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, grid, on_devices", cases("more meshes", MORE), indirect=["on_devices"]
)
def test_more_random_functions_over_a_mesh(name, grid, on_devices):
    compare(name, grid, on_devices)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, grid, on_devices", cases("lines", CHECKED), indirect=["on_devices"])
def test_ranks_as_devices_with_checks_of_jax(name, grid, on_devices):
    """JAX checks the types in each function that it makes of what is rewritten."""
    with jax.enable_checks(True):
        compare(name, grid, on_devices)


def compare(name, grid, on_devices, jit=jax.jit):
    p, (shape, axes) = PROGRAMS[name], grid
    mesh, known = mpi4jax.Mesh(shape, axes, comm=COMM), on_devices[name, shape]
    assert not isinstance(known, str), known

    def mapped(f, ins, outs):
        how = {"in_specs": ins, "out_specs": outs, "check_vma": p.check_vma, **p.how}
        return mpi4jax.shard_map(f, mesh=mesh, **how)

    def of_rank(tree, specs):
        return part(mesh, tree, specs)

    args = of_rank(arguments(p, N), p.ins)
    found = results(p, axes, mapped, args, of_rank, known, jit)
    assert found.keys() == known.keys() - (set() if jit is jax.jit else {*SLOW})
    for what, value in found.items():
        expected = of_rank(known[what], p.outs if SPECS.get(what) else p.ins)
        assert jax.tree.structure(value) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype, what
            assert a.shape == b.shape, what
            exact = p.is_exact and what == "value"
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 5e-5, "atol": 1e-5}
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, err_msg=what, **close)


# ---- What JAX itself cannot run on CPUs


def ranks(f, ins, outs, mesh=None, **how):
    mesh = mesh or mpi4jax.Mesh(comm=COMM)
    return jax.jit(mpi4jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, **how))


def test_pbroadcast():
    x = jnp.arange(3.0) + 10 * R
    f = ranks(lambda x: lax.pbroadcast(x, "i", N - 1), ROWS, ROWS)
    np.testing.assert_array_equal(f(x), jnp.arange(3.0) + 10 * (N - 1))
    (c,) = jax.vjp(f, x)[1](x)
    expected = N * jnp.arange(3.0) + 10 * sum(range(N)) if R == N - 1 else jnp.zeros(3)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.ranks(4)
def test_ppermute_numbers_ranks_in_the_order_of_the_mesh():
    """Also where the names are in another: as JAX up to 0.11, and with its check switched off."""
    f = ranks(
        lambda x: lax.ppermute(x, ("b", "a"), ring(N)),
        P(("a", "b")),
        P(("a", "b")),
        mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM),
    )
    assert f(jnp.full(1, R))[0] == (R - 1) % N


def sent(source, dest):
    return 1 + (source + dest) % 2


def test_ragged_all_to_all():
    """Rank r sends to rank k one row or two, from the rows 2k and 2k+1; each lies where it fits."""
    first = np.array([sum(sent(k, R) for k in range(s)) for s in range(N)])  # here, of each source

    def f(x):
        r, k = lax.axis_index("i"), jnp.arange(N)
        output = jnp.full((2 * N + 1, 2), -1.0) + 0 * x[:1]
        before = jnp.array([[sum(sent(j, d) for j in range(s)) for d in k] for s in range(N)])[r]
        return lax.ragged_all_to_all(
            x, output, 2 * k + 0 * r, sent(r, k), before, sent(k, r), axis_name="i"
        )

    x = (100.0 * R + jnp.arange(4.0 * N)).reshape(2 * N, 2)
    g = ranks(f, ROWS, ROWS)
    expected, seen = np.full((2 * N + 1, 2), -1.0), np.zeros((2 * N, 2))
    for s in range(N):
        for j in range(sent(s, R)):
            expected[first[s] + j] = 100 * s + 4 * R + 2 * j + np.arange(2)
        seen[2 * s : 2 * s + sent(R, s)] = 1
    np.testing.assert_array_equal(g(x), expected)
    np.testing.assert_array_equal(jax.vjp(g, x)[1](jnp.ones_like(expected))[0], seen)


# ---- Errors


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda x: x, ValueError, "replication|varying|out_specs"),
        (
            lambda x: lax.scan(lambda c, v: (c + v, None), jnp.zeros(()), x)[0],
            TypeError,
            "varying",
        ),
    ],
    ids=["promise", "carry"],
)
def test_checks_of_jax(f, error, words):
    mesh = mpi4jax.Mesh(comm=COMM)
    with pytest.raises(error, match=words):
        mpi4jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=P())(jnp.ones(3))


def test_arguments():
    how = {"in_specs": ROWS, "out_specs": ROWS}
    with pytest.raises(TypeError, match=r"argument .mesh. must be a mpi4jax\.Mesh"):
        mpi4jax.shard_map(lambda x: x, mesh=jax.sharding.AbstractMesh((N,), ("i",)), **how)
    with pytest.raises(TypeError, match="argument 'f' must be a function, got int"):
        mpi4jax.shard_map(3, mesh=mpi4jax.Mesh(comm=COMM), **how)
    with pytest.raises(
        ValueError, match=f"multiply to at most the size of the communicator, {N}; got"
    ):
        mpi4jax.Mesh((N + 1,), comm=COMM)
    with pytest.raises(ValueError, match="a different name for each of the 2 axes"):
        mpi4jax.Mesh((N, 1), ("a", "a"), comm=COMM)
    with pytest.raises(TypeError, match="'axis_names' must be names"):
        mpi4jax.Mesh(axis_names=(3,), comm=COMM)


def test_mesh_of_a_cartesian_communicator():
    cart = COMM.Create_cart(MPI.Compute_dims(N, 2))
    mesh = mpi4jax.Mesh(axis_names=("a", "b"), comm=cart)
    assert mesh.axis_sizes == tuple(cart.dims)
    assert list(mesh.coordinates.values()) == cart.Get_coords(cart.rank)
    assert mesh.comm("a").size == cart.dims[0]
    assert repr(mesh) == f"Mesh('a': {cart.dims[0]}, 'b': {cart.dims[1]})"
    cart.Free()


# ---- Operations of mpi4jax inside


def own(x, k):
    return jnp.stack([x * (j + k) for j in range(N)])


# Each beside the same of JAX's collectives, of a value of each rank and a replicated one.
PAIRS = {
    "allreduce": (
        lambda x, w, comm: notoken.allreduce(x * w, MPI.SUM, comm=comm),
        lambda x, w: lax.psum(x * w, "i"),
        P(),
    ),
    "allreduce of a replicated value": (
        lambda x, w, comm: notoken.allreduce(jnp.sin(w), mpi4jax.MEAN, comm=comm),
        lambda x, w: lax.pmean(jnp.sin(w), "i"),
        P(),
    ),
    "allgather": (
        lambda x, w, comm: notoken.allgather(x * w, comm=comm),
        lambda x, w: lax.psum(jnp.zeros((N, 3)).at[lax.axis_index("i")].set(x * w), "i"),
        P(),
    ),
    "bcast": (
        lambda x, w, comm: notoken.bcast(x * w, N - 1, comm=comm),
        lambda x, w: lax.psum(jnp.where(lax.axis_index("i") == N - 1, x * w, 0), "i"),
        P(),
    ),
    "permute of a replicated value": (
        lambda x, w, comm: notoken.permute(jnp.sin(w), ring(N), comm=comm) * x,
        lambda x, w: lax.ppermute(jnp.sin(w), "i", ring(N)) * x,
        ROWS,
    ),
    "sendrecv": (
        lambda x, w, comm: notoken.sendrecv(
            x * w, jnp.zeros(3), (R - 1) % N, (R + 1) % N, comm=comm
        ),
        lambda x, w: lax.ppermute(x * w, "i", ring(N)),
        ROWS,
    ),
    "alltoall": (
        lambda x, w, comm: notoken.alltoall(own(x * w, 1.0), comm=comm).sum(0),
        lambda x, w: lax.all_to_all(own(x * w, 1.0), "i", 0, 0).sum(0),
        ROWS,
    ),
    "reduce_scatter": (
        lambda x, w, comm: notoken.reduce_scatter(own(x * w, 2.0), MPI.SUM, comm=comm),
        lambda x, w: lax.psum_scatter(own(x * w, 2.0), "i"),
        ROWS,
    ),
    "scan": (
        lambda x, w, comm: notoken.scan(x * w, MPI.SUM, comm=comm),
        # Not jnp.cumsum: XLA's, on CPUs, is wrong where only the row in the middle is not zero.
        lambda x, w: jnp.tril(jnp.ones((N, N)))[lax.axis_index("i")] @ lax.all_gather(x * w, "i"),
        ROWS,
    ),
    "iallreduce": (
        lambda x, w, comm: mpi4jax.wait(mpi4jax.iallreduce(x * w, MPI.SUM, comm=comm)),
        lambda x, w: lax.psum(x * w, "i"),
        P(),
    ),
    "ipermute": (
        lambda x, w, comm: mpi4jax.wait(mpi4jax.ipermute(x * w, ring(N), comm=comm)),
        lambda x, w: lax.ppermute(x * w, "i", ring(N)),
        ROWS,
    ),
    "pvary": (
        lambda x, w, comm: mpi4jax.pvary(x * jnp.sin(mpi4jax.pvary(w, comm=comm)), comm=comm),
        lambda x, w: x * jnp.sin(w),
        ROWS,
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("congruent", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_operations_inside(name, congruent, check_vma):
    """Values and derivatives are the same as JAX's, with another communicator, too."""
    operation, collective, outs = PAIRS[name]
    comm = CONGRUENT if congruent else COMM
    mesh = mpi4jax.Mesh(comm=COMM)

    def mapped(f, ins, outs):
        return mpi4jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)

    args = (jnp.arange(3.0) + R, jnp.arange(1.0, 4.0))
    found = []
    for f in (lambda x, w: operation(x, w, comm), collective):
        p = Program(f, (ROWS, P()), outs, (), check_vma=check_vma)
        found.append(results(p, ("i",), mapped, args))
    for what, value in found[0].items():
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(found[1][what]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=what)


def test_ipvary_is_for_functions_of_operations():
    f = mpi4jax.shard_map(mpi4jax.ipvary, mesh=mpi4jax.Mesh(), in_specs=P(), out_specs=P())
    with pytest.raises(NotImplementedError, match="ipvary: inside of mpi4jax"):
        f(jnp.ones(3))


def test_ghost_cells_and_a_sum_in_one_function():
    """On a ring, as with permutations."""
    cart = COMM.Create_cart([N], periods=[True])
    mesh = mpi4jax.Mesh(axis_names="i", comm=cart)

    def exchanged(u, w):
        v = notoken.halo_exchange(jnp.pad(u * w, 1), cart)
        return lax.psum(jnp.sum(jnp.sin(v[2:] - v[:-2])), "i")

    def permuted(u, w):
        left = lax.ppermute(u[-1:] * w, "i", ring(N))
        right = lax.ppermute(u[:1] * w, "i", ring(N, -1))
        v = jnp.concatenate([left, u * w, right])
        return lax.psum(jnp.sum(jnp.sin(v[2:] - v[:-2])), "i")

    u, found = jnp.arange(4.0) + R, []
    for f in (exchanged, permuted):
        g = ranks(f, (ROWS, P()), P(), mesh)
        inside = ranks(jax.grad(f, argnums=(0, 1)), (ROWS, P()), (ROWS, P()), mesh)
        found.append((g(u, 0.7), jax.grad(g, argnums=(0, 1))(u, 0.7), inside(u, 0.7)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    cart.Free()


@pytest.mark.min_ranks(2)
def test_operations_over_some_ranks_inside():
    """What ranks of no axis have in common is each rank's own, to JAX."""
    few = COMM.Split(R // 2, R)
    mesh = mpi4jax.Mesh(comm=COMM)

    def f(x, w):
        return notoken.allreduce(x * jnp.sin(w), MPI.SUM, comm=few) * (lax.axis_index("i") + 1)

    g = ranks(f, (ROWS, P()), ROWS, mesh)
    x, w = jnp.ones(2), jnp.arange(2.0)
    mine = [k for k in range(N) if k // 2 == R // 2]
    np.testing.assert_allclose(g(x, w), len(mine) * jnp.sin(w) * (R + 1), rtol=1e-6)
    dx, dw = jax.vjp(g, x, w)[1](jnp.ones(2))
    np.testing.assert_allclose(dx, sum(k + 1 for k in mine) * jnp.sin(w), rtol=1e-6)
    sizes = [len([j for j in range(N) if j // 2 == k // 2]) for k in range(N)]
    total = sum((k + 1) * m for k, m in enumerate(sizes))
    np.testing.assert_allclose(dw, total * jnp.cos(w), rtol=1e-6)
    with pytest.raises(ValueError, match="out_specs"):
        ranks(f, (ROWS, P()), P(), mesh)(x, w)
    few.Free()


# ---- What is compiled


def compiled(f, x):
    """What XLA runs, without names; and the names of lines in it."""
    text = jax.jit(f).lower(x).compile().as_text()
    lines = re.findall(r"line\\22: \\22([^\\]*)", text)
    text = re.sub(r", metadata=\{[^}]*\}|%[\w.-]+", "", text)
    text = re.sub(r"(line\\22: \\22)[^\\]*", r"\1", text)
    text = re.sub(r", \\22boundary\\22: \\22[^\\]*\\22", "", text)
    return [line for line in text.splitlines() if line.startswith("  ")], lines


@pytest.mark.min_ranks(2)
def test_one_psum_is_one_allreduce():
    """To the letter: the same custom call, and nothing beside it."""
    mesh = mpi4jax.Mesh(comm=COMM)

    def ours(x):
        return notoken.allreduce(x, MPI.SUM, comm=COMM)

    def theirs(x):
        return lax.psum(x, "i")

    theirs = mpi4jax.shard_map(theirs, mesh=mesh, in_specs=ROWS, out_specs=P())
    x = jnp.ones(())[None]
    (program, (line,)), (expected, _) = compiled(theirs, x), compiled(ours, x)
    assert program == expected
    assert line.startswith("test_shard_map.py:")
    assert "theirs" in line
    assert sum("mpi4jax_allreduce" in line for line in program) == 1


# ---- Control flow, spelling, local devices


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_collective_in_a_branch_that_varies(jit):
    mesh = mpi4jax.Mesh(comm=COMM)

    def branch(v):
        return vary(lax.psum(v, "i"))

    def cond(x):
        return lax.cond(
            x[0] > 0,
            branch,
            lambda v: v,
            x,
        )

    def loop(x):
        return lax.while_loop(lambda v: (v < 2 * N).all(), branch, x)

    first = branch.__code__.co_firstlineno + 1
    for f, name in ((cond, "cond"), (loop, "while")):
        g = jit(mpi4jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS))
        words = rf"test_shard_map.py:\d+: .*predicate of this {name} varies over \['i'\].*:{first},"
        with pytest.raises(ValueError, match=words):
            g(jnp.ones(2))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_branch_that_varies_without_a_collective(jit):
    """Its gradient is summed outside of the branch; JAX itself deadlocks."""
    mesh = mpi4jax.Mesh(comm=COMM)

    def f(w, x):
        y = lax.cond(lax.axis_index("i") == 0, lambda v: jnp.sin(w) * v * 2, lambda v: v, x)
        return lax.psum(y.sum(), "i")

    g = mpi4jax.shard_map(f, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    assert jit(g)(1.0, jnp.ones(2)) == pytest.approx(4 * np.sin(1) + 2 * (N - 1))
    assert jit(jax.grad(g))(1.0, jnp.ones(2)) == pytest.approx(4 * np.cos(1))


def test_each_eager_call_reads_what_the_program_has_now(capsys):
    state, mesh = {"w": 1.0}, mpi4jax.Mesh(comm=COMM)

    def f(w, x):
        print("block", x)
        total = lax.psum(x.sum(), "i")
        return total * w * state["w"] if total > 0 else -total

    g = mpi4jax.shard_map(f, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    for k in (1.0, 10.0):
        state["w"] = k
        assert g(1.0, jnp.ones(2)) == 2 * N * k
        assert jax.grad(g)(1.0, jnp.ones(2)) == 2 * N * k
        assert jax.vmap(g, (0, None))(jnp.ones(3), jnp.ones(2)).tolist() == [2 * N * k] * 3
    assert f"block At {{'i': {R}}}:\n[1. 1.]" in capsys.readouterr().out


def test_results_outside_of_jit_have_no_mesh():
    """Although JAX 0.10 gives the numbers of a branch types with the mesh."""
    mesh = mpi4jax.Mesh((1, N), ("a", "b"), comm=COMM)

    def halved(v):
        return lax.cond(v > 0, lambda v: 0.5 * v, lambda v: v, v)

    for axes in ({"b"}, {"a", "b"}):
        how = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": axes}
        y = mpi4jax.shard_map(jax.vmap(halved), mesh=mesh, **how)(jnp.arange(-1.0, 2.0))
        assert y.tolist() == [-1, 0, 0.5]
        assert jax.typeof(y) == jax.typeof(jnp.ones(3))


def test_nothing_is_compiled_again():
    mesh = mpi4jax.Mesh(comm=COMM)

    def layer(c, _):
        return jax.nn.gelu(c) + lax.pmean(c, "i"), None

    def call(x):
        f = lambda x: lax.psum(lax.scan(layer, x, None, length=2)[0], "i")
        return mpi4jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=P())(x)

    call(jnp.ones(2))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *a, **k: compiled.append(a))
        call(jnp.ones(2))
    assert not compiled


@pytest.mark.parametrize(
    ("args", "how", "words"),
    [
        ((), {"check_rep": False}, "unexpected argument 'check_rep'; write check_vma=False"),
        ((), {"auto": frozenset()}, "unexpected argument 'auto'; write axis_names="),
        ((), {"in_specs": None}, "argument 'in_specs' must be a PartitionSpec"),
        (
            (),
            {"unknown": 1},
            "unexpected argument 'unknown'; expected the arguments of jax.shard_map",
        ),
        ((3,), {}, r"got 2\. Pass the others by name: mesh="),
    ],
)
def test_other_spellings(args, how, words):
    given = {"mesh": mpi4jax.Mesh(comm=COMM), "in_specs": ROWS, "out_specs": ROWS, **how}
    with pytest.raises(TypeError, match=words):
        mpi4jax.shard_map(lambda x: x, *args, **given)


def test_local_devices():
    local, mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), mpi4jax.Mesh(comm=COMM)
    rows = P("d")
    on_devices = jax.shard_map(lambda y: 2 * y, mesh=local, in_specs=rows, out_specs=rows)
    on_ranks = mpi4jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    assert on_ranks(jax.jit(on_devices)(jnp.ones(1))).tolist() == [3]

    nested = mpi4jax.shard_map(on_devices, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(
        NotImplementedError, match=r"inside of mpi4jax.shard_map.*one after the other"
    ):
        jax.jit(nested)(jnp.ones(1))
    nested = jax.shard_map(on_ranks, mesh=local, in_specs=rows, out_specs=rows)
    with pytest.raises(NotImplementedError, match=r"inside of a jax.shard_map over"):
        jax.jit(nested)(jnp.ones(1))


@pytest.mark.min_ranks(2)
def test_gradients_are_one_message():
    mesh, params = mpi4jax.Mesh(comm=COMM), [(jnp.ones((3, 3)), jnp.ones(3))] * 5

    def loss(params, x):
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return lax.pmean(x.mean(), "i")

    mapped = mpi4jax.shard_map(loss, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    inside = mpi4jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    for f in (jax.grad(mapped), jax.value_and_grad(mapped), inside):
        text = jax.jit(f).lower(params, jnp.ones((2, 3))).as_text()
        assert len(re.findall("@mpi4jax_allreduce", text)) <= 1


@pytest.mark.min_ranks(2)
def test_permutations_of_a_tree_are_one_message():
    mesh = mpi4jax.Mesh(comm=COMM)
    f = mpi4jax.shard_map(
        lambda k, v: lax.ppermute((k, v), "i", ring(N)), mesh=mesh, in_specs=ROWS, out_specs=ROWS
    )
    x = jnp.arange(2.0) + 10 * R
    text = jax.jit(f).lower(x, x + 1).as_text()
    assert len(re.findall("@mpi4jax_permute", text)) == 1
    k, v = jax.jit(f)(x, x + 1)
    np.testing.assert_array_equal(k, jnp.arange(2.0) + 10 * ((R - 1) % N))
    np.testing.assert_array_equal(v, k + 1)
    (dk, dv) = jax.jit(jax.grad(lambda k, v: (f(k, v)[1] * x).sum(), (0, 1)))(x, x + 1)
    np.testing.assert_array_equal(dk, jnp.zeros(2))
    np.testing.assert_array_equal(dv, jnp.arange(2.0) + 10 * ((R + 1) % N))


def rule(kind):
    """A function whose derivative is by its rule: twice the true one."""
    if kind == "custom_jvp":
        f = jax.custom_jvp(jnp.sin)
        f.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))
    else:
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (2 * c * jnp.cos(x),))
    return f


@pytest.mark.parametrize("is_nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["", "without check_vma"])
def test_rules_in_a_shard_map_over_some_axes(kind, is_nested, check_vma):
    mesh, f = mpi4jax.Mesh((1, N), ("a", "b"), comm=COMM), rule(kind)
    how = {"mesh": mesh, "check_vma": check_vma}
    if is_nested:
        f = mpi4jax.shard_map(f, **how, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    g = mpi4jax.shard_map(
        lambda x: lax.psum(f(x).sum(), "b"), **how, in_specs=P("b"), out_specs=P(), axis_names={"b"}
    )
    x = jnp.arange(2.0) + R
    value, grad = jax.jit(jax.value_and_grad(g))(x)
    np.testing.assert_allclose(grad, 2 * jnp.cos(x), rtol=1e-6)
    everyones = jnp.sin(jnp.arange(2.0) + jnp.arange(N)[:, None])
    np.testing.assert_allclose(value, everyones.sum(), rtol=1e-5)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["", "without check_vma"])
def test_a_nested_shard_map_has_blocks(check_vma, jit):
    """Each rank computes on its block of a vector, and the blocks are gathered."""
    mesh, how = mpi4jax.Mesh((1, N), ("a", "b"), comm=COMM), {"check_vma": check_vma}

    def scaled(y):
        return y * lax.psum(y.sum(), "b") + lax.axis_index("b")

    def f(x):
        specs = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": {"b"}}
        return jax.shard_map(scaled, **specs, **how)(x) + lax.psum(x, "a")

    specs = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
    x = jnp.arange(2.0 * N)
    found = jit(mpi4jax.shard_map(f, mesh=mesh, **specs, **how))(x)
    np.testing.assert_allclose(found, x * x.sum() + x + jnp.repeat(jnp.arange(N), 2))


def test_a_function_without_a_result():
    seen = []
    f = mpi4jax.shard_map(seen.append, mesh=mpi4jax.Mesh(comm=COMM), in_specs=ROWS, out_specs=None)
    assert f(jnp.ones(2)) is None
    assert seen[0].shape == (2,)


@pytest.mark.parametrize("static", ["two", None])
def test_a_static_argument_has_none_as_its_spec(static):
    mesh = mpi4jax.Mesh(comm=COMM)

    def f(x, k):
        return lax.psum(2 * x if k == static else x, "i")

    mapped = mpi4jax.shard_map(f, mesh=mesh, in_specs=(ROWS, None), out_specs=P())
    for call in (mapped, jax.jit(mapped, static_argnums=1)):
        np.testing.assert_array_equal(call(jnp.ones(2), static), 2.0 * N * jnp.ones(2))


def test_a_rule_that_differentiates_a_function_with_a_rule():
    mesh = mpi4jax.Mesh(comm=COMM)
    inner = jax.custom_vjp(lambda x: lax.psum(jnp.sin(x), "i"))
    inner.defvjp(
        lambda x: (inner(x), x),
        lambda x, c: (3 * jnp.cos(x) * vary(c),),
    )
    outer = jax.custom_jvp(inner)

    @outer.defjvp
    def _(xs, ts):
        y, pullback = jax.vjp(inner, *xs)
        (g,) = pullback(jnp.ones_like(y))
        return y, lax.psum(g * ts[0], "i")

    f = mpi4jax.shard_map(outer, mesh=mesh, in_specs=ROWS, out_specs=P())
    x = jnp.arange(3.0) + R
    for grad in (jax.grad(lambda x: f(x).sum()), jax.jit(jax.grad(lambda x: f(x).sum()))):
        np.testing.assert_allclose(grad(x), 3 * jnp.cos(x), rtol=1e-6)
