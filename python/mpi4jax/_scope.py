"""Running ops fast: the scope that hides their effect from JAX's dispatch.

JAX dispatches a compiled function from C++ only if it has no effects. A *scope* is a primitive
around a whole jaxpr: seen from outside it has no MPI effect; its lowering starts a chain of XLA
tokens and lets JAX thread it through everything inside. It may only stand at the top of a
compiled function, where there is nothing on the same level that it could be reordered with.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from . import _compat, _native, _schedule
from ._misuse import warn_of_discarded
from ._primitive import effect

scope_p = Primitive("mpi4jax_scope")
scope_p.multiple_results = True


@scope_p.def_effectful_abstract_eval
def _abstract_eval(*args: Any, jaxpr: ClosedJaxpr) -> tuple[Any, set[Any]]:
    return jaxpr.out_avals, {e for e in jaxpr.effects if e != effect}


def _lowering(ctx: mlir.LoweringRuleContext, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    devices = _compat.device_count(ctx)
    if devices > 1:
        # JAX says the like of functions whose effect it sees.
        raise ValueError(
            f"mpi4jax: a function that communicates must run on one device, got {devices}; "
            "start one rank per device, and put the arrays of a rank on its device"
        )
    if ctx.module_context.lowering_parameters.for_export:
        # It would be used below another jit, where hidden ops are lost.
        raise ValueError(
            "mpi4jax.jit: an exported function has to show that it communicates; "
            "export jax.jit(f) instead, and call what is loaded from mpi4jax.jit"
        )
    outer = ctx.tokens_in
    tokens = {effect: _compat.fresh_xla_token()}
    tokens.update({e: outer.get(e) for e in outer.effects()})
    inner = ctx.replace(tokens_in=mlir.TokenSet(tokens), tokens_out=None)
    out = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *args)
    if outer.effects():
        ctx.set_tokens_out(mlir.TokenSet({e: inner.tokens_out.get(e) for e in outer.effects()}))
    return out


def _jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr) -> Any:
    f = jaxpr_as_fun(jaxpr)
    return jax.jvp(lambda *a: f(*a), primals, tuple(ad.instantiate_zeros(t) for t in tangents))


def _batch(args: Any, dims: Any, *, jaxpr: ClosedJaxpr) -> Any:
    out = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=list(dims))(*args)
    return out, [0] * len(jaxpr.out_avals)


mlir.register_lowering(scope_p, _lowering)
scope_p.def_impl(_compat.eval_primitive(scope_p))  # under jax.disable_jit()
# Kept also where nothing uses its results.
_compat.never_dead(scope_p)
# Transformed, a scope is what is in it: the effect shows again.
ad.primitive_jvps[scope_p] = _jvp
batching.primitive_batchers[scope_p] = _batch


def scoped(f: Callable[..., Any], check: bool = False) -> Callable[..., Any]:
    """``f`` inside a scope; for the function of an outermost ``jax.jit``.

    With ``check``, the ranks compare their schedules when it is traced.
    """

    name = getattr(f, "__name__", repr(f))

    @functools.wraps(f)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if _compat.trace_state_clean() and not jax.config.jax_disable_jit:
            # Its results had NaNs, and JAX calls it to find out where. Other ranks do not.
            raise FloatingPointError(_compat.NOT_REPEATED.format(name))
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]  # others: static arguments

        def flat(*values: Any) -> Any:
            remaining = iter(values)
            full = [next(remaining) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
            a, k = jax.tree.unflatten(tree, full)
            return f(*a, **k)

        operands = [leaf for leaf, t in zip(leaves, traced, strict=True) if t]
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*operands)
        run = jaxpr_as_fun(jaxpr)
        warn_of_discarded(jaxpr)
        if check:
            with jax.ensure_compile_time_eval():
                flush()  # what is under way must not mix with the comparison
            _schedule.compare(name, jaxpr)
        hidden = effect in jaxpr.effects and not _compat.has_refs(jaxpr)
        out = scope_p.bind(*operands, jaxpr=jaxpr) if hidden else run(*operands)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return inside


def jit(fun: Callable[..., Any] | None = None, /, *, check: bool = False, **kwargs: Any) -> Any:
    """Drop-in replacement for :func:`jax.jit` with cheap dispatch of functions that communicate.

    A function compiled by ``jax.jit`` that communicates has an ordered effect, so JAX dispatches
    it from Python. Compiled by this function, it is dispatched from C++, like one that does not
    communicate. Below another transformation (``jax.jit``, ``jax.grad``, ``jax.vmap`` ...) it is
    ``jax.jit``, so differentiate first: ``mpi4jax.jit(jax.grad(f))``.

    Args:
        fun: function to compile. Without it, a decorator is returned.
        check: whether the ranks compare their schedules of collectives when the function is
            traced, which is before it first runs (with these shapes). All ranks of the
            communicators in it must then trace it at the same point of the program.
        **kwargs: as for :func:`jax.jit` (``static_argnums``, ``donate_argnames``, ...).

    Returns:
        The compiled function, with the attributes of one made by ``jax.jit``: ``lower``,
        ``trace``, ``eval_shape``, ``clear_cache``.

    Raises:
        RuntimeError: with ``check``, when it is called: the schedules of the ranks differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import mpi4jax
        >>> from mpi4jax import notoken
        >>> mean = mpi4jax.jit(lambda x: notoken.allreduce(x, MPI.SUM) / MPI.COMM_WORLD.size)
        >>> float(mean(jnp.float32(3)))
        3.0
    """
    if fun is None:
        return functools.partial(jit, check=check, **kwargs)
    inside = scoped(fun, check)

    @functools.wraps(fun)
    def top(*args: Any, **kw: Any) -> Any:
        return (fun if jax.config.jax_disable_jit else inside)(*args, **kw)

    return _Jitted(jax.jit(top, **kwargs), jax.jit(fun, **kwargs), _compat.trace_state_probes())


class _Jitted(_native.Dispatch):
    """A function compiled by :func:`jit`: in a scope at the top, as it is below.

    An object, not a function with attributes: `jax.jit` copies the attributes of the function that
    it is given, and `jax.jit(f).lower` must not be `f.lower`.
    """

    def __init__(self, top: Any, below: Any, probes: Any):
        functools.update_wrapper(self, below.__wrapped__)
        self._functions = top, below

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> Any:
        return self  # as functions are their own copies

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<mpi4jax.jit of {self.__wrapped__!r}>"  # type: ignore[attr-defined]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        for function in self._functions:
            function.clear_cache()


# ---- Waiting


@jax.jit
def _nothing(x: jax.Array) -> jax.Array:
    # A copy, for which no kernel has to be compiled; JAX would not run what returns its argument.
    return jax.lax.optimization_barrier(x)


_zero = np.zeros((), np.float32)


def flush() -> None:
    """Wait until all operations that were started by this process have ended.

    JAX runs ahead of Python: when a call returns, its communication may not have begun. Call this
    before you use the same communicator through mpi4py. It is called at exit, before
    ``MPI_Finalize``.

    Raises:
        RuntimeError: called while a function is traced, whose operations have not started.
    """
    with jax.transfer_guard("allow"):
        done = _nothing(_zero)
    if isinstance(done, jax.core.Tracer):
        raise RuntimeError(
            "flush: called inside a function that is being compiled, where nothing has started "
            "that could be waited for; call it after the compiled function"
        )
    done.block_until_ready()
    jax.effects_barrier()
