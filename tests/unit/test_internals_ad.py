"""The same of JAX's derivatives and of `vmap`."""

import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import (
    CONSTANT,
    NAMES,
    X,
    grad,
    lowered,
    names,
    no_arguments,
    ops,
    ops_of,
    receive,
    send,
    squared_beside,
    total,
)
from jax import lax
from jax._src import api, api_util, linear_util
from jax._src.interpreters import ad, batching, partial_eval as pe
from jax.extend.core import ClosedJaxpr, primitives
from jax.sharding import AxisType, PartitionSpec
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken
from mpi4jax._diff import ad as _ad, custom_rules
from mpi4jax._jax import compat, traces
from mpi4jax._jax.functions import HOLDS, inner_jaxprs, opened
from mpi4jax._op.manual import of_all_ranks
from mpi4jax._op.primitive import PRIMITIVES

VERSION = jax.version.__version_info__


def jvp(f):
    return lambda x: jax.jvp(f, (x,), (x,))


def linearized(f):
    return lambda x: jax.linearize(f, x)[1](x)


def constant_received(x):
    return x + receive()


def rule_for_jvp(x):
    f = jax.custom_jvp(total)
    f.defjvp(lambda p, t: (notoken.bcast(p[0], 0), total(t[0])))
    return x + f(CONSTANT)


def rule_for_vjp(x):
    f = jax.custom_vjp(total)
    f.defvjp(lambda c: (notoken.bcast(c, 0), None), lambda _, ct: (total(ct),))
    return x + f(CONSTANT)


def manual(x):
    mesh, whole = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)), PartitionSpec()
    f = jax.shard_map(lambda c: receive() + c, mesh=mesh, in_specs=whole, out_specs=whole)
    return x + f(CONSTANT)


def only_backward(x):
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, ct: (send(), (ct,))[1])
    f(x)
    return x * x


def symbolic_backward(x):
    """What is sent is left out where the cotangent is a symbolic zero."""
    f = jax.custom_vjp(lambda x: x)

    def backward(_, ct):
        if type(ct) is not jax.custom_derivatives.SymbolicZero:
            send()
        return (ct,)

    f.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    f(x)
    return x * x


def branch(x):
    return squared_beside(lambda: lax.cond(x[0] > 0, send, lambda: None))(x)


TRACES = {
    jvp: (ad.JVPTrace, ad.JVPTracer),
    linearized: (ad.LinearizeTrace, ad.LinearizeTracer),
}
# What is wrapped; a program; its ops; and those that it has without.
WRAPPED = {
    **{
        f"{trace.__name__}.{name}": (trace, name, transform(f), *expected)
        for transform, (trace, tracer) in TRACES.items()
        for name, f, *expected in (
            ("process_primitive", constant_received, ["recv", "recv"], ["recv"]),
            ("process_custom_jvp_call", rule_for_jvp, ["bcast", "allreduce"], ["allreduce"]),
            ("process_custom_vjp_call", rule_for_vjp, ["bcast"], ["allreduce"]),
        )
    },
    **{
        f"{tracer.__name__}.__init__": (
            tracer,
            "__init__",
            transform(constant_received),
            ["recv", "recv"],
            ["recv"],
        )
        for transform, (_, tracer) in TRACES.items()
    },
    "trace_to_jaxpr_nounits": (
        pe,
        "trace_to_jaxpr_nounits",
        lambda ct: jax.linear_transpose(constant_received, X)(ct),
        ["recv", "send"],
        ["recv"],
    ),
}


@pytest.mark.parametrize("what", WRAPPED)
def test_derivatives_without_what_is_wrapped(what, undo):
    owner, name, f, expected, otherwise = WRAPPED[what]
    assert names(f) == expected
    undo(owner, name)
    # Another function, so that JAX traces it again.
    assert names(lambda x: f(x)) == otherwise


