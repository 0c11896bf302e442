"""Threads that are none of Python's: which could go on with a program, and which could not."""

import c_threads
import pytest
from faults import HUNG_STATUS, PRELUDE

LATER = """
done = threading.Event()
def late(): nt.send(x, 0, tag=1, comm=comm); mpi4jax.flush(); done.set()
if rank == 1:
    call_later(late, 9, HOW)
    wait(nt.recv(x, 0, tag=2, comm=comm)); done.wait(); time.sleep(0.2)
else: nt.send(nt.recv(x, 1, tag=1, comm=comm), 1, tag=2, comm=comm)
mpi4jax.flush(); print("the end", rank)
"""


def run(run_job, tmp_path, program, **more):
    (tmp_path / "program.py").write_text(PRELUDE + program)
    env = {
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_DUMP_DIR": str(tmp_path),
        "MPI4JAX_REPORT_AFTER": "5",
        **more,
    }
    result = run_job(2, "program.py", cwd=tmp_path, env=env, time_limit=55)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("how", range(len(c_threads.WAYS)), ids=c_threads.WAYS)
def test_a_c_librarys_thread_may_call_python_later(run_job, tmp_path, how):
    program = c_threads.prelude() + LATER.replace("HOW", str(how))
    status, output = run(run_job, tmp_path, program)
    assert status == 0, output
    assert output.count("the end") == 2, output


# What ordinary programs have besides the program's own threads.
IDLE = {
    "pools of libraries": (
        "np.ones((500, 500)) @ np.ones((500, 500))\n"
        "wait(jax.jit(lambda x: jnp.linalg.svd(x @ x.T))(jnp.ones((200, 200))))\n"
    ),
    "faulthandler": "import faulthandler; faulthandler.dump_traceback_later(100)\n",
    "an executor": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(3); [f.result() for f in [pool.submit(time.sleep, 0.1)] * 3]\n"
    ),
    "a thread that waits for a queue": (
        "import queue; q = queue.Queue(); threading.Thread(target=q.get, daemon=True).start()\n"
    ),
}
WAITS = {
    "a method of an array": "nt.recv(x, 1 - rank, tag=7).block_until_ready()",
    "a function of JAX": "wait(nt.recv(x, 1 - rank, tag=7))",
    "NumPy": "np.asarray(jax.jit(lambda x: nt.recv(x, 1 - rank, tag=7))(x))",
    "flush": "y = jax.jit(lambda x: nt.recv(x, 1 - rank, tag=7))(x); mpi4jax.flush()",
    "the first call of a function that makes a communicator": (
        "y = jax.jit(lambda a: nt.recv(a[:3], 1 - rank, tag=7))(a @ a)"
    ),
}


@pytest.mark.parametrize(
    ("before", "waits"),
    [
        *((before, "a function of JAX") for before in IDLE),
        *(("pools of libraries", w) for w in WAITS),
    ],
)
def test_a_deadlock_is_found_beside_threads_that_only_wait(run_job, tmp_path, before, waits):
    program = f"a = jnp.ones((500, 500))\n{IDLE[before]}{WAITS[waits]}\nmpi4jax.flush()\n"
    status, output = run(run_job, tmp_path, program, MPI4JAX_DEADLOCK_AFTER="4")
    assert status == HUNG_STATUS, output
    assert "mpi4jax: deadlock: rank " in output, output
