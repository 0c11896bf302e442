"""Errors: in words, at trace time where they can be known, and never a hang."""

import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from mpi4py import MPI
from reference import (
    NEEDS,
    RANK,
    REDUCING,
    SIZE,
    SPECS,
    dtype_of,
    enable_x64,
    ring,
    supported_dtypes,
)

import mpi4jax
from mpi4jax import notoken
from mpi4jax._primitive import DTYPES

X = np.ones((SIZE, 2), np.float32)
TAG_UB = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)

# A good call of each op; tests replace one argument.
GOOD = {
    "allgather": {"x": X},
    "allreduce": {"x": X, "op": MPI.SUM},
    "alltoall": {"x": X},
    "barrier": {},
    "bcast": {"x": X, "root": 0},
    "gather": {"x": X, "root": 0},
    "halo_exchange": {"x": np.ones((3, 3), np.float32), "cart": ring()},
    "recv": {"x": X, "source": MPI.PROC_NULL},
    "reduce": {"x": X, "op": MPI.SUM, "root": 0},
    "scan": {"x": X, "op": MPI.SUM},
    "scatter": {"x": X if RANK == 0 else X[0], "root": 0},
    "send": {"x": X, "dest": MPI.PROC_NULL},
    "sendrecv": {"sendbuf": X, "recvbuf": X, "source": MPI.PROC_NULL, "dest": MPI.PROC_NULL},
}
WITH_COMM = [name for name in SPECS if "cart" not in GOOD[name]]
STATIC = ("root",)  # the others may be traced: tests/test_traced_peers.py

RANKS = f"a rank from 0 to {SIZE - 1}"
SOURCES = f"{RANKS} or MPI.ANY_SOURCE or MPI.PROC_NULL"
DESTS = f"{RANKS} or MPI.PROC_NULL"
TAGS = f"an integer from 0 to {TAG_UB}"
OPEN_TAGS = f"{TAGS} or MPI.ANY_TAG"

# (ops that have the argument, argument, bad value, error, expected, given)
BAD = [
    (WITH_COMM, "comm", 3, TypeError, "an mpi4py.MPI.Intracomm or None", "int: 3"),
    (WITH_COMM, "comm", MPI.SUM, TypeError, "an mpi4py.MPI.Intracomm or None", "Op"),
    (WITH_COMM, "comm", MPI.COMM_NULL, (TypeError, ValueError), "", ""),
    (SPECS, "token", 3, TypeError, "a token (a float32 scalar", "int: 3"),
    (SPECS, "token", np.ones(2, np.float32), TypeError, "a token", "ndarray"),
    (SPECS, "token", np.int32(0), TypeError, "a token", "int32"),
    (SPECS, "token", "t", TypeError, "a token", "str: 't'"),
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
    (("recv", "sendrecv"), "source", [0], TypeError, SOURCES, "list: [0]"),
    (("send", "sendrecv"), "dest", SIZE + 100, ValueError, DESTS, SIZE + 100),
    (("send", "sendrecv"), "dest", MPI.ANY_SOURCE, ValueError, DESTS, MPI.ANY_SOURCE),
    (("send", "sendrecv"), "dest", np.float32(0), TypeError, DESTS, "float32"),
    (("send",), "tag", -1, ValueError, TAGS, -1),
    (("send",), "tag", TAG_UB + 1, ValueError, TAGS, TAG_UB + 1),
    (("send",), "tag", 1.0, TypeError, TAGS, "float: 1.0"),
    (("recv",), "tag", -77, ValueError, OPEN_TAGS, -77),
    (("sendrecv",), "sendtag", MPI.ANY_TAG, ValueError, TAGS, MPI.ANY_TAG),
    (("sendrecv",), "recvtag", TAG_UB + 1, ValueError, OPEN_TAGS, TAG_UB + 1),
    (("recv", "sendrecv"), "status", 3, TypeError, "an mpi4py.MPI.Status or None", "int: 3"),
    (("recv", "sendrecv"), "status", MPI.Status, TypeError, "an mpi4py.MPI.Status", "type"),
]
ROWS = [(name, *row[1:]) for row in BAD for name in row[0]]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "name, argument, value, error, expected, given",
    ROWS,
    ids=[f"{name}-{argument}-{i}" for i, (name, argument, *_) in enumerate(ROWS)],
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
    "name, argument", [(name, a) for name, row in GOOD.items() for a in STATIC if a in row]
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
@pytest.mark.parametrize("name", ["alltoall", "scatter"])
def test_wrong_first_axis(name, jit, shape):
    if name == "scatter" and RANK > 0:
        return  # a template of any shape

    def call(x):
        return getattr(notoken, name)(**{**GOOD[name], "x": x})

    x = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=name) as caught:
        jax.jit(call).trace(x) if jit else call(x)
    message = str(caught.value)
    assert message.startswith(f"{name}: argument 'x'")
    assert f"({SIZE}, ...)" in message
    assert str(x.shape) in message


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
]


