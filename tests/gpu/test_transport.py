"""Which transport is chosen, what is said about it, and what a missing or wrong library does.

What needs a GPU runs on stand-ins for the CUDA driver and NCCL, whose device memory is host memory.
All of it runs on one rank, and starts jobs of more.
"""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import client
import pytest
from libraries import compile_library, mpicc
from mpi4py import MPI

import mpi4jax
import mpirun as launcher

HERE = Path(__file__).resolve().parent
RANKS = HERE.parent / "ranks"
FAKES = HERE / "fake"

INFO = "import mpi4jax; print(mpi4jax.transport_info()); print(mpi4jax.has_cuda_support())"

# What the environment that the tests run in may have set; and a driver, which it may have.
NOWHERE = {
    "MPI4JAX_TRANSPORT": "",
    "MPI4JAX_USE_CUDA_MPI": "",
    "MPI4JAX_LIBCUDA": "/nowhere/libcuda.so.1",
}


@pytest.fixture(scope="module")
def python(fork_server, tmp_path_factory):
    """python(code, env): a program, as an MPI job of one rank."""
    folder = tmp_path_factory.mktemp("python")

    def run(code, env):
        out, err = folder / "out", folder / "err"
        environment = launcher.environment_outside_mpi()
        environment |= {name: str(value) for name, value in {**NOWHERE, **env}.items()}
        with open(os.devnull) as nothing, open(out, "w") as one, open(err, "w") as two:
            files = {number: file.fileno() for number, file in enumerate((nothing, one, two))}
            connection = client.ask(fork_server, ["-c", code], environment, str(folder), files)
        with connection:
            connection.settimeout(100)
            status = client.wait(connection)
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """The environment in which a driver and an NCCL of ours are in the part of the real ones."""
    compiler = mpicc()
    folder = tmp_path_factory.mktemp("fakes")
    return {
        **NOWHERE,
        "MPI4JAX_TEST_CUDA_ON_CPU": "1",
        "MPI4JAX_LIBCUDA": str(compile_library(folder / "libcuda.so.1", FAKES / "cuda.c")),
        "MPI4JAX_LIBNCCL": str(
            compile_library(folder / "libnccl.so.2", FAKES / "nccl.c", compiler=compiler)
        ),
    }


def fails(result, *words):
    assert result.returncode != 0
    assert all(word in result.stderr for word in words), result.stderr


def skip_without_ucx():
    why = mpi4jax.transport_info().unavailable.get("cpu:ucx")
    if why is not None:
        pytest.skip(f"no UCX: {why}")


# ---- The environment


def test_info_names_what_is_used():
    info = mpi4jax.transport_info()
    assert info.cpu_error is None
    assert all((info.cpu, info.cpu_reason, info.gpu, info.gpu_reason))
    assert f"CPU: {info.cpu} ({info.cpu_reason})" in str(info)


def test_default(python):
    out = python(INFO, {}).stdout
    assert "CPU: mpi (the default)\nGPU: staged (the default), which cannot be used: " in out
    assert "/nowhere/libcuda.so.1" in out, "the reason"
    assert out.endswith("False\n")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"MPI4JAX_TRANSPORT": "pigeon"}, ["pigeon", "mpi, staged, cuda-mpi, nccl, ucx, auto"]),
        ({"MPI4JAX_USE_CUDA_MPI": "perhaps"}, ["MPI4JAX_USE_CUDA_MPI=perhaps", "it takes 1", "0"]),
        (
            {"MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_USE_CUDA_MPI": "1"},
            ["contradicts", "cuda-mpi", "mpi, staged, cuda-mpi, nccl, ucx, auto"],
        ),
        ({"MPI4JAX_TRANSPORT": "cuda-mpi", "MPI4JAX_USE_CUDA_MPI": "0"}, ["contradicts", "staged"]),
        ({"MPI4JAX_NCCL_MESSAGES": "fast"}, ["MPI4JAX_NCCL_MESSAGES=fast", "nccl, staged"]),
        ({"MPI4JAX_NCCL_GRAPHS": "yes"}, ["MPI4JAX_NCCL_GRAPHS=yes", "0, 1"]),
    ],
)
def test_wrong_settings_are_errors_at_import(python, settings, words):
    fails(python("import mpi4jax", settings), "ValueError", *words)