def test_no_trace_leaks(undo):
    """Of a loop that is differentiated, to JAX's checker."""

    def check(around):
        f = grad(lambda x: lax.scan(lambda c, _: (around(c), None), x, None, length=2)[0])
        with jax.checking_leaks():
            jax.jit(f)(X)

    check(total)
    undo(pe, "tracers_to_jaxpr")
    with pytest.raises(Exception, match="Leaked trace"):
        check(lambda x: total(x))


TRANSFORMS = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x)[1](x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jvp of vjp": lambda f, x: jax.jvp(lambda y: jax.vjp(f, y)[1](x)[0], (x,), (x,)),
    "vjp of vjp": lambda f, x: jax.vjp(lambda y: jax.vjp(f, y)[1](x)[0], x)[1](x),
}
GUARDED = {
    "allreduce": total,
    "MAX": lambda x: notoken.allreduce(x, MPI.MAX),
    "PROD": lambda x: notoken.allreduce(x, MPI.PROD),
    "MEAN": lambda x: notoken.allreduce(x, mpi4jax.MEAN),
    "tree": lambda x: total({"a": x, "b": x})["b"],
    "started": lambda x: mpi4jax.wait(mpi4jax.iallreduce(x)),
    "sendrecv": lambda x: notoken.sendrecv(x, x, 0, 0),
    "message": lambda x: notoken.sendrecv(x, x, MPI.ANY_SOURCE, 0),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", GUARDED)
def test_derivatives_transfer_nothing_of_the_users(name, transform):
    """Of constants of their own JAX's guard says nothing."""
    x = jnp.ones(3)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(TRANSFORMS[transform](GUARDED[name], x))


@pytest.mark.parametrize(
    "f", [squared_beside(lambda: jax.checkpoint(send)()), branch], ids=["checkpoint", "cond"]
)
def test_equations_without_results_are_kept(f, monkeypatch):
    """Partial evaluation forgets their effects, but not the effects of what needs their tokens."""
    f = jax.checkpoint(f)
    assert names(grad(f)) == ["send", "recv"]
    monkeypatch.setattr(_ad.exit_p, "bind", lambda token: token)
    jax.clear_caches()
    assert names(grad(lambda x: f(x))) == ["send"]


def compiled_ops(f):
    return len(re.findall(r"custom_call @mpi4jax_", lowered(f)))


def test_a_checkpoint_without_operands_is_kept():
    f = grad(no_arguments)
    assert compiled_ops(f) == compiled_ops(grad(squared_beside(receive))) == 1


def test_a_checkpoint_prints_what_it_has_received():
    """The backward pass prints once more, but does not communicate again."""

    def f(x):
        jax.debug.print("{}", total(x))
        return jnp.sum(x * x)

    g = jax.grad(jax.checkpoint(f))
    assert np.array_equal(g(X), 2 * X)
    assert compiled_ops(g) == 1


@pytest.mark.parametrize("f", [only_backward, symbolic_backward])
def test_a_backward_pass_that_communicates_is_kept(f, monkeypatch):
    assert names(grad(f)) == ["send"]
    monkeypatch.setattr(custom_rules, "communicates", lambda *_: False)
    jax.clear_caches()
    assert names(grad(f)) == []


def test_messages_of_a_backward_pass_hand_on_one_token():
    """From the last one to the first: else a derivative of it could change their order."""

    def f(x):
        send(jnp.sin(x))
        y = notoken.sendrecv(x, receive(), MPI.PROC_NULL, MPI.PROC_NULL, sendtag=1)
        send(y)
        return y

    eqns = [e for e in jax.make_jaxpr(grad(f))(X).eqns if e.primitive.name in NAMES]
    forward, backward = ["send", "recv", "sendrecv", "send"], ["recv", "sendrecv", "send", "recv"]
    assert [NAMES[e.primitive.name] for e in eqns] == forward + backward
    for part in (eqns[:4], eqns[4:]):
        for before, after in itertools.pairwise(part):
            assert after.invars[-1] is before.outvars[-1]


def tangents(out_axes, x):
    """The primal result and the tangents of ``total``, for a basis of two directions."""
    return jax.vmap(lambda t: jax.jvp(total, (x,), (t,)), out_axes=out_axes)(jnp.eye(3)[:2])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_vmap_of_tangents_has_unbatched_primals(undo, axis):
    once = [("allreduce", (3,)), ("allreduce", (2, 3))]
    y, t = tangents((None, axis), X)
    assert ops(lambda x: tangents((None, axis), x)) == once
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(t, jnp.moveaxis(jnp.eye(3)[:2], 0, axis))
    assert ops(lambda x: tangents(0, x)) == [("allreduce", (2, 3))] * 2
    undo(batching, "batch")
    with pytest.raises(ValueError, match="None but output was batched"):
        tangents((None, axis), X)


def test_a_vmap_with_an_unbatched_result_batches_messages():
    """It need not be around a `jvp`; another rank sends a message of the whole batch."""

    def received(x):
        return 0.0, constant_received(x)

    assert ops(jax.vmap(received, out_axes=(None, 0))) == [("recv", (3, 3))]


def test_a_gradient_in_such_a_vmap_is_batched():
    """Where nothing in it is mapped, either: on another rank something may be."""

    def gradient(x):
        return 0.0, jax.grad(lambda w: jnp.sum(total(w)))(jnp.ones(3)) + x

    assert ops(jax.vmap(gradient, out_axes=(None, 0))) == ops(jax.vmap(gradient))


def test_jacfwd_wants_unbatched_primals(undo):
    assert ops(jax.jacfwd(total)) == [("allreduce", (3,)), ("allreduce", (3, 3))]
    # A gradient inside has its own token, which no `vmap` of a program leaves unbatched.
    of_gradient = jax.jacfwd(jax.grad(lambda x: jnp.sum(total(x) ** 2)))
    assert ops(of_gradient)[0] == ("allreduce", (3,))
    undo(api, "vmap")
    with pytest.raises(ValueError, match="out_axes is None"):
        ops(of_gradient)


def test_a_jax_without_vmap_there(caplog):
    compat.warn_of_changed_jax.cache_clear()
    traces.name_axes_of_tangents(types.SimpleNamespace(), types.SimpleNamespace())
    record, of_programs = caplog.records
    assert "jax.vmap around jax.jvp" in of_programs.getMessage()
    assert "newer than this mpi4jax supports: jax.jacfwd" in record.getMessage()
    np.testing.assert_array_equal(jax.jacrev(total)(X), jnp.eye(3))


def test_ops_are_batched_where_nothing_is_mapped():
    """The "fancy" rules are called also there."""
    assert ops(jax.vmap(constant_received)) == [("recv", (3, 3))]


@of_all_ranks
def collective(x):
    return total(x)


def test_ops_of_all_ranks_are_differentiated_as_primitives_of_jax():
    """Where their operand is perturbed, and nowhere else."""
    assert names(grad(squared_beside(lambda: collective(CONSTANT)))) == ["allreduce"]
    assert names(grad(squared_beside(lambda: total(CONSTANT)))) == ["allreduce"] * 2
    assert names(grad(lambda x: jnp.sin(collective(x)))) == ["allreduce"] * 2
    assert ops(jax.vmap(lambda x: x + collective(CONSTANT))) == [("allreduce", (3,))]


def test_a_checkpoint_computes_ops_of_all_ranks_again(monkeypatch):
    """As its policy says, and not where the backward pass does not need them."""
    once, save = jax.checkpoint(lambda x: collective(jnp.sin(x))), jax.checkpoint_policies
    again = lambda x: jnp.sin(collective(jnp.sin(x)))
    saving = jax.checkpoint(again, policy=save.everything_saveable)
    counts = [len(names(grad(f))) for f in (once, jax.checkpoint(again), saving)]
    assert counts == [2, 3, 2]
    monkeypatch.delitem(pe.dce_rules, PRIMITIVES["allreduce"])
    jax.clear_caches()
    assert len(names(grad(once))) == 3
    monkeypatch.delitem(pe.partial_eval_jaxpr_custom_rules, PRIMITIVES["allreduce"])
    jax.clear_caches()
    assert len(names(grad(jax.checkpoint(again)))) == 2


RECEIVED = jax.make_jaxpr(constant_received)(X)


def solved(x):
    return lax.custom_linear_solve(
        lambda y: 2 * total(y), x, lambda _, b: total(b) / 2, symmetric=True
    )


CALLED = {
    "jit": (primitives.jit_p, jax.jit(lambda x: x + receive())),
    "closed_call": (
        primitives.closed_call_p,
        jax.jit(
            lambda x: compat.bind_with(primitives.closed_call_p, {"call_jaxpr": RECEIVED}, [x])[0]
        ),
    ),
    "scan": (
        primitives.scan_p,
        lambda x: lax.scan(lambda c, _: (c + receive(), c), x, None, length=3)[0],
    ),
    "while": (
        primitives.while_p,
        lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + receive()), (0, x)
        )[1],
    ),
    "cond": (
        primitives.cond_p,
        lambda x: lax.cond(jnp.any(x > 0), constant_received, lambda x: x, x),
    ),
    "platform_dependent": (
        primitives.cond_p,
        lambda x: lax.platform_dependent(x, cpu=constant_received, default=constant_received),
    ),
    "checkpoint": (compat.remat_p, jax.checkpoint(lambda x: x + receive())),
    "linear_solve": (primitives.linear_solve_p, solved),
    "shard_map": (compat.shard_map_p, lambda x: manual(x) - x),
}