@pytest.mark.parametrize("value, word", NOT_ARRAYS, ids=[word for _, word in NOT_ARRAYS])
@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("barrier", "sendrecv")])
def test_not_an_array(name, value, word):
    arguments = {**GOOD[name], "x": value}
    given = rf"^{name}: argument 'x' must be an array, .*, got .*{word}"
    with pytest.raises(TypeError, match=given):
        getattr(notoken, name)(**arguments)
    with pytest.raises(TypeError, match=given):
        jax.jit(lambda: getattr(notoken, name)(**arguments)).trace()


def test_a_buffer_that_is_no_array():
    arguments = {**GOOD["sendrecv"], "recvbuf": "text"}
    with pytest.raises(TypeError, match=r"^sendrecv: argument 'recvbuf' .*, got str: 'text'"):
        notoken.sendrecv(**arguments)


def test_inside_a_primitive_that_hides_effects():
    hiding = jax.extend.core.Primitive("hiding")
    hiding.def_abstract_eval(lambda x: x)
    total = lambda x: notoken.allreduce(x, MPI.SUM)
    mlir.register_lowering(hiding, mlir.lower_fun(total, multiple_results=False))
    with pytest.raises(NotImplementedError, match=r"^allreduce: called inside a primitive that"):
        jax.jit(hiding.bind).lower(X)


@pytest.mark.parametrize("dtype", list(supported_dtypes()))
def test_reductions_without_meaning(dtype):
    x = np.zeros(3, dtype_of(dtype))
    for op, need in NEEDS.items():
        if DTYPES[dtype][need]:
            continue
        for name in REDUCING:
            arguments = {**GOOD[name], "op": getattr(MPI, op), "x": x}
            with enable_x64(True):
                with pytest.raises(TypeError) as caught:
                    getattr(notoken, name)(**arguments)
                with pytest.raises(TypeError):
                    jax.jit(lambda a=arguments, n=name: getattr(notoken, n)(**a)).trace()
            message = str(caught.value)
            assert message.startswith(f"{name}: reduction {op} is not defined for dtype {dtype}; ")
            assert "expected one of " in message


def test_some_reductions_are_without_meaning():
    """The test above would not notice a table that allows everything."""
    with pytest.raises(
        TypeError, match="allreduce: reduction MAX is not defined for dtype complex64"
    ):
        notoken.allreduce(1j, MPI.MAX)
    with pytest.raises(TypeError, match="scan: reduction BAND is not defined for dtype float32"):
        notoken.scan(1.0, MPI.BAND)
    with pytest.raises(TypeError, match="reduce: reduction SUM is not defined for dtype bool"):
        notoken.reduce(True, MPI.SUM, 0)
    with pytest.raises(TypeError, match="allreduce: reduction SUM is not defined for PRNG keys"):
        notoken.allreduce(jax.random.key(0), MPI.SUM)
    with pytest.raises(TypeError, match="allreduce: reduction SUM is not defined for PRNG keys"):
        jax.jit(lambda: notoken.allreduce({"k": jax.random.key(0)}, MPI.SUM))()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
@pytest.mark.parametrize("name", REDUCING)
def test_location_of_extremum_needs_pairs(name, op, shape):
    arguments = {**GOOD[name], "op": getattr(MPI, op), "x": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=rf"{name}: reduction {op} .* \(\.\.\., 2\), got ") as e:
        getattr(notoken, name)(**arguments)
    assert str(shape) in str(e.value)


