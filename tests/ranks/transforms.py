"""The transformations of JAX, each as a check of one op.

The op becomes a *unit*: a function from an array to one of the same shape, the same on all ranks,
so that it can stand in a loop, a branch, a custom rule. The program under test makes `STEPS` steps
with it. What it should give is computed in one process, by JAX, from the model of the op in
`oracle.py` on all ranks' inputs: the value, the Jacobian of the whole job, the Hessian of a loss.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from oracle import RANK, SIZE, Case

import mpi4jax
from mpi4jax._spec import SPECS

SHAPE = (2,)
STEPS = 2
JITS = {"jax.jit": jax.jit, "mpi4jax.jit": mpi4jax.jit}

ROWS = [
    Case("allgather"),
    Case("allreduce", {"op": "SUM"}),
    Case("allreduce", {"op": "PROD"}),
    Case("alltoall"),
    Case("barrier"),
    Case("bcast", {"root": SIZE - 1}),
    Case("gather", {"root": SIZE - 1}),
    Case("halo_exchange"),
    Case("reduce", {"op": "SUM", "root": 0}),
    Case("reduce", {"op": "MAX", "root": SIZE - 1}),
    Case("scan", {"op": "SUM"}),
    Case("scan", {"op": "MIN"}),
    Case("scatter", {"root": 0}),
    Case("send-recv"),
    Case("sendrecv"),
]


def title(case: Case) -> str:
    return "-".join([case.row, *([case.params["op"]] if "op" in case.params else [])])


class NotApplicable(Exception):
    """There is nothing that this transformation of this op could mean."""


# ---- The unit, its model, and the program


def _many(xp: Any, x: Any) -> Any:
    return xp.stack([x * (j + 1) for j in range(SIZE)])


def _one(y: Any, x: Any) -> Any:
    if y.ndim > x.ndim:
        return sum(y[j] / (j + 1) for j in range(SIZE))
    n = x.shape[0]
    return y if len(y) == n else y[:n] - 0.5 * y[n:]  # with ghost cells


def unit(case: Case, api: str) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        whole = len(case.input_shape(RANK)) > len(SHAPE)
        y = case.f(api)(_many(jnp, x) if whole else x)
        # Ranks use a global result differently.
        return _one(mpi4jax.pvary(y) if case.replicated else y, x)

    return f


@functools.partial(jnp.vectorize, excluded=(0,), signature="(r,i)->(r,i)")
def unit_of_all(case: Case, X: Any) -> Any:
    """The model of the unit; the last two axes of ``X`` are the rank and that of SHAPE."""
    xs = [X[r] for r in range(SIZE)]
    whole = [len(case.input_shape(r)) > len(SHAPE) for r in range(SIZE)]
    ys = case.model(jnp, [_many(jnp, x) if w else x for x, w in zip(xs, whole, strict=True)])
    return jnp.stack([_one(y, x) for y, x in zip(ys, xs, strict=True)])


def step(u: Callable[[Any], Any], x: Any) -> Any:
    return 0.5 * x + 0.1 * u(x * x)


def program(u: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        for _ in range(STEPS):
            x = step(u, x)
        return x

    return f


WEIGHTS = np.arange(1, SIZE * SHAPE[0] + 1, dtype=np.float32).reshape(SIZE, *SHAPE)


def loss(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """This rank's part of the loss of the job."""
    return lambda x: jnp.sum(WEIGHTS[RANK] * f(x))


