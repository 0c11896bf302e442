"""Each workaround that is in use is needed: without it, the JAX that is installed goes wrong.

If a test fails with a newer JAX, put the version without the fault into
`mpi4jax/_jax/workarounds.py`.
"""

import signal
import subprocess
import sys
from importlib.metadata import requires

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import X, grad, lowered, no_arguments, total
from jax import lax
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import primitives
from jax.interpreters import batching, partial_eval
from packaging.requirements import Requirement
from packaging.version import Version

from mpi4jax import notoken
from mpi4jax._jax import compat
from mpi4jax._jax.workarounds import OLDEST, WORKAROUNDS, is_needed


def xla_aborts(tmp_path, undo):
    code = (
        "import jax, jax.numpy as jnp; from jax.experimental import io_callback\n"
        "@jax.jit\n"
        "def zeros():\n"
        "    x = jnp.zeros((1, 3))\n"
        "    io_callback(print, None, x, ordered=True)\n"
        "    return jax.lax.reduce(x, 0.0, jax.lax.add, (0,))\n"
        "jax.jit(lambda: 2 * zeros())()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    return done.returncode == -signal.SIGABRT and "cannot remove instruction" in done.stderr


def xla_fuses(tmp_path, undo):
    pytest.skip("it is a fault of XLA's on GPUs: tests/gpu/test_compiled.py")


def a_checkpoint_is_dropped(tmp_path, undo):
    undo(partial_eval.dce_rules, compat.remat_p)
    return "mpi4jax_recv" not in lowered(grad(no_arguments))


def complex_residuals_are_refused(tmp_path, undo):
    def f(x):
        z = jnp.sin(x * (1 + 2j))
        return jnp.sum(jnp.abs(jnp.sin(z * z)) ** 2)

    keep = jax.checkpoint_policies.everything_saveable
    undo(lax.reduce_precision_p, "bind")
    try:
        jax.grad(jax.checkpoint(f, policy=keep))(X)
    except TypeError:
        return True
    return False


def operands_of_callbacks_are_forgotten(tmp_path, undo):
    def f(x):
        y = x @ x
        jax.debug.callback(lambda y: None, y)
        return jnp.sum(x * x)

    g = jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))
    assert np.array_equal(g(X), 2 * X)
    undo(partial_eval.partial_eval_jaxpr_custom_rules, compat.debug_callback_p)
    try:
        g(X)
    except KeyError:
        return True
    return False


def effects_leak(tmp_path, undo):
    undo(pe, "tracers_to_jaxpr")
    f = grad(lambda x: lax.scan(lambda c, _: (total(c), None), x, None, length=2)[0])
    try:
        with jax.checking_leaks():
            jax.jit(f)(X)
    except Exception as error:
        return "Leaked trace" in str(error)
    return False


def batched_loops_go_on(tmp_path, undo):
    undo(batching.fancy_primitive_batchers, primitives.while_p)

    def f(x, limit):
        again = lambda v: notoken.allreduce(v) < limit
        return lax.while_loop(again, lambda v: v + 1, x)

    limits = jnp.array([1.0, 3.0, 2.0])
    return not np.array_equal(jax.jit(jax.vmap(f))(jnp.zeros(3), limits), limits)


FAULTS = {
    "calls of a token alone": xla_aborts,
    "fused slices": xla_fuses,
    "checkpoints without operands": a_checkpoint_is_dropped,
    "complex residuals": complex_residuals_are_refused,
    "operands of callbacks": operands_of_callbacks_are_forgotten,
    "effects of traces": effects_leak,
    "batched conditions": batched_loops_go_on,
}


@pytest.mark.parametrize("name", WORKAROUNDS)
def test_a_workaround_in_use_is_needed(name, tmp_path, undo):
    if not is_needed(name):
        pytest.skip("this JAX has no such fault")
    assert FAULTS[name](tmp_path, undo), f"JAX {jax.__version__} has no such fault any more"


def test_no_workaround_is_for_versions_that_are_not_supported():
    (oldest,) = (
        specifier.version
        for requirement in map(Requirement, requires("mpi4jax"))
        if requirement.name == "jax" and not requirement.marker
        for specifier in requirement.specifier
        if specifier.operator == ">="
    )
    assert Version(oldest).release[:2] == OLDEST
    for workaround in WORKAROUNDS.values():
        assert workaround.fixed is None or workaround.fixed > OLDEST
