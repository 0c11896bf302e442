"""Errors: in words, at trace time where they can be known, and never a hang."""

import inspect
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from mpi4py import MPI
from reference import DTYPES, FOLDS, RANK, SIZE, SUPPORTED, dtype_of, enable_x64
from table import AVERAGING, REDUCING, ROWS, good, reduction_of

import mpi4jax
from mpi4jax import _native, notoken

X = np.ones((SIZE, 3), np.float32)
# Derivatives use the upper half of the tags.
TAG_UB = 2 ** ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1).bit_length() - 2) - 1

# A good call of each op; tests replace one argument.
GOOD = {name: good(name) for name in ROWS}
WITH_COMM = [name for name in ROWS if "cart" not in GOOD[name]]
STATIC = ("root",)  # the others may be traced: test_traced_peers.py

RANKS = f"a rank from 0 to {SIZE - 1}"
SOURCES = f"{RANKS} or MPI.ANY_SOURCE or MPI.PROC_NULL"
DESTS = f"{RANKS} or MPI.PROC_NULL"
TAGS = f"an integer from 0 to {TAG_UB}"
OPEN_TAGS = f"{TAGS} or MPI.ANY_TAG"

# (ops that have the argument, argument, bad value, error, expected, given)
BAD = [
    (WITH_COMM, "comm", 3, TypeError, "an mpi4py.MPI.Intracomm or None", "int: 3"),
    (WITH_COMM, "comm", MPI.SUM, TypeError, "an mpi4py.MPI.Intracomm or None", "Op"),
    (WITH_COMM, "comm", MPI.COMM_NULL, ValueError, "left this rank out", ""),
    (ROWS, "token", 3, TypeError, "a token (a float32 scalar", "int: 3"),
    (ROWS, "token", np.ones(2, np.float32), TypeError, "a token", "ndarray"),
    (ROWS, "token", np.int32(0), TypeError, "a token", "int32"),
    (ROWS, "token", "t", TypeError, "a token", "str: 't'"),
    (REDUCING, "op", "SUM", TypeError, "an mpi4py.MPI.Op", "str: 'SUM'"),
    (REDUCING, "op", sum, TypeError, "an mpi4py.MPI.Op", "builtin"),
    (REDUCING, "op", MPI.REPLACE, TypeError, "MPI.Op.Create", "MPI.REPLACE"),
    (REDUCING, "op", MPI.OP_NULL, TypeError, "SUM, PROD", "MPI.OP_NULL"),
    (("bcast", "gather", "reduce", "scatter"), "root", SIZE, ValueError, RANKS, SIZE),
    (("bcast", "gather", "reduce", "scatter"), "root", -1, ValueError, RANKS, -1),
    (("bcast", "gather", "reduce", "scatter"), "root", 0.5, TypeError, RANKS, "float: 0.5"),
    (("bcast", "gather", "reduce", "scatter"), "root", None, TypeError, RANKS, "NoneType"),
    (("bcast", "gather", "reduce", "scatter"), "root", True, TypeError, RANKS, "bool: True"),
    (("bcast", "gather", "reduce", "scatter"), "root", "0", TypeError, RANKS, "str: '0'"),
    (("recv", "sendrecv"), "source", SIZE, ValueError, SOURCES, SIZE),
    (("recv", "sendrecv"), "source", -77, ValueError, SOURCES, -77),
    (("recv", "sendrecv"), "source", SIZE, ValueError, "start the program with mpiexec", SIZE),
    (("recv",), "x", (2,), TypeError, "jnp.zeros((2,))", "(2,), which is a pytree of integers"),
    (("recv",), "x", [2, 3], TypeError, "jax.ShapeDtypeStruct((2, 3), dtype)", "[2, 3]"),
    (("sendrecv",), "recvbuf", (2, 3), TypeError, "jnp.zeros((2, 3))", "(2, 3)"),
    (("recv", "sendrecv"), "source", [0], TypeError, SOURCES, "list: [0]"),
    (("send", "sendrecv"), "dest", SIZE + 100, ValueError, DESTS, SIZE + 100),
    (("send", "sendrecv"), "dest", MPI.ANY_SOURCE, ValueError, DESTS, MPI.ANY_SOURCE),
    (("send", "sendrecv"), "dest", np.float32(0), TypeError, DESTS, "float32"),
    (("send", "sendrecv"), "dest", jnp.ones(2), TypeError, DESTS, "ArrayImpl"),
    (("allgatherv", "scatterv"), "counts", [-1] * SIZE, ValueError, "not negative", "-1"),
    (("alltoallv",), "send_counts", [1] * (SIZE + 1), ValueError, "one entry per rank", SIZE + 1),
    (("send",), "tag", -1, ValueError, TAGS, -1),
    (("send",), "tag", TAG_UB + 1, ValueError, TAGS, TAG_UB + 1),
    (("send",), "tag", 1.0, TypeError, TAGS, "float: 1.0"),
    (("recv",), "tag", -77, ValueError, OPEN_TAGS, -77),
    (("sendrecv",), "sendtag", MPI.ANY_TAG, ValueError, TAGS, MPI.ANY_TAG),
    (("sendrecv",), "recvtag", TAG_UB + 1, ValueError, OPEN_TAGS, TAG_UB + 1),
    (("recv", "sendrecv"), "status", 3, TypeError, "an mpi4py.MPI.Status or None", "int: 3"),
    (("recv", "sendrecv"), "status", MPI.Status, TypeError, "an mpi4py.MPI.Status", "type"),
]
WRONG = [(name, *row[1:]) for row in BAD for name in row[0]]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "name, argument, value, error, expected, given",
    WRONG,
    ids=[f"{name}-{argument}-{i}" for i, (name, argument, *_) in enumerate(WRONG)],
)
def test_wrong_argument(name, argument, value, error, expected, given, jit):
    """The message names op, argument, what was expected and what was given."""
    arguments = {**GOOD[name], argument: value}
    api = mpi4jax if argument == "token" else notoken

    def call():
        return getattr(api, name)(**arguments)

    with pytest.raises(error) as caught:
        jax.jit(call).trace() if jit else call()
    message = str(caught.value)
    assert message.startswith(f"{name}: argument '{argument}' ")
    assert str(expected) in message
    assert str(given) in message
    assert type(caught.value) in (TypeError, ValueError)