@pytest.mark.parametrize(
    ("settings", "cpu", "gpu"),
    [
        ({"MPI4JAX_USE_CUDA_MPI": "1"}, "mpi", "cuda-mpi"),
        ({"MPI4JAX_USE_CUDA_MPI": "0"}, "mpi", "staged"),
        ({"MPI4JAX_TRANSPORT": "nccl"}, "mpi", "nccl"),
        ({"MPI4JAX_TRANSPORT": "staged"}, "staged", "staged"),
        ({"MPI4JAX_TRANSPORT": "cuda-mpi", "MPI4JAX_USE_CUDA_MPI": "1"}, "mpi", "cuda-mpi"),
        ({"MPI4JAX_TRANSPORT": "auto"}, "mpi", "staged"),
    ],
)
def test_settings_choose(python, settings, cpu, gpu):
    code = "import mpi4jax; i = mpi4jax.transport_info(); print(i.cpu, i.gpu)"
    result = python(code, settings)
    assert result.stdout == f"{cpu} {gpu}\n", result.stderr


def test_one_log_line_says_what_was_chosen(python):
    code = "import logging; logging.basicConfig(level='INFO'); import mpi4jax"
    lines = python(code, {}).stderr.splitlines()
    (line,) = [line for line in lines if "transports:" in line]
    assert "mpi on CPU (the default), staged on GPU (the default)" in line


@pytest.mark.parametrize("version", [(0, 9, 0), (0, 9, 1)])
def test_graphs_that_this_jaxlib_cannot_record(python, version):
    code = f"from jax._src import lib; lib.version = {version}; import mpi4jax"
    result = python(code, {"MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_NCCL_GRAPHS": "1"})
    assert result.returncode == 0, result.stderr
    said = "needs jaxlib 0.9.1, not 0.9.0: nothing is recorded" in result.stderr
    assert said == (version < (0, 9, 1))


def test_size_of_staging_is_checked(python):
    code = "import jax.numpy as j; from mpi4jax import notoken as nt; nt.bcast(j.ones(3), 0)"
    env = {"MPI4JAX_TRANSPORT": "staged", "MPI4JAX_STAGING_BYTES": "lots"}
    fails(python(code, env), "MPI4JAX_STAGING_BYTES=lots")


def test_import_leaves_jax_to_be_configured(python):
    """Its devices are chosen when they are first asked for; `jax.distributed` comes before that."""
    code = """
import jax, mpi4jax
from mpi4jax import _compat
assert not _compat.xla_bridge.backends_are_initialized()
jax.config.update("jax_num_cpu_devices", 3)
print(jax.local_device_count())
"""
    result = python(code, {})
    assert result.stdout == "3\n", result.stderr


@pytest.mark.parametrize(
    ("settings", "gpus", "device", "words"),
    [
        ({"MPI_LOCALRANKID": 1}, 4, "1", "local rank 1 computes on GPU 1 of 4\n"),
        ({"MPI_LOCALRANKID": 5}, 4, "1", "GPU 1 of 4, which ranks share"),
        ({"MPI_LOCALRANKID": 1}, 1, "all", None),
        ({"MPI_LOCALRANKID": 1, "CUDA_VISIBLE_DEVICES": "2,3"}, 2, "all", None),
        ({"MPI_LOCALRANKID": 1, "VISIBLE": "3"}, 4, "3", None),
        ({}, 4, "all", None),
    ],
)
def test_each_rank_of_a_node_computes_on_its_own_gpu(python, fakes, settings, gpus, device, words):
    code = """
import jax, logging, os
logging.basicConfig(level="INFO")
if "VISIBLE" in os.environ:
    jax.config.update("jax_cuda_visible_devices", os.environ["VISIBLE"])
import mpi4jax
from mpi4jax import _compat
print(_compat.visible_gpus())
"""
    result = python(code, {**fakes, "FAKE_CUDA_DEVICES": gpus, **settings})
    assert result.stdout == f"{device}\n", result.stderr
    assert words in result.stderr if words else "computes on GPU" not in result.stderr


