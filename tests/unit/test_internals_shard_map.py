"""What `mpi4jax.shard_map` takes from JAX's internals; see `docs/jax-internals.md`."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.sharding import AxisType, PartitionSpec as P

import mpi4jax
from mpi4jax._jax import lines, named_axes, ranks, rewriting
from mpi4jax._jax.functions import equations
from mpi4jax._spmd.collectives import Collectives

X = jnp.ones(1)


def test_the_mark_of_a_mesh():
    """It stays where JAX changes the types of axes, and no other mesh has it."""
    world, other = object(), object()
    mesh, again, unlike = (ranks.mesh_of_ranks((2,), ("i",), w) for w in (world, world, other))
    manual = mesh.update_axis_types({"i": AxisType.Manual})
    assert manual.axis_types == (AxisType.Manual,) if hasattr(manual, "axis_types") else manual
    assert manual.manual_axes == ("i",)
    assert [named_axes.world_of(m) for m in (mesh, manual, again, unlike)] == [world] * 3 + [other]
    assert mesh != unlike
    assert mesh != named_axes.abstract_mesh((2,), ("i",))
    assert named_axes.world_of(named_axes.abstract_mesh((2,), ("i",))) is None
    assert named_axes.world_of(jax.make_mesh((1,), ("i",))) is None


def test_a_shard_map_over_devices_stays():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    how = {"in_specs": P("i"), "out_specs": P("i")}
    on_devices = jax.shard_map(lambda x: lax.psum(2 * x, "i"), mesh=mesh, **how, check_vma=False)
    on_ranks = mpi4jax.shard_map(lambda x: lax.pmax(x, "i") + x, mesh=mpi4jax.Mesh(), **how)
    f = jax.jit(lambda x: on_ranks(on_devices(x)))
    assert f(X) == 4
    assert jax.grad(lambda x: f(x)[0])(X) == 4
    with pytest.raises(NotImplementedError, match="ifferentiation rule for 'pmax'"):
        jax.grad(jax.shard_map(lambda x: lax.pmax(x, "i")[0], mesh=mesh, in_specs=P("i"),
                               out_specs=P()))(X)  # fmt: skip


def rewritten(f, made=None):
    """A function for a mesh of two, whose sums multiply by ten; ``made`` has their operands."""
    mesh = named_axes.abstract_mesh((2,), ("i",))
    how = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    closed = jax.make_jaxpr(jax.shard_map(f, **how))(jax.ShapeDtypeStruct((6,), np.float32))
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive is named_axes.shard_map_p)

    def ten_times(p, xs, types):
        if made is not None:
            made.extend(xs)
        return [10 * x for x in xs]

    table = {"psum": ten_times, "psum_invariant": ten_times, "pvary": lambda p, xs, types: xs}
    rewriter = rewriting.Rewriter(mesh, table, lambda *names: NotImplementedError(*names), True)
    return rewriter.function(ClosedJaxpr(eqn.params["jaxpr"], ()))


def values(jaxpr, *args):
    return rewriting.call(jaxpr, "f", args)


def test_equal_collectives_are_made_once():
    def f(x):
        y = lax.psum(x, "i")
        z = lax.psum(jnp.sin(x), "i")
        return x + y + z + lax.psum(x[:2], "i")[0]

    made = []
    jaxpr = rewritten(f, made)
    assert [x.shape for x in made] == [(3,), (2,)]
    (y,) = values(jaxpr, jnp.ones(3))
    np.testing.assert_allclose(y, 1 + 10 + 10 * np.sin(1) + 10, rtol=1e-6)
    # Each is on its own line, also where what it becomes was made before.
    found = [lines.eqn_line(e) for e in jaxpr.jaxpr.eqns if e.primitive is lax.mul_p]
    first = f.__code__.co_firstlineno
    assert found == [f"test_internals_shard_map.py:{first + k}" for k in (1, 2, 3)]


def test_what_is_rewritten_knows_of_no_mesh():
    def f(x):
        with set_xla_metadata(key="value"), jax.named_scope("scope"):
            y = jnp.sin(x)
        return jax.nn.relu(y) + lax.fori_loop(0, 2, lambda _, z: z + lax.psum(x, "i"), y)

    jaxpr = rewritten(f)
    assert all(named_axes.is_plain(v.aval) for e in jaxpr.jaxpr.eqns for v in e.outvars)
    assert all(e.ctx.cur_abstract_mesh.empty for e in jaxpr.jaxpr.eqns)
    (sin,) = (e for e in jaxpr.jaxpr.eqns if e.primitive is lax.sin_p)
    assert sin.ctx.xla_metadata == {"key": "value"}
    assert str(sin.source_info.name_stack) == "scope"
    text = str(jaxpr)
    assert "{V:i}" not in text
    assert "psum" not in text


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX has other names for it")
def test_effects_on_mutable_arrays():
    """Those name variables, so that everything is bound again there."""

    def f(x):
        r = jax.new_ref(x)
        r[...] += lax.psum(x, "i")
        lax.fori_loop(0, 2, lambda _, c: r.__setitem__(..., 2 * r[...]), None)
        return r[...]

    assert values(rewritten(f), jnp.ones(3))[0].tolist() == [44, 44, 44]


def test_parameters_of_a_jitted_function():
    """A call has the parameters of the jitted function; operands and results differ in number."""

    def f(*xs):
        return [x + 1 for x in xs[:1]]

    given = jax.make_jaxpr(jax.jit(f))(X, X, X, X)
    expected = dict(given.eqns[-1].params)
    (eqn,) = jax.make_jaxpr(lambda *xs: values(expected["jaxpr"], *xs))(X, X, X, X).eqns
    assert eqn.primitive.name == given.eqns[-1].primitive.name
    assert eqn.params == expected


def test_without_jit_equations_run_one_by_one():
    jaxpr = rewritten(lambda x: jnp.sin(x) + lax.psum(x, "i"))
    with jax.disable_jit():
        (y,) = values(jaxpr, jnp.ones(3))
    np.testing.assert_allclose(y, np.sin(1) + 10, rtol=1e-6)


# Refused, with a line: for GPUs alone in JAX, deprecated, or without a counterpart here.
REFUSED = {"pgather", "psend", "precv"}
OTHERS = {"shard_map", "eval_jaxpr"}  # no collectives


def test_all_primitives_of_jax_that_communicate_are_known():
    modules = (
        importlib.import_module("jax._src.lax.parallel"),
        importlib.import_module("jax._src.shard_map"),
    )
    values = [v for module in modules for v in vars(module).values()]
    names = {v.name for v in values if isinstance(v, Primitive)}
    known = Collectives(mpi4jax.Mesh(), frozenset({"i"}), True, "f()").table()
    assert names - known.keys() - REFUSED - OTHERS == set()
    assert not REFUSED & known.keys()


def samples():
    """Functions whose equations hold functions, by the names of their primitives and parameters."""
    square, rows = (lambda x: x * x), jnp.ones((2, 2))
    jvp, vjp = jax.custom_jvp(square), jax.custom_vjp(square)
    jvp.defjvp(lambda xs, ts: (square(*xs), 2 * xs[0] * ts[0]))
    vjp.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
    vmapped = jax.custom_batching.custom_vmap(square)
    vmapped.def_vmap(lambda size, batched, x: (x * x, batched[0]))
    yield from (jvp, vjp, vmapped, jax.checkpoint(square), jax.jit(square))
    yield lambda x: lax.cond(x[0] > 0, square, square, x)
    yield lambda x: lax.while_loop(lambda x: x[0] > 0, square, x)
    yield lambda x: lax.scan(lambda c, _: (c, c), x, None, length=2)
    yield lambda x: lax.custom_linear_solve(lambda x: 2 * x, x, lambda f, b: b, lambda f, b: b)
    yield lambda x: jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, c: r * c, x, x)
    yield lambda x: lax.custom_root(lambda z: z - x, x, lambda f, z: z, lambda g, y: y)
    yield lambda x: lax.reduce(x, 0.0, lambda a, b: a - b, (0,))
    yield lambda x: lax.reduce_window(x, 0.0, lambda a, b: a - b, (1,), (1,), "VALID")
    yield lambda x: x.at[0].apply(square).at[jnp.array([0])].add(1.0)
    yield lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    yield lambda x: lax.map(square, rows) @ x[:1].repeat(2)


# Parameters that hold functions: rewritten; or of operands alone, without collectives.
REWRITTEN = {
    *(("custom_jvp_call", key) for key in ("call_jaxpr", "jvp_jaxpr_fun")),
    *(("custom_vjp_call", key) for key in ("call_jaxpr", "fwd_jaxpr_thunk", "bwd")),
    *(("remat2", "jaxpr"), ("checkpoint", "jaxpr"), ("jit", "jaxpr"), ("pjit", "jaxpr")),
    *(("cond", "branches"), ("scan", "jaxpr"), ("while", "cond_jaxpr"), ("while", "body_jaxpr")),
    *(("custom_linear_solve", "jaxprs"), ("linear_call", "callee"), ("custom_vmap_call", "call")),
    *(("linear_call", "transpose_thunk"), ("custom_vmap_call", "rule")),
    ("call_hi_primitive", "_prim"),
}
WITHOUT = {
    *(("reduce", "jaxpr"), ("reduce", "computation"), ("reduce_window", "jaxpr")),
    *(("scatter-add", "update_jaxpr"), ("scatter_apply", "update_jaxpr")),
    *(("scatter", "update_jaxpr"), ("pure_callback", "callback")),
    *(("custom_vjp_call", "out_trees"), ("jit", "ctx_mesh")),  # a mesh can be called
}


def test_all_parameters_that_hold_functions_are_known():
    found = set()
    for f in samples():
        for eqn in equations(jax.make_jaxpr(f)(jnp.ones(1)).jaxpr):
            for key, value in eqn.params.items():
                values = value if isinstance(value, (tuple, list)) else (value,)
                kinds = (ClosedJaxpr, Jaxpr)
                if key == "_prim" or any(callable(v) or isinstance(v, kinds) for v in values):
                    found.add((eqn.primitive.name, key))
    assert found - REWRITTEN - WITHOUT == set()


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_axis_that_the_mesh_does_not_have(check_vma):
    """The error names the axis and the mesh's; JAX's own has no message, or not the mesh's axes."""
    mesh = mpi4jax.Mesh()
    for collective in (
        lambda x: lax.psum(x, "j"),
        lambda x: lax.all_gather(x, "j"),
        jax.jit(lambda x: lax.psum(x, "j")),
        lambda x: lax.axis_index("j"),
    ):
        how = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
        mapped = mpi4jax.shard_map(collective, mesh=mesh, **how)
        for f in (mapped, jax.jit(mapped)):
            with pytest.raises(NameError, match=r"over 'j': the mesh has the axes \('i',\)"):
                f(jnp.ones(3))


