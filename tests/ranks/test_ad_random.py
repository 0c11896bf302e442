"""Random programs, as they are and differentiated: what each rank calls, and in which order.

Nested functions of all kinds around messages whose tags tell them apart. Rank 0 and rank 1 run
the same program, but each op is of a kind of its own: a sendrecv, or a send on one rank and a
recv on the other, from or into what is perturbed, constant or dropped. What each rank has called
is read from the debug log.
"""

import os
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken

COMM = MPI.COMM_WORLD
RANK = COMM.rank
OTHER = 1 - RANK
ANY_TAG = int(MPI.ANY_TAG)
JITS = [jax.jit, lambda f: f]
PROGRAMS = int(os.environ.get("MPI4JAX_TEST_PROGRAMS", "8"))

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(60)]

VALUES, WIDTH, DEPTH = 3, 2, 3
WRAPPERS = ("jit", "mpi jit", "scan", "fori", "cond", "remat", "vmap", "custom_vjp", "custom_jvp")
FORWARD = ("jit", "scan", "while", "cond", "remat", "vmap", "custom_jvp")


def generate(rng, depth, count, wrappers):
    """A list of statements."""
    out = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["op"] * 4 + list(wrappers if depth < DEPTH else []))
        if kind == "op":
            count[0] += 1
            out.append(
                {
                    "kind": "op",
                    "tag": count[0],
                    "value": rng.randrange(VALUES),
                    "way": rng.choice(["both", "to 0", "to 1"]),
                    "any": rng.random() < 0.2,
                    "constant": rng.random() < 0.4,  # the operand or the template
                    "dropped": rng.random() < 0.4,  # the result
                    "api": rng.choice([notoken, mpi4jax]),
                }
            )
        else:
            body = generate(rng, depth + 1, count, wrappers)
            out.append(
                {
                    "kind": kind,
                    "body": body,
                    "times": rng.randint(1, 2),
                    "taken": rng.random() < 0.5,
                    "unused": rng.random() < 0.3,  # by either rank
                    "unused on": rng.choice([None, 0, 1]),
                    "constants": rng.random() < 0.3,  # no argument is perturbed
                }
            )
    return out


def tags(program):
    """Tags in the order in which the program has them."""
    out = []
    for s in program:
        if s["kind"] == "op":
            out.append(s["tag"])
        elif s["kind"] in ("scan", "fori", "while"):
            out += tags(s["body"]) * s["times"]
        elif s["kind"] != "cond" or s["taken"]:
            out += tags(s["body"])
    return out


def communicate(s, x):
    """One op: x is sent, or is the template, or both. The other rank does the opposite."""
    api, tag = s["api"], s["tag"]
    if s["constant"]:
        x = np.full(WIDTH, 0.5, np.float32)
    result = lambda out: out if api is notoken else out[0]
    if s["way"] == "both":
        receive = {} if s["any"] else {"recvtag": tag}
        source = MPI.ANY_SOURCE if s["any"] else OTHER
        return result(api.sendrecv(x, x, source, OTHER, sendtag=tag, **receive))
    if s["way"] == f"to {OTHER}":
        api.send(x, OTHER, tag=tag)
        return x
    return result(api.recv(x) if s["any"] else api.recv(x, OTHER, tag=tag))


def execute(program, values, truth):
    for s in program:
        if s["kind"] == "op":
            y = communicate(s, values[s["value"]])
            if not s["dropped"]:
                values = [jnp.sin(y) if i == s["value"] else v for i, v in enumerate(values)]
            continue
        given = [jnp.full(WIDTH, 0.25) for _ in values] if s["constants"] else values
        out = wrapped(s, truth)(given)
        if not s["unused"] and s["unused on"] != RANK:
            values = out
    return values


def wrapped(s, truth):
    """The body of a statement, as a function from values to values."""

    def body(values, truth=truth):
        return execute(s["body"], values, truth)

    def other_branch(values):
        return [v + 1 for v in values]

    # Rules must not close over what is traced: the truth is an argument, without a derivative.
    def custom_jvp():
        def rule(primals, tangents):
            return jax.jvp(lambda v: body(v, primals[1]), primals[:1], tangents[:1])

        f = jax.custom_jvp(body)
        f.defjvp(rule)
        return lambda v: f(v, truth)

    def custom_vjp():
        f = jax.custom_vjp(body)
        f.defvjp(
            lambda v, truth: jax.vjp(lambda v: body(v, truth), v),
            lambda back, c: (*back(c), None),
        )
        return lambda v: f(v, truth)

    def loop(v):
        return lax.while_loop(lambda c: c[0] < times, lambda c: (c[0] + 1, body(c[1])), (0, v))[1]

    def choice(v):
        return lax.cond(truth > 0 if s["taken"] else truth < 0, body, other_branch, v)

    kind, times = s["kind"], s["times"]
    return {
        "jit": lambda: jax.jit(body),
        "mpi jit": lambda: mpi4jax.jit(body),
        "scan": lambda: lambda v: lax.scan(lambda v, _: (body(v), None), v, None, length=times)[0],
        "fori": lambda: lambda v: lax.fori_loop(0, times, lambda _, v: body(v), v),
        "while": lambda: loop,
        "cond": lambda: choice,
        "remat": lambda: jax.checkpoint(body),
        "vmap": lambda: lambda v: [z[0] for z in jax.vmap(body)([z[None] for z in v])],
        "custom_jvp": custom_jvp,
        "custom_vjp": custom_vjp,
    }[kind]()