# ---- Libraries: where they are found, absent, too old, incomplete, broken

LIBRARIES = {
    "libcuda.so.1": ("MPI4JAX_LIBCUDA", "cuda:staged", "12.0"),
    "libnccl.so.2": ("MPI4JAX_LIBNCCL", "cuda:nccl", "2.18"),
    "libucp.so.0": ("MPI4JAX_LIBUCP", "cpu:ucx", "1.11"),
}


def why_not(python, transport, env):
    code = f"import mpi4jax; print(mpi4jax.transport_info().unavailable.get({transport!r}))"
    result = python(code, env)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("soname", LIBRARIES)
def test_missing_libraries_are_named(python, fakes, soname):
    variable, transport, _ = LIBRARIES[soname]
    why = why_not(python, transport, {**fakes, variable: f"/nowhere/{soname}"})
    assert f"{soname} cannot be loaded (/nowhere/{soname}: " in why


@pytest.mark.parametrize("soname", LIBRARIES)
def test_missing_functions_are_named(python, fakes, tmp_path, soname):
    variable, transport, needed = LIBRARIES[soname]
    source = tmp_path / "empty.c"
    source.write_text("int cuInit(unsigned flags) { return 0; }")
    library = compile_library(tmp_path / soname, source)
    why = why_not(python, transport, {**fakes, variable: library})
    assert f"{library} has no function " in why
    assert f"at least version {needed}" in why


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_CUDA_VERSION": "11080"}, "is version 11.8, expected at least 12.0"),
        ({"FAKE_CUDA_BROKEN": "100"}, "cuInit returned error code 100: no CUDA-capable device"),
        ({"FAKE_CUDA_BROKEN": "9999"}, "error code 9999: unknown error"),
        ({"FAKE_CUDA_DEVICES": "0"}, "finds no device"),
        ({"FAKE_NCCL_VERSION": "21403"}, "is version 2.14.3, expected at least 2.18"),
    ],
)
def test_unusable_cuda_says_why(python, fakes, settings, words):
    out = python(INFO, {**fakes, **settings}).stdout
    assert words in out
    assert out.endswith("True\n" if "FAKE_NCCL_VERSION" in settings else "False\n")


def test_nccl_is_found_where_the_packages_of_jax_keep_it(python, fakes, tmp_path):
    env = {**fakes, "PYTHONPATH": ""}
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mpi4jax; "
        "print(mpi4jax.transport_info().unavailable.get('cuda:nccl'))"
    )
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(env.pop("MPI4JAX_LIBNCCL"), folder)
    assert python(code, env).stdout == "None\n"


def test_an_old_ucx_is_refused(python, tmp_path):
    table = (HERE.parent.parent / "src/transport/ucx/sys.rs").read_text()
    rows = table.partition("function_table!")[2].partition("optional")[0].splitlines()
    names = [row.split("(")[0].strip() for row in rows if row.strip().startswith(("ucp_", "ucs_"))]
    version = (
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 9; *c = 0; }"
    )
    others = [f"void {name}(void) {{}}" for name in names if name != "ucp_get_version"]
    source = tmp_path / "old.c"
    source.write_text("\n".join([version, *others]))
    library = compile_library(tmp_path / "libucp.so.0", source)
    env = {"MPI4JAX_TRANSPORT": "ucx", "MPI4JAX_LIBUCP": library}
    fails(python("import mpi4jax", env), "version 1.9.0, expected at least 1.11")