HELD = {
    **{name: call for name, call in CALLED.items() if call[0] in HOLDS},
    "custom_jvp": (primitives.custom_jvp_call_p, jax.custom_jvp(constant_received)),
    "custom_vjp": (primitives.custom_vjp_call_p, jax.custom_vjp(constant_received)),
}
HELD["custom_jvp"][1].defjvps(None)
HELD["custom_vjp"][1].defvjp(lambda x: (x, None), lambda _, c: (c,))


@pytest.mark.parametrize("name", HELD)
def test_where_functions_are(name):
    """A primitive holds them in the parameter that the table has, and their arguments are its last
    operands: those in front are constants, and what a loop carries is its first results."""
    primitive, f = HELD[name]
    (eqn,) = [e for e in equations_in(jax.make_jaxpr(f)(X).jaxpr) if e.primitive is primitive]
    functions = [opened(f) for f in HOLDS[primitive].functions(eqn.params)]
    assert any(map(ops_of, functions))
    for function in functions:
        taken = eqn.invars[len(eqn.invars) - len(function.invars) :]
        assert [v.aval for v in taken] == [v.aval for v in function.invars]
        carried = len(eqn.outvars)
        if HOLDS[primitive].is_call:
            assert len(taken) == len(eqn.invars)
        if HOLDS[primitive].loop:
            constants, carried = HOLDS[primitive].loop(eqn.params)
            assert constants == 1  # what is received into
            assert carried == 1 + (primitive is primitives.while_p)
        given = [v.aval for v in eqn.outvars[:carried]]
        assert given == [v.aval for v in function.outvars[:carried]]