class Reference:
    """What the job as a whole gives. Axes of the inputs come after those of the results."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(zlib.crc32(case.id.encode()))
        self.X, self.T = rng.uniform(0.5, 1.5, (2, SIZE, *SHAPE)).astype(np.float32)
        self.unit = jax.jit(functools.partial(unit_of_all, case))
        self.program = jax.jit(program(functools.partial(unit_of_all, case)))
        self.jacobian_at = jax.jit(jax.jacobian(self.program))
        self.value, self.jacobian = self.program(self.X), np.asarray(self.jacobian_at(self.X))
        # All of a rank's input, to all of a rank's result.
        self.tangent = np.einsum("risj,sj->ri", self.jacobian, self.T)
        self.cotangent = np.einsum("ri,risj->sj", WEIGHTS, self.jacobian)

    @functools.cached_property
    def hessian(self) -> np.ndarray:
        whole = jax.hessian(lambda X: jnp.sum(WEIGHTS * self.program(X)))
        return np.asarray(jax.jit(whole)(self.X))

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """Of the unit, where it is linear."""
        return np.asarray(jax.jit(jax.jacobian(self.unit))(self.X))


reference = functools.lru_cache(maxsize=None)(lambda row: Reference(ROWS[row]))


@dataclass
class Subject:
    """One cell of the table, ready to be checked."""

    case: Case
    api: str
    jit: Callable[..., Any]
    ref: Reference

    @property
    def x(self) -> jax.Array:
        return jnp.asarray(self.ref.X[RANK])

    @property
    def t(self) -> jax.Array:
        return jnp.asarray(self.ref.T[RANK])

    @property
    def w(self) -> np.ndarray:
        return WEIGHTS[RANK]

    @property
    def u(self) -> Callable[[Any], Any]:
        return unit(self.case, self.api)

    @property
    def f(self) -> Callable[[Any], Any]:
        return program(self.u)

    def linear(self) -> None:
        if not self.case.linear:
            raise NotApplicable("the op is not linear")

    def check(self, f: Callable[[Any], Any], forward: bool = True, reverse: bool = True) -> None:
        """Whether ``f`` is the program, and its derivatives are the program's."""

        def everything(x: Any, t: Any) -> Any:
            out = [f(x)]
            if forward:
                out.append(jax.jvp(f, (x,), (t,))[1])
            if reverse:
                out.append(jax.grad(loss(f))(x))
            return out

        value, *derivatives = self.jit(everything)(self.x, self.t)
        close(value, self.ref.value[RANK])
        if forward:
            close(derivatives.pop(0), self.ref.tangent[RANK])
        if reverse:
            close(derivatives.pop(0), self.ref.cotangent[RANK])


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=2e-4, atol=1e-5)


# ---- The checks: name -> function of a Subject. The docstrings are the table's.

CHECKS: dict[str, Callable[[Subject], None]] = {}


