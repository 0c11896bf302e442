"""What JAX does where this package touches its internals: docs/jax-internals.md has the list.

A test fails if JAX does something else there. Where a function of JAX's is wrapped or a table of
JAX's filled, most tests also take that away: what is lost then is why it is there, and if nothing
is lost any more, it can go.
"""

import inspect
import os
import queue
import re
import subprocess
import sys
import threading
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from internals import (
    CALLS,
    CONSTANT,
    X,
    lowered,
    names,
    ops_of,
    send,
    total,
)
from jax import lax
from jax._src import core, dispatch, effects, source_info_util
from jax._src.interpreters import mlir as _mlir, partial_eval as pe, pxla
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken
from mpi4jax._compile.scope import scope_p
from mpi4jax._jax import compat, lines
from mpi4jax._jax.workarounds import is_needed
from mpi4jax._job import flush
from mpi4jax._op.primitive import PRIMITIVES, MPIEffect, effect

# ---- What is compiled


def main_of(text):
    return next(line for line in text.splitlines() if " @main(" in line)


def _eager(f):
    with jax.disable_jit():
        f(X)


WAYS = {
    "jit": lambda f: jax.jit(f)(X),
    "jit, donated": lambda f: jax.jit(f, donate_argnums=0)(X + 1),
    "eager primitive": _eager,
    "ahead of time": lambda f: jax.jit(f).lower(X).compile(),
    "export": lambda f: jax.export.export(jax.jit(f), disabled_checks=CALLS)(X),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_lowered_comes_through_one_function(way, monkeypatch):
    given, ours = [], pxla.lower_sharding_computation
    signature = inspect.signature(ours)

    def record(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        if effect in args[0].effects:
            given.append((args[0], bound["donated_invars"], bound["lowering_parameters"]))
        return ours(*args, **kwargs)

    monkeypatch.setattr(pxla, "lower_sharding_computation", record)
    jax.clear_caches()
    WAYS[way](lambda x: total(x))
    ((jaxpr, donated, parameters),) = given
    assert isinstance(jaxpr, ClosedJaxpr)
    assert ops_of(jaxpr.jaxpr) == [("allreduce", (3,))]
    assert list(donated)[:1] == [way == "jit, donated"]
    assert len(donated) == len(jaxpr.jaxpr.invars)
    assert parameters.for_export == (way == "export")


def test_operations_and_ordered_effects_have_one_chain(undo):
    def f(x):
        send(x)
        jax.debug.callback(lambda: None, ordered=True)
        send(x)

    def joins(f):
        """Where the tokens of the two kinds become one."""
        return lowered(f).count("stablehlo.after_all")

    assert joins(f) == 3  # to one token, and at the end to one of each kind
    assert joins(send) == 0
    undo(_mlir, "jaxpr_subcomp")
    assert joins(lambda x: f(x)) == 0


def test_the_scope_hides_the_effect(undo):
    def f(x):
        send(x)
        return jax.jit(total)(x)

    def tokens(line):
        return "token" in line

    text = lowered(f)
    assert not tokens(main_of(text))
    # A token from the first custom call goes through the inner function into the second.
    calls = [line for line in text.splitlines() if "custom_call @mpi4jax_" in line]
    assert len(calls) == 2
    assert all(re.search(r": \(tensor<3xf32>, !stablehlo.token\) -> ", c) for c in calls)
    assert text.count("stablehlo.create_token") == 1
    first = re.search(r"(%\d+) = stablehlo.custom_call @mpi4jax_send\(%arg1, %arg0\)", text)
    assert re.search(rf"call @\S+\({first[1]}, %arg1\) : \(!stablehlo.token, tensor", text)
    exported = jax.export.export(jax.jit(f), disabled_checks=CALLS)(X)
    assert tokens(main_of(exported.mlir_module()))
    undo(pxla, "lower_sharding_computation")
    assert tokens(main_of(lowered(f)))


@pytest.mark.skipif(not is_needed("calls of a token alone"), reason="this JAX has no such fault")
def test_a_call_whose_only_operand_is_a_token_gets_another():
    """Of the scope, and of a jitted function in loops and branches."""

    @jax.jit
    def zeros():
        x = jnp.zeros((1, 3))
        send(x)
        return lax.reduce(x, 0.0, lax.add, (0,))

    def f(x):
        x = lax.cond(x[0] > 0, zeros, lambda: zeros() + 1)
        return lax.fori_loop(0, 2, lambda _, x: x + zeros() + 1, x)

    nothing = lambda: 2 * zeros()
    for g, args in ((nothing, ()), (f, (X,))):
        text = jax.jit(g).lower(*args).as_text()
        assert re.search(
            r"call @\S+\((%\S+), \1\) : \(!stablehlo.token, !stablehlo.token\) ->", text
        )
        assert ": (!stablehlo.token) -> (" not in text
    np.testing.assert_array_equal(jax.jit(nothing)(), np.zeros(3))
    np.testing.assert_array_equal(jax.jit(f)(X), np.full(3, 2.0))


def python_calls(f):
    """The calls of Python functions when ``f`` is called for the third time."""
    f(X), f(X)
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
    try:
        f(X)
    finally:
        sys.setprofile(None)
    return seen


def test_a_function_without_effects_is_dispatched_from_cpp(undo):
    assert not python_calls(jax.jit(lambda x: total(x)))
    undo(pxla, "lower_sharding_computation")
    assert python_calls(jax.jit(lambda x: total(x)))


def permuted(x, comm):
    return notoken.permute(x, [(0, 0)], comm=comm)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_first_call_that_makes_a_communicator_is_waited_for(ahead):
    """The first one alone; JAX then dispatches such functions from C++ as any other."""
    comm, sent, message = MPI.COMM_SELF.Dup(), [], np.ones(3, np.float32)

    def send():
        sent.append(1)
        comm.Send(message, 0)

    @jax.jit
    def f(x):
        y = jnp.outer(jnp.ones(200), jnp.resize(x, 200))  # enough, so that JAX does not wait
        x = lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), y)[0, :3]
        return notoken.recv(permuted(x, comm), 0, comm=comm)

    f = f.lower(X).compile() if ahead else f
    threading.Timer(1.5, send).start()  # after the compilation
    f(X)
    assert sent
    sent.clear()
    timer = threading.Timer(0.3, send)
    timer.start()
    f(X)
    assert not sent
    timer.join()
    other = MPI.COMM_SELF.Dup()
    f = jax.jit(lambda x: permuted(x, other))
    assert len(python_calls(f.lower(X).compile() if ahead else f)) == int(ahead)


