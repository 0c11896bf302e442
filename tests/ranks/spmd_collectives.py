"""Functions for `jax.shard_map`: each collective, along one axis and two."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from spmd import AB, PROGRAMS, ROWS, A, program, ring, rows, size, vary

# ---- Each collective


@program((ROWS,), P(), rows(2, 3))
def psum(x):
    return lax.psum(x, "i")


@program((ROWS, P()), (P(), P()), rows(2, 3), (3,))
def psum_of_tree(x, y):
    return lax.psum({"x": x, "y": (x.sum(0) + y, y)}, "i"), lax.psum(1, "i") * y


PROGRAMS["psum_of_tree"].outs = ({"x": P(), "y": (P(), P())}, P())


@program((ROWS,), P(), rows(2, 3))
def pmean(x):
    return lax.pmean(x * x, "i")


@program((ROWS,), (P(), P()), rows(2, 3), is_exact=True, has_derivative=False)
def extrema(x):
    return lax.pmax(x, "i"), lax.pmin(x, "i")


@program((ROWS,), (P(), P()), lambda n: np.arange(2 * n, dtype=np.int32), has_derivative=False)
def integers(x):
    return lax.psum(x, "i"), lax.pmax(x > 1, "i").astype(jnp.int32)


@program((ROWS,), (ROWS, ROWS, ROWS, ROWS), rows(2, 3), is_exact=True)
def all_gather(x):
    own = lax.axis_index("i") + 1.0
    return (
        lax.all_gather(x, "i").sum(0) * own,
        lax.all_gather(x, "i", axis=1)[:, -1],
        lax.all_gather(x, "i", tiled=True) * own,
        lax.all_gather(x, "i", axis=1, tiled=True),
    )


@program((P(None, "i"),), (ROWS, P(None, "i")), lambda n: (n, 2 * n * n))
def psum_scatter(x):
    return (
        lax.psum_scatter(x, "i"),
        lax.psum_scatter(x * lax.axis_index("i"), "i", scatter_dimension=1, tiled=True),
    )


@program(
    (ROWS,), (ROWS, ROWS, P("i", None), P(None, "i")), lambda n: (n * n, 2 * n, 3), is_exact=True
)
def all_to_all(x):
    return (
        lax.all_to_all(x, "i", 0, 0),
        lax.all_to_all(x, "i", 0, 0, tiled=True),
        lax.all_to_all(x, "i", 1, 0, tiled=True),
        lax.all_to_all(x, "i", 0, 1, tiled=True),
    )


@program((ROWS,), ROWS, lambda n: (n * n, 2 * n, 3), has_derivative=False)
def all_to_all_of_other_axes(x):  # JAX differentiates it wrongly
    n = size("i")
    y = lax.all_to_all(x.reshape(n, 2, n, 3), "i", 2, 1)
    return lax.all_to_all(x, "i", 0, 1).sum(0), y.sum((0, 1))


PROGRAMS["all_to_all_of_other_axes"].outs = (ROWS, ROWS)


@program((ROWS,), (ROWS, ROWS, ROWS), rows(2, 3), is_exact=True)
def ppermute(x):
    n = size("i")
    return (
        lax.ppermute(x, "i", ring(n)),
        lax.ppermute(x, "i", [(0, n - 1)]),  # zeros on all others
        lax.pshuffle(x, "i", list(range(n))[::-1]),
    )


@program((P(),), (ROWS, ROWS), (2, 3), is_exact=True)
def index_and_size(x):
    x = vary(x)
    return x * (lax.axis_index("i") + 1), jnp.full((1,), size("i"), jnp.int32) * x[0, 0]


@program((P(),), P(), (2, 3))
def replicated_value_used_by_each_rank(x):
    return lax.psum(jnp.sin(x * (lax.axis_index("i") + 1.0)), "i")


@program((ROWS,), (ROWS, ROWS, ROWS, ROWS), rows(4, 4), sizes=(4,), check_vma=False)
def axis_index_groups(x):
    pairs = [[0, 2], [3, 1]]
    return (
        lax.psum(x, "i", axis_index_groups=pairs),
        lax.all_gather(x, "i", axis_index_groups=pairs, tiled=True),
        lax.psum_scatter(x, "i", axis_index_groups=pairs, tiled=True),
        lax.all_to_all(x, "i", 1, 0, axis_index_groups=pairs, tiled=True),
    )


@program((ROWS, P()), (P(), ROWS, P()), rows(2, 3), (3,), check_vma=False)
def without_check_vma(x, w):
    y = lax.psum(jnp.tanh(x) * w, "i")
    return y, x * y + lax.all_gather(x, "i").sum(0), lax.pmean(y * 2, "i")


@program((ROWS,), P(), rows(2, 3), check_vma=False)
def mean_without_check_vma(x):
    return lax.pmean(jnp.sin(x), "i")


@program((ROWS,), (P(), ROWS, ROWS, ROWS, ROWS), rows(2, 4), check_vma=False)
def axis_of_a_vmap(x):
    """Collectives over the axis of a `vmap`, together with the mesh's and beside it."""

    def of_row(v):
        ring_of_rows = lax.ppermute(v, "rows", [(0, 1), (1, 0)])
        highest = lax.stop_gradient(lax.pmax(lax.stop_gradient(v), ("i", "rows")))
        return (
            lax.psum(jnp.sin(v), ("i", "rows")),
            lax.psum(v * lax.psum(v, "i"), "rows"),
            v * lax.axis_index(("rows", "i")) + highest,
            lax.all_gather(v, "rows", tiled=True),
            lax.psum_scatter(v * ring_of_rows, "rows", tiled=True),
        )

    return jax.vmap(of_row, axis_name="rows")(x)