def test_ucx_that_is_not_there_is_an_error_on_all_ranks(mpirun):
    env = {**NOWHERE, "MPI4JAX_TRANSPORT": "ucx", "MPI4JAX_LIBUCP": "/nowhere/libucp.so.0"}
    code = """
try: import mpi4jax
except RuntimeError as error: print(error)
"""
    result = mpirun(2, "-c", code, env=env)
    assert result.stdout.count("libucp.so.0 cannot be loaded") == 2, result
    assert result.stdout.count("MPI4JAX_TRANSPORT=mpi") == 2


# ---- Messages through UCX

MESSAGES = textwrap.dedent("""
    import numpy as np, jax, jax.numpy as jnp, mpi4jax
    from mpi4py import MPI
    from mpi4jax import notoken as nt
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    assert mpi4jax.transport_info().cpu == "ucx"

    for n in (0, 1, 1000, 1_000_000):
        y = nt.sendrecv(jnp.full(n, rank), jnp.zeros(n, int), left, right)
        np.testing.assert_array_equal(y, np.full(n, left))

    if size > 1:
        other = comm.Dup()
        # The first use of a communicator is collective.
        nt.barrier(comm=comm), nt.barrier(comm=other)
        if rank == 0:
            for tag, where in ((1, comm), (2, comm), (1, other)):
                nt.send(jnp.float32(tag + 10 * (where is other)), 1, tag=tag, comm=where)
        if rank == 1:
            got = [nt.recv(jnp.float32(0), 0, tag=2, comm=comm)]
            got += [nt.recv(jnp.float32(0), MPI.ANY_SOURCE, comm=other)]
            got += [nt.recv(jnp.float32(0), 0, comm=comm)]
            assert list(map(float, got)) == [2, 11, 1], got
        nt.barrier(comm=comm), nt.barrier(comm=other)

        if rank:
            nt.send(jnp.full(3, rank, jnp.float32), 0, tag=10 + rank)
        else:
            status = MPI.Status()
            for _ in range(size - 1):
                y = np.asarray(nt.recv(jnp.zeros(8), MPI.ANY_SOURCE, status=status))
                assert (status.source, status.tag) == (y[0], 10 + y[0])
                assert status.Get_count(MPI.FLOAT) == 3 and not y[3:].any()

    edge = nt.sendrecv(
        jnp.float32(rank), jnp.float32(-5),
        rank - 1 if rank else MPI.PROC_NULL, rank + 1 if rank + 1 < size else MPI.PROC_NULL,
    )
    assert edge == (rank - 1 if rank else -5)
    # Nobody receives this before its sender is at the end of its program.
    if size > 1 and rank == 0:
        nt.send(jnp.arange(1000.0), size - 1)
    mpi4jax.flush()
    comm.Barrier()
    if size > 1 and rank == size - 1:
        np.testing.assert_array_equal(nt.recv(jnp.zeros(1000), 0), np.arange(1000.0))
    print("good")
""")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_messages_through_ucx(mpirun, ranks):
    skip_without_ucx()
    result = mpirun(ranks, "-c", MESSAGES, env={**NOWHERE, "MPI4JAX_TRANSPORT": "ucx"})
    assert result.stdout.count("good") == ranks, result.stderr


def test_a_short_message_through_ucx_is_fatal(python):
    skip_without_ucx()
    code = textwrap.dedent("""
        import jax.numpy as jnp
        from mpi4py import MPI
        from mpi4jax import notoken as nt
        print(nt.sendrecv(jnp.zeros(3), jnp.zeros(5), 0, 0))
    """)
    result = python(code, {"MPI4JAX_TRANSPORT": "ucx"})
    fails(result, "r0 | ", "3 items from rank 0, expected 5")


# ---- All ops, without a GPU