def test_sendrecv_templates():
    with pytest.raises(TypeError):
        notoken.sendrecv(X, object(), 0, 0)
    with pytest.raises(TypeError):
        notoken.sendrecv("text", X, 0, 0)


def test_missing_and_unknown_arguments():
    for call in (
        lambda: notoken.allreduce(X),
        lambda: notoken.bcast(X),
        lambda: notoken.send(X),
        lambda: notoken.allgather(X, MPI.COMM_WORLD),
        lambda: notoken.allgather(X, axis=0),
    ):
        with pytest.raises(TypeError):
            call()


def test_intercommunicator():
    if SIZE == 1:
        pytest.skip("an intercommunicator has two groups")
    local = MPI.COMM_WORLD.Split(RANK > 0, RANK)
    inter = local.Create_intercomm(0, MPI.COMM_WORLD, 1 if RANK == 0 else 0)
    with pytest.raises(TypeError, match=r"barrier: argument 'comm' .* got Intercomm"):
        notoken.barrier(comm=inter)
    inter.Free()
    local.Free()


def test_errors_leave_nothing_behind():
    with pytest.raises(ValueError, match="root"):
        notoken.bcast(X, SIZE)
    with pytest.raises(TypeError):
        mpi4jax.jit(lambda x: (notoken.send(x, MPI.PROC_NULL), notoken.bcast(x, "0")))(X)
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


def test_trace_time_error_points_at_the_user():
    """Frames of this package do not hide the user's line."""
    with pytest.raises(ValueError, match="root") as caught:
        jax.jit(lambda: notoken.bcast(X, SIZE))()
    assert any(entry.path.name == "test_errors.py" for entry in caught.traceback)


# ---- Errors at run time: the job ends, with a line that says who, what and why


def program(tmp_path, text):
    file = tmp_path / "program.py"
    head = """
        import jax, jax.numpy as jnp, numpy as np
        from mpi4py import MPI
        import mpi4jax
        from mpi4jax import notoken
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    """
    file.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return file


ABORTING = {
    "truncated message": (
        2,
        """
        x = jnp.ones(5 if rank == 0 else 3)
        notoken.send(x, 1) if rank == 0 else notoken.recv(x, 0)
        notoken.barrier()
        """,
        r"^r1 \| MPI_Recv returned error code (\d+): .*[Tt]runc",
    ),
    "truncated message in a loop": (
        2,
        """
        def body(i, x):
            y = notoken.sendrecv(jnp.ones(3 + rank), x, 1 - rank, 1 - rank)
            return y
        f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))
        f(jnp.ones(3)).block_until_ready()
        mpi4jax.flush()
        """,
        r"^r0 \| MPI_Sendrecv returned error code (\d+): .*[Tt]runc",
    ),
    "alone": (
        1,
        """
        request = MPI.COMM_WORLD.Isend(np.ones(5, np.float32), 0)
        y = jax.jit(lambda x: notoken.recv(x, 0, comm=MPI.COMM_WORLD))(jnp.ones(2))
        y.block_until_ready()
        """,
        r"^r0 \| MPI_Recv returned error code (\d+): .*[Tt]runc",
    ),
    "short message": (
        2,
        """
        x = jnp.ones(3 if rank == 0 else 5)
        notoken.send(x, 1) if rank == 0 else notoken.recv(x, 0)
        notoken.barrier()
        """,
        r"^r1 \| MPI_Recv received 3 items from rank 0, expected 5",
    ),
    "in a communicator of one's own": (
        3,
        """
        comm = MPI.COMM_WORLD.Split(rank == 0, -rank)   # ranks 2, 1 of the world are 0, 1 of it
        x = jnp.ones(5 if comm.rank == 0 else 3)
        if comm.size == 2:
            notoken.send(x, 1, comm=comm) if comm.rank == 0 else notoken.recv(x, 0, comm=comm)
        notoken.barrier()
        """,
        r"^r1 \| MPI_Recv returned error code (\d+): .*[Tt]runc",
    ),
}  # fmt: skip


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ranks, text, line", ABORTING.values(), ids=ABORTING)
def test_mpi_errors_end_the_job(mpirun, tmp_path, ranks, text, line):
    """All ranks end; without that the others would wait for ever for the one that failed."""
    job = mpirun(ranks, program(tmp_path, textwrap.dedent(text) + "print('came to the end')\n"))
    assert job.returncode not in (0, None), job.stderr
    # mpiexec's own lines may end in ours.
    assert re.search(line.lstrip("^"), job.stderr), job.stderr
    assert "came to the end" not in job.stdout