@pytest.mark.parametrize(
    "name, argument",
    [
        (name, a)
        for name, row in ROWS.items()
        for a in STATIC
        if a in row.signature.strip("()").split(", ")
    ],
)
def test_traced_argument(name, argument):
    def f(value):
        return getattr(notoken, name)(**{**GOOD[name], argument: value})

    with pytest.raises(
        TypeError, match=f"{name}: argument '{argument}' must be a static integer, "
    ) as e:
        jax.jit(f)(0)
    assert "static_argnums" in str(e.value)


@pytest.mark.parametrize("integer", [0, np.int64(0), np.uint8(0), np.array(0)], ids=repr)
def test_integers_of_any_kind(integer):
    assert notoken.bcast(jnp.ones(2), integer).shape == (2,)
    notoken.sendrecv(1.0, 1.0, MPI.ANY_SOURCE, RANK, sendtag=integer, recvtag=integer)


@pytest.mark.parametrize("shape", [(), (SIZE + 1, 2), (0,), (2 * SIZE,)], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["alltoall", "reduce_scatter", "scatter"])
def test_wrong_first_axis(name, jit, shape):
    def call(x):
        return getattr(notoken, name)(**{**GOOD[name], "x": x})

    x = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=name) as caught:
        jax.jit(call).trace(x) if jit else call(x)
    message = str(caught.value)
    assert message.startswith(f"{name}: argument 'x'")
    assert f"({SIZE}, ...)" in message
    assert str(x.shape) in message
    assert f"{name.capitalize()} input must have shape (nproc, ...)" in message, "that of 0.9"


def test_rows_for_itself_that_differ():
    with pytest.raises(ValueError, match="alltoallv: arguments 'send_counts' and 'recv_counts'"):
        notoken.alltoallv(X, [1] * SIZE, [2] * SIZE)


def test_wrong_first_axis_of_a_leaf():
    with pytest.raises(ValueError, match="alltoall: argument 'x'"):
        notoken.alltoall({"a": X, "b": np.ones((SIZE + 1,), np.float32)})


