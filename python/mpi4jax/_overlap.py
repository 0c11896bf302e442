"""Start an operation, compute, and wait for it.

``iallreduce`` and the others are made of the functions of `ops`, whose arguments they take but for
the token: they start what those do, and return a :class:`Request`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from mpi4py import MPI

from . import _compat, _neighbours, _requests_lowering, ops
from ._arguments import ANY_SOURCE, ANY_TAG
from ._call import traced_peers
from ._comm import MEAN, as_reduction
from ._eager import clean, run_program, take_peers
from ._flush import started_here
from ._misuse import refuse_second_wait
from ._order import behind, ready
from ._packing import check_no_keys, pack_arguments, with_templates
from ._primitive import mean_of_sum, split, sum_of_mean
from ._request import End, Joint, Of, Request
from ._requests import HANDLE, split_wait, start_p, wait_p
from ._spec import SPECS, Call, Params, Spec, first_axes
from ._tokens import ZERO_TOKEN

del _requests_lowering  # has registered how the primitives are compiled

if TYPE_CHECKING:  # they see the arguments, and `token` among them: no type takes one away
    from ._neighbours import neighbor_allgather as ineighbor_allgather
    from ._neighbours import neighbor_alltoall as ineighbor_alltoall
    from .ops import allgather as iallgather
    from .ops import allgatherv as iallgatherv
    from .ops import allreduce as iallreduce
    from .ops import alltoall as ialltoall
    from .ops import alltoallv as ialltoallv
    from .ops import barrier as ibarrier
    from .ops import bcast as ibcast
    from .ops import exscan as iexscan
    from .ops import gather as igather
    from .ops import gatherv as igatherv
    from .ops import halo_exchange as ihalo_exchange
    from .ops import permute as ipermute
    from .ops import ragged_alltoall as iragged_alltoall
    from .ops import recv as irecv
    from .ops import reduce as ireduce
    from .ops import reduce_scatter as ireduce_scatter
    from .ops import scan as iscan
    from .ops import scatter as iscatter
    from .ops import scatterv as iscatterv
    from .ops import send as isend
    from .ops import sendrecv as isendrecv

__all__ = [
    "Request",
    "after",
    "iallgather",
    "iallgatherv",
    "iallreduce",
    "ialltoall",
    "ialltoallv",
    "ibarrier",
    "ibcast",
    "iexscan",
    "igather",
    "igatherv",
    "ihalo_exchange",
    "ineighbor_allgather",
    "ineighbor_alltoall",
    "ipermute",
    "iragged_alltoall",
    "irecv",
    "ireduce",
    "ireduce_scatter",
    "iscan",
    "iscatter",
    "iscatterv",
    "isend",
    "isendrecv",
    "wait",
    "waitall",
]

# ---- Starting


def _start(spec: Spec, args: Sequence[Any], p: Params) -> Request:
    """Bind the start once per dtype, with the same numbers, which are behind the trees."""
    n = spec.arrays or 0
    trees, numbers = args[:n], args[n:]
    known = tuple(sorted((k, v) for k, v in p.items() if k not in ("eager", "operand")))
    if not trees:
        (handle,) = start_p.bind(*numbers, of=spec.name, **p)
        return Request([handle], Of(spec.name, known, None))
    (packed,) = pack_arguments(spec, trees, p)
    check_no_keys(spec, p, packed)
    before, _ = first_axes(spec, p)
    handles = []
    for dtype in packed.groups:
        x = packed.pack(dtype, before, spec)
        q = sum_of_mean(spec, p, x) if p.get("reduction") is MEAN else p
        handles += start_p.bind(x, *numbers, of=spec.name, **q)
    return Request([*handles, *numbers[: spec.has_counts]], Of(spec.name, known, packed.form))


def _start_program(spec: Spec, _: bool, p: Params) -> Callable[..., Any]:
    def call(*args: Any) -> Request:
        return _start(spec, args, p)

    call.__name__ = f"i{spec.name}"
    return jax.jit(call)


def start(call: Call) -> Request:
    """Start an op."""
    spec, p = SPECS[call.op], call.params
    name = f"i{spec.name}"
    if p.get("status") is not None:
        raise TypeError(f"{name}: takes no status; expected status=None, or {spec.name}")
    source, tag = p.get("source"), p.get("recvtag")
    traced = isinstance(source, jax.core.Tracer) or isinstance(tag, jax.core.Tracer)
    if not traced and (source, tag) == (ANY_SOURCE, ANY_TAG):
        raise ValueError(
            f"{name}: source=MPI.ANY_SOURCE with tag=MPI.ANY_TAG would take the messages of "
            f"derivatives; name one of the two, or use {spec.name}"
        )
    args = call.arrays + call.counts
    if spec.start is not None:
        return spec.start(_begin, args, p)
    return _begin(spec.name, args, p)


def _begin(op: str, args: Sequence[Any], p: Params) -> Request:
    """Start an op by what starts it in MPI. Its counts, if it takes some, are the last of ``args``:
    how many rows go to each rank, and how many come from each."""
    spec = SPECS[op]
    p = {**spec.defaults, **p}
    if not clean():
        return _start(spec, [*args, *traced_peers(p)], p)
    started_here()
    try:
        request = run_program(_start_program, spec, False, dict(p), [*map(with_templates, args)])
    except TypeError:
        # Says which argument is no array, if that is why.
        pack_arguments(spec, args[: spec.arrays], p)
        raise
    return Request(request._children, replace(request._of, params=tuple(sorted(p.items()))))


def _started(
    op: Callable[..., Any], begin: Callable[..., Request], mpi: str | None = None
) -> Callable[..., Any]:
    """The function that starts an op, by an MPI function, MPI_Isend by default.

    Args:
        op: the function that waits for it.
        begin: starts it, given the arguments of that function by their names.
        mpi: the MPI function.
    """
    left_out = {"token", "status"}
    given = inspect.signature(op)
    # A wildcard has no derivative here.
    changed = {"source": inspect.Parameter.empty, "tag": 0, "recvtag": 0}
    parameters = [
        q.replace(default=changed.get(name, q.default))
        for name, q in given.parameters.items()
        if name not in left_out
    ]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return begin(**bound.arguments)

    call.__name__ = call.__qualname__ = f"i{op.__name__}"
    call.__module__ = "mpi4jax"
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documentation(op, mpi or "MPI_Isend")
    return call


def _documentation(op: Callable[..., Any], function: str) -> str:
    name = op.__name__
    summary, *_ = (op.__doc__ or "").partition(" (MPI_")
    first = summary[:1].lower() + summary[1:]
    section = "3.7" if function in ("MPI_Irecv", "MPI_Isend") else "6.12"
    return f"""Start to {first}, without waiting ({function}; MPI-4.1, section {section}).

    Takes what :func:`{name}` takes, without a token.

    Returns:
        Request: for :func:`wait`, whose result is that of :func:`{name}`.

    Raises:
        TypeError, ValueError: as :func:`{name}`.

    See also: :func:`{name}`, :func:`wait`, :func:`after`.
    """


def _starts(prepare: Callable[..., Call]) -> Callable[..., Request]:
    return lambda **arguments: start(prepare(**arguments))


def _starts_made_of(prepare: Callable[..., tuple[Call, End]]) -> Callable[..., Request]:
    """The same of a function that is made of an op."""

    def begin(**arguments: Any) -> Request:
        call, end = prepare(**arguments)
        return Joint([start(call), ()], end)

    return begin


_FUNCTIONS = [
    *(
        _started(getattr(ops, op), _starts(spec.prepare), spec.started)
        for op, spec in SPECS.items()
        if spec.starts
    ),
    *(_started(op, _starts_made_of(prepare)) for op, prepare in _neighbours.PREPARE.items()),
]
STARTED = {function.__name__: function for function in _FUNCTIONS}
globals().update(STARTED)


# ---- Waiting


def _handles(name: str, request: Any) -> tuple[Any, ...]:
    if not isinstance(request, Request):
        raise TypeError(
            f"{name}: argument 'request' must be a request, which iallreduce and the other "
            f"operations that start give; got {type(request).__name__}: {request!r}"
        )
    handles = request._all_handles()
    for handle in handles:
        if jnp.shape(handle) != HANDLE.shape or jnp.result_type(handle) != HANDLE.dtype:
            raise ValueError(
                f"{name}: argument 'request' has numbers of shape {jnp.shape(handle)} and dtype "
                f"{jnp.result_type(handle)}, expected {HANDLE.shape} of float32: a request is "
                "passed on as it is, and what is started inside of a vmap is waited for there"
            )
    return handles


def _wait(of: Of, handles: Sequence[Any], p: Params, numbers: Sequence[Any] = ()) -> Any:
    """Bind the wait once per dtype, with the same counts and numbers."""
    spec, mean = of.spec, p.get("reduction") is MEAN
    q = {**p, "reduction": as_reduction(of.op, MPI.SUM)} if mean else p
    if of.form is None:
        wait_p.bind(*handles, *numbers, of=of.op, given=None, derived=False, **q)
        return None
    before, after = first_axes(spec, p)
    results = {}
    for (dtype, indices), handle in zip(of.form.groups.items(), handles, strict=True):
        shape = _packed_shape([of.form.data[i][0] for i in indices], before)
        given = ShapedArray(shape, np.dtype(dtype))
        out = wait_p.bind(handle, *numbers, of=of.op, given=given, derived=False, **q)
        if out:
            results[dtype] = mean_of_sum(spec, p, out[0]) if mean else out[0]
    return of.form.unpack(results, before, after) if spec.returns else None


def _packed_shape(shapes: Sequence[tuple[int, ...]], length: int | None) -> tuple[int, ...]:
    """The shape of a message of leaves of these shapes: what `Packed.pack` makes."""
    if len(shapes) == 1:
        return shapes[0]
    if length is None:
        return (sum(map(math.prod, shapes)),)
    return (length, sum(math.prod(shape[1:]) for shape in shapes))


def _wait_program(spec: Spec, _: bool, p: Params) -> Callable[..., Any]:
    of = p.pop("request")

    def call(handles: Sequence[Any], *numbers: Any) -> Any:
        y = _wait(of, handles, p, numbers)
        return y if spec.returns else ZERO_TOKEN

    call.__name__ = f"wait_i{spec.name}"
    return jax.jit(call)


def wait(request: Request, *, after: Any = None) -> Any:
    """Wait for an operation that was started, and return its result.

    Args:
        request: from :func:`iallreduce` or another function that starts an operation. It is waited
            for once.
        after: a pytree of arrays, which are computed before the wait begins. Without it, XLA may
            wait first and compute then.

    Returns:
        The result of the operation; None of ``isend`` and ``ibarrier``. There is no token.

    Raises:
        TypeError: ``request`` is none.
        ValueError: ``request`` was changed, or waited for before in this function.
        RuntimeError: it was waited for before, or never started.

    Derivative:
        The transpose starts the adjoint operation, and that of the start waits for it: so the
        backward pass overlaps as the forward pass does.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> request = mpi4jax.iallreduce(jnp.ones(3))
        >>> y = mpi4jax.wait(request)
        >>> float(y[0]) == mpi4jax.default_comm().size
        True

    See also: :func:`waitall`, :func:`after`.
    """
    for handle in _handles("wait", request):
        refuse_second_wait(f"i{request._op}", handle)
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    return _result(request, [ready(leaves)] if leaves else [])


def _result(request: Request, there: list[Any]) -> Any:
    """What an operation gives, that is waited for once these handles of nothing are there."""
    if isinstance(request, Joint):
        return request._result([_result(each, there) for each in request._requests])
    of, counts = request._of, request._counts()
    handles = tuple(sum(there, handle) for handle in request._all_handles())
    p = dict(of.params)
    if not clean() or any(isinstance(x, jax.core.Tracer) for x in (*handles, *counts)):
        return _wait(of, handles, p, counts)
    started_here()
    p["request"] = replace(of, params=())
    y = run_program(_wait_program, of.spec, False, p, [handles, *counts])
    return y if of.spec.returns else None


def waitall(requests: Any, *, after: Any = None) -> Any:
    """Wait for several operations that were started: :func:`wait` for each.

    Args:
        requests: a list, a tuple or another pytree of requests.
        after: as in :func:`wait`.

    Returns:
        The results, in a pytree of the same structure.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`wait`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> requests = [mpi4jax.iallreduce(jnp.full(3, i)) for i in range(2)]
        >>> a, b = mpi4jax.waitall(requests)
        >>> int(b[0]) == mpi4jax.default_comm().size
        True

    See also: :func:`wait`.
    """
    return jax.tree.map(
        lambda request: wait(request, after=after),
        requests,
        is_leaf=lambda leaf: isinstance(leaf, Request),
    )


def after(request: Request, z: Any) -> Any:
    """Return ``z`` once an operation has been started: what is computed from it overlaps.

    Without it, XLA may compute first and start the operation then.

    Args:
        request: from :func:`iallreduce` or another function that starts an operation.
        z: array, or a pytree of arrays.

    Returns:
        ``z``, unchanged.

    Raises:
        TypeError: ``request`` is none.

    Derivative:
        The identity. In the backward pass, the adjoint operation is waited for after the cotangent
        of ``z`` has been computed.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax
        >>> @jax.jit
        ... def f(x, a):
        ...     request = mpi4jax.iallreduce(x)
        ...     b = jnp.sin(mpi4jax.after(request, a))
        ...     return mpi4jax.wait(request, after=b) + b
        >>> f(jnp.ones(3), jnp.zeros(3)).shape
        (3,)

    See also: :func:`wait`.
    """
    handles = _handles("after", request)
    return jax.tree.map(lambda x: behind(jnp.asarray(x), handles), z)


# ---- A primitive outside of any function that is traced


def _evaluate(primitive: Any, tell: Any, program: Callable[..., Any]) -> None:
    def run(*args: Any, **p: Any) -> Any:
        if jax.config.jax_disable_jit:  # then the program below would come here again
            return _compat.eval_primitive(primitive)(*args, **p)
        arrays, numbers, token = tell(p, args)
        of, given = p.pop("of"), p.pop("given", None)
        counts = numbers[: SPECS[of].has_counts]
        take_peers(p, numbers[len(counts) :])
        q = {**p, "given": given}
        return run_program(program, SPECS[of], False, q, [*arrays, *counts], token)

    primitive.def_impl(run)


def _bound_start(spec: Spec, _: bool, p: Params) -> Callable[..., Any]:
    q = {k: v for k, v in p.items() if k != "given"}
    return jax.jit(lambda *args: start_p.bind(*args, of=spec.name, **q))


def _bound_wait(spec: Spec, _: bool, p: Params) -> Callable[..., Any]:
    return jax.jit(lambda *args: wait_p.bind(*args, of=spec.name, **p))


_evaluate(start_p, lambda p, args: split(SPECS[p["of"]], p, args), _bound_start)
_evaluate(wait_p, split_wait, _bound_wait)
