"""The public operations.

Each takes and returns arrays or pytrees of arrays, blocks no Python (like every JAX operation),
and happens exactly once per execution, in program order, also if its results are unused.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI

from . import _cart, _compat
from ._comm import Comm, Status, as_comm, as_reduction, as_status, static_int
from ._misuse import warn_of_used_token
from ._primitive import PRIMITIVES, split_payload
from ._spec import SPECS, Params, Spec, stacked

ANY_SOURCE, ANY_TAG, PROC_NULL = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.PROC_NULL
_TAG_UB = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)

# ---- Validation of static arguments


def _rank(op: str, name: str, value: Any, comm: Comm, *special: tuple[str, int]) -> int:
    if type(value) is int and 0 <= value < comm.size:
        return value
    names = "".join(f" or MPI.{n}" for n, _ in special)
    expected = f"a rank from 0 to {comm.size - 1}{names}"
    value = static_int(op, name, value, expected)
    if 0 <= value < comm.size or any(value == v for _, v in special):
        return value
    raise ValueError(
        f"{op}: argument '{name}' must be {expected} (communicator {comm.key} has size "
        f"{comm.size}), got {value}"
    )


def _tag(op: str, name: str, value: Any, *, wildcard: bool = False) -> int:
    if type(value) is int and 0 <= value <= 32767:  # every MPI allows these
        return value
    expected = f"an integer from 0 to {_TAG_UB}" + (" or MPI.ANY_TAG" if wildcard else "")
    value = static_int(op, name, value, expected)
    if 0 <= value <= _TAG_UB or (wildcard and value == ANY_TAG):
        return value
    raise ValueError(f"{op}: argument '{name}' must be {expected}, got {value}")


# ---- Tokens


class _NoToken:
    """Passed as token by the functions of `notoken`: no token is returned."""

    def __repr__(self) -> str:
        return "<no token>"


NO_TOKEN = _NoToken()
_ZERO_TOKEN = np.zeros((), np.float32)


def create_token(*args: Any) -> jax.Array:
    """Make a token, a float32 scalar.

    Ops happen in program order with or without tokens. A token passed from op to op makes this
    order visible in the data flow, as earlier packages of this kind required.

    Args:
        *args: ignored; accepted because earlier packages took an array here.

    Returns:
        jax.Array: a scalar of dtype float32.

    Example:
        >>> import mpi4jax
        >>> token = mpi4jax.create_token()
        >>> token = mpi4jax.barrier(token=token)
        >>> token.shape, str(token.dtype)
        ((), 'float32')
    """
    return jnp.zeros((), np.float32)


def _check_token(op: str, token: Any) -> None:
    if token is None or token is NO_TOKEN or isinstance(token, _compat.Token):
        return
    aval = getattr(token, "aval", token)
    if isinstance(aval, _compat.AbstractToken):
        return
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != np.float32:
        raise TypeError(
            f"{op}: argument 'token' must be a token (a float32 scalar, from create_token() or "
            f"from another op) or None, got {type(token).__name__}: {token!r}"
        )


def _value_token(token: Any) -> list[Any]:
    """The token as an operand; JAX's own tokens are none, and order nothing here."""
    foreign = token is None or token is NO_TOKEN or isinstance(token, _compat.Token)
    if foreign or isinstance(getattr(token, "aval", None), _compat.AbstractToken):
        return []
    return [token]


# ---- Calling a primitive

