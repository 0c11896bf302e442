"""Everything that depends on JAX's version or on its internals.

Only this package imports from ``jax._src``. Supported: JAX 0.7 and newer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dispatch, effects, source_info_util, traceback_util, xla_bridge
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.interpreters import pxla
from jax._src.shard_map import shard_map_p as shard_map_p
from jax.core import ShapedArray
from jax.extend import backend
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Primitive,
    Token as Token,
    primitives,
)
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import ad, partial_eval as public_pe, xla
from jax.sharding import NamedSharding, PartitionSpec

from .workarounds import is_needed


def _primitive_of(f: Callable[..., Any]) -> Primitive:
    """Return the last primitive of a function of a number."""
    with jax.disable_jit(False):
        return jax.make_jaxpr(f)(0.0).eqns[-1].primitive


# It is public in newer versions, in which a flag may select the primitive of `jax.checkpoint`.
remat_p = getattr(primitives, "remat_p", None) or _primitive_of(jax.checkpoint(lambda x: x + 1))
debug_callback_p = _primitive_of(lambda x: jax.debug.callback(print, x))
debug_print_p = _primitive_of(lambda x: jax.debug.print("{}", x))  # the same up to JAX 0.7

(abstract_token,) = jax.make_jaxpr(jax.lax.create_token)().out_avals
AbstractToken = type(abstract_token)
trace_state_clean = core.trace_ctx.is_top_level
Effect = effects.Effect
keep_caches = jax.jit(lambda: 0)
caches_are_kept = keep_caches._cache_size  # 0 until `keep_caches`, and after `jax.clear_caches`
# The newest version that the tests run with.
TESTED = (0, 12)
newer_than_tested = jax.version.__version_info__[:2] > TESTED

# Frames of this package do not belong to the user: error messages, `user_place` and the tracebacks
# that JAX filters skip them.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)
NOT_THE_USERS = (_PACKAGE + os.sep, os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)


def replace_by(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of JAX by ``make(original)``, which programs that never communicate call,
    too: for them it should call ``original`` and little else (`tests/unit/test_import_cost.py`)."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of JAX, which programs seldom call, by ``around(original, *args)``."""
    replace_by(owner, name, lambda original: lambda *a, **kw: around(original, *a, **kw))


def allows_transfers(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Let a rule of ours put its own constants on a device under `jax.transfer_guard`.

    The guard as a decorator would add a frame of `contextlib`, which looks like the user's.
    """

    @functools.wraps(rule)
    def allowed(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return rule(*args, **kwargs)

    return allowed


def warn(words: str) -> None:
    """Warn at the user's line that has led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, stacklevel=level)


_BRANCHING = {inspect.unwrap(f).__code__ for f in (jax.lax.cond, jax.lax.switch)}


def in_branch() -> bool:
    """Return whether a branch of a `cond` or `switch`, which may never run, is being traced."""
    if trace_state_clean():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in _BRANCHING:
        frame = frame.f_back
    return frame is not None


def add_effect_type(effect: type[effects.Effect]) -> None:
    """Declare ``effect`` ordered, and allowed wherever an operation may be.

    Without one of these, ops are lost or refused. Without ``partial_eval_kept_effects``, random
    programs lose messages in reverse mode (`tests/ranks/test_ad_random.py`).
    """
    for kind in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        effects.partial_eval_kept_effects,
    ):
        kind.add_type(effect)
    if is_needed("checkpoints without operands"):
        _keep_in_checkpoint(effect)


def _keep_in_checkpoint(effect: type[effects.Effect]) -> None:
    """Keep a ``jax.checkpoint`` that has an effect and neither operands nor used results.

    JAX drops those that have effects rather than those that have none.
    """
    original = public_pe.dce_rules[remat_p]

    def rule(*args: Any) -> Any:
        eqn, result = args[-1], original(*args)
        if result[1] is None and any(isinstance(e, effect) for e in eqn.effects):
            return [True] * len(eqn.invars), eqn
        return result

    public_pe.dce_rules[remat_p] = rule


