"""What a function for `jax.shard_map` is that devices and ranks run, and what is compared."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

GRIDS = {1: [(1, 1)], 2: [(2, 1)], 3: [(1, 3)], 4: [(2, 2), (4, 1)]}


@dataclass
class Program:
    """One function with its arguments: ``shapes(n)`` of the global arrays, or the arrays."""

    f: object
    ins: tuple
    outs: object
    shapes: object
    grid: bool = False
    mesh: tuple = ()  # the only one: a shape, and names of the axes
    is_extra: bool = False  # not for `make test`
    is_exact: bool = False  # only moves data: equal to the bit
    has_derivative: bool = True
    not_in_jax: tuple = ()  # derivatives that JAX refuses or fails to compile
    check_vma: bool = True
    sizes: tuple = (1, 2, 3, 4)
    how: dict = field(default_factory=dict)

    @property
    def kind(self):
        """One process computes JAX's results of all programs of a kind."""
        if self.mesh:
            return "more meshes" if self.is_extra else "meshes"
        return "grids" if self.grid else "lines"


PROGRAMS = {}
FORWARD = ("tangent outside", "second derivative")
REVERSE = ("gradient outside", "second derivative", "gradient inside")


def program(ins, outs, *shapes, **how):
    def add(f):
        PROGRAMS[f.__name__] = Program(f, ins, outs, shapes, **how)
        return f

    return add


def meshes(p, n):
    """Shapes of meshes with their axes."""
    if n not in p.sizes:
        return []
    if p.mesh:
        return [p.mesh]
    return [(shape, ("a", "b")) for shape in GRIDS[n]] if p.grid else [((n,), ("i",))]


def arguments(p, n):
    """The global arrays."""
    random = np.random.default_rng(len(p.shapes))

    def make(shape):
        shape = shape(n) if callable(shape) else shape
        if isinstance(shape, np.ndarray):
            return shape
        return random.normal(size=shape).astype(jnp.result_type(float))

    return tuple(
        jax.tree.map(make, s, is_leaf=lambda s: callable(s) or type(s) is tuple) for s in p.shapes
    )


ROWS, A, B, AB = P("i"), P("a"), P("b"), P(("a", "b"))
size = lax.axis_size


def vary(x):
    return lax.pcast(x, "i", to="varying") if hasattr(lax, "pcast") else lax.pvary(x, "i")


def rows(k, *rest):
    """k rows on each rank."""
    return lambda n: (k * n, *rest)


def ring(n, step=1):
    return [(k, (k + step) % n) for k in range(n)]


# ---- What is compared: values, and derivatives taken outside and inside


def weights(tree):
    """Cotangents, or tangents: other ones for each leaf and element."""
    leaves, structure = jax.tree.flatten(tree)

    def one(k, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, jax.dtypes.float0)
        return jnp.cos(k + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    return jax.tree.unflatten(structure, [one(k, x) for k, x in enumerate(leaves)])


def varying(aval):
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def total_of(p, axes):
    """The gradient, taken inside, of the sum of all results."""

    def total(args):
        out = sum(jnp.sum(jnp.sin(y.astype(float))) for y in jax.tree.leaves(p.f(*args)))
        over = varying(jax.typeof(out)) if p.check_vma else axes
        return lax.psum(out, tuple(over)) if over else out

    def gradient(*args):
        g = jax.grad(total, allow_int=True)(args)
        g = jax.tree.map(lambda g, x: x if g.dtype == jax.dtypes.float0 else g, g, args)
        # Without the types, the gradient of a replicated argument may differ between devices.
        return g if p.check_vma else jax.tree.map(lambda x: lax.pmean(x, axes), g)

    return gradient


SLOW = ("second derivative", "gradient inside")  # where each equation is a call


def results(p, axes, mapped, args, part=lambda tree, specs: tree, known=None, jit=jax.jit):
    """What comes of a program, by names.

    ``mapped(f, in_specs, out_specs)`` is a `shard_map`, ``part`` takes a device's blocks of sharded
    arrays, and ``known`` are the results on all devices.
    """
    axes = tuple(axis for axis in axes if axis in p.how.get("axis_names", axes))
    f, within = mapped(p.f, p.ins, p.outs), mapped(total_of(p, axes), p.ins, p.ins)
    whole = known["value"] if known else jax.eval_shape(f, *args)
    whole_args = known["arguments"] if known else args

    if p.has_derivative:
        cotangents, tangents = part(weights(whole), p.outs), part(weights(whole_args), p.ins)

    def all_of_them(*args):
        found = {"value": f(*args), "arguments": args}
        if p.has_derivative:

            def backward(*args):
                return jax.vjp(f, *args)[1](cotangents)

            derivatives = {
                "gradient outside": lambda: backward(*args),
                "tangent outside": lambda: jax.jvp(f, args, tangents)[1],
                "second derivative": lambda: jax.jvp(backward, args, tangents)[1],
                "gradient inside": lambda: within(*args),
            }
            left_out = p.not_in_jax if jit is jax.jit else (*p.not_in_jax, *SLOW)
            found |= {k: d() for k, d in derivatives.items() if k not in left_out}
        return found

    return jit(all_of_them)(*args)


SPECS = {"value": "outs", "tangent outside": "outs"}  # how results are sharded; others as arguments


# ---- Of random functions: a statement is a dict, and has other statements in its "body"


def all_of(program):
    """All statements, inner ones too."""
    for s in program:
        yield s
        yield from all_of(s.get("body", []))


def _remat_of_names(body, values, times):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(body, policy=policy)(values)


def _vmap(body, values, times):
    both = [jnp.stack([x, x * 0.5]) for x in values]
    return [jnp.sin(y.sum(0)) for y in jax.vmap(body)(both)]


def _linearize(body, values, times):
    out, linear = jax.linearize(body, values)
    return [jnp.sin(y + t) for y, t in zip(out, linear(values), strict=True)]


# The new state, by functions of JAX around one of any state, whatever the axes.
AROUND = {
    "jit": lambda body, values, times: jax.jit(body)(values),
    "scan": lambda body, values, times: lax.scan(
        lambda c, _: (body(c), None), values, None, length=times
    )[0],
    "remat": lambda body, values, times: jax.checkpoint(body)(values),
    "remat of names": _remat_of_names,
    "vmap": _vmap,
    "linearize": _linearize,
}