def check(name: str) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    def register(f: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS[name] = f
        return f

    return register


@check("no jit")
def _eager(s: Subject) -> None:
    close(s.f(s.x), s.ref.value[RANK])
    close(jax.grad(loss(s.f))(s.x), s.ref.cotangent[RANK])
    close(jax.jvp(s.f, (s.x,), (s.t,))[1], s.ref.tangent[RANK])


@check("jit")
def _jit(s: Subject) -> None:
    f = s.jit(s.f)
    for _ in range(3):
        close(f(s.x), s.ref.value[RANK])


@check("nested jit")
def _nested_jit(s: Subject) -> None:
    u = jax.jit(s.u)
    s.check(jax.jit(program(s.jit(lambda x: u(x)))))


@check("grad")
def _grad(s: Subject) -> None:
    value, gradient = s.jit(jax.value_and_grad(loss(s.f)))(s.x)
    close(value, np.sum(s.w * s.ref.value[RANK]))
    close(gradient, s.ref.cotangent[RANK])
    close(jax.grad(s.jit(loss(s.f)))(s.x), s.ref.cotangent[RANK])


@check("vjp")
def _vjp(s: Subject) -> None:
    def pull(x: Any, c: Any) -> Any:
        y, back = jax.vjp(s.f, x)
        return y, back(c)[0], back(2 * c)[0]  # more than once

    y, once, twice = s.jit(pull)(s.x, s.w)
    close(y, s.ref.value[RANK])
    close(once, s.ref.cotangent[RANK])
    close(twice, 2 * s.ref.cotangent[RANK])


@check("jvp")
def _jvp(s: Subject) -> None:
    y, t = s.jit(lambda x, t: jax.jvp(s.f, (x,), (t,)))(s.x, s.t)
    close(y, s.ref.value[RANK])
    close(t, s.ref.tangent[RANK])


@check("linearize")
def _linearize(s: Subject) -> None:
    def run(x: Any, t: Any) -> Any:
        y, linear = jax.linearize(s.f, x)
        return y, linear(t), linear(-t), jax.linear_transpose(linear, x)(s.w)[0]

    y, plus, minus, back = s.jit(run)(s.x, s.t)
    close(y, s.ref.value[RANK])
    close(plus, s.ref.tangent[RANK])
    close(minus, -s.ref.tangent[RANK])
    close(back, s.ref.cotangent[RANK])


@check("linear_transpose")
def _linear_transpose(s: Subject) -> None:
    s.linear()
    back = jax.linear_transpose(s.u, s.x)
    forth = jax.linear_transpose(lambda c: back(c)[0], s.x)
    close(s.jit(lambda c: back(c)[0])(s.w), np.einsum("ri,risj->sj", WEIGHTS, s.ref.matrix)[RANK])
    close(s.jit(lambda t: forth(t)[0])(s.t), np.einsum("risj,sj->ri", s.ref.matrix, s.ref.T)[RANK])


@check("jacfwd")
def _jacfwd(s: Subject) -> None:
    # All ranks have the same column of the identity at the same time.
    close(s.jit(jax.jacfwd(s.f))(s.x), np.einsum("risj->rij", s.ref.jacobian)[RANK])


@check("jacrev")
def _jacrev(s: Subject) -> None:
    close(s.jit(jax.jacrev(s.f))(s.x), np.einsum("risj->sij", s.ref.jacobian)[RANK])


@check("hessian")
def _hessian(s: Subject) -> None:
    close(s.jit(jax.hessian(loss(s.f)))(s.x), np.einsum("risj->rij", s.ref.hessian)[RANK])


@check("grad of grad")
def _grad_of_grad(s: Subject) -> None:
    expected = np.einsum("risj,ri->sj", s.ref.hessian, s.ref.T)[RANK]
    gradient = jax.grad(loss(s.f))
    close(s.jit(jax.grad(lambda x: jnp.sum(s.t * gradient(x))))(s.x), expected)
    close(s.jit(lambda x: jax.jvp(gradient, (x,), (s.t,))[1])(s.x), expected)


BATCH = np.array([1.0, 0.5, -2.0], np.float32)


def _batch(ref: Reference) -> np.ndarray:
    return np.stack([ref.X * b for b in BATCH])


@check("vmap")
def _vmap(s: Subject) -> None:
    X = _batch(s.ref)
    expected = np.stack([s.ref.program(x) for x in X])[:, RANK]
    close(s.jit(jax.vmap(s.f))(X[:, RANK]), expected)
    other = s.jit(jax.vmap(s.f, in_axes=1, out_axes=-1))
    close(other(X[:, RANK].T), expected.T)


@check("vmap of vmap")
def _vmap_of_vmap(s: Subject) -> None:
    X = np.stack([_batch(s.ref), _batch(s.ref) + 1])
    expected = np.stack([[s.ref.program(x) for x in inner] for inner in X])[:, :, RANK]
    twice = jax.vmap(jax.vmap(s.f, in_axes=1, out_axes=1), in_axes=2, out_axes=2)
    close(s.jit(twice)(X[:, :, RANK].transpose(2, 1, 0)), expected.transpose(2, 1, 0))


@check("vmap of grad")
def _vmap_of_grad(s: Subject) -> None:
    X = _batch(s.ref)
    expected = np.stack([np.einsum("ri,risj->sj", WEIGHTS, s.ref.jacobian_at(x)) for x in X])
    close(s.jit(jax.vmap(jax.grad(loss(s.f))))(X[:, RANK]), expected[:, RANK])


@check("grad of vmap")
def _grad_of_vmap(s: Subject) -> None:
    X = _batch(s.ref)
    expected = np.stack([np.einsum("ri,risj->sj", WEIGHTS, s.ref.jacobian_at(x)) for x in X])
    gradient = jax.grad(lambda x: jnp.sum(jax.vmap(loss(s.f))(x)))
    close(s.jit(gradient)(X[:, RANK]), expected[:, RANK])


@check("vmap of jvp")
def _vmap_of_jvp(s: Subject) -> None:
    tangents = s.jit(jax.vmap(lambda b: jax.jvp(s.f, (s.x,), (b * s.t,))[1]))(BATCH)
    close(tangents, np.stack([b * s.ref.tangent[RANK] for b in BATCH]))


@check("lax.scan")
def _scan(s: Subject) -> None:
    s.check(lambda x: lax.scan(lambda x, _: (step(s.u, x), None), x, None, length=STEPS)[0])


@check("lax.while_loop")
def _while(s: Subject) -> None:
    def f(x: Any) -> Any:
        def go_on(state: Any) -> Any:  # communicates as well
            return s.u(jnp.full(SHAPE, state[0], jnp.float32))[0] * 0 + state[0] < STEPS

        return lax.while_loop(go_on, lambda state: (state[0] + 1, step(s.u, state[1])), (0, x))[1]

    s.check(f, reverse=False)  # JAX differentiates no while loop in reverse
    # Of a batch, in which loops end after different numbers of steps.
    X, ends = _batch(s.ref), np.arange(3)

    def g(x: Any, end: Any) -> Any:
        def go_on(state: Any) -> Any:
            return s.u(jnp.full(SHAPE, state[0], jnp.float32))[0] * 0 + state[0] < end

        return lax.while_loop(go_on, lambda state: (state[0] + 1, step(s.u, state[1])), (0, x))[1]

    expected = []
    for x, end in zip(X, ends, strict=True):
        for _ in range(end):
            x = step(s.ref.unit, x)
        expected.append(x[RANK])
    close(s.jit(jax.vmap(g))(X[:, RANK], ends), np.stack(expected))


@check("lax.fori_loop")
def _fori(s: Subject) -> None:
    s.check(lambda x: lax.fori_loop(0, STEPS, lambda _, x: step(s.u, x), x))


@check("lax.cond")
def _cond(s: Subject) -> None:
    def f(x: Any) -> Any:
        for _ in range(STEPS):
            x = lax.cond(jnp.sum(x) > -1e9, lambda x: step(s.u, x), lambda x: x - 1, x)
        return x

    s.check(f)
    # A batched predicate: both branches are taken.
    X = _batch(s.ref)
    batched = jax.vmap(lambda x: lax.cond(x[0] > 0, s.f, lambda x: -x, x))
    expected = np.stack([s.ref.program(x)[RANK] if x[RANK, 0] > 0 else -x[RANK] for x in X])
    close(s.jit(batched)(X[:, RANK]), expected)


@check("lax.switch")
def _switch(s: Subject) -> None:
    def f(x: Any) -> Any:
        for _ in range(STEPS):
            branches = [lambda x: x, lambda x: step(s.u, x), lambda x: s.u(s.u(x))]
            x = lax.switch(jnp.array(x[0] * 0, int) + 1, branches, x)
        return x

    s.check(f)


@check("lax.map")
def _map(s: Subject) -> None:
    X = _batch(s.ref)
    expected = np.stack([s.ref.program(x) for x in X])[:, RANK]
    close(s.jit(lambda x: lax.map(s.f, x))(X[:, RANK]), expected)
    s.check(lambda x: lax.map(s.f, jnp.stack([x, 2 * x]))[0])
    s.check(lambda x: lax.map(s.f, jnp.stack([x, 2 * x]), batch_size=2)[0])


@check("lax.associative_scan")
def _associative_scan(s: Subject) -> None:
    X = np.stack([s.ref.X * b for b in (1.0, 0.5, 2.0, 1.5, 0.7)]).astype(np.float32)

    def run(u: Callable[[Any], Any], x: Any) -> Any:
        return lax.associative_scan(lambda a, b: a + 0.1 * u(b), x)

    mine = lambda x: run(jax.vmap(s.u), x)
    whole = jax.jit(lambda X: run(s.ref.unit, X))
    value, back = jax.vjp(whole, X)
    cotangent = np.broadcast_to(WEIGHTS, value.shape)
    y, gradient = s.jit(lambda x: (mine(x), jax.vjp(mine, x)[1](cotangent[:, RANK])[0]))(X[:, RANK])
    close(y, value[:, RANK])
    close(gradient, back(cotangent)[0][:, RANK])


@check("checkpoint")
def _checkpoint(s: Subject) -> None:
    s.check(program(jax.checkpoint(s.u)))
    s.check(jax.checkpoint(s.f))


def _with_policy(name: str, policy: Any) -> None:
    @check(f"checkpoint, {name}")
    def checks(s: Subject) -> None:
        def run(u: Callable[[Any], Any], x: Any) -> Any:
            return 0.5 * x + jnp.tanh(checkpoint_name(u(jnp.sin(x)), "kept"))

        inner = jax.checkpoint(lambda x: run(s.u, x), policy=policy)
        value, gradient = s.jit(jax.value_and_grad(loss(inner)))(s.x)
        whole, back = jax.vjp(jax.jit(lambda X: run(s.ref.unit, X)), s.ref.X)
        close(value, np.sum(s.w * whole[RANK]))
        close(gradient, back(WEIGHTS)[0][RANK])


_policies = jax.checkpoint_policies
for _name, _policy in {
    "everything saved": _policies.everything_saveable,
    "nothing saved": _policies.nothing_saveable,
    "dots saved": _policies.dots_saveable,
    "named saved": _policies.save_only_these_names("kept"),
}.items():
    _with_policy(_name, _policy)


@check("custom_jvp")
def _custom_jvp(s: Subject) -> None:
    u = jax.custom_jvp(s.u)
    u.defjvp(lambda primals, tangents: jax.jvp(s.u, primals, tangents))
    s.check(program(u))
    s.check(program(jax.jit(u)))


@check("custom_vjp")
def _custom_vjp(s: Subject) -> None:
    u = jax.custom_vjp(s.u)
    u.defvjp(lambda x: (s.u(x), x), lambda x, c: jax.vjp(s.u, x)[1](c))
    s.check(program(u), forward=False)
    s.check(program(jax.checkpoint(jax.jit(u))), forward=False)


@check("custom_linear_solve")
def _custom_linear_solve(s: Subject) -> None:
    s.linear()

    def iterate(matvec: Callable[[Any], Any], b: Any) -> Any:
        return lax.fori_loop(0, 40, lambda _, x: x + 0.3 * (b - matvec(x)), jnp.zeros_like(b))

    def solve(b: Any) -> Any:
        return lax.custom_linear_solve(
            lambda x: 2 * x + 0.2 * s.u(x), b, iterate, transpose_solve=iterate
        )

    n = WEIGHTS.size
    matrix = 2 * np.eye(n) + 0.2 * s.ref.matrix.reshape(n, n)
    inverse = np.linalg.inv(matrix)

    def everything(b: Any, t: Any) -> Any:
        return *jax.jvp(solve, (b,), (t,)), jax.grad(loss(solve))(b)

    x, t, c = s.jit(everything)(s.x, s.t)
    whole = lambda v: v.reshape(WEIGHTS.shape)[RANK]
    close(x, whole(inverse @ s.ref.X.ravel()))
    close(t, whole(inverse @ s.ref.T.ravel()))
    close(c, whole(inverse.T @ WEIGHTS.ravel()))


@check("donation")
def _donation(s: Subject) -> None:
    f = s.jit(lambda x: (s.f(x), jax.grad(loss(s.f))(x)), donate_argnums=0)
    for _ in range(2):
        x = jnp.array(s.x)
        y, gradient = f(x)
        close(y, s.ref.value[RANK])
        close(gradient, s.ref.cotangent[RANK])
        assert x.is_deleted()


@check("lower().compile()")
def _ahead_of_time(s: Subject) -> None:
    compiled = s.jit(jax.value_and_grad(loss(s.f))).lower(s.x).compile()
    for _ in range(3):
        close(compiled(s.x)[1], s.ref.cotangent[RANK])


CUSTOM_CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{op}") for op in SPECS]


@check("export")
def _export(s: Subject) -> None:
    both = lambda x: (s.f(x), jax.grad(loss(s.f))(x))
    exported = jax.export.export(jax.jit(both), disabled_checks=CUSTOM_CALLS)(s.x)
    run = jax.export.deserialize(exported.serialize()).call
    for f in (run, s.jit(run)):
        y, gradient = f(s.x)
        close(y, s.ref.value[RANK])
        close(gradient, s.ref.cotangent[RANK])