@pytest.mark.parametrize("axes", ["b", ("i", "b")])
def test_a_sum_over_the_axis_of_a_vmap_needs_check_vma_false(axes):
    """As in JAX, from 0.8 on. The error names the argument that allows it."""

    def mapped(check_vma):
        sums = jax.vmap(lambda x: lax.psum(x, axes), axis_name="b")
        how = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
        return mpi4jax.shard_map(sums, mesh=mpi4jax.Mesh(), **how)

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(mapped(False)(x), jnp.full(3, 3.0))
    if jax.__version_info__ < (0, 8) and axes != "b":
        np.testing.assert_array_equal(mapped(True)(x), jnp.full(3, 3.0))
        return
    words = r"psum over 'b': .* axis of a jax\.vmap .* only with check_vma=False"
    with pytest.raises(NotImplementedError, match=words):
        mapped(True)(x)


def test_specs_in_a_list_are_refused():
    """As in JAX: a tuple holds the specs of several arguments."""
    both = {"in_specs": [P("i"), P()], "out_specs": P("i"), "mesh": mpi4jax.Mesh()}
    for shard_map in (mpi4jax.shard_map, mpi4jax.sharding.global_shard_map):
        with pytest.raises(ValueError, match="in_specs"):
            shard_map(lambda x, w: x * w, **both)(jnp.ones(3), jnp.ones(3))