NOT_ARRAYS = [
    (object(), "object"),
    ("text", "str"),
    (np.array(["a"]), "U1"),
    (np.array([None]), "object"),
    (np.ones(2, "datetime64[s]"), "datetime64"),
    (np.ones(2, "S3"), "S3"),
    (jax.ShapeDtypeStruct((3,), np.float32), "ShapeDtypeStruct"),
]


@pytest.mark.parametrize(
    "name, value, word",
    [
        pytest.param(name, value, word, id=f"{name}-{word}")
        for name in ROWS
        for value, word in NOT_ARRAYS
        # What is received can be described.
        if "x" in GOOD[name] and (name, word) != ("recv", "ShapeDtypeStruct")
    ],
)
def test_not_an_array(name, value, word):
    arguments = {**GOOD[name], "x": value}
    given = rf"^{name}: argument 'x' must be an array, .*, got .*{word}"
    with pytest.raises(TypeError, match=given):
        getattr(notoken, name)(**arguments)
    with pytest.raises(TypeError, match=given):
        jax.jit(lambda: getattr(notoken, name)(**arguments)).trace()


def test_inside_a_primitive_that_hides_effects():
    hiding = jax.extend.core.Primitive("hiding")
    hiding.def_abstract_eval(lambda x: x)
    total = lambda x: notoken.allreduce(x, MPI.SUM)
    mlir.register_lowering(hiding, mlir.lower_fun(total, multiple_results=False))
    # JAX 0.7 finds out before it comes to the operation.
    name = "mpi4jax" if jax.version.__version_info__ < (0, 8) else "allreduce"
    with pytest.raises(NotImplementedError, match=rf"^{name}: called inside a primitive that"):
        jax.jit(hiding.bind).lower(X)


KINDS = {"bool": "boolean", "int": "integer", "uint": "integer", "complex": "complex"}
# Reductions that have no meaning for a data type.
MEANINGLESS = [(d, op) for d in DTYPES for op in (*FOLDS, "MEAN") if op not in SUPPORTED[d]]


@pytest.mark.parametrize("dtype, op", MEANINGLESS, ids=[f"{d}-{op}" for d, op in MEANINGLESS])
def test_reductions_without_meaning(dtype, op):
    x = np.zeros(3, dtype_of(dtype))
    for name in AVERAGING if op == "MEAN" else REDUCING:
        arguments = {**GOOD[name], "op": reduction_of(op), "x": x}
        with enable_x64(True), pytest.raises(TypeError) as caught:
            getattr(notoken, name)(**arguments)
        message = str(caught.value)
        assert message.startswith(f"{name}: reduction {op} is not defined for dtype {dtype}; ")
        _, _, expected = message.partition("; expected a")
        expected, _, advice = expected.partition("; ")
        expected = expected.removeprefix("n").strip().removesuffix(" dtype")
        kind = {"MEAN": "float"}.get(op, "int" if dtype == "bool" else None)
        assert advice == (f"use x.astype({kind})" if kind else "")
        kinds = {d: KINDS.get(re.sub(r"\d.*", "", d), "floating-point") for d in DTYPES}
        named = re.split(", | or ", expected)
        assert set(named) == {kinds[d] for d in DTYPES if op in SUPPORTED[d]}
        assert kinds[dtype] not in named


class Model:
    """A pytree with a leaf that is no array, as modules of Equinox have."""

    def __init__(self, *leaves):
        self.leaves = leaves


jax.tree_util.register_pytree_with_keys(
    Model,
    lambda m: (list(zip(map(jax.tree_util.GetAttrKey, "ab"), m.leaves, strict=True)), None),
    lambda _, leaves: Model(*leaves),
)
MODULE = "; communicate the leaves that are arrays, .*eqx.partition"
LEAVES = {
    f"custom_jvp at .b: .*{MODULE}": Model(X, jax.nn.relu),
    f"custom_jvp at \\['m'\\].b: .*{MODULE}": {"a": X, "m": Model(X, jax.nn.relu)},
    f"str at \\[1\\]: 'adam'{MODULE}": [X, "adam"],
    "str: 'adam'": "adam",
    "dtype >f4, whose byte order is not .*; expected x.astype\\(np.float32\\)": X.astype(">f4"),
    "dtype >i8 at \\['a'\\], whose .* expected x.astype\\(np.int64\\)": {"a": X.astype(">i8")},
    "dtype <U4: ": np.array(["adam"]),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["bcast", "allreduce", "assert_equal", "iallreduce"])