@pytest.mark.ranks(1)
def test_python_errors_end_the_job(mpirun, tmp_path):
    """A rank that dies of an exception does not leave the others waiting."""
    text = """
        if rank == 1:
            raise ValueError("on purpose")
        notoken.recv(1.0, 1)
        mpi4jax.flush()
    """
    job = mpirun(2, program(tmp_path, text))
    assert job.returncode not in (0, None), job.stderr
    assert "on purpose" in job.stderr


# ---- Import


def imported(mpirun, tmp_path, before, ranks=1):
    file = tmp_path / "import.py"
    file.write_text(textwrap.dedent(before) + "\nimport mpi4jax\nprint('imported')\n")
    job = mpirun(ranks, file)
    assert job.returncode not in (0, None), job.stdout
    assert "imported" not in job.stdout
    assert "Segmentation" not in job.stderr
    return job.stderr


@pytest.mark.ranks(1)
def test_another_mpi_than_the_one_built_for(mpirun, tmp_path):
    error = imported(
        mpirun,
        tmp_path,
        """
        import sys, types
        sys.modules["mpi4jax._build_info"] = types.SimpleNamespace(
            vendor="Another MPI", version="9.8.7", found="by a test"
        )
        """,
    )
    vendor = MPI.get_vendor()[0]
    assert re.search(rf"ImportError: .*built for Another MPI 9.8.7, but .* {vendor}", error), error
    assert "MPICC" in error
    assert "MPI4PY_LIBMPI" in error


@pytest.mark.ranks(1)
def test_module_that_does_not_load(mpirun, tmp_path):
    """Such as one whose MPI symbols are missing."""
    error = imported(
        mpirun,
        tmp_path,
        """
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "mpi4jax._native":
                    raise ImportError("undefined symbol: MPI_Of_another")
        sys.meta_path.insert(0, Finder())
        """,
    )
    assert "ImportError: mpi4jax's native module" in error
    assert "undefined symbol: MPI_Of_another" in error
    assert "MPICC" in error


@pytest.mark.ranks(1)
def test_mpi_is_not_initialized(mpirun, tmp_path):
    error = imported(mpirun, tmp_path, "import mpi4py\nmpi4py.rc.initialize = False")
    assert "ImportError: mpi4jax needs a running MPI, but MPI is not initialized" in error


@pytest.mark.ranks(1)
def test_mpi_was_finalized(mpirun, tmp_path):
    error = imported(mpirun, tmp_path, "from mpi4py import MPI\nMPI.Finalize()")
    assert "ImportError: mpi4jax needs a running MPI, but MPI was finalized" in error


@pytest.mark.ranks(1)
@pytest.mark.parametrize("level", ["single", "funneled"])
def test_thread_level(mpirun, tmp_path, level):
    before = f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\n"
    before += "from mpi4py import MPI\nprint('level', MPI.Query_thread() >= MPI.THREAD_SERIALIZED)"
    file = tmp_path / "import.py"
    file.write_text(before + "\nimport mpi4jax\n")
    job = mpirun(1, file)
    if "level True" in job.stdout:
        pytest.skip("this MPI gives more than it is asked for")
    assert job.returncode != 0
    assert (
        "ImportError: mpi4jax calls MPI from XLA's threads, but MPI was initialized" in job.stderr
    )
    assert "expected at least MPI_THREAD_SERIALIZED" in job.stderr


@pytest.mark.ranks(1)
def test_tables_that_differ(mpirun, tmp_path):
    """A native module of another version."""
    error = imported(
        mpirun,
        tmp_path,
        """
        from mpi4py import MPI
        import sys, types, importlib.util, importlib.machinery
        where = importlib.util.find_spec("mpi4jax").submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec("mpi4jax._native", where)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        fake = types.ModuleType("mpi4jax._native")
        fake.__dict__.update(native.__dict__)
        fake.ops_table = lambda: native.ops_table()[1:]
        sys.modules["mpi4jax._native"] = fake
        """,
    )
    assert "ImportError: mpi4jax: the native module does not know the op allgather" in error