# Of test_ops.py. How ops are called (in loops, under vmap) is the same for all transports.
OPS = "chain or donated or any_root or shapes or different or user"
EVERYTHING = os.environ.get("MPI4JAX_TEST_ALL") == "1"
# Transports of which the suite in tests/rust does not try every dtype.
RUNS = {
    "staged-cpu": OPS,
    "staged-gpu": OPS,
    "cuda-mpi-gpu": OPS,
    "nccl-gpu": f"{OPS} or reduces_every",
    "ucx-cpu": OPS,
    "ucx-gpu": OPS,
}
if EVERYTHING:
    RUNS = dict.fromkeys(RUNS, f"{OPS} or moves_every or reduces_every")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("run", RUNS)
def test_all_ops(mpirun, fakes, run):
    transport, _, place = run.rpartition("-")
    if transport == "ucx":
        skip_without_ucx()
    reached = "reached" if transport in ("cuda-mpi", "ucx") else "1"
    env = {**fakes, "MPI4JAX_TEST_CUDA_ON_CPU": reached} if place == "gpu" else NOWHERE
    env = {**env, "MPI4JAX_TRANSPORT": transport}
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", RANKS / "test_ops.py"]
    result = mpirun(2, *command, "-k", RUNS[run], env=env, time_limit=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" passed") == 2, result.stdout
    assert " failed" not in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("transport", "messages"), [("staged", ""), ("nccl", "nccl"), ("nccl", "staged")]
)
def test_what_runs_on_a_machine_with_a_gpu(mpirun, fakes, transport, messages):
    """The scripts in this folder, so that they have no faults of their own when they get there."""
    env = {**fakes, "MPI4JAX_TRANSPORT": transport, "MPI4JAX_NCCL_MESSAGES": messages}
    result = mpirun(2, HERE / "ops.py", "300001", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"GPU: {transport} (MPI4JAX_TRANSPORT={transport}" in result.stdout


ALLREDUCE = textwrap.dedent("""
    import jax.numpy as jnp
    from mpi4py import MPI
    from mpi4jax import notoken as nt
    for _ in range(3):
        print(nt.allreduce(jnp.ones(3), MPI.SUM))
""")


def test_nccl_never_waits_on_the_host(python, fakes, tmp_path):
    cuda, nccl = tmp_path / "cuda.log", tmp_path / "nccl.log"
    logs = {"FAKE_CUDA_LOG": cuda, "FAKE_NCCL_LOG": nccl}
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "nccl", **logs})
    assert result.returncode == 0, result.stderr
    assert cuda.read_text() == "copies 0 waits 0 allocations 0 copied 0\n"
    assert nccl.read_text() == "operations 3\ncommunicators 0\n"


@pytest.mark.parametrize(("transport", "status"), [("nccl", 0), ("staged", 1)])
def test_waits_are_counted_on_a_machine_with_a_gpu(mpirun, fakes, tmp_path, transport, status):
    counter, driver = tmp_path / "libcount.so", fakes["MPI4JAX_LIBCUDA"]
    compile_library(counter, HERE / "count.c", "-Wl,--no-as-needed", driver)
    env = {**fakes, "MPI4JAX_TRANSPORT": transport, "MPI4JAX_LIBCUDA": str(counter)}
    result = mpirun(1, HERE / "graph.py", env=env)
    assert "160 operations, 160 calls on the host" in result.stdout, result.stderr
    assert ("160 calls on the host, 0 waits" in result.stdout) == (status == 0)
    assert result.returncode == status


def test_staging_memory_is_reused(python, fakes, tmp_path):
    log = tmp_path / "cuda.log"
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": log})
    assert result.returncode == 0, result.stderr
    assert "allocations 2 " in log.read_text()