# Handed to compiled code as they are; anything else may be a pytree.
_ARRAYS = {_compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def _as_array(op: str, argument: str, leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as e:
        kind = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
        raise TypeError(
            f"{op}: argument '{argument}' must be an array, a number, or a pytree of those, "
            f"got {kind}: {leaf!r}"
        ) from e


def _pack_arguments(spec: Spec, trees: Sequence[Any]) -> list[_Packed]:
    names = ("sendbuf", "recvbuf") if spec.arrays == 2 else ("x",)
    return [_Packed(spec.name, name, tree) for name, tree in zip(names, trees, strict=True)]


def _groups(leaves: Sequence[jax.Array]) -> dict[Any, list[int]]:
    """Positions of the leaves of each dtype; in the same order on every rank."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(i)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


class _Packed:
    """The leaves of a tree, as one array per dtype."""

    def __init__(self, op: str, argument: str, tree: Any):
        leaves, self.tree = jax.tree.flatten(tree)
        leaves = [_as_array(op, argument, leaf) for leaf in leaves]
        self.shardings = [_compat.explicit_sharding(x) for x in leaves]
        leaves = [
            x if s is None else jax.sharding.reshard(x, NamedSharding(s.mesh, PartitionSpec()))
            for x, s in zip(leaves, self.shardings, strict=True)
        ]
        self.impls = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
        self.shapes = [x.shape for x in leaves]
        self.leaves = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        self.groups = _groups(self.leaves)

    @property
    def has_keys(self) -> bool:
        return any(impl is not None for impl in self.impls)

    def pack(self, dtype: Any, stack: bool, size: int, op: str) -> jax.Array:
        """The message of one dtype: a leaf as it is, or all leaves side by side."""
        xs = [self.leaves[i] for i in self.groups[dtype]]
        if len(xs) == 1:
            return xs[0]
        if not stack:
            return jnp.concatenate([x.ravel() for x in xs])
        for x in xs:
            split_payload(op, x, size)
        return jnp.concatenate([x.reshape(size, -1) for x in xs], axis=1)

    def unpack(self, results: dict[Any, Any], before: bool, after: bool, size: int) -> Any:
        """The tree of results, from the result of each dtype's message."""
        out: list[Any] = [None] * len(self.leaves)
        for dtype, indices in self.groups.items():
            y = results[dtype]
            if len(indices) == 1:
                out[indices[0]] = y
                continue
            shapes = [self.leaves[i].shape[int(before) :] for i in indices]
            ends = np.cumsum([int(np.prod(s)) for s in shapes])[:-1]
            for i, part, s in zip(indices, jnp.split(y, ends, axis=-1), shapes, strict=True):
                out[i] = part.reshape((size, *s) if after else s)
        return self.rebuild(out)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The tree of these leaves."""
        out = [
            y if impl is None else jax.random.wrap_key_data(y, impl=impl)
            for y, impl in zip(leaves, self.impls, strict=True)
        ]
        for i, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True)):
            if sharding is not None and out[i].shape == shape:
                out[i] = jax.sharding.reshard(out[i], sharding)
        return jax.tree.unflatten(self.tree, out)


def _bind_trees(spec: Spec, trees: Sequence[Any], p: Params, token: list[Any]) -> Any:
    """Bind the primitive once per dtype; (result or None, token)."""
    if not trees:
        return None, PRIMITIVES[spec.name].bind(*token, **p)
    if spec.arrays is None:
        return _bind_blocks(spec, trees, p, token)
    size, (before, after) = p["comm"].size, stacked(spec, p)
    packed = _pack_arguments(spec, trees)
    reduction = p.get("reduction")
    if reduction is not None and packed[0].has_keys:
        raise TypeError(
            f"{spec.name}: reduction {reduction.name} is not defined for PRNG keys; "
            "expected numbers (keys can be moved, not reduced)"
        )
    results: dict[Any, Any] = {}
    dtypes = packed[0].groups
    if len(packed) == 2:
        dtypes = _groups([*packed[0].leaves, *packed[1].leaves])
    for dtype in dtypes:
        row, q, sides = spec, p, packed
        if len(packed) == 2 and not all(dtype in side.groups for side in packed):
            # The two trees of a sendrecv differ in this dtype: it only goes, or only comes.
            sends = dtype in packed[0].groups
            row, sides = SPECS["send" if sends else "recv"], [packed[0 if sends else 1]]
            q = {k: p[k] for k in row.all_params}
        xs = [side.pack(dtype, before, size, spec.name) for side in sides]
        out = PRIMITIVES[row.name].bind(*xs, *token, **q)
        if token:
            token = [out[-1]]
        if row.returns:
            results[dtype] = out[0]
    y = packed[-1].unpack(results, before, after, size) if spec.returns else None
    return y, token


def _bind_blocks(spec: Spec, trees: Sequence[Any], p: Params, token: list[Any]) -> Any:
    """Bind an op on several arrays once per dtype; (result, token)."""
    (packed,) = _pack_arguments(spec, trees)
    out: list[Any] = [None] * len(packed.leaves)
    for indices in packed.groups.values():
        xs = [packed.leaves[i] for i in indices]
        axes = []
        for i, x in zip(indices, xs, strict=True):
            shape = packed.shapes[i]
            inside = x.ndim - len(shape)  # axes of one element: those of a key's data
            counted = _cart.from_end(spec.name, p["axes"], p["widths"], shape)
            axes.append(tuple(axis + inside for axis in counted))
        ys = PRIMITIVES[spec.name].bind(*xs, *token, **{**p, "axes": tuple(axes)})
        if token:
            *ys, token[0] = ys
        for i, y in zip(indices, ys, strict=True):
            out[i] = y
    return packed.rebuild(out), token


@functools.cache
def compiled(
    name: str, params: tuple[tuple[str, Any], ...], want_token: bool = False
) -> Callable[..., Any]:
    """The compiled function of one op, for calls outside of any transformation.

    With ``want_token`` it returns a token as well, which is ready when the op has ended.
    """
    primitive, fixed = PRIMITIVES[name], dict(params)
    token = [_ZERO_TOKEN] if want_token else []

    def call(*args: Any) -> list[Any]:
        return [*primitive.bind(*args, **fixed), *token]

    call.__name__ = name
    return jax.jit(call)


@functools.cache
def _compiled_trees(
    name: str, params: tuple[tuple[str, Any], ...], want_token: bool
) -> Callable[..., Any]:
    """Like :func:`compiled`, for pytrees and for whatever else JAX takes as an array."""
    spec, p = SPECS[name], dict(params)

    def call(*trees: Any) -> list[Any]:
        y, _ = _bind_trees(spec, trees, p, [])
        return ([y] if spec.returns else []) + ([_ZERO_TOKEN] if want_token else [])

    call.__name__ = name
    return jax.jit(call)


_clean = _compat.trace_state_clean
_scratch = threading.local()


def _eager(spec: Spec, args: tuple[Any, ...], p: Params, want_token: bool) -> Any:
    status: Status | None = p.get("status")
    if status is not None:
        # One status serves all eager calls: a new one for each would be compiled for each.
        if not hasattr(_scratch, "status"):
            _scratch.status = Status(MPI.Status())
        p["status"] = _scratch.status
    simple = spec.arrays is not None and all(type(x) in _ARRAYS for x in args)
    compile_ = compiled if simple else _compiled_trees
    try:
        out = compile_(spec.name, tuple(p.items()), want_token)(*args)
    except TypeError:
        _pack_arguments(spec, args)  # says which argument is no array, if that is why
        raise
    if status is not None:
        jax.block_until_ready(out)
        ctypes.memmove(status.address, p["status"].address, MPI._sizeof(MPI.Status))
    if spec.returns and want_token:
        return out[0], out[1]
    return out[0] if out else None


def _run(name: str, args: tuple[Any, ...], token: Any, p: Params) -> Any:
    """Run an op; its result, with the new token unless the caller is of `notoken`."""
    spec = SPECS[name]
    want = token is not NO_TOKEN
    if token is not None and want:
        _check_token(name, token)
    if _clean():
        return _eager(spec, args, p, want)
    operand = _value_token(token)
    if operand:
        warn_of_used_token(name, token)
    y, new = _bind_trees(spec, args, p, operand)
    if not want:
        return y
    if not new:
        new = [token if token is not None else create_token()]
    return (y, new[0]) if spec.returns else new[0]


# ---- The operations


def allgather(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on all ranks (MPI_Allgather; MPI-4.1, section 6.7).

    Args:
        x: array of shape ``S``, equal on all ranks, of any dtype; or a pytree of such arrays.
        comm: communicator of ``n`` ranks; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result, of shape ``(n, *S)`` and the dtype of ``x``, whose row ``j`` comes
        from rank ``j``, and the new token.

    Raises:
        TypeError: a wrong type of ``comm``, ``token`` or dtype.

    Derivative:
        The result is one global value: the cotangent of ``x`` on rank ``r`` is row ``r`` of the
        result's. Under ``vmap`` the batch axis of the result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.allgather(jnp.ones(3))
        >>> y.shape == (mpi4jax.default_comm().size, 3)
        True

    See also: :func:`gather`, :func:`alltoall`.
    """
    return _run("allgather", (x,), token, {"comm": as_comm("allgather", comm), "adjoint": False})


def allreduce(x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Reduce over all ranks, result on all ranks (MPI_Allreduce; MPI-4.1, section 6.9.6).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        op: reduction, such as ``MPI.SUM``, or one made with ``MPI.Op.Create``. ``MPI.MINLOC`` and
            ``MPI.MAXLOC`` reduce pairs (value, index) along a last axis of length 2.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result, of the shape and dtype of ``x``, and the new token.

    Raises:
        TypeError: a wrong type of ``op``, ``comm`` or ``token``, or a reduction that is not
            defined for the dtype (MAX of complex numbers, say).
        ValueError: MINLOC or MAXLOC of an array that does not hold pairs.
        NotImplementedError: differentiated with a reduction that has no derivative.

    Derivative:
        The result is one global value. SUM: the cotangent passes through. PROD, MAX and MIN:
        exact also at zeros and ties (which share equally).

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> y, token = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
        >>> float(y[0]) == mpi4jax.default_comm().size
        True

    See also: :func:`reduce`, :func:`scan`, :func:`pvary`.
    """
    p = {
        "comm": as_comm("allreduce", comm),
        "reduction": as_reduction("allreduce", op),
        "adjoint": False,
    }
    return _run("allreduce", (x,), token, p)


def alltoall(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Send block ``j`` to rank ``j``, for all ranks at once (MPI_Alltoall; MPI-4.1, section 6.8).

    Args:
        x: array of shape ``(n, *S)``, equal on all ranks, where ``n`` is the communicator's
            size; or a pytree of such arrays.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result, of the shape and dtype of ``x``, whose block ``j`` comes from rank
        ``j``, and the new token.

    Raises:
        TypeError: a wrong type of ``comm``, ``token`` or dtype.
        ValueError: the first axis of ``x`` does not have length ``n``.

    Derivative:
        Its own transpose. Under ``vmap`` the batch axis is axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> n = mpi4jax.default_comm().size
        >>> y, token = mpi4jax.alltoall(jnp.ones((n, 2)))
        >>> y.shape == (n, 2)
        True

    See also: :func:`allgather`, :func:`scatter`.
    """
    return _run("alltoall", (x,), token, {"comm": as_comm("alltoall", comm)})


def barrier(*, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Wait for all ranks (MPI_Barrier; MPI-4.1, section 6.3).

    Args:
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        The new token.

    Raises:
        TypeError: a wrong type of ``comm`` or ``token``.

    Example:
        >>> import mpi4jax
        >>> token = mpi4jax.barrier()
    """
    return _run("barrier", (), token, {"comm": as_comm("barrier", comm)})


def bcast(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Copy the root's array to all ranks (MPI_Bcast; MPI-4.1, section 6.4).

    Args:
        x: array of shape ``S``; its values are read on the root only. Or a pytree of such.
        root: rank whose array is copied.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the root's array and the new token.

    Raises:
        TypeError: a wrong type of ``root``, ``comm``, ``token`` or dtype.
        ValueError: ``root`` is not a rank of ``comm``.

    Derivative:
        The result is one global value: the root gets its cotangent, other ranks get zeros.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.bcast(jnp.arange(3), root=0)
        >>> y.tolist()
        [0, 1, 2]

    See also: :func:`scatter`, :func:`pvary`.
    """
    c = as_comm("bcast", comm)
    p = {"comm": c, "root": _rank("bcast", "root", root, c), "adjoint": False}
    return _run("bcast", (x,), token, p)


def gather(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on the root (MPI_Gather; MPI-4.1, section 6.5).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        root: rank that receives.
        comm: communicator of ``n`` ranks; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result and the new token. The result has shape ``(n, *S)`` on the root; on
        other ranks it is ``x``, unchanged.

    Raises:
        TypeError: a wrong type of ``root``, ``comm``, ``token`` or dtype.
        ValueError: ``root`` is not a rank of ``comm``.

    Derivative:
        The transpose scatters the root's cotangent; other ranks add that of the ``x`` which they
        returned. Under ``vmap`` the batch axis of the root's result is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> y, token = mpi4jax.gather(jnp.ones(3), root=0)

    See also: :func:`allgather`, :func:`scatter`.
    """
    c = as_comm("gather", comm)
    p = {"comm": c, "root": _rank("gather", "root", root, c), "adjoint": False}
    return _run("gather", (x,), token, p)


def halo_exchange(
    x: Any,
    cart: MPI.Cartcomm,
    *,
    axes: int | Sequence[int | None] | None = None,
    width: int | Sequence[int | tuple[int, int]] = 1,
    corners: bool = True,
    token: Any = None,
) -> Any:
    """Fill the ghost cells of a block with the edges of the neighbours' blocks.

    Each rank holds a block of a large array, with ghost cells around it: ``width`` cells at either
    end of each exchanged axis. They become copies of the cells of the neighbours on a Cartesian
    communicator (MPI-4.1, section 8.5), all at once: one message to each neighbour, which carries
    all arrays of ``x`` (MPI_Isend, MPI_Irecv and MPI_Wait; section 3.7). At an edge of the grid
    that is not periodic, ghost cells keep what they hold, and count as part of the block: its
    neighbours along the edge get copies of them.

    Args:
        x: block with its ghost cells, of any dtype; or a pytree of blocks. Neighbours' blocks may
            differ in length along the axis that they are neighbours on, and along no other.
        cart: communicator with a Cartesian topology (``MPI.Intracomm.Create_cart``), which also
            says what is periodic. All its ranks have to take part.
        axes: the array's axis for each dimension of ``cart``, or None for a dimension that is not
            exchanged. By default the last axes, in order.
        width: number of ghost cells: one number; or for each dimension of ``cart`` a number or a
            pair (below, above). The same on all ranks.
        corners: whether ghost cells that are beyond two or more axes are filled too, by the
            diagonal neighbours (3**d - 1 neighbours instead of 2*d along d axes); they keep their
            values otherwise.
        token: token from another op, or None.

    Returns:
        Tuple of the block with its ghost cells filled, of the shape and dtype of ``x``, and the
        new token.

    Raises:
        TypeError: a wrong type of ``cart``, ``axes``, ``width``, ``token`` or dtype.
        ValueError: ``axes`` or ``width`` do not fit ``cart`` or ``x``; fewer inner cells along an
            axis than the width.

    Derivative:
        The transpose adds the cotangents of ghost cells to those of the cells that they are copies
        of, and ghost cells that were filled get zeros. Under ``vmap`` the batch goes along.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
        >>> x = jnp.full(5, cart.rank).at[0].set(-1).at[4].set(-1)
        >>> y, token = mpi4jax.halo_exchange(x, cart)
        >>> [int(v) for v in y] == [cart.Shift(0, 1)[0], *[cart.rank] * 3, cart.Shift(0, 1)[1]]
        True

    See also: :func:`scatter_blocks`, :func:`gather_blocks`, :func:`sendrecv`.
    """
    name = "halo_exchange"
    comm = _cart.as_cart(name, cart)
    chosen, widths = _cart.axes_of(name, comm, axes), _cart.widths_of(name, comm, width)
    exchanged = tuple(k for k, axis in enumerate(chosen) if axis is not None)
    p = {
        "comm": comm,
        "axes": tuple(chosen[k] for k in exchanged),
        "widths": tuple(widths[k] for k in exchanged),
        "neighbours": _cart.neighbours(comm, exchanged, bool(corners)),
        "adjoint": False,
    }
    return _run(name, (x,), token, p)


def recv(
    x: Any,
    source: int = ANY_SOURCE,
    *,
    tag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
    token: Any = None,
) -> Any:
    """Receive an array from another rank (MPI_Recv; MPI-4.1, section 3.2).

    Args:
        x: template, with the shape and dtype of what is received; its values are not read (they
            are the result if ``source`` is ``MPI.PROC_NULL``). Or a pytree of templates.
        source: rank to receive from, ``MPI.ANY_SOURCE`` or ``MPI.PROC_NULL``.
        tag: tag of the message, or ``MPI.ANY_TAG``.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        status: if given, is filled when the message has arrived.
        token: token from another op, or None.

    Returns:
        Tuple of the received array and the new token.

    Raises:
        TypeError: a wrong type of ``source``, ``tag``, ``comm``, ``status``, ``token`` or dtype.
        ValueError: ``source`` or ``tag`` is out of range.

    A message that is shorter than the template ends the job with an error, unless ``status`` is
    given: then the rest of the result is zeros.

    Derivative:
        The cotangent is sent back to the rank, and with the tag, that the message came from.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> x, token = mpi4jax.recv(jnp.ones(3), source=MPI.PROC_NULL)
        >>> x.tolist()
        [1.0, 1.0, 1.0]

    See also: :func:`send`, :func:`sendrecv`.
    """
    c = as_comm("recv", comm)
    p = {
        "comm": c,
        "source": _rank(
            "recv", "source", source, c, ("ANY_SOURCE", ANY_SOURCE), ("PROC_NULL", PROC_NULL)
        ),
        "recvtag": _tag("recv", "tag", tag, wildcard=True),
        "status": as_status("recv", status),
        "env_in": 0,
        "env_out": False,
    }
    return _run("recv", (x,), token, p)


def reduce(
    x: Any, op: MPI.Op, root: int, *, comm: MPI.Intracomm | None = None, token: Any = None
) -> Any:
    """Reduce over all ranks, result on the root (MPI_Reduce; MPI-4.1, section 6.9.1).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        op: reduction, such as ``MPI.SUM``, or one made with ``MPI.Op.Create``.
        root: rank that gets the result.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result and the new token. The result is the reduction on the root; on other
        ranks it is ``x``, unchanged.

    Raises:
        TypeError: a wrong type of ``op``, ``root``, ``comm`` or ``token``, or a reduction that
            is not defined for the dtype.
        ValueError: ``root`` is not a rank of ``comm``.
        NotImplementedError: differentiated with a reduction that has no derivative.

    Derivative:
        SUM: the transpose broadcasts the root's cotangent; other ranks add that of the ``x``
        which they returned. PROD, MAX and MIN: as for :func:`allreduce`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> y, token = mpi4jax.reduce(jnp.ones(3), op=MPI.SUM, root=0)

    See also: :func:`allreduce`, :func:`scan`.
    """
    c = as_comm("reduce", comm)
    p = {
        "comm": c,
        "reduction": as_reduction("reduce", op),
        "root": _rank("reduce", "root", root, c),
        "adjoint": False,
    }
    return _run("reduce", (x,), token, p)


def scan(x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Reduce over the ranks up to this one (MPI_Scan; MPI-4.1, section 6.11.1).

    Args:
        x: array of shape ``S``, equal on all ranks; or a pytree of such arrays.
        op: reduction, such as ``MPI.SUM``, or one made with ``MPI.Op.Create``.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of the result, the reduction over ranks ``0`` to ``r`` inclusive on rank ``r``, of
        the shape and dtype of ``x``, and the new token.

    Raises:
        TypeError: a wrong type of ``op``, ``comm`` or ``token``, or a reduction that is not
            defined for the dtype.
        NotImplementedError: differentiated with a reduction that has no derivative.

    Derivative:
        SUM: the transpose sums the cotangents of ranks ``r`` to ``n - 1``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> y, token = mpi4jax.scan(jnp.ones(3), op=MPI.SUM)
        >>> float(y[0]) == mpi4jax.default_comm().rank + 1
        True

    See also: :func:`allreduce`.
    """
    p = {"comm": as_comm("scan", comm), "reduction": as_reduction("scan", op), "adjoint": False}
    return _run("scan", (x,), token, p)


def scatter(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Send block ``j`` of the root's array to rank ``j`` (MPI_Scatter; MPI-4.1, section 6.6).

    Args:
        x: on the root, array of shape ``(n, *S)`` where ``n`` is the communicator's size; on
            other ranks a template of shape ``S``, whose values are not read. Or pytrees of such.
        root: rank whose array is distributed.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        Tuple of this rank's block, of shape ``S``, and the new token.

    Raises:
        TypeError: a wrong type of ``root``, ``comm``, ``token`` or dtype.
        ValueError: ``root`` is not a rank of ``comm``; on the root, the first axis of ``x`` does
            not have length ``n``.

    Derivative:
        The transpose gathers to the root; other ranks get exact zeros. Under ``vmap`` the batch
        axis of the root's operand is axis 1.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> x = jnp.ones((comm.size, 3)) if comm.rank == 0 else jnp.ones(3)
        >>> y, token = mpi4jax.scatter(x, root=0)
        >>> y.shape
        (3,)

    See also: :func:`gather`, :func:`alltoall`.
    """
    c = as_comm("scatter", comm)
    p = {"comm": c, "root": _rank("scatter", "root", root, c), "adjoint": False}
    return _run("scatter", (x,), token, p)


def send(
    x: Any, dest: int, *, tag: int = 0, comm: MPI.Intracomm | None = None, token: Any = None
) -> Any:
    """Send an array to another rank (MPI_Send; MPI-4.1, section 3.2).

    Args:
        x: array of any shape and dtype; or a pytree of arrays.
        dest: rank to send to, or ``MPI.PROC_NULL``.
        tag: tag of the message.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        The new token.

    Raises:
        TypeError: a wrong type of ``dest``, ``tag``, ``comm``, ``token`` or dtype.
        ValueError: ``dest`` or ``tag`` is out of range.

    Derivative:
        The cotangent of ``x`` is received from ``dest``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> from mpi4py import MPI
        >>> token = mpi4jax.send(jnp.ones(3), dest=MPI.PROC_NULL)

    See also: :func:`recv`, :func:`sendrecv`.
    """
    c = as_comm("send", comm)
    p = {
        "comm": c,
        "dest": _rank("send", "dest", dest, c, ("PROC_NULL", PROC_NULL)),
        "sendtag": _tag("send", "tag", tag),
        "env_in": 0,
        "env_out": False,
    }
    return _run("send", (x,), token, p)


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
    token: Any = None,
) -> Any:
    """Send to one rank and receive from another, at once (MPI_Sendrecv; MPI-4.1, section 3.10).

    Args:
        sendbuf: array that is sent, of any shape and dtype; or a pytree of arrays.
        recvbuf: template, with the shape and dtype of what is received; or a pytree.
        source: rank to receive from, ``MPI.ANY_SOURCE`` or ``MPI.PROC_NULL``.
        dest: rank to send to, or ``MPI.PROC_NULL``.
        sendtag: tag of the message that is sent.
        recvtag: tag of the message that is received, or ``MPI.ANY_TAG``.
        comm: communicator; by default a clone of ``COMM_WORLD``.
        status: if given, is filled when the message has arrived.
        token: token from another op, or None.

    Returns:
        Tuple of the received array and the new token.

    Raises:
        TypeError: a wrong type of an argument, or a wrong dtype.
        ValueError: a rank or a tag is out of range.

    Derivative:
        The cotangent travels the other way: to ``source``, from ``dest``. Under ``vmap`` an
        unbatched buffer beside a batched one is broadcast.

    Example:
        >>> import jax.numpy as jnp, mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        >>> x = jnp.full(3, comm.rank)
        >>> y, token = mpi4jax.sendrecv(x, x, source=left, dest=right)
        >>> int(y[0]) == left
        True

    See also: :func:`send`, :func:`recv`.
    """
    c = as_comm("sendrecv", comm)
    p = {
        "comm": c,
        "source": _rank(
            "sendrecv", "source", source, c, ("ANY_SOURCE", ANY_SOURCE), ("PROC_NULL", PROC_NULL)
        ),
        "dest": _rank("sendrecv", "dest", dest, c, ("PROC_NULL", PROC_NULL)),
        "sendtag": _tag("sendrecv", "sendtag", sendtag),
        "recvtag": _tag("sendrecv", "recvtag", recvtag, wildcard=True),
        "status": as_status("sendrecv", status),
        "env_in": 0,
        "env_out": False,
    }
    return _run("sendrecv", (sendbuf, recvbuf), token, p)


# ---- Utilities


def pvary(x: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Mark a value that is equal on all ranks as used differently by each: the identity.

    The result of allreduce, allgather and bcast is one global value, with one cotangent. Where
    the ranks go on to use it differently, their cotangents differ, and the gradient needs their
    sum: ``pvary`` adds it. Its derivative is the identity, its transpose an allreduce SUM.

    Args:
        x: array, equal on all ranks, of any shape and of a floating-point or complex dtype; or a
            pytree of such arrays.
        comm: communicator; by default a clone of ``COMM_WORLD``.

    Returns:
        ``x``.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> f = lambda x: (comm.rank + 1) * mpi4jax.pvary(x)
        >>> float(jax.grad(f)(1.0)) == sum(range(1, comm.size + 1))
        True
    """
    c, total = as_comm("pvary", comm), as_reduction("pvary", MPI.SUM)
    adjoint_of_sum = PRIMITIVES["allreduce"]

    def one(v: Any) -> Any:
        v = jnp.asarray(v)
        if not jnp.issubdtype(v.dtype, np.inexact):
            return v  # no derivative, so the identity
        return adjoint_of_sum.bind(v, comm=c, reduction=total, adjoint=True)[0]

    return jax.tree.map(one, x)


def auto_tokenize(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f``: ops keep their order without tokens.

    Earlier packages of this kind needed this decorator where ops were used without tokens. Here
    order comes from JAX's effect system, also under differentiation; the decorator is kept so
    that programs that use it run unchanged.

    Example:
        >>> import mpi4jax
        >>> @mpi4jax.auto_tokenize
        ... def f(x):
        ...     return x
        >>> f(1)
        1
    """
    return f


OPS: tuple[Callable[..., Any], ...] = (
    allgather,
    allreduce,
    alltoall,
    barrier,
    bcast,
    gather,
    halo_exchange,
    recv,
    reduce,
    scan,
    scatter,
    send,
    sendrecv,
)