def test_each_primitive_of_the_table_is_tried():
    assert HOLDS.keys() == {primitive for primitive, _ in HELD.values()}


def equations_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for _, inner in inner_jaxprs(eqn.params):
            yield from equations_in(opened(inner))


def primitives_in(jaxpr):
    inside = [v for e in jaxpr.eqns for _, v in inner_jaxprs(e.params)]
    open_ones = [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in inside]
    return {e.primitive for e in jaxpr.eqns}.union(*map(primitives_in, open_ones))


@pytest.mark.parametrize("name", CALLED)
def test_primitives_with_functions_inside(name):
    """Their parameters are those that the rules of `_diff/ad.py` read and write."""
    primitive, g = CALLED[name]
    f = lambda x: x + g(CONSTANT)
    assert primitive in primitives_in(jax.make_jaxpr(f)(X).jaxpr)
    assert len(names(jvp(f))) > len(names(f)) > 0
    value, tangent = jax.jit(jvp(f))(X)
    np.testing.assert_allclose(value, f(X))
    np.testing.assert_allclose(tangent, X)  # the derivative of a constant is zero
    forward = jax.jvp(g, (X,), (X,))[1]
    if name != "while":  # JAX has no reverse mode for it
        np.testing.assert_allclose(jax.vjp(g, X)[1](X)[0], forward)