HALO = textwrap.dedent("""
    import jax, jax.numpy as jnp, numpy as np
    from mpi4py import MPI
    import mpi4jax
    from mpi4jax import notoken as nt
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size, 1], periods=[True, True])
    n, w = 1000, 2
    x = jnp.arange(float(n * n)).reshape(n, n)
    y = x + 0.5

    def wrapped(a, axis):  # all ranks hold the same
        a = np.moveaxis(np.array(a), axis, 0)
        a[:w], a[-w:] = a[-2 * w:-w].copy(), a[w:2 * w].copy()
        return np.moveaxis(a, 0, axis)

    exchange = lambda *xs: nt.halo_exchange(xs, cart, width=w)
    in_place = mpi4jax.jit(lambda x, y: exchange(2 * x, 2 * y))
    kept = mpi4jax.jit(lambda x, y: (x + 0, *exchange(x, y)))
    for block, got in zip((2 * x, 2 * y), in_place(x, y)):
        np.testing.assert_array_equal(got, wrapped(wrapped(block, 0), 1))
    same, *filled = kept(x, y)
    np.testing.assert_array_equal(same, x)
    for block, got in zip((x, y), filled):
        np.testing.assert_array_equal(got, wrapped(wrapped(block, 0), 1))
    # The adjoint: each cell has as cotangent the number of places where it arrives.
    ones = mpi4jax.jit(jax.grad(lambda x: exchange(x)[0].sum()))(x)
    count = np.ones(n)
    count[:w] = count[-w:] = 0
    count[w:2 * w] += 1
    count[-2 * w:-w] += 1
    np.testing.assert_array_equal(ones, np.outer(count, count))
    mpi4jax.flush()
""")


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_cells_that_travel_are_staged(mpirun, fakes, tmp_path, ranks):
    program, log = tmp_path / "halo.py", tmp_path / "cuda.log"
    program.write_text(HALO)
    env = {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": str(log)}
    result = mpirun(ranks, program, env=env)
    assert result.returncode == 0, result.stderr
    block = 1000 * 1000 * 4
    for line in log.read_text().splitlines():
        copied = int(line.split()[-1])
        # Six blocks down and up: of each a strip of two cells at the edges, in the adjoint four.
        assert 0 < copied < 12 * block / 50, line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_NCCL_ASYNC_ERROR": "1"}, "an earlier operation returned error code 3"),
        ({"FAKE_CUDA_STREAM_DEVICE": "1"}, "NCCL's communicators were made for JAX's first local"),
    ],
)
def test_nccl_reports_errors(python, fakes, settings, words):
    fails(python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "nccl", **settings}), words)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("nt.recv(x)", "receiving from ANY_SOURCE"),
        ("nt.recv(x, tag=5)", "receiving from ANY_SOURCE"),
        ("nt.recv(x, 0, tag=5)", "receiving with tag 5"),
        ("nt.send(x, 0, tag=5)", "sending with tag 5"),
        ("nt.sendrecv(x, x, 0, 0, sendtag=5)", "sending with tag 5"),
        ("nt.sendrecv(x, x, 0, 0, recvtag=5)", "receiving with tag 5"),
        ("nt.send(x, 0)", "a send between a rank and itself"),
        ("jax.grad(lambda x: nt.recv(x).sum())(x)", "receiving from ANY_SOURCE"),
    ],
)
def test_nccl_refuses_what_needs_matching(python, fakes, op, words):
    """Where the two ends of a message could take different ways, none is sent."""
    code = f"import jax; from mpi4jax import notoken as nt; x = jax.numpy.ones(3); {op}"
    result = python(code, {**fakes, "MPI4JAX_TRANSPORT": "nccl"})
    fails(result, words, "MPI4JAX_NCCL_MESSAGES=staged")