@pytest.mark.parametrize("words", LEAVES)
def test_leaves_that_are_no_arrays(words, name, jit):
    call = lambda: getattr(notoken, name)(LEAVES[words])
    given = f"argument 'x' must be an array, a number, or a pytree of those, got {words}"
    with pytest.raises(TypeError, match=rf"^\w+: {given}"):
        jax.jit(call)() if jit else call()


@pytest.mark.parametrize("name", [name for name in REDUCING if name not in AVERAGING])
def test_a_mean_is_over_all_ranks(name):
    with pytest.raises(TypeError, match=rf"^{name}: argument 'op' is mpi4jax.MEAN, .*allreduce"):
        getattr(notoken, name)(X, mpi4jax.MEAN)


def test_prng_keys_are_not_reduced():
    expected = "allreduce: reduction SUM is not defined for PRNG keys"
    with pytest.raises(TypeError, match=expected):
        notoken.allreduce(jax.random.key(0), MPI.SUM)
    with pytest.raises(TypeError, match=expected):
        jax.jit(lambda: notoken.allreduce({"k": jax.random.key(0)}, MPI.SUM))()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
@pytest.mark.parametrize("name", REDUCING)
def test_location_of_extremum_needs_pairs(name, op, shape):
    arguments = {**GOOD[name], "op": getattr(MPI, op), "x": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=rf"{name}: reduction {op} .* \(\.\.\., 2\), got ") as e:
        getattr(notoken, name)(**arguments)
    assert str(shape) in str(e.value)


def test_the_tables_are_those_of_the_implementation():
    """Otherwise an op or a data type without tests would pass."""
    assert {row["name"] for row in json.loads(_native.ops_table())} == set(ROWS)
    assert set(ROWS) <= set(mpi4jax.__all__) & set(notoken.__all__)
    assert {row["name"] for row in json.loads(_native.dtypes_table())} == set(SUPPORTED)


def test_trace_time_error_points_at_the_user():
    """Frames of this package do not hide the user's line."""
    with pytest.raises(ValueError, match="root") as caught:
        jax.jit(lambda: notoken.bcast(X, SIZE))()
    assert any(entry.path.name == "test_errors.py" for entry in caught.traceback)


def _with_rule(kind, rule):
    """A sine whose derivative rule fails."""
    f = kind(jnp.sin)
    f.defjvp(rule) if kind is jax.custom_jvp else f.defvjp(lambda x: (jnp.sin(x), x), rule)
    return f


def _fails(*_):
    raise ZeroDivisionError("the rule fails")


_RULES = {
    "custom_jvp": _with_rule(jax.custom_jvp, _fails),
    "custom_vjp": _with_rule(jax.custom_vjp, _fails),
    "jvp of a primitive": lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, jnp.sin, x),
}
_WITHIN = {
    "": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, jnp.sin, x),
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("within", _WITHIN)
@pytest.mark.parametrize("rule", _RULES)
def test_no_frames_of_ours_in_a_program_that_does_not_communicate(rule, within):
    f = _WITHIN[within](jax.jit(_RULES[rule]))
    with pytest.raises((ZeroDivisionError, ValueError)) as caught:
        jax.grad(lambda x: f(x).sum())(jnp.ones((2, 3)))
    files = [str(entry.path) for entry in caught.traceback]
    assert not [file for file in files if os.path.dirname(mpi4jax.__file__) in file]


def test_nonblocking_functions_name_themselves():
    # Not those without an operand, or that check it later, or that start other operations.
    others = {"ibarrier", "iragged_alltoall", "isendrecv"}
    for name in sorted({"i" + name for name in ROWS} & set(notoken.__all__) - others):
        function = getattr(notoken, name)
        first, *rest = inspect.signature(function).parameters
        good = GOOD[name[1:]]
        arguments = {argument: good[argument] for argument in rest if argument in good}
        with pytest.raises(TypeError, match=f"^{name}: argument"):
            function(**{first: "a"}, **arguments)