def test_each_rule_is_tried():
    assert set(_ad.RULES) - {_ad.exit_p} == {p for p, _ in CALLED.values()}


def test_an_equation_is_evaluated_again():
    """`get_bind_params` gives what an equation with functions of the user's was bound with."""
    f = jax.custom_jvp(lambda x: x * x)
    f.defjvp(lambda p, t: (f(*p), 5 * t[0]))
    g = jax.custom_vjp(lambda x: x * x)
    g.defvjp(lambda x: (g(x), None), lambda _, c: (5 * c,))
    for h in (f, g):
        (eqn,) = jax.make_jaxpr(h)(X).jaxpr.eqns
        again = lambda x, eqn=eqn: compat.bind_with(eqn.primitive, eqn.params, [x])[0]
        np.testing.assert_array_equal(again(2 * X), 4 * X)
        np.testing.assert_array_equal(jax.grad(lambda x, a=again: jnp.sum(a(x)))(X), 5 * X)


def test_traces_that_differentiate():
    """What a trace has: the two parts of a value, its parent, the trace of its tangents."""

    def f(x):
        trace = x._trace
        assert traces.differentiates(trace)
        primal, tangent = traces.primal_and_tangent(trace, x)
        assert traces.primal_and_tangent(trace, 1.0)[1] is None
        with traces.primals_of(trace):
            double = 2 * primal
        with traces.tangents_of(trace):
            triple = 3 * tangent
        return traces.dual(trace, double, triple)

    np.testing.assert_array_equal(jax.jvp(f, (X,), (X,)), [2 * X, 3 * X])
    value, pushforward = jax.linearize(f, X)
    np.testing.assert_array_equal([value, pushforward(X)], [2 * X, 3 * X])


def test_a_vmap_inside_of_a_derivative():
    seen = []

    def f(x):
        seen.append((x._trace, traces.outside_of_vmap(x._trace)))
        return x

    jax.jvp(jax.vmap(f), (X,), (X,))
    ((batching, below),) = seen
    assert not traces.differentiates(batching)
    assert traces.differentiates(below)


def test_functions_of_jax_can_be_called_again():
    flat, tree = api_util.flatten_fun_nokwargs(
        linear_util.wrap_init(
            lambda x: {"a": x}, debug_info=api_util.debug_info("", total, (), {})
        ),
        jax.tree.structure((X,)),
    )
    for _ in range(2):
        assert traces.trace_function(flat, [jax.typeof(X)]).out_avals == [jax.typeof(X)]
        assert tree() == jax.tree.structure({"a": 0})
        traces.let_call_again(flat)


def test_what_is_concrete():
    assert traces.concrete(X) is X
    assert traces.concrete(jax.typeof(X)) is None
    seen = []
    jax.make_jaxpr(lambda x: (seen.append(traces.concrete(x)), x)[1])(X)
    assert seen == [None]


@pytest.mark.parametrize("op", [MPI.MAX, MPI.MIN], ids=["MAX", "MIN"])
def test_an_extremum_is_compared_with_what_was_sent(op):
    # Not with what XLA may compute once more, and round differently: nobody would have attained it.
    def f(x):
        return notoken.allreduce(x * x + x, op)

    text = lowered(lambda x: jax.jvp(f, (x,), (x,))[1])
    (sent,) = re.findall(r"(%\d+) = stablehlo.custom_call @mpi4jax_after\(%\d+\)", text)
    assert re.search(rf"stablehlo.compare +EQ, {sent},", text)
