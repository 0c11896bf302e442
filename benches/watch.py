"""What watching costs a rank: operations on files, messages and bytes, by the number of ranks.

    python benches/watch.py 2 8 32 64

One job each, in which the last rank keeps the others waiting for SECONDS. Ranks 0 and 1 run under
`strace`, so that they say nothing of waits; a library in LD_PRELOAD counts the messages of all
ranks (those of the program are none that it sees). Needs Linux, strace, Open MPI and a C compiler.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import mpirun

SECONDS = 45
# The waiting is counted from this long after its begin, for this long: before the first line.
AFTER, WINDOW = 12, 10

PROGRAM = f"""
import os, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
def mark(name):
    try: os.stat("/mpi4jax-phase-" + name)
    except OSError: pass
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
jax.block_until_ready(nt.allreduce(jnp.ones(3)))
jax.block_until_ready(nt.barrier())
mark("wait")
if rank == 0: print("started", time.time(), flush=True)
if rank == size - 1: time.sleep({SECONDS})
jax.block_until_ready(nt.barrier())
mark("end")
if rank == 0: print("served", time.time(), flush=True)
"""

COUNT = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static long messages, bytes;
int MPI_Isend(const void *b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request *r) {
  messages++, bytes += n;
  return PMPI_Isend(b, n, t, to, tag, c, r);
}
__attribute__((destructor)) static void tell(void) {
  char name[4096];
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *folder = getenv("WATCH_FOLDER");
  if (!rank || !folder || !messages) return;
  snprintf(name, sizeof name, "%s/messages.%s", folder, rank);
  FILE *file = fopen(name, "w");
  fprintf(file, "%ld %ld", messages, bytes);
  fclose(file);
}
"""

RANK = (
    'export LD_PRELOAD="$WATCH_COUNT"; case $OMPI_COMM_WORLD_RANK in 0|1) '
    'exec strace -f -y -ttt -qq --seccomp-bpf '
    '-e trace=%file,fstat,getdents64,write -o "$WATCH_FOLDER/calls.$OMPI_COMM_WORLD_RANK" "$@";; '
    '*) exec "$@";; esac'
)  # fmt: skip


def counts(folder: Path, rank: int) -> dict[str, tuple[int, int]]:
    """(operations on files, bytes) of the job's folder by one rank, in each phase."""
    phases: dict[str, list[int]] = {"start": [0, 0]}
    phase, since = "start", 0.0
    for line in (folder / f"calls.{rank}").read_text(errors="replace").splitlines():
        _, when, call = line.split(None, 2)
        if mark := re.search(r"/mpi4jax-phase-(\w+)", call):
            phase, since = mark[1], float(when)
        name, passed = phase, float(when) - since
        if phase == "wait":
            inside = AFTER < passed <= AFTER + WINDOW
            name = "wait" if inside else "first seconds" if passed <= AFTER else "line"
        of = phases.setdefault(name, [0, 0])
        if f"{folder}/mpi4jax-" in call:
            done = re.search(r" = (\d+)$", call)
            is_data = call.startswith(("write", "getdents64", "<... write", "<... getdents64"))
            of[0] += 1
            of[1] += int(done[1]) if done and is_data else 0
    return {name: (operations, size) for name, (operations, size) in phases.items()}


def measure(ranks: int, folder: Path) -> None:
    program, library = folder / "program.py", folder / "count.so"
    program.write_text(PROGRAM)
    (folder / "count.c").write_text(COUNT)
    mpicc = Path(mpirun.find_mpiexec(sys.executable)).with_name("mpicc")
    compiler = [mpicc, "-shared", "-fPIC", folder / "count.c", "-o", library]
    subprocess.run(compiler, check=True)
    env = {
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_DUMP_DIR": str(folder),
        "WATCH_FOLDER": str(folder),
        "WATCH_COUNT": str(library),
        "OMP_NUM_THREADS": "1",
    }
    begin = time.time()
    command = ["sh", "-c", RANK, "sh", sys.executable, str(program)]
    job = mpirun.captured(ranks, command, cwd=folder, time_limit=500, env=env)
    end = time.time()
    assert job.returncode == 0, job.stderr
    times = {w: float(t) for w, t in re.findall(r"(started|served) ([\d.]+)", job.stdout)}
    said = re.findall(r"^r\d+ \| mpi4jax:.*$", job.stderr, re.MULTILINE)
    print(
        f"{ranks} ranks: {times['started'] - begin:.1f} s to the start, "
        f"{end - times['served']:.1f} s to the end; said:"
    )
    print(*(f"  {line[:200]}" for line in said), sep="\n")
    files = (folder / f"messages.{rank}" for rank in range(ranks))
    sent = sorted(tuple(map(int, f.read_text().split())) if f.exists() else (0, 0) for f in files)
    print("  messages and bytes of a rank: the most", sent[-1], "the next", sent[-2])
    for rank in range(min(2, ranks)):
        phases = ", ".join(f"{k} {n} ({size} B)" for k, (n, size) in counts(folder, rank).items())
        print(f"  rank {rank}: {phases}", flush=True)


if __name__ == "__main__":
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
            measure(count, Path(name))
