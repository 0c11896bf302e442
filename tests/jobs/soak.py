"""Whether the memory of a job stays the same, however long it runs: for two ranks or more.

    python tools/mpirun.py -n 2 --time-limit 3600 tests/jobs/soak.py
    python tools/mpirun.py -n 2 tests/jobs/soak.py --only communicators --communicators 1000

It communicates, compiles and makes communicators, each as often as an option says, and reads the
memory of each rank and the size of the board at the half and at the end. JAX and MPI alone do the
same for comparison: what they do not give back is not ours.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpi4jax
import mpi4jax.notoken as m
from mpi4jax import _native
from mpi4jax._call import eager

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
IN_A_CALL = 1000  # operations of a call of a compiled function, which has a loop
KEPT = 50  # number of compilations after which JAX forgets what it has compiled


class Mallinfo(ctypes.Structure):
    """What `mallinfo2` of glibc returns."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


class Memory(NamedTuple):
    """The memory of a rank, after JAX has forgotten what it has compiled."""

    resident: int  # bytes that are not shared and have no file
    allocated: int  # bytes in use of malloc, for Rust, C++ and C
    blocks: int  # blocks that Python has allocated
    board: int  # bytes of the board of this host


def memory() -> Memory:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    m.flush()
    jax.clear_caches()
    eager._on_device.cache_clear()  # at most 1,024 operands
    for _ in range(3):
        gc.collect()
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    lines = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return Memory(resident, info.uordblks + info.hblkhd, sys.getallocatedblocks(), board())


def board() -> int:
    """The bytes of the file that this process has mapped."""
    place = str(_native.board_place())
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split()[5] for line in lines if place in line}
    return os.stat(path).st_blocks * 512


def operations(count: int) -> None:
    """Run allreduces, messages to a neighbor and nonblocking operations, in compiled loops."""

    def body(_: Any, x: Any) -> Any:
        x = m.allreduce(x, MPI.SUM) / SIZE
        x = m.sendrecv(x, x, LEFT, RIGHT)
        x = m.wait(m.iallreduce(x, MPI.MAX))
        return m.permute(x, [(rank, (rank + 1) % SIZE) for rank in range(SIZE)])

    of_body = 4
    f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, IN_A_CALL // of_body, body, x))
    x = jnp.ones(8)
    for _ in range(-(-count // IN_A_CALL)):
        x = f(x).block_until_ready()
    assert x.tolist() == [1.0] * 8


def compilations(count: int, is_ours: bool = True) -> None:
    """Compile a new function, and run it once."""
    for i in range(count):

        def f(x: Any) -> Any:
            y = m.allreduce(x * i, MPI.SUM) if is_ours else jnp.cumsum(x * i)  # noqa: B023
            return (y / 2).sum()

        f = (mpi4jax.jit if is_ours else jax.jit)(jax.grad(f))
        assert f(jnp.ones(1 + i % 20))[-1] == i / 2
        if i % KEPT == KEPT - 1:
            jax.clear_caches()


def communicators(count: int, is_ours: bool = True) -> None:
    """Make communicators in each way, use them, and free them."""
    ways: list[Callable[[], Any]] = [
        WORLD.Dup,
        lambda: WORLD.Split(0, -RANK),
        lambda: WORLD.Create_cart([SIZE], periods=[True]),
    ]
    for i in range(count):
        comm = ways[i % len(ways)]()
        if is_ours:
            f = mpi4jax.jit(lambda x: m.allreduce(x, MPI.SUM, comm=comm))  # noqa: B023
            assert f(jnp.ones(2)).tolist() == [SIZE, SIZE]
            assert m.allreduce(jnp.ones(2), MPI.SUM, comm=comm).tolist() == [SIZE, SIZE]
        else:
            assert comm.allreduce(1) == SIZE
        comm.Free()
        if i % KEPT == KEPT - 1:
            jax.clear_caches()


PARTS: dict[str, Callable[[int], None]] = {
    "operations": operations,
    "compilations": compilations,
    "compilations of JAX alone": partial(compilations, is_ours=False),
    "communicators": communicators,
    "communicators of MPI alone": partial(communicators, is_ours=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operations", type=int, default=10**7)
    parser.add_argument("--compilations", type=int, default=10**4)
    parser.add_argument("--communicators", type=int, default=10**4)
    parser.add_argument("--only", default="", help="parts whose name begins so")
    parser.add_argument("--ours", action="store_true", help="without those of JAX and MPI alone")
    parser.add_argument("--json", help="a file for what rank 0 has gathered")
    options = parser.parse_args()
    results = []
    for name, run in PARTS.items():
        if not name.startswith(options.only) or (options.ours and "alone" in name):
            continue
        count = getattr(options, name.split()[0])
        run(min(count, 3 * KEPT))  # what is made once has been made
        found = []
        for _ in range(2):
            run(count // 2)
            found.append(memory())
        of_ranks = WORLD.gather(found)
        if of_ranks is not None:
            results.append([name, count, of_ranks])
            for rank, (half, end) in enumerate(of_ranks):
                print(f"{name}: {count}, rank {rank}")
                for what, before, after in zip(Memory._fields, half, end, strict=True):
                    print(f"  {what:9} {before:>12} {after:>12} {after - before:>+10}", flush=True)
    if RANK == 0 and options.json:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