def entry(call):
    """The name and the tag of an MPI call that was logged."""
    name = call.split()[0].removeprefix("MPI_").lower()
    found = re.findall(r"(<-|->) -?\d+ \(tag (-?\d+)|(<-|->) -?\d+ with tag (-?\d+)", call)
    sent = [t for a, t, b, u in found for t in [t or u] if (a or b) == "->"]
    received = [t for a, t, b, u in found for t in [t or u] if (a or b) == "<-"]
    return name, int((sent or received)[0])


@pytest.fixture
def calls(logged):
    """``calls(f)``: names and tags of the messages that ``f`` has sent and received, in order."""

    def run(f):
        lines = [line.split(" | ")[2] for line in logged(f)[1]]
        return [entry(line) for line in lines if " done " not in line]

    return run


def names_of(program):
    """The MPI calls that this rank makes for each tag, forward and backward."""
    forward, backward = {}, {}
    for s in program:
        if s["kind"] == "op":
            sends = s["way"] == f"to {OTHER}"
            both = s["way"] == "both"
            forward[s["tag"]] = "sendrecv" if both else "send" if sends else "recv"
            backward[s["tag"]] = "sendrecv" if both else "recv" if sends else "send"
        else:
            f, b = names_of(s["body"])
            forward, backward = forward | f, backward | b
    return forward, backward


def calls_of(program, name):
    """What the log must have: each op in program order."""
    wild = {s["tag"] for s in statements(program) if s["any"]}
    out = []
    for tag in tags(program):
        unknown = name[tag] == "recv" and tag in wild
        out.append((name[tag], ANY_TAG if unknown else tag))
    return out


def statements(program):
    for s in program:
        if s["kind"] == "op":
            yield s
        else:
            yield from statements(s["body"])


# ---- Tests


def random_program(seed, wrappers):
    rng = random.Random(seed)
    while not 3 <= len(tags(program := generate(rng, 0, [0], wrappers))) <= 12:
        pass
    # Unknown when it is traced, and not differentiated: custom rules may not close over that.
    truth = jnp.ones(1)
    f = lambda values: sum(jnp.sum(v) for v in execute(program, values, truth[0]))
    values = [jnp.linspace(0.1, 0.9, WIDTH) * (i + 1 + RANK) for i in range(VALUES)]
    return program, f, values


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program_in_reverse(calls, seed):
    program, f, values = random_program(seed, WRAPPERS)
    jit = JITS[seed % len(JITS)]
    f, gradient = jit(f), jit(jax.grad(f))
    gradient(values), f(values)
    forward, backward = names_of(program)
    expected = calls_of(program, forward)
    assert calls(lambda: f(values)) == expected
    # Backward, no tag is a wildcard: the forward pass has recorded it.
    expected += [(backward[tag], tag) for tag in reversed(tags(program))]
    assert calls(lambda: gradient(values)) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(100, 100 + PROGRAMS))
def test_random_program_forward_and_reverse(calls, seed):
    program, f, values = random_program(seed, FORWARD)
    reverse = "'while'" not in str(program)  # JAX differentiates no while loop in reverse
    jit = JITS[seed % len(JITS)]
    tangents = [jnp.cos(7 * v + RANK) for v in values]
    forward, _ = names_of(program)

    push = jit(lambda v, t: jax.jvp(f, (v,), (t,))[1])
    derivative = COMM.allreduce(float(push(values, tangents)))
    # The tangent of a message follows it, also where the receive had a wildcard.
    found = calls(lambda: push(values, tangents))
    assert found[::2] == calls_of(program, forward)
    assert found[1::2] == [(forward[tag], tag) for tag in tags(program)]

    if reverse:
        gradient = jit(jax.grad(f))(values)
        product = sum(float(jnp.vdot(g, t)) for g, t in zip(gradient, tangents, strict=True))
        np.testing.assert_allclose(COMM.allreduce(product), derivative, rtol=1e-4, atol=1e-5)

        second = jit(lambda v, t: jax.jvp(jax.grad(f), (v,), (t,))[1])
        second(values, tangents)
        order = [tag for _, tag in calls(lambda: second(values, tangents))]
        both = [tag for tag in tags(program) for _ in range(2)]
        wild = {s["tag"] for s in statements(program) if s["any"]}
        known = [t for t in both if t not in wild]
        assert [t for t in order[: len(both)] if t in known] == known
        assert order[len(both) :] == both[::-1]
