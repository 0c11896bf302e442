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
from jax._src import config, core, mesh as mesh_lib, source_info_util
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive

from . import compat, traces

Step = Callable[[Any, list[Any]], Sequence[Any]]  # an equation and its operands -> its results


class _Outside:
    """The context of a call, to which what is evaluated inside of the function goes back."""

    def __init__(self) -> None:
        self.trace = core.trace_ctx.trace
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
        return x.value if isinstance(x, Block) and x._trace is self else x

    def stage_value(self, x: Any) -> Block:
        return Block(self, jax.typeof(x), self.value(x))

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        avals = [jax.typeof(x) for x in args]
        out, _ = primitive.abstract_eval(*avals, **params)
        eqn = types.SimpleNamespace(
            primitive=primitive,
            params=params,
            invars=[types.SimpleNamespace(aval=aval) for aval in avals],
            source_info=source_info_util.current(),
        )
        with self.outside.again():
            values = self.step(eqn, [self.value(x) for x in args])
        if primitive.multiple_results:
            return [Block(self, *pair) for pair in zip(out, values, strict=True)]
        return Block(self, out, values[0])

    def _by_equations(
        self, args: Any, bind: Callable[..., Any], fun: Any = None, rule: Any = None
    ) -> list[Block]:
        """Return the results of what is no primitive of its operands alone: its equations,
        evaluated."""
        traced = traces.trace_python(lambda *xs: list(bind(core.trace_ctx.trace, xs)), args)
        consts, values = ([self.value(x) for x in xs] for xs in (traced.consts, args))
        with self.outside.again():
            values = compat.evaluate(traced.jaxpr, consts, values, self.step)
        if traces.was_called(rule):
            # JAX reads the structure of results from the rule, which requires that the function
            # has left none.
            traces.let_call_again(fun)
        return [Block(self, *pair) for pair in zip(traced.out_avals, values, strict=True)]

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        return self._by_equations(
            args, lambda trace, xs: trace.process_shard_map(primitive, fun, xs, **params)
        )

    def process_custom_jvp_call(self, *call: Any, **params: Any) -> Any:
        return self._by_rule("process_custom_jvp_call", *call, **params)

    def process_custom_vjp_call(self, *call: Any, **params: Any) -> Any:
        return self._by_rule("process_custom_vjp_call", *call, **params)

    def _by_rule(self, process: str, primitive: Any, fun: Any, *rest: Any, **params: Any) -> Any:
        *rules, args = rest

        def bind(trace: Any, xs: Any) -> Any:
            return getattr(trace, process)(primitive, fun, *rules, xs, **params)

        return self._by_equations(args, bind, fun, rules[0])


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

    def run(self, f: Callable[..., Any], args: Any, values: Sequence[Any]) -> Any:
        leaves, tree = jax.tree.flatten(args)
        pairs = zip(leaves, values, strict=True)
        blocks = [Block(self.trace, jax.typeof(x), value) for x, value in pairs]
        with core.set_current_trace(self.trace):
            out, tree = jax.tree.flatten(f(*jax.tree.unflatten(tree, blocks)))
        self.results = [self.trace.value(y) for y in out]
        typed = iter(_typed_p.bind(avals=tuple(jax.typeof(y) for y in out if _is_array(y))))
        return jax.tree.unflatten(tree, [next(typed) if _is_array(y) else y for y in out])


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
