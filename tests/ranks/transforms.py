"""The transformations of JAX, each as a check of one op: of a `Subject`."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from reference import RANK
from table import ROWS
from transformed_ops import COUPLING, SHAPE, STEPS, WEIGHTS, close, loss, program, step

# Name -> function of a Subject.

CHECKS = {}


def check(name):
    def register(f):
        CHECKS[name] = f
        return f

    return register


@check("no jit")
def _eager(s):
    close(s.f(s.x), s.ref.value[RANK])
    close(jax.grad(loss(s.f))(s.x), s.ref.cotangent[RANK])
    close(jax.jvp(s.f, (s.x,), (s.t,))[1], s.ref.tangent[RANK])


@check("jit")
def _jit(s):
    f = s.jit(s.f)
    for _ in range(3):
        close(f(s.x), s.ref.value[RANK])


@check("nested jit")
def _nested_jit(s):
    u = jax.jit(s.u)
    s.check(jax.jit(program(s.jit(lambda x: u(x)))))


@check("grad")
def _grad(s):
    value, gradient = s.jit(jax.value_and_grad(loss(s.f)))(s.x)
    close(value, np.sum(s.w * s.ref.value[RANK]))
    close(gradient, s.ref.cotangent[RANK])
    close(jax.grad(s.jit(loss(s.f)))(s.x), s.ref.cotangent[RANK])


@check("vjp")
def _vjp(s):
    def pull(x, c):
        y, back = jax.vjp(s.f, x)
        return y, back(c)[0], back(2 * c)[0]  # more than once

    y, once, twice = s.jit(pull)(s.x, s.w)
    close(y, s.ref.value[RANK])
    close(once, s.ref.cotangent[RANK])
    close(twice, 2 * s.ref.cotangent[RANK])


@check("jvp")
def _jvp(s):
    y, t = s.jit(lambda x, t: jax.jvp(s.f, (x,), (t,)))(s.x, s.t)
    close(y, s.ref.value[RANK])
    close(t, s.ref.tangent[RANK])


@check("linearize")
def _linearize(s):
    def run(x, t):
        y, linear = jax.linearize(s.f, x)
        return y, linear(t), linear(-t), jax.linear_transpose(linear, x)(s.w)[0]

    y, plus, minus, back = s.jit(run)(s.x, s.t)
    close(y, s.ref.value[RANK])
    close(plus, s.ref.tangent[RANK])
    close(minus, -s.ref.tangent[RANK])
    close(back, s.ref.cotangent[RANK])


@check("linear_transpose")
def _linear_transpose(s):
    s.linear()
    back = jax.linear_transpose(s.u, s.x)
    forth = jax.linear_transpose(lambda c: back(c)[0], s.x)
    close(s.jit(lambda c: back(c)[0])(s.w), np.einsum("ri,risj->sj", WEIGHTS, s.ref.matrix)[RANK])
    close(s.jit(lambda t: forth(t)[0])(s.t), np.einsum("risj,sj->ri", s.ref.matrix, s.ref.T)[RANK])


@check("jacfwd")
def _jacfwd(s):
    # All ranks have the same column of the identity at the same time.
    close(s.jit(jax.jacfwd(s.f))(s.x), np.einsum("risj->rij", s.ref.jacobian)[RANK])


@check("jacrev")
def _jacrev(s):
    close(s.jit(jax.jacrev(s.f))(s.x), np.einsum("risj->sij", s.ref.jacobian)[RANK])


@check("hessian")
def _hessian(s):
    close(s.jit(jax.hessian(loss(s.f)))(s.x), np.einsum("risj->rij", s.ref.hessian)[RANK])


@check("grad of grad")
def _grad_of_grad(s):
    expected = np.einsum("risj,ri->sj", s.ref.hessian, s.ref.T)[RANK]
    gradient = jax.grad(loss(s.f))
    close(s.jit(jax.grad(lambda x: jnp.sum(s.t * gradient(x))))(s.x), expected)
    close(s.jit(lambda x: jax.jvp(gradient, (x,), (s.t,))[1])(s.x), expected)


BATCH = np.array([1.0, 0.5, -2.0], np.float32)


def _batch(ref):
    return np.stack([ref.X * b for b in BATCH])


@check("vmap")
def _vmap(s):
    X = _batch(s.ref)
    expected = np.stack([s.ref.program(x) for x in X])[:, RANK]
    close(s.jit(jax.vmap(s.f))(X[:, RANK]), expected)
    other = s.jit(jax.vmap(s.f, in_axes=1, out_axes=-1))
    close(other(X[:, RANK].T), expected.T)


@check("vmap of vmap")
def _vmap_of_vmap(s):
    X = np.stack([_batch(s.ref), _batch(s.ref) + 1])
    expected = np.stack([[s.ref.program(x) for x in inner] for inner in X])[:, :, RANK]
    twice = jax.vmap(jax.vmap(s.f, in_axes=1, out_axes=1), in_axes=2, out_axes=2)
    close(s.jit(twice)(X[:, :, RANK].transpose(2, 1, 0)), expected.transpose(2, 1, 0))


@check("vmap of grad")
def _vmap_of_grad(s):
    X = _batch(s.ref)
    expected = np.stack([np.einsum("ri,risj->sj", WEIGHTS, s.ref.jacobian_at(x)) for x in X])
    close(s.jit(jax.vmap(jax.grad(loss(s.f))))(X[:, RANK]), expected[:, RANK])


@check("grad of vmap")
def _grad_of_vmap(s):
    X = _batch(s.ref)
    expected = np.stack([np.einsum("ri,risj->sj", WEIGHTS, s.ref.jacobian_at(x)) for x in X])
    gradient = jax.grad(lambda x: jnp.sum(jax.vmap(loss(s.f))(x)))
    close(s.jit(gradient)(X[:, RANK]), expected[:, RANK])


@check("vmap of jvp")
def _vmap_of_jvp(s):
    tangents = s.jit(jax.vmap(lambda b: jax.jvp(s.f, (s.x,), (b * s.t,))[1]))(BATCH)
    close(tangents, np.stack([b * s.ref.tangent[RANK] for b in BATCH]))


@check("lax.scan")
def _scan(s):
    s.check(lambda x: lax.scan(lambda x, _: (step(s.u, x), None), x, None, length=STEPS)[0])


@check("lax.while_loop")
def _while(s):
    def f(x):
        def go_on(state) -> Any:  # communicates as well
            return s.u(jnp.full(SHAPE, state[0], jnp.float32))[0] * 0 + state[0] < STEPS

        return lax.while_loop(go_on, lambda state: (state[0] + 1, step(s.u, state[1])), (0, x))[1]

    s.check(f, reverse=False)  # JAX differentiates no while loop in reverse
    # Of a batch, in which loops end after different numbers of steps.
    X, ends = _batch(s.ref), np.arange(3)

    def g(x, end):
        def go_on(state):
            return s.u(jnp.full(SHAPE, state[0], jnp.float32))[0] * 0 + state[0] < end

        return lax.while_loop(go_on, lambda state: (state[0] + 1, step(s.u, state[1])), (0, x))[1]

    expected = []
    for x, end in zip(X, ends, strict=True):
        for _ in range(end):
            x = step(s.ref.unit, x)
        expected.append(x[RANK])
    close(s.jit(jax.vmap(g))(X[:, RANK], ends), np.stack(expected))


@check("lax.fori_loop")
def _fori(s):
    s.check(lambda x: lax.fori_loop(0, STEPS, lambda _, x: step(s.u, x), x))


@check("lax.cond")
def _cond(s):
    def f(x):
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
def _switch(s):
    def f(x):
        for _ in range(STEPS):
            branches = [lambda x: x, lambda x: step(s.u, x), lambda x: s.u(s.u(x))]
            x = lax.switch(jnp.array(x[0] * 0, int) + 1, branches, x)
        return x

    s.check(f)


@check("lax.map")
def _map(s):
    X = _batch(s.ref)
    expected = np.stack([s.ref.program(x) for x in X])[:, RANK]
    close(s.jit(lambda x: lax.map(s.f, x))(X[:, RANK]), expected)
    s.check(lambda x: lax.map(s.f, jnp.stack([x, 2 * x]))[0])
    s.check(lambda x: lax.map(s.f, jnp.stack([x, 2 * x]), batch_size=2)[0])


@check("lax.associative_scan")
def _associative_scan(s):
    X = np.stack([s.ref.X * b for b in (1.0, 0.5, 2.0, 1.5, 0.7)]).astype(np.float32)

    def run(u, x):
        return lax.associative_scan(lambda a, b: a + 0.1 * u(b), x)

    mine = lambda x: run(jax.vmap(s.u), x)
    whole = jax.jit(lambda X: run(s.ref.unit, X))
    value, back = jax.vjp(whole, X)
    cotangent = np.broadcast_to(WEIGHTS, value.shape)
    y, gradient = s.jit(lambda x: (mine(x), jax.vjp(mine, x)[1](cotangent[:, RANK])[0]))(X[:, RANK])
    close(y, value[:, RANK])
    close(gradient, back(cotangent)[0][:, RANK])


@check("checkpoint")
def _checkpoint(s):
    s.check(program(jax.checkpoint(s.u)))
    s.check(jax.checkpoint(s.f))


def _with_policy(name, policy):
    @check(f"checkpoint, {name}")
    def checks(s):
        def run(u, x):
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
def _custom_jvp(s):
    u = jax.custom_jvp(s.u)
    u.defjvp(lambda primals, tangents: jax.jvp(s.u, primals, tangents))
    s.check(program(u))
    s.check(program(jax.jit(u)))


@check("custom_vjp")
def _custom_vjp(s):
    u = jax.custom_vjp(s.u)
    u.defvjp(lambda x: (s.u(x), x), lambda x, c: jax.vjp(s.u, x)[1](c))
    s.check(program(u), forward=False)
    s.check(program(jax.checkpoint(jax.jit(u))), forward=False)


@check("custom_linear_solve")
def _custom_linear_solve(s):
    s.linear()

    def iterate(matvec, b):
        return lax.fori_loop(0, 40, lambda _, x: x + 0.3 * (b - matvec(x)), jnp.zeros_like(b))

    def solve(b):
        return lax.custom_linear_solve(
            lambda x: 2 * x + 2 * COUPLING * s.u(x), b, iterate, transpose_solve=iterate
        )

    n = WEIGHTS.size
    matrix = 2 * np.eye(n) + 2 * COUPLING * s.ref.matrix.reshape(n, n)
    inverse = np.linalg.inv(matrix)

    def everything(b, t):
        return *jax.jvp(solve, (b,), (t,)), jax.grad(loss(solve))(b)

    x, t, c = s.jit(everything)(s.x, s.t)
    whole = lambda v: v.reshape(WEIGHTS.shape)[RANK]
    close(x, whole(inverse @ s.ref.X.ravel()))
    close(t, whole(inverse @ s.ref.T.ravel()))
    close(c, whole(inverse.T @ WEIGHTS.ravel()))


@check("donation")
def _donation(s):
    f = s.jit(lambda x: (s.f(x), jax.grad(loss(s.f))(x)), donate_argnums=0)
    for _ in range(2):
        x = jnp.array(s.x)
        y, gradient = f(x)
        close(y, s.ref.value[RANK])
        close(gradient, s.ref.cotangent[RANK])
        assert x.is_deleted()


@check("lower().compile()")
def _ahead_of_time(s):
    compiled = s.jit(jax.value_and_grad(loss(s.f))).lower(s.x).compile()
    for _ in range(3):
        close(compiled(s.x)[1], s.ref.cotangent[RANK])


NAMES = (*ROWS, "start", "wait", "ready")
CUSTOM_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{name}") for name in [*NAMES, "after"]
]


@check("export")
def _export(s):
    both = lambda x: (s.f(x), jax.grad(loss(s.f))(x))
    exported = jax.export.export(jax.jit(both), disabled_checks=CUSTOM_CALLS)(s.x)
    run = jax.export.deserialize(exported.serialize()).call
    for f in (run, s.jit(run)):
        y, gradient = f(s.x)
        close(y, s.ref.value[RANK])
        close(gradient, s.ref.cotangent[RANK])
