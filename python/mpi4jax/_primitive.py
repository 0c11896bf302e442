"""A JAX primitive, with all its rules, from a row of the table of ops.

Every primitive has one ordered effect, so JAX keeps each op, once, in program order. The rules
follow one convention for derivatives: a result that is the same on all ranks (of allreduce,
allgather and bcast) is one global value, whose cotangent is the same on all ranks too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from . import _compat, _compat_traces, _native
from ._comm import as_reduction
from ._spec import SPECS, Params, Spec, is_root, stacked, wildcard

TOKEN = ShapedArray((), np.dtype(np.float32))
ENVELOPE = ShapedArray((2,), np.dtype(np.int32))
# Envelopes are stored with this added, which makes all of MPI's constants positive: JAX makes zeros
# of what a branch of a `cond` keeps for the backward pass where it takes another branch.
ENVELOPE_OFFSET = 3


# dtype name -> {"arithmetic": ..., "ordered": ..., "bitwise": ..., "logical": ...}
DTYPES = {
    name: {"arithmetic": a, "ordered": o, "bitwise": b, "logical": lo}
    for name, _, _, movable, a, o, b, lo in _native.dtypes_table()
    if movable
}


class MPIEffect(_compat.Effect):
    """The one effect of all ops: they happen in program order."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash("mpi4jax.MPIEffect")

    def __repr__(self) -> str:
        return "MPI"

    __str__ = __repr__


effect = MPIEffect()
_compat.add_effect_type(MPIEffect)


def split(spec: Spec, p: Params, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Operands as (arrays, envelope, token); the last two are empty or of length one."""
    n = len(p["axes"]) if spec.arrays is None else spec.arrays
    m = n + bool(p.get("env_in"))
    return list(args[:n]), list(args[n:m]), list(args[m:])


# ---- Abstract evaluation


def split_payload(op: str, x: Any, size: int) -> tuple[int, ...]:
    """The shape of one rank's block of ``x``, which holds one for each of ``size`` ranks."""
    if not x.shape or x.shape[0] != size:
        raise ValueError(
            f"{op}: argument 'x': {op.capitalize()} input must have shape (nproc, ...), one block "
            f"per rank; expected ({size}, ...), got {x.shape}"
        )
    return tuple(x.shape[1:])


def result_avals(spec: Spec, p: Params, avals: Sequence[Any]) -> list[ShapedArray]:
    if not spec.returns:
        return []
    if spec.arrays is None:
        return [_compat.array_type(x.shape, [x]) for x in avals]
    x = avals[-1]  # of sendrecv: the template of the received array
    before, after = stacked(spec, p)
    size = p["comm"].size
    payload = split_payload(spec.name, x, size) if before else x.shape
    return [_compat.array_type((size, *payload) if after else tuple(payload), avals)]


# What a reduction needs of a dtype: the flag's name in the native table.
_NEEDS = {
    **dict.fromkeys(("SUM", "PROD"), "arithmetic"),
    **dict.fromkeys(("MAX", "MIN", "MAXLOC", "MINLOC"), "ordered"),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), "bitwise"),
    **dict.fromkeys(("LAND", "LOR", "LXOR"), "logical"),
}


def _check_dtype(spec: Spec, p: Params, aval: Any) -> None:
    name = str(aval.dtype)
    flags = DTYPES.get(name)
    if flags is None:
        raise TypeError(
            f"{spec.name}: dtype {name} cannot be communicated; expected one of {', '.join(DTYPES)}"
        )
    reduction = p.get("reduction")
    if reduction is None or reduction.user:
        return
    if reduction.name in ("MAXLOC", "MINLOC") and aval.shape[-1:] != (2,):
        raise ValueError(
            f"{spec.name}: reduction {reduction.name} works on pairs (value, index) along the last "
            f"axis; expected shape (..., 2), got {aval.shape}"
        )
    if flags[_NEEDS[reduction.name]]:
        return
    allowed = ", ".join(d for d, f in DTYPES.items() if f[_NEEDS[reduction.name]])
    raise TypeError(
        f"{spec.name}: reduction {reduction.name} is not defined for dtype {name}; "
        f"expected one of {allowed}"
    )


def _abstract_eval(spec: Spec, *args: Any, **p: Any) -> tuple[list[Any], set[Any]]:
    arrays, _, token = split(spec, p, args)
    for x in arrays:
        _check_dtype(spec, p, x)
    out = result_avals(spec, p, arrays)
    out += [ENVELOPE] if p.get("env_out") else []
    return [*out, *(TOKEN for _ in token)], {effect}


