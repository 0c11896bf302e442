"""A function for `jax.shard_map`, called outside of every traced function: evaluated equation by
equation on this rank's concrete blocks, while JAX checks the types of the values.

JAX does the same on the devices of one process. So `print` shows blocks, Python may branch on a
replicated value, and a variable of the program is read at each call.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, mesh as mesh_lib, source_info_util
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive

from . import compat, traces

Step = Callable[[Any, list[Any]], Sequence[Any]]  # an equation and its operands -> its results


class _Outside:
    """The context of a call, to which what is evaluated inside of the function goes back."""

    def __init__(self) -> None:
        self.trace = core.eval_trace
        self.axes = core.trace_ctx.axis_env
        self.mesh = mesh_lib.get_abstract_mesh()
        self.check_vma = config._check_vma.value

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        axes = core.trace_ctx.axis_env
        with (
            core.set_current_trace(self.trace),
            mesh_lib.use_abstract_mesh(self.mesh),
            config._check_vma(self.check_vma),
        ):
            core.trace_ctx.set_axis_env(self.axes)
            try:
                yield
            finally:
                core.trace_ctx.set_axis_env(axes)


class Block(core.Tracer):  # type: ignore[misc]
    """A value of this rank, with the type that JAX gives it inside of the `shard_map`."""

    aval: Any = None  # a slot of `Tracer`, or a property that has no setter (JAX 0.7)

    def __init__(self, trace: BlockTrace, aval: Any, value: Any):
        self._trace, self.aval, self.value = trace, aval, value

    def to_concrete_value(self) -> Any:
        """The array if it is the same on all ranks; otherwise ranks would branch differently."""
        if not self._trace.check_vma or compat.varying_axes(self.aval):
            return None
        return core.to_concrete_value(self.value)

    def full_lower(self) -> Block:
        return self

    def __str__(self) -> str:
        over = ", ".join(sorted(compat.varying_axes(self.aval)))
        return f"{self._trace.where if over else 'On all ranks'}:\n{self.value}"

    __repr__ = __str__


class BlockTrace(core.Trace):  # type: ignore[misc]
    """Evaluates each primitive by ``step``, in the context of the call.

    Args:
        outside: the context of the call.
        step: evaluates an equation there; of a collective, by an operation of this package.
        check_vma: as it is for the `shard_map`.
        where: the words that print shows before a block.
    """

    def __init__(self, outside: _Outside, step: Step, check_vma: bool, where: str):
        super().__init__()
        self.outside, self.step, self.check_vma, self.where = outside, step, check_vma, where

    def value(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):  # a literal of JAX 0.10 has a type with the mesh
            return np.asarray(x)
        return x.value if isinstance(x, Block) and x._trace is self else x

    def stage_value(self, x: Any) -> Block:
        return Block(self, jax.typeof(x), self.value(x))

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        avals = [jax.typeof(x) for x in args]
        out, _ = primitive.abstract_eval(*avals, **params)
        outs = out if primitive.multiple_results else [out]
        eqn = types.SimpleNamespace(
            primitive=primitive,
            params=params,
            invars=[types.SimpleNamespace(aval=aval) for aval in avals],
            outvars=[types.SimpleNamespace(aval=aval) for aval in outs],
            source_info=source_info_util.current(),
        )
        with self.outside.again():
            values = self.step(eqn, [self.value(x) for x in args])
        results = [Block(self, *pair) for pair in zip(outs, values, strict=True)]
        return results if primitive.multiple_results else results[0]

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        """Evaluate a nested one by the equations of its function."""
        found: list[Any] = []

        def nested(*xs: Any) -> list[Any]:
            trace: Any = core.trace_ctx.trace
            found.append(trace.process_shard_map(primitive, fun, xs, **params))
            return list(found[-1])

        def step(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            with self.outside.again():  # not in the mesh of the equation
                return self.step(eqn, operands)

        traced = traces.trace_python(nested, args)
        consts, values = ([self.value(x) for x in xs] for xs in (traced.consts, args))
        values = compat.evaluate(traced.jaxpr, consts, values, step)
        results = [Block(self, *pair) for pair in zip(traced.out_avals, values, strict=True)]
        return found[-1].update(results) if hasattr(found[-1], "update") else results

    def process_custom_jvp_call(self, primitive: Any, fun: Any, *rest: Any, **_: Any) -> Any:
        """Evaluate the function: what differentiates has asked for its rule before."""
        with core.set_current_trace(self):
            return fun.call_wrapped(*rest[-1])

    process_custom_vjp_call = process_custom_jvp_call

    def process_call(self, primitive: Any, fun: Any, args: Any, params: Any, /) -> Any:
        """Evaluate one part of a function that JAX has divided for a derivative."""
        with core.set_current_trace(self):
            return fun.call_wrapped(*args)


_typed_p = Primitive("mpi4jax_typed")  # results of given types, that stand for concrete ones
_typed_p.multiple_results = True
_typed_p.def_abstract_eval(lambda *, avals: avals)


class Evaluation:
    """The evaluation of a function on blocks, inside of JAX's trace of it.

    Made where the function is called. Then, in that trace, :meth:`run` evaluates the function, and
    gives the trace results of the same types; :attr:`results` are the concrete ones.
    """

    def __init__(self, step: Step, check_vma: bool, where: str):
        self.trace = BlockTrace(_Outside(), step, check_vma, where)
        self.results: list[Any] = []

    def run(self, f: Callable[..., Any], typed: Sequence[Any], values: Sequence[Any]) -> Any:
        pairs = zip(typed, values, strict=True)
        blocks = [Block(self.trace, jax.typeof(x), value) for x, value in pairs]
        with core.set_current_trace(self.trace):
            out = f(*blocks)
        with self.trace.outside.again():
            self.results = [self._result(y) for y in out]
        found = iter(_typed_p.bind(avals=tuple(jax.typeof(y) for y in out if _is_array(y))))
        placed = [next(found) if _is_array(y) else y for y in out]
        return out.update(placed) if hasattr(out, "update") else placed

    def _result(self, y: Any) -> Any:
        """Return the array that a result is, also where the function has returned a number of
        Python or an array of NumPy."""
        value = self.trace.value(y)
        is_number = isinstance(value, (bool, int, float, complex, np.generic, np.ndarray))
        return jax.numpy.asarray(value) if is_number and _is_array(y) else value


def _is_array(y: Any) -> bool:
    """Return whether JAX has a type for a result. Otherwise it raises its error."""
    try:
        jax.typeof(y)
    except TypeError:
        return False
    return True


def is_staged() -> bool:
    """Whether what is called now becomes equations of a function that is traced."""
    trace = core.trace_ctx.trace
    while hasattr(trace, "parent_trace") and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = trace.parent_trace
    return trace is not core.eval_trace