# What a later JAX may have in the place of the class of calls.
OTHER_CALLS = {
    "no such class": types.SimpleNamespace(),
    "another class": types.SimpleNamespace(ExecuteReplicated=dict),
    "a class of another layout": types.SimpleNamespace(ExecuteReplicated=object),
}


@pytest.mark.parametrize("jax_has", OTHER_CALLS)
def test_a_jax_without_first_calls(jax_has, monkeypatch, caplog):
    """Results are right, and one line says what is lost."""
    compat.warn_of_changed_jax.cache_clear()
    monkeypatch.setattr(compat, "pxla", OTHER_CALLS[jax_has])
    for _ in range(2):
        comm = MPI.COMM_SELF.Dup()
        np.testing.assert_array_equal(jax.jit(lambda x, comm=comm: permuted(x, comm))(X), X)
    (record,) = caplog.records
    assert "newer than this mpi4jax supports: the first call" in record.getMessage()


def test_a_jax_without_compile_there(caplog):
    compat.warn_of_changed_jax.cache_clear()
    compat.on_first_call(types.SimpleNamespace(), lambda args: None, lambda: None)
    assert len(caplog.records) == 1


def test_programs_for_several_devices_are_refused():
    """By an error of JAX's, which is put into our words."""
    code = (
        "import jax, numpy as np; from mpi4jax import notoken; from mpi4py import MPI\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((2,), ('i',))\n"
        "x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P('i')))\n"
        "jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))(x)\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode
    assert "must run on one device, got several" in done.stderr


def test_names_of_arguments_and_results_are_kept():
    text = lowered(lambda given: {"sum": total(given)})
    assert "jax.result_info = \"result['sum']\"" in text


def test_arguments_that_the_scope_does_not_use_are_dropped(monkeypatch):
    f = lambda x, y: (total(x), total(y * 2) * 0 + 1)[0]
    g = lambda x, y: (total(x), y * 2)[0]
    assert main_of(lowered(f, X, X)).count("%arg") == 2
    assert main_of(lowered(g, X, X)).count("%arg") == 1
    closed = jax.make_jaxpr(g)(X, X)
    scoped = jax.make_jaxpr(lambda *xs: scope_p.bind(*xs, jaxpr=closed))(X, X).jaxpr
    assert pe.dce_jaxpr(scoped, [True])[1] == [True, False]
    monkeypatch.delitem(pe.dce_rules, scope_p)
    jax.clear_caches()
    assert pe.dce_jaxpr(scoped, [True])[1] == [True, True]


def test_users_line():
    here = f"internals.py:{inspect.getsourcelines(total)[1] + 1}"
    assert re.search(r"line\\22: \\22internals.py:total#\d+\\22", lowered(lambda x: total(x)))
    (eqn,) = jax.make_jaxpr(total)(X).jaxpr.eqns
    assert lines.eqn_line(eqn) == here
    # Between that line and JAX there are frames of this package, which JAX leaves out.
    package = os.path.dirname(os.path.abspath(mpi4jax.__file__))
    traceback = eqn.source_info.traceback
    assert any(f.file_name.startswith(package) for f in traceback.frames)
    assert not any(f.file_name.startswith(package) for f in source_info_util.user_frames(traceback))


def test_eval_primitive_compiles_once():
    p = jax.make_jaxpr(lambda x: total(x))(X).jaxpr.eqns[0].params
    call = compat.eval_primitive(PRIMITIVES["allreduce"])
    assert isinstance(call(X, **p)[0], compat.ArrayImpl)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    call(X, **p)
    assert not [name for name in compiled if "compile" in name]


# ---- Around the calls


def test_cleared_caches_are_noticed():
    compat.keep_caches()
    assert compat.caches_are_kept()
    jax.clear_caches()
    assert not compat.caches_are_kept()


def test_the_first_call_of_a_program_holds_up_other_threads():
    """Until it has ended: why the first call of an eager operation does nothing."""
    entered, go_on = queue.Queue(), threading.Event()

    def wait(x):
        entered.put(x)
        go_on.wait(20)
        return x

    f = jax.jit(lambda x: jax.pure_callback(wait, x, x))
    threads = [threading.Thread(target=f, args=(np.float32(i),)) for i in range(2)]
    [thread.start() for thread in threads]
    entered.get(timeout=20)
    with pytest.raises(queue.Empty):
        entered.get(timeout=0.5)
    go_on.set()
    [thread.join() for thread in threads]
    entered.get(timeout=20)


def test_where_a_branch_is_traced():
    found = []

    def note(x):
        found.append(compat.in_branch())
        return x

    jax.jit(lambda x: lax.cond(x > 0, note, jax.jit(note), x))(1)
    jax.jit(
        lambda x: lax.switch(x, [note, lambda x: lax.fori_loop(0, x, lambda i, x: note(x), x)], x)
    )(1)
    assert len(found) >= 4
    assert all(found)
    found.clear()
    note(lax.cond(True, lambda x: x, lambda x: x, 1))
    jax.jit(lambda x: note(lax.cond(x > 0, lambda x: x, lambda x: x, x)))(1)
    assert found == [False, False]


def test_where_a_function_is_traced():
    clean = []

    def f(x):
        clean.append(compat.trace_state_clean())
        return x

    f(X)
    assert clean == [True]
    for transform in (jax.jit, jax.make_jaxpr, jax.vmap, jax.value_and_grad):
        clean.clear()
        transform(lambda x: jnp.sum(f(x)))(X)
        assert clean == [False]
    clean.clear()
    lax.scan(lambda c, _: (f(c), None), X, None, length=2)
    assert not any(clean)
    assert compat.trace_state_clean()


def test_effects_barrier_waits(monkeypatch, undo):
    waited = []
    monkeypatch.setattr(flush, "last", lambda: (waited.append(1), X)[1])
    jax.effects_barrier()
    assert waited == [1]
    undo(type(dispatch.runtime_tokens), "block_until_ready")
    jax.effects_barrier()
    assert waited == [1]


def test_gpus_that_jax_was_told_to_use():
    assert compat.visible_gpus() == "all"
    jax.config.update("jax_cuda_visible_devices", "0,1")
    try:
        assert compat.visible_gpus() == "0,1"
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")


def test_constants_of_jax():
    assert type(X) is compat.ArrayImpl
    assert isinstance(lax.create_token(), compat.Token | jax.Array)
    assert isinstance(jax.typeof(lax.create_token()), compat.AbstractToken)
    assert compat.platforms() >= {d.platform for d in jax.devices()}


# ---- The effect


@jax.custom_jvp
def _with_rule(x):
    return total(x)


_with_rule.defjvp(lambda p, t: (total(*p), total(*t)))


def _checked():
    core.check_jaxpr(jax.make_jaxpr(lambda x: _with_rule(x))(X).jaxpr)


# What needs a registry of effects, and what JAX says or gives otherwise.
REGISTRIES = {
    "lowerable_effects": (
        lambda: jax.export.export(jax.jit(lambda x: total(x)), disabled_checks=CALLS)(X),
        "Cannot lower jaxpr with effects",
    ),
    "ordered_effects": (lambda: lowered(lambda x: total(x)), "may drop the operation"),
    "control_flow_allowed_effects": (
        lambda: names(lambda x: lax.fori_loop(0, 2, lambda i, c: total(c), x)),
        "Effects not supported in",
    ),
    "custom_derivatives_allowed_effects": (_checked, "Effects not supported in"),
    "remat_allowed_effects": (
        lambda: names(jax.grad(lambda x: jnp.sum(jax.checkpoint(total)(x)))),
        "Effects not supported in",
    ),
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_effect_without_one_of_the_registries(name, undo):
    use, otherwise = REGISTRIES[name]
    use()
    registry = getattr(effects, name)
    registry._effect_types.remove(MPIEffect)
    jax.clear_caches()
    try:
        with pytest.raises(Exception, match=otherwise):
            use()
    finally:
        registry.add_type(MPIEffect)
        jax.clear_caches()


def test_mutable_arrays():
    new_ref = getattr(jax, "new_ref", None) or core.mutable_array  # of 0.7
    f = lambda x: new_ref(total(x))[...]
    assert compat.has_refs(jax.make_jaxpr(f)(X))
    assert not compat.has_refs(jax.make_jaxpr(total)(X))
    np.testing.assert_array_equal(jax.jit(f)(X), X)
    g = lambda ref: ref[...] + 1
    assert compat.has_refs(jax.make_jaxpr(g)(new_ref(X)))


# ---- Types and parameters


def test_axes_that_a_value_varies_over():
    mesh, seen = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)), []

    def f(x, y):
        seen.extend(compat.varying_axes(jax.typeof(v)) for v in (x, y, total(x), total(y)))
        return total(x) + compat.vary_as(y, jax.typeof(x))

    cut, whole = PartitionSpec("i"), PartitionSpec()
    jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=(cut, whole), out_specs=cut))(X, X)
    assert seen == [{"i"}, set(), {"i"}, set()]


def test_types_that_say_how_an_array_is_cut():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    for spec in (PartitionSpec("i"), PartitionSpec(None)):
        x = jax.device_put(CONSTANT, NamedSharding(mesh, spec))
        found = compat.explicit_sharding(x)
        assert (found is None) == (spec[0] is None)
    assert compat.explicit_sharding(X) is None


def test_scans_and_constants():
    def f(x, y, c):
        return lax.scan(lambda carry, v: ((carry[0] + c, carry[1] * v), v), (x, 1.0), y)

    closed = jax.make_jaxpr(f)(X, X, X)
    (eqn,) = closed.jaxpr.eqns
    assert compat.scan_counts(eqn.params) == (1, 2)
    large = jnp.arange(1000.0)
    with_constant = jax.make_jaxpr(lambda x: x + large)(X[0])
    inside, constants = compat.close_constants(with_constant)
    assert inside.consts in ((), [])
    assert len(inside.in_avals) == len(constants) + 1
    np.testing.assert_array_equal(core.eval_jaxpr(inside.jaxpr, (), *constants, 1.0)[0], large + 1)