# ---- Lowering


# XLA packs several values of a 4-bit type into a byte, where a rank's block may not begin: they
# travel as values of a wider type, which holds each of them exactly.
_CARRIERS = dict(_native.carriers())


def _carrier(aval: Any) -> Any:
    """The aval under which an array is communicated."""
    carrier = _CARRIERS.get(str(aval.dtype))
    return ShapedArray(aval.shape, np.dtype(jnp.dtype(carrier))) if carrier else aval


Operand = tuple[Any, Any]
Operands = list[Operand]


class _Lowering:
    """The lowering of one equation: custom calls that follow one another, and local arithmetic."""

    def __init__(self, ctx: mlir.LoweringRuleContext, spec: Spec, p: Params, on_gpu: bool):
        self.ctx, self.spec, self.p, self.on_gpu = ctx, spec, p, on_gpu
        if effect not in ctx.tokens_in.effects():
            raise NotImplementedError(
                f"{spec.name}: called inside a primitive that does not tell JAX of the effects of "
                "the functions in it (a lineax.linear_solve is one), so that the operation could "
                "be lost; use a solver of JAX (jax.scipy.sparse.linalg, custom_linear_solve)"
            )
        self.token = ctx.tokens_in.get(effect)

    def call(
        self,
        op: str,
        *operands: Operand,
        out: Sequence[Any] = (),
        in_place: bool = False,
        **attrs: Any,
    ) -> list[Any]:
        """Emit the custom call of ``op`` on (value, aval) pairs; its results, without the token.

        Args:
            op: name of the op.
            *operands: values with their avals.
            out: avals of the results that are arrays.
            in_place: whether each result is to be where its operand is.
            **attrs: attributes that only this op has.
        """
        p = self.p
        status = p.get("status")
        if self.ctx.module_context.lowering_parameters.for_export:
            _check_exportable(self.spec.name, p)
        if status is not None:
            self.ctx.module_context.add_keepalive(status.mpi)
        carried = [self._convert(operand, _carrier(operand[1])) for operand in operands]
        wire = [_carrier(aval) for aval in out]
        outs = [*wire, *([ENVELOPE] if p.get("env_out") else [])]
        values = [value for value, _ in carried]
        # The adjoint of a reduce calls bcast, which has none.
        reduction = p["reduction"].name if SPECS[op].has_reduction else ""
        target = self._gpu_target(op, reduction, carried) if self.on_gpu else f"mpi4jax_{op}"
        aliases = {i: i for i in range(len(out))} if in_place else None
        lower = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
        ctx = self.ctx.replace(
            avals_in=[*(aval for _, aval in carried), _compat.abstract_token],
            avals_out=[*outs, _compat.abstract_token],
        )
        *results, self.token = lower(
            ctx,
            *values,
            self.token,
            comm=p["comm"].key,
            dest=np.int64(p.get("dest", -1)),
            env_in=np.int64(p.get("env_in", 0)),
            env_out=np.int64(p.get("env_out", 0)),
            op=op,
            recvtag=np.int64(p.get("recvtag", -1)),
            reduction=reduction,
            reverse=np.int64(attrs.pop("reverse", 0)),
            root=np.int64(p.get("root", -1)),
            sendtag=np.int64(p.get("sendtag", -1)),
            site=_compat.user_line(self.ctx),
            source=np.int64(p.get("source", -1)),
            status=np.int64(status.address if status is not None else 0),
            **attrs,
        )
        for i, (carried_aval, aval) in enumerate(zip(wire, out, strict=True)):
            results[i], _ = self._convert((results[i], carried_aval), aval)
        if p.get("env_out"):
            results[-1] = self.local(
                lambda e: e + ENVELOPE_OFFSET, ENVELOPE, (results[-1], ENVELOPE)
            )
        return results

    def envelope(self, stored: Operand) -> Operand:
        """The envelope that overrides one side of a message; that of the parameters if unset."""
        sides = {RECEIVE_SIDE: ("source", "recvtag"), SEND_SIDE: ("dest", "sendtag")}
        default = np.array([self.p[name] for name in sides[self.p["env_in"]]], np.int32)
        set_or_default = self.local(
            lambda e: jnp.where(e == 0, default, e - ENVELOPE_OFFSET), ENVELOPE, stored
        )
        return set_or_default, ENVELOPE

    def _gpu_target(self, op: str, reduction: str, operands: list[Operand]) -> str:
        """The custom-call target: some transports leave some calls to a second one."""
        return _native.gpu_target(
            op,
            self.p["comm"].key,
            str(operands[0][1].dtype) if operands else None,
            reduction,
            self.p.get("source", -1),
            self.p.get("recvtag", -1),
            self.p.get("dest", -1),
            self.p.get("sendtag", -1),
            self.p.get("status") is not None,
        )

    def _convert(self, operand: Operand, to: Any) -> Operand:
        if operand[1].dtype == to.dtype:
            return operand
        return self.local(lambda v: v.astype(to.dtype), to, operand), to

    def local(self, f: Callable[..., Any], out: Any, *operands: tuple[Any, Any]) -> Any:
        """Emit ``f``, ordinary JAX code, on (value, aval) pairs."""
        ctx = self.ctx.replace(
            avals_in=[aval for _, aval in operands], avals_out=[out], tokens_in=mlir.TokenSet()
        )
        (y,) = mlir.lower_fun(f, multiple_results=False)(ctx, *(value for value, _ in operands))
        return y