def test_words_for_common_mistakes():
    with pytest.raises(TypeError, match=r"make a reduction of a function with MPI.Op.Create\("):
        notoken.allreduce(X, op=lambda a, b: a + b)
    cart = MPI.COMM_WORLD.Create_cart([SIZE], periods=[False])
    with pytest.raises(ValueError, match=r"got .mirror.\. For a wall, use grids\.neumann"):
        notoken.halo_exchange(X[0], cart, border="mirror")


def test_a_token_for_a_function_without_tokens():
    with pytest.raises(TypeError, match=r"^bcast: there is no argument .token. .*'import mpi4jax'"):
        notoken.bcast(X[RANK], 0, token=None)


# ---- Names of other packages

OTHER_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "argmax": "maxloc",
    "argmin": "minloc",
    "axis_index": "Get_rank",
    "axis_size": "Get_size",
    "halo": "halo_exchange",
    "pbroadcast": "bcast",
    "pmax": "op=MPI.MAX",
    "pmin": "op=MPI.MIN",
    "pvarying": "pvary",
    "send_recv": "sendrecv",
    "psum": "op=MPI.SUM",
    "pmean": "op=mpi4jax.MEAN",
    "broadcast": "bcast",
    "ppermute": "permute",
    "psum_scatter": "reduce_scatter",
    "Allreduce": "use allreduce",
    "Isend": "use isend",
}


@pytest.mark.parametrize("module", [mpi4jax, notoken], ids=["mpi4jax", "notoken"])
@pytest.mark.parametrize("name, ours", OTHER_NAMES.items())
def test_functions_of_other_packages(module, name, ours):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no .*{ours}"):
        getattr(module, name)
    assert name not in dir(module)
    assert not hasattr(module, name)


@pytest.mark.parametrize("module", [mpi4jax, notoken], ids=["mpi4jax", "notoken"])
def test_names_that_there_are_not(module):
    name = "nothing"
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        getattr(module, name)
    with pytest.raises(ImportError, match="cannot import name 'psum'"):
        exec(f"from {module.__name__} import psum")


def test_names_of_other_packages_are_not_ours():
    from mpi4jax._op import other_names

    ours = {*mpi4jax.__all__, *notoken.__all__}
    assert not ours & {*other_names._FUNCTIONS}
    arguments = {name for row in ROWS.values() for name in re.findall(r"\w+", row.signature)}
    assert arguments & {*other_names._KEYWORDS} <= {"token"}


@pytest.mark.parametrize("name", ["allreduce", "iallreduce"])
@pytest.mark.parametrize(
    "keyword, ours",
    {
        "axis_name": "comm=",
        "axis_index_groups": "comm.Split",
        "dst": "'dest'",
        "src": "'source', or 'root'",
        "tiled": "allgatherv",
    }.items(),
)
def test_arguments_of_other_packages(name, keyword, ours):
    words = f"{name}: there is no argument '{keyword}' here.*{ours}"
    for module in (mpi4jax, notoken):
        with pytest.raises(TypeError, match=words):
            getattr(module, name)(X, **{keyword: "i"})


@pytest.mark.parametrize(
    "given, ours",
    [
        ("sum", "MPI.SUM"),
        ("SUM", "MPI.SUM"),
        ("mean", "mpi4jax.MEAN"),
        (sum, "MPI.SUM"),
        (jnp.add, "MPI.SUM"),
        (np.maximum, "MPI.MAX"),
        (jnp.minimum, "MPI.MIN"),
        (np.multiply, "MPI.PROD"),
        ("avg", "mpi4jax.MEAN"),
        ("mul", "MPI.PROD"),
        ("product", "MPI.PROD"),
    ],
)
def test_reductions_of_other_packages(given, ours):
    with pytest.raises(TypeError, match=f"allreduce: argument 'op' must be .*; use {ours}$"):
        notoken.allreduce(X, op=given)


def test_specs_that_do_not_match_the_arguments():
    """The error is JAX's, which says where they differ."""
    how = {"mesh": mpi4jax.Mesh(), "in_specs": ({"a": PartitionSpec()},)}
    f = mpi4jax.shard_map(lambda tree: tree["b"], **how, out_specs=PartitionSpec())
    with pytest.raises(ValueError, match=r"shard_map in_specs\[0\]"):
        f({"b": X})