# ---- Two axes


@program((P("a", "b"),), (P(), P("b"), P("a"), P()), lambda n: (2 * n, 3 * n), grid=True)
def sums_over_axes(x):
    return (
        lax.psum(x, ("a", "b")),
        lax.psum(x, "a").sum(0)[: x.shape[1]],
        lax.pmean(x, "b").sum(1),
        lax.psum(x * x, ("b", "a")),
    )


@program((AB,), (AB, AB, AB, AB, AB), lambda n: (2 * n * n, 3), grid=True, is_exact=True)
def axes_in_another_order(x):
    n = size(("a", "b"))
    place = lax.axis_index(("b", "a")) * 10 + lax.axis_index(("a", "b"))
    return (
        x * place,
        lax.ppermute(x, ("a", "b"), ring(n)),
        jax.checkpoint(lambda x: lax.all_gather(x, ("b", "a"), tiled=True))(x),
        lax.all_to_all(x, ("b", "a"), 0, 0, tiled=True),
        lax.psum_scatter(lax.all_gather(x, ("a", "b")), ("b", "a"))[0],
    )


@program((P(("b", "a")),), (P(("b", "a")), P(None, ("a", "b"))), rows(2, 3), grid=True)
def cut_in_another_order(x):
    y = lax.all_gather(x, ("b", "a"), tiled=True)
    k, m = lax.axis_index(("a", "b")), x.shape[0]
    z = lax.dynamic_slice_in_dim(y * 2, k * m, m)
    return x * lax.axis_index("a"), z.T


@program((P("a", "b"), P("b", None)), P("a"), lambda n: (2 * n, n), lambda n: (n, 3), grid=True)
def matrix_product(x, w):
    return lax.psum(x @ w, "b")


@program(
    (A,),
    A,
    lambda n: (2 * n, 2 * n),
    grid=True,
    how={"axis_names": {"a"}},
    not_in_jax=("gradient outside", "second derivative", "gradient inside"),
)
def nested(x):
    """The rows along one axis; inside, the columns along another."""

    def columns(y):
        return jnp.tanh(y) + lax.psum(y.sum(1, keepdims=True), "b") + lax.axis_index("b")

    y = jax.shard_map(columns, in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"})(x)
    return y * lax.psum(y.sum(), "a")