# Of other files: wildcards, tags that select, statuses, short messages, and a communicator on which
# ranks do not come together.
MATCHING = (
    "test_wildcards or tags_select or status_of_recv or largest_tag or shorter or open_chain "
    "or mpi4py_in_between"
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["nccl", "auto"])
def test_messages_that_need_matching_beside_nccl(mpirun, fakes, transport):
    """`auto` takes NCCL for all else, and breaks no program."""
    env = {**fakes, "MPI4JAX_TRANSPORT": transport}
    if transport != "auto":
        env["MPI4JAX_NCCL_MESSAGES"] = "staged"
    files = [RANKS / "test_status.py", RANKS / "test_order.py"]
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", MATCHING]
    result = mpirun(2, *command, env=env, time_limit=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" passed") == 2, result.stdout
    assert " failed" not in result.stdout, result.stdout


# A barrier on two ranks, whose settings depend on the rank.
UNLIKE = """
import os
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
{setting}
from mpi4jax import notoken as nt
try:
    nt.barrier()
except Exception as error:
    print(error)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "os.environ['MPI4JAX_NCCL_MESSAGES'] = ['nccl', 'staged'][rank]",
            ["here it is nccl", "here it is staged"],
        ),
        (
            "os.environ['FAKE_NCCL_BROKEN'] = str(rank)",
            ["ncclCommInitRank returned error code 2", "another rank could not make it"],
        ),
        (
            "os.environ['FAKE_NCCL_NAMELESS'] = '1'",
            ["ncclGetUniqueId returned error code 2", "another rank has no NCCL"],
        ),
        (
            "if rank: os.environ['MPI4JAX_LIBNCCL'] = '/nowhere'",
            ["/nowhere", "another rank has no NCCL"],
        ),
    ],
)
def test_ranks_that_differ_all_learn_of_it(mpirun, fakes, setting, words):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl"}
    result = mpirun(2, "-c", UNLIKE.format(setting=setting), env=env)
    assert result.stdout.count("has no counterpart") == 2, result
    assert all(word in result.stdout for word in words), result.stdout


STUCK = ALLREDUCE + "import time; time.sleep(60)"


def test_what_never_ends_on_the_gpu_is_reported(python, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_TIMEOUT": 1}
    result = python(STUCK, {**env, "FAKE_CUDA_STUCK": 1})
    words = "allreduce on mpi4jax.default, which is on the GPU, has not ended after MPI4JAX_TIMEOUT"
    fails(result, words, "allreduce #3")


@pytest.mark.parametrize("transport", ["staged", "nccl"])
def test_an_error_of_the_driver_ends_the_job(python, fakes, transport):
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": transport, "FAKE_CUDA_LOST": 1})
    fails(result, "cuEventRecord returned error code 700")


def test_what_nccl_reports_later_is_seen_by_the_watchdog(python, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "FAKE_NCCL_ASYNC_ERROR": 3}
    fails(python(STUCK, env), "failed: an earlier operation returned error code 3")


def test_what_is_recorded_is_not_watched(python, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_TIMEOUT": 1, "FAKE_CUDA_STUCK": 1}
    code = ALLREDUCE + "import time; time.sleep(3)"
    result = python(code, {**env, "FAKE_CUDA_CAPTURING": 1})
    assert result.returncode == 0, result.stderr


def test_cuda_mpi_without_support_names_the_others(python, fakes):
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "cuda-mpi"})
    if result.returncode == 0:
        pytest.skip(f"this {MPI.get_vendor()[0]} is CUDA-aware, or a trial says so")
    fails(result, "CUDA-aware", "staged", "nccl")


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [({}, "nccl"), ({"FAKE_CUDA_SHARED": "1"}, "staged"), ({"FAKE_NCCL_VERSION": "1"}, "staged")],
)
def test_auto(mpirun, fakes, settings, chosen):
    """NCCL where each of the two ranks has a GPU of its own."""
    code = "import mpi4jax; print(mpi4jax.transport_info().gpu)"
    result = mpirun(2, "-c", code, env={**fakes, "MPI4JAX_TRANSPORT": "auto", **settings})
    # A CUDA-aware MPI comes before staging.
    answers = {chosen, "cuda-mpi"} if chosen == "staged" else {chosen}
    (answer,) = set(result.stdout.split())
    assert answer in answers