def _round_real(bind: Callable[..., Any], x: Any, **params: Any) -> Any:
    """JAX rounds what a `jax.checkpoint` stores, without asking whether complex numbers can be."""
    return x if jnp.iscomplexobj(x) else bind(x, **params)


if is_needed("complex residuals"):
    wrap(jax.lax.reduce_precision_p, "bind", _round_real)


def replace_lowered(
    effect: effects.Effect,
    replace: Callable[[ClosedJaxpr, Sequence[bool], bool], ClosedJaxpr],
    finish: Callable[[Any], None],
    refusal: str,
    hidden: str,
) -> bool:
    """Have JAX lower ``replace(jaxpr, donated, for_export)`` for each module's ``jaxpr``.

    ``donated`` says for each argument whether its caller has given it up; ``finish`` is called
    with what JAX has lowered, if it has the effect.

    What jitted functions, eager primitives, ahead-of-time compilation and export lower all comes
    through one function of JAX. Programs with the effect that run on several devices are refused
    by ``refusal``, those that hide it from JAX by ``hidden``.

    Returns:
        Whether JAX has that function.
    """
    original = getattr(pxla, "lower_sharding_computation", None)
    if original is None:
        return False
    signature = inspect.signature(original)
    if next(iter(signature.parameters)) != "closed_jaxpr":
        return False
    if not {"donated_invars", "lowering_parameters"} <= signature.parameters.keys():
        return False

    def lower(original: Any, closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(closed_jaxpr, *args, **kwargs).arguments
        donated, for_export = given["donated_invars"], given["lowering_parameters"].for_export
        if effect in closed_jaxpr.effects and not for_export:
            # JAX refuses functions with the effect, which is hidden in processes with one device.
            shardings = (*given["in_shardings"], *given["out_shardings"])
            if any(getattr(sharding, "num_devices", 1) > 1 for sharding in shardings):
                raise ValueError(refusal)
        try:
            lowered = original(replace(closed_jaxpr, donated, for_export), *args, **kwargs)
        except ValueError as error:
            if effect in closed_jaxpr.effects and "for more than 1 device" in str(error):
                raise ValueError(refusal) from None
            raise
        if effect in closed_jaxpr.effects:
            finish(lowered)
        return lowered

    def make(original: Any) -> Callable[..., Any]:
        def lower_or_refuse(closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if closed_jaxpr.effects:
                    return lower(original, closed_jaxpr, *args, **kwargs)
                return original(closed_jaxpr, *args, **kwargs)
            except KeyError as error:  # up to 0.7: the tokens of a primitive that has no effects
                if error.args == (effect,):
                    raise NotImplementedError(hidden) from None
                raise

        return lower_or_refuse

    replace_by(pxla, "lower_sharding_computation", make)
    return True


def on_first_call(
    computation: Any, begins: Callable[[Sequence[Any]], None], ended: Callable[[], None]
) -> None:
    """Have the first call of a lowered function call ``begins`` with its arguments, wait for its
    results, and then call ``ended``."""

    def compiled(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        executable = compile(*args, **kwargs)
        with unless_changed(WITHOUT_FIRST_CALLS):
            _wait_once(executable.unsafe_call, begins, ended)
        return executable

    with unless_changed(WITHOUT_FIRST_CALLS):
        wrap(computation, "compile", compiled)


def _wait_once(
    call: Any, begins: Callable[[Sequence[Any]], None], ended: Callable[[], None]
) -> None:
    kind: Any = pxla.ExecuteReplicated
    if not isinstance(call, kind):
        raise TypeError

    class FirstCall(kind):
        __slots__ = ()

        def __call__(self, *args: Any) -> Any:
            self.__class__ = kind
            begins(args)
            out = jax.block_until_ready(self(*args))
            ended()
            return out

    call.__class__ = FirstCall


WITHOUT_FIRST_CALLS = (
    "the first call of a compiled function does not wait for the communicator that it makes; with "
    "Open MPI, a program that makes another one meanwhile may deadlock; call mpi4jax.flush() before"
)


@contextlib.contextmanager
def unless_changed(without: str) -> Iterator[None]:
    """Context: without what of JAX's is touched in it, a warning says what is lost."""
    try:
        yield
    except (AttributeError, TypeError):
        warn_of_changed_jax(without)


@functools.cache  # once
def warn_of_changed_jax(without: str) -> None:
    """Log what is lost because a later JAX does something else inside."""
    logging.getLogger("mpi4jax").warning(
        "JAX %s is newer than this mpi4jax supports: %s", jax.__version__, without
    )


def on_effects_barrier(wait: Callable[[], None]) -> None:
    """Have ``jax.effects_barrier()``, which waits for effects that JAX sees, call ``wait`` too.

    Any name of the function calls the wrapped method, also one that was bound before this import.
    """

    def block_until_ready(original: Callable[[Any], None], tokens: Any) -> None:
        original(tokens)
        wait()

    wrap(type(dispatch.runtime_tokens), "block_until_ready", block_until_ready)


def on_set_mesh(mesh_type: type, begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have ``jax.set_mesh`` take meshes of this type: ``begin(mesh)``, and ``end(mesh)`` when a
    ``with`` ends. It is a class from JAX 0.8 on, and not there before."""

    def init(original: Callable[..., None], self: Any, mesh: Any) -> None:
        if not isinstance(mesh, mesh_type):
            return original(self, mesh)
        self.prev_mesh = mesh
        return begin(mesh)

    def enter(original: Callable[..., Any], self: Any) -> Any:
        return self.prev_mesh if isinstance(self.prev_mesh, mesh_type) else original(self)

    def exit(original: Callable[..., Any], self: Any, *error: Any) -> Any:
        is_ours = isinstance(self.prev_mesh, mesh_type)
        return end(self.prev_mesh) if is_ours else original(self, *error)

    if hasattr(jax, "set_mesh"):
        with unless_changed("jax.set_mesh does not take a mesh of ranks"):
            wrap(jax.set_mesh, "__init__", init)
            wrap(jax.set_mesh, "__enter__", enter)
            wrap(jax.set_mesh, "__exit__", exit)


def context_of_jit() -> Callable[[Any], contextlib.AbstractContextManager[Any]] | None:
    """Make a context that takes a value: what `jax.jit` has traced for one value is not used for
    another. Return None in a JAX that has no such contexts, such as 0.7."""
    make = getattr(jax, "make_user_context", None)
    return make() if make else None  # type: ignore[no-any-return]


def visible_gpus(option: str = "jax_cuda_visible_devices") -> str:
    """Return the GPUs that JAX was told to use: ``"all"``, or numbers separated by commas."""
    return str(jax.config.read(option))


def has_started() -> bool:
    """Return whether JAX has started its platforms, after which it chooses no other devices."""
    return xla_bridge.backends_are_initialized()


def platforms() -> set[str]:
    """Return the platforms on which this process may have arrays."""
    return set(backend.backends())


def drop_unused(primitive: Primitive, key: str) -> None:
    """Drop operands and results of ``primitive`` that the jaxpr in its parameter does not use."""

    def rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # before it, from 0.12: which of the operands are live
        closed = eqn.params[key]
        jaxpr, used_in = public_pe.dce_jaxpr(closed.jaxpr, list(used))[:2]
        return list(used_in), eqn.replace(
            invars=[v for v, u in zip(eqn.invars, used_in, strict=True) if u],
            outvars=[v for v, u in zip(eqn.outvars, used, strict=True) if u],
            params={**eqn.params, key: ClosedJaxpr(jaxpr, closed.consts)},
        )

    public_pe.dce_rules[primitive] = rule


def eval_primitive(primitive: Primitive) -> Callable[..., Any]:
    """Compile and run a primitive, as JAX does with its own primitives."""

    def impl(*args: Any, **params: Any) -> Any:
        return xla.apply_primitive(primitive, *args, **params)

    return impl


def bind_with(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate an equation that has these parameters in a jaxpr."""
    found = primitive.get_bind_params(params)
    subfuns, params = found if isinstance(found, tuple) else ((), found)  # a tuple up to 0.9
    out = primitive.bind(*subfuns, *args, **params)
    return list(out) if primitive.multiple_results else [out]


def as_value(operand: Any) -> Any:
    """Return an operand of an equation as a value with a shape and a dtype.

    JAX passes a literal to rules as a number: of a type of its own, of Python's, or of NumPy's.
    """
    return operand if hasattr(operand, "shape") else jax.numpy.asarray(operand)


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], step: Callable[..., Sequence[Any]]
) -> list[Any]:
    """Return the results of a jaxpr; ``step(eqn, operands)`` evaluates each equation."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        # Its source line stays the user's line.
        with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
            outs = step(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def zero_tangent(x: Any) -> Any:
    """Return the symbolic zero for the tangent of ``x``."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def has_refs(jaxpr: ClosedJaxpr) -> bool:
    """Return whether it reads or writes mutable arrays (``jax.new_ref``)."""
    return bool(effects.lowerable_effects.filter_not_in(jaxpr.effects))


def explicit_sharding(x: Any) -> Any:
    """Return how an array is sharded, if its type says so (explicit axes), or None."""
    sharding = jax.typeof(x).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the manual axes (of a `jax.shard_map`) over which a value of this type varies."""
    found = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return frozenset(found)


def array_type(shape: tuple[int, ...], arrays: Sequence[Any]) -> ShapedArray:
    """The type of a result of this shape, otherwise of the last of the arrays it is made from, also
    whether it is weak.

    It varies over the manual axes that any of them varies over.
    """
    like = arrays[-1]
    varying: frozenset[Any] = frozenset().union(*map(varying_axes, arrays))
    # Constants have no mesh. Along the mesh axes of other values, ops get unsharded arrays.
    sharding = next((x.sharding for x in arrays if not x.sharding.mesh.empty), like.sharding)
    if shape != like.shape or sharding is not like.sharding:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(None for _ in shape)))
    like = like.update(shape=shape, sharding=sharding)
    return varying_type(like, add=varying)


def varying_type(
    aval: Any, add: frozenset[Any] = frozenset(), remove: frozenset[Any] = frozenset()
) -> Any:
    """Return the type of a value that varies over other manual axes."""
    varying = (varying_axes(aval) | add) - remove
    if hasattr(aval, "manual_axis_type"):  # from 0.11
        return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=varying))
    return aval.update(vma=varying)


def vary_over(x: Any, axes: Any) -> Any:
    """Return ``x`` as a value that also varies over these manual axes."""
    axes = tuple(axes - varying_axes(jax.typeof(x)))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):  # from 0.8
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # type: ignore[attr-defined]


def vary_as(x: Any, aval: Any) -> Any:
    """Return ``x`` as a value that varies over the manual axes of type ``aval``."""
    given, required = varying_axes(jax.typeof(x)), varying_axes(aval)
    if given - required:
        x = jax.lax.psum(x, tuple(given - required))  # the transpose of what made it vary
    return vary_over(x, required)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = [len(tree) for tree in params["ft_in"].unpack()][:2]  # from 0.11
    return consts, carry


def close_constants(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Return a jaxpr with its constants as first arguments, and the constants."""
    opened = jaxpr.jaxpr
    invars, info = [*opened.constvars, *opened.invars], opened.debug_info
    names = info.arg_names
    if names is not None:
        names = (*("" for _ in jaxpr.consts), *names)
    opened = opened.replace(constvars=[], invars=invars, debug_info=info._replace(arg_names=names))
    return ClosedJaxpr(opened, ()), list(jaxpr.consts)