def _check_exportable(op: str, p: Params) -> None:
    """Refuse to export what names nothing in another process, or something else."""
    comm, reduction = p["comm"], p.get("reduction")
    if "#" in comm.key:
        raise ValueError(
            f"{op}: communicator {comm.key} has no name of its own, by which an exported program "
            "could find it again; give it one with comm.Set_name(...) before its first use"
        )
    if reduction is not None and reduction.user:
        raise ValueError(f"{op}: a reduction made with MPI.Op.Create cannot be exported")
    if p.get("status") is not None:
        raise ValueError(f"{op}: cannot be exported with a status, which is in this process")


# (lowering, arrays, envelope, avals of the results that are arrays) -> results
Lower = Callable[[_Lowering, Operands, Operands, list[Any]], list[Any]]


def _lower_everywhere(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    """Every rank sends and every rank receives."""
    return low.call(low.spec.name, *xs, *env, out=out)


def _zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def _lower_allgather(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    if not low.p["adjoint"]:
        return _lower_everywhere(low, xs, env, out)
    return [low.local(lambda c: c[low.p["comm"].rank], out[0], *xs)]


def _lower_allreduce(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    if not low.p["adjoint"]:
        return _lower_everywhere(low, xs, env, out)
    return [xs[0][0]]


def _lower_bcast(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    if low.p["adjoint"]:
        return [xs[0][0] if is_root(low.p) else low.local(lambda: _zeros(out[0]), out[0])]
    if is_root(low.p):
        low.call("bcast", *xs)
        return [xs[0][0]]
    return low.call("bcast", out=out)


def _plus(low: _Lowering, y: Any, x: Operand) -> list[Any]:
    return [low.local(jnp.add, x[1], (y, x[1]), x)]


def _lower_gather(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    root = is_root(low.p)
    if low.p["adjoint"]:
        if root:
            return low.call("scatter", *xs, out=out)
        # This rank's result was its own input.
        (y,) = low.call("scatter", out=out)
        return _plus(low, y, xs[0])
    if root:
        return low.call("gather", *xs, out=out)
    low.call("gather", *xs)
    return [xs[0][0]]


def _lower_reduce(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    root = is_root(low.p)
    if low.p["adjoint"]:
        if root:
            low.call("bcast", *xs)
            return [xs[0][0]]
        (y,) = low.call("bcast", out=out)
        return _plus(low, y, xs[0])
    if root:
        return low.call("reduce", *xs, out=out)
    low.call("reduce", *xs)
    return [xs[0][0]]


def _lower_scan(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    return low.call(low.spec.name, *xs, out=out, reverse=int(low.p["adjoint"]))


def _lower_scatter(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    root = is_root(low.p)
    if low.p["adjoint"]:
        if root:
            return low.call("gather", *xs, out=out)
        low.call("gather", *xs)
        return [low.local(lambda: _zeros(out[0]), out[0])]
    return low.call("scatter", *(xs if root else ()), out=out)


def _lower_recv(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    if low.p["source"] == MPI.PROC_NULL:  # MPI leaves the buffer as it is
        if low.p["status"] is not None:
            low.call("recv", *env, out=out)  # and fills the status
        return [xs[0][0]]
    return low.call("recv", *env, out=out)


def _lower_sendrecv(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    x, template = xs
    if low.p["source"] == MPI.PROC_NULL:
        low.call("sendrecv", x, *env, out=out)
        return [template[0]]
    return low.call("sendrecv", x, *env, out=out)


def _describe_halo(p: Params, avals: Sequence[Any]) -> np.ndarray:
    """What `Attributes::halo` in `src/xla/frame.rs` reads."""
    blocks = [
        [np.dtype(_carrier(x).dtype).itemsize, x.ndim, *x.shape, *(x.ndim - a for a in axes)]
        for x, axes in zip(avals, p["axes"], strict=True)
    ]
    lists = (p["widths"], [[rank] for rank in p["neighbours"]], blocks)
    return np.array([n for rows in lists for n in (len(rows), *itertools.chain(*rows))], np.int64)


def _lower_halo(low: _Lowering, xs: Operands, env: Operands, out: list[Any]) -> list[Any]:
    halo = _describe_halo(low.p, [aval for _, aval in xs])
    return low.call(
        "halo_exchange", *xs, out=out, in_place=True, reverse=int(low.p["adjoint"]), halo=halo
    )


LOWERINGS: dict[str, Lower] = {
    "allgather": _lower_allgather,
    "allreduce": _lower_allreduce,
    "alltoall": _lower_everywhere,
    "barrier": _lower_everywhere,
    "bcast": _lower_bcast,
    "gather": _lower_gather,
    "halo_exchange": _lower_halo,
    "recv": _lower_recv,
    "reduce": _lower_reduce,
    "scan": _lower_scan,
    "scatter": _lower_scatter,
    "send": _lower_everywhere,
    "sendrecv": _lower_sendrecv,
}


def _lowering(
    spec: Spec, on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, **p: Any
) -> list[Any]:
    arrays, env, token = split(spec, p, list(zip(args, ctx.avals_in, strict=True)))
    low = _Lowering(ctx, spec, p, on_gpu)
    env = [low.envelope(stored) for stored in env]
    out = result_avals(spec, p, [aval for _, aval in arrays])
    results = LOWERINGS[spec.name](low, arrays, env, out)
    # Other ordered effects have tokens of their own.
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: low.token})))
    return [*results, *(value for value, _ in token)]


# ---- Batching


def first_token(tokens: Any) -> Any:
    """The first of a batch of tokens, which may be empty."""
    return jnp.sum(tokens[:1])


def _batch(
    spec: Spec, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **p: Any
) -> tuple[Any, Any]:
    """All arrays are batched, also unbatched ones: on another rank they may be batched.

    Not in `jax.jacfwd`, and not where `_ad.py` has made a token that tells.
    """
    if all(d is None for d in dims) and (p.get("threaded") or _compat_traces.is_jacfwd(axis_data)):
        out = bind(spec, *args, **p)
        return out, [None] * len(out)
    arrays, env, token = split(spec, p, list(zip(args, dims, strict=True)))
    size = axis_data.size
    before, after = stacked(spec, p)

    def to_payload(x: Any, d: int | None) -> Any:
        """Move, or make, the batch axis at the front of the payload of one rank."""
        if d is None:
            x, d = jnp.broadcast_to(x, (size, *x.shape)), 0
        return jnp.moveaxis(x, d, int(before))

    xs = [to_payload(x, d) for x, d in arrays]
    # Elements that did not take a branch of a `cond` have none.
    env = [x if d is None else jnp.max(x, axis=d, initial=0) for x, d in env]
    one = [x if d is None else first_token(jnp.moveaxis(x, d, 0)) for x, d in token]
    out = bind(spec, *xs, *env, *one, **p)
    out_dims: list[int | None] = [None] * len(out)
    if spec.returns:
        results = len(xs) if spec.arrays is None else 1
        out_dims[:results] = [int(after)] * results
    if token and token[0][1] is not None:
        out[-1], out_dims[-1] = jnp.broadcast_to(out[-1], (size,)), 0
    return out, out_dims


# ---- Differentiation


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.inexact))


def _jvp(spec: Spec, primals: Any, tangents: Any, **p: Any) -> tuple[list[Any], list[Any]]:
    arrays, env, token = split(spec, p, primals)
    array_tangents, _, token_tangent = split(spec, p, tangents)
    token_tangent = [ad.instantiate_zeros(t) for t in token_tangent]
    reduction = p.get("reduction")
    if reduction is not None and reduction.name != "SUM" and _inexact(arrays[0]):
        return _jvp_of_reduction(spec, arrays, token, array_tangents, token_tangent, p)

    q = {**p, "status": None} if "status" in p else dict(p)
    results: list[Any]
    if spec.transpose == "reversed" and not p["env_in"] and wildcard(p):
        # The tangent's message must come from where the primal's came from, and its transpose
        # must go back there: the primal op tells.
        y, envelope, *token_out = bind(spec, *arrays, *token, **{**p, "env_out": True})
        results = [y, *([envelope] if p["env_out"] else []), *token_out]
        env, q["env_in"] = [envelope], RECEIVE_SIDE
    else:
        results = bind(spec, *arrays, *env, *token, **p)
    if "env_out" in q:
        q["env_out"] = False

    differentiable = [_inexact(x) for x in arrays]
    ts = [
        ad.instantiate_zeros(t) if d else None
        for t, d in zip(array_tangents, differentiable, strict=True)
    ]
    if all(differentiable):
        out = bind(spec, *ts, *env, *token_tangent, **q)
    elif any(differentiable):
        out = _half_sendrecv(ts, env, token_tangent, q)
    else:
        out = token_tangent
    remaining = iter(out)
    return results, [next(remaining) if _inexact(r) else _compat.zero_tangent(r) for r in results]


def _half_sendrecv(ts: list[Any], env: list[Any], token: list[Any], q: Params) -> list[Any]:
    """The tangent of a sendrecv of which only one side has a derivative (the other: integers)."""
    name, t, side = (
        ("send", ts[0], SEND_SIDE) if ts[0] is not None else ("recv", ts[1], RECEIVE_SIDE)
    )
    if q["env_in"] != side:
        env, q = [], {**q, "env_in": 0}
    return bind(SPECS[name], t, *env, *token, **_pick(name, q))


# Values of `env_in`: which side of a message the envelope operand overrides.
RECEIVE_SIDE, SEND_SIDE = 1, 2
_OTHER_SIDE = {0: 0, RECEIVE_SIDE: SEND_SIDE, SEND_SIDE: RECEIVE_SIDE}


def _transpose(spec: Spec, cotangents: Sequence[Any], *args: Any, **p: Any) -> list[Any]:
    arrays, env, token = split(spec, p, args)
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    p.pop("threaded", None)  # the token of the transpose does not come from _ad.py
    # A known token orders nothing here; a linear one has the cotangent that comes with it.
    linear_token = bool(token) and ad.is_undefined_primal(token[0])
    token_ct = [cotangents[-1]] if token else []
    cs = cotangents[: len(arrays) if spec.arrays is None else int(spec.returns)]

    if spec.transpose == "reversed":
        array_cts, token_ct = _transpose_message(
            spec, next(iter(cs), None), arrays, env, token_ct, p
        )
    elif spec.transpose == "adjoint":
        q = dict(p, adjoint=not p["adjoint"])
        array_cts, _, token_ct = split(spec, p, bind(spec, *cs, *token_ct, **q))
    else:
        array_cts, _, token_ct = split(spec, p, bind(spec, *cs, *token_ct, **p))

    out = [
        _compat.vary_as(ct, x.aval) if ad.is_undefined_primal(x) else None
        for x, ct in zip(arrays, array_cts, strict=True)
    ]
    return [*out, *(None for _ in env), *(token_ct if linear_token else [None] * len(token))]


def _transpose_message(
    spec: Spec, c: Any, arrays: list[Any], env: list[Any], token: list[Any], p: Params
) -> tuple[list[Any], list[Any]]:
    """The cotangent travels back to where the message came from."""
    if not p["env_in"] and p.get("source") == MPI.ANY_SOURCE:
        raise NotImplementedError(
            f"{spec.name}: cannot be transposed with source=MPI.ANY_SOURCE, because only the "
            "forward pass knows the sender; name the source, or differentiate with jax.grad or "
            "jax.vjp, which record it"
        )
    q: Params = {"comm": p["comm"], "env_in": _OTHER_SIDE[p["env_in"]], "env_out": False}
    back = {
        "dest": p.get("source"),
        "source": p.get("dest"),
        "sendtag": 0 if p.get("recvtag") == MPI.ANY_TAG else p.get("recvtag"),
        "recvtag": p.get("sendtag"),
        "status": None,
    }
    x = arrays[0]
    if spec.name == "send":
        y, *token = bind(SPECS["recv"], _zero_like(x), *env, *token, **_pick("recv", q | back))
        return [y], token
    from_nobody = p["source"] == MPI.PROC_NULL  # the result was the template
    if spec.name == "recv":
        token = bind(SPECS["send"], c, *env, *token, **_pick("send", q | back))
        return [c if from_nobody else _zero_like(x)], token
    y, *token = bind(
        SPECS["sendrecv"], c, _zero_like(x), *env, *token, **_pick("sendrecv", q | back)
    )
    return [y, c if from_nobody else _zero_like(arrays[1])], token


def _zero_like(x: Any) -> Any:
    """The zero of the type of an operand of a transpose rule, known or not."""
    return ad.instantiate_zeros(ad.Zero(x.aval if ad.is_undefined_primal(x) else jax.typeof(x)))


def _pick(name: str, params: Params) -> Params:
    """The parameters of ``name`` among others'."""
    names = {*SPECS[name].all_params, "threaded"}
    return {k: v for k, v in params.items() if k in names}


def _jvp_of_reduction(
    spec: Spec, xs: list[Any], token: list[Any], tangents: Any, token_tangent: list[Any], p: Params
) -> tuple[list[Any], list[Any]]:
    """PROD, MAX and MIN; the others have no derivative."""
    name, comm = p["reduction"].name, p["comm"]
    if name not in ("PROD", "MAX", "MIN"):
        raise NotImplementedError(
            f"{spec.name}: reduction {name} has no derivative; "
            "expected one of SUM, PROD, MAX, MIN (or use jax.lax.stop_gradient on the input)"
        )
    if spec.name not in ("allreduce", "reduce", "scan"):  # the formulas below are theirs
        raise NotImplementedError(
            f"{spec.name}: the derivative for reduction {name} is not written"
        )
    (x,), t = xs, ad.instantiate_zeros(tangents[0])
    y, *token_out = bind(spec, x, *token, **p)
    total = {"comm": comm, "reduction": as_reduction(spec.name, MPI.SUM), "adjoint": False}

    # Every op here takes the token, of the values or of the tangents, and gives it back: an op on
    # tangents without it would not be part of the linear function on a rank whose tangent is zero.
    def reduced(op: str, v: Any, token: list[Any], **changes: Any) -> tuple[Any, list[Any]]:
        v, *token = bind(SPECS[op], v, *token, **_pick(op, {**p, **total, **changes}))
        return v, token

    def everyone(v: Any, token: list[Any]) -> tuple[Any, list[Any]]:
        """All ranks' ``v``. Ranks use it differently, hence the pvary (allreduce's adjoint)."""
        return reduced("allreduce", *reduced("allgather", v, token), adjoint=True)

    if spec.name == "scan":
        # Results differ between ranks: all ranks' values, differentiated locally.
        fold: Any = {"PROD": jnp.prod, "MAX": jnp.max, "MIN": jnp.min}[name]
        all_x, token_out = everyone(x, token_out)
        all_t, token_tangent = everyone(t, token_tangent)
        _, ty = jax.jvp(lambda v: fold(v[: comm.rank + 1], axis=0), (all_x,), (all_t,))
        return [y, *token_out], [ty, *token_tangent]
    if name == "PROD":
        # The product of the other ranks' factors, without dividing: exact at zeros.
        all_x, token_out = everyone(x, token_out)
        share = jnp.prod(all_x.at[comm.rank].set(1), axis=0)
    else:
        best = y
        if spec.name != "allreduce":
            best, token_out = reduced("allreduce", x, token_out, reduction=p["reduction"])
        attained = (x == best).astype(x.dtype)
        ties, token_out = reduced("allreduce", attained, token_out)
        share = attained / ties
    ty, token_tangent = reduced(spec.name, t * share, token_tangent)
    if spec.name == "reduce" and not is_root(p):
        ty = t  # this rank's result is its own input
    return [y, *token_out], [ty, *token_tangent]


# ---- Definition

PRIMITIVES: dict[str, Primitive] = {}


def bind(spec: Spec, *args: Any, **p: Any) -> list[Any]:
    return list(PRIMITIVES[spec.name].bind(*args, **p))


def define(spec: Spec) -> Primitive:
    """Make the primitive of a row and register its rules."""
    primitive = Primitive(f"mpi4jax_{spec.name}")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(functools.partial(_abstract_eval, spec))
    # Not cached: equal ops on different lines are one lowering to JAX, and it would name one line.
    for platform, on_gpu in (("cpu", _native.is_gpu_on_cpu()), ("cuda", True)):
        rule = functools.partial(_lowering, spec, on_gpu)
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    # The "fancy" rules are called also where no operand is batched.
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, spec)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, spec)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, spec)
    return primitive


PRIMITIVES.update({name: define(spec) for name, spec in SPECS.items()})
