"""Faults: ranks that do different things, where a comparison might have looked away."""

from faults import PRELUDE, Fault
from faults_different import AFTERWARDS, LATE, MAYBE

INT = r"rank 1: allreduce #\d+ .*int32"
FLOAT = r"rank 0: allreduce #\d+ .*float32"
CART = "c = comm.Create_cart([size, 1], periods=[True, True])\nx = jnp.ones((4, 4))\n"
USES = (
    "rows, columns = nt.Layout((4, 8), {0: size}), nt.Layout((4, 8), {1: size})\n"
    "nt.redistribute(jnp.ones((4, 8 // size)), columns, rows)\n"
    "nt.ghosts.Plan([rank], [1 - rank])\n"
    "nt.checkpoints.save('checkpoint', x)\n"
    "nt.fft.fftn(jnp.ones((4 // size, 4)), nt.Layout((4, 4), {0: size}))\n"
)
IMPORTS = (
    "comm, rank, size, x = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, jnp.ones(3)\n"
    "def wait(y): return jax.block_until_ready(y)\n"
    "if rank == 1: d = comm.Dup()\n"
    "import mpi4jax; from mpi4jax import notoken as nt\n"
    "if rank == 0: d = comm.Dup()\n"
)

FAULTS = {
    **{
        f"another dtype after 40 communicators, on {words}": Fault(
            "wait(nt.allreduce(x))\n" * early + "cs = [comm.Dup() for _ in range(40)]\n"
            "for c in cs: nt.allreduce(x, comm=c)\n"
            f"print('WRONG', wait(nt.allreduce(jnp.arange(3) if rank else x, comm={of})))",
            (AFTERWARDS, INT, FLOAT),
            env=LATE,
            status=1,
            silent=("WRONG",),
        )
        for words, early, of in [
            ("the default one", True, "None"),
            ("the last one", False, "cs[-1]"),
        ]
    },
    "more communicators and peers than are compared": Fault(
        "cs = [comm.Dup() for _ in range(140)]\nfor c in cs: y = nt.allreduce(x, comm=c)\n"
        "for c in cs: y = nt.sendrecv(y, y, rank, rank, comm=c)\nwait(y)",
        (
            r"r0 \| mpi4jax: this rank uses more than 128 communicators: .* are not compared",
            r"r\d \| mpi4jax: this rank exchanges messages with more than 64 ranks .* not compared",
        ),
        env=LATE,
        status=0,
    ),
    # The root does not wait for the others, and the first of its collectives has left the entries.
    # The sizes of the collective before differ rightly.
    "another dtype of a bcast whose root is far ahead": Fault(
        "wait(nt.allgatherv(x[: 1 + rank], [1, 2]))\n"
        "ps = [jnp.full(4, 1.5 + i) for i in range(30)]\n"
        "if rank: ps[0] = ps[0].astype(int); time.sleep(3)\n"
        "ps = [nt.bcast(p[: 1 + i * i // 5 % 4], 0) for i, p in enumerate(ps)]\n"
        "wait(nt.allreduce(x)); print('WRONG')",
        (AFTERWARDS, r"rank 0: bcast #2 .*float32", r"rank 1: bcast #2 .*int32"),
        env=LATE,
        status=1,
        silent=("WRONG",),
    ),
    # Both ranks pass the bcast. That is not certain to be a mistake; the dtype is.
    "another dtype after two roots of a bcast": Fault(
        "c = comm.Dup(); wait(nt.allreduce(x, comm=c))\n"
        "wait(nt.bcast(x, rank, comm=c))\n"
        "print('WRONG', wait(nt.allreduce(jnp.arange(3) if rank else x, comm=c)))",
        (
            f"{MAYBE}.*from now on, only the data types",
            r"rank 0: bcast #2 \(root 0",
            r"rank 1: bcast #2 \(root 1",
            AFTERWARDS,
            INT,
            FLOAT,
        ),
        env=LATE,
        status=1,
        silent=("WRONG",),
    ),
    "two roots of a bcast after this package has used the default communicator": Fault(
        USES + "print('WRONG', wait(nt.bcast(x, rank)), wait(nt.allreduce(x)))",
        (AFTERWARDS, r"rank 0: bcast #\d+ \(root 0", r"rank 1: bcast #\d+ \(root 1"),
        env=LATE,
        status=1,
        silent=(MAYBE,),
    ),
    **{
        f"ghost cells {words}": Fault(
            f"{CART}wait({first} if rank else {other})\n"
            "wait(nt.allreduce(x, comm=c)); print('WRONG')",
            (
                AFTERWARDS,
                *(f"rank {rank}: halo_exchange #1 .*, {it}\n" for rank, it in enumerate(says)),
            ),
            env=LATE,
            status=1,
            silent=("WRONG",),
        )
        for words, first, other, *says in [
            (
                "of another axis",
                "nt.halo_exchange(x, c, axes=(1, None))",
                "nt.halo_exchange(x, c, axes=(0, None))",
                r"widths 1\+1 along axes -2",
                r"widths 1\+1 along axes -1",
            ),
            (
                "that one rank adds",
                "nt.halo_add(x, c, axes=(0, None))",
                "nt.halo_exchange(x, c, axes=(0, None))",
                r"widths 1\+1 along axes -2",
                r"widths 1\+1 along axes -2, added to the cells that they are copies of",
            ),
        ]
    },
    # Both ranks know the origin of the duplicates, so they cannot confuse them with the grid.
    "another dtype on a grid beside duplicates": Fault(
        "a, b = comm.Dup(), comm.Dup()\nfor c in (a, b): wait(nt.allreduce(x, comm=c))\n"
        "b.Free(); c = comm.Create_cart([size])\n"
        "print('WRONG', wait(nt.allreduce(jnp.arange(3) if rank else x, comm=c)))",
        (AFTERWARDS, INT, FLOAT),
        env=LATE,
        status=1,
        silent=("WRONG",),
    ),
    # The root waits in the duplication, which has a number of its own.
    "another dtype of a bcast whose root duplicates MPI_COMM_WORLD": Fault(
        "c = comm.Dup(); wait(nt.allreduce(x, comm=c))\n"
        "if rank: comm.recv(source=0); time.sleep(2)\n"
        "wait(nt.bcast(jnp.arange(3) if rank else x, 0, comm=c))\n"
        "if rank == 0: comm.send(None, 1)\n"
        "d = comm.Dup()\n"
        "wait(nt.allreduce(x, comm=c)); print('the end', rank)",
        (
            MAYBE,
            r"rank 0: bcast #2 .*float32",
            r"rank 1: bcast #2 .*int32",
            "the end 0",
            "the end 1",
        ),
        env=LATE,
        status=0,
    ),
    **{
        f"another dtype on {words}, after imports beside a duplication": Fault(
            f"c = {of}\n"
            "wait(nt.allreduce(jnp.arange(3) if rank else x, comm=c)); print('the end', rank)",
            (
                r"r0 \| mpi4jax: rank 1 imported mpi4jax after .* compared only on MPI_COMM_WORLD",
                "the end 0",
                "the end 1",
            ),
            status=0,
            prelude=PRELUDE.partition("import mpi4jax\n")[0] + IMPORTS,
        )
        for words, of in [("the duplicate", "d"), ("a grid", "comm.Create_cart([size])")]
    },
    "a transform along another axis": Fault(
        "layout = nt.Layout((4, 4, 4), {0: size})\n"
        "axes = (0, 1) if rank else (0, 2)\n"
        "y = wait(nt.fft.fftn(jnp.ones((4 // size, 4, 4)), layout, axes)); wait(nt.allreduce(y))\n"
        "print('WRONG')",
        (
            AFTERWARDS,
            "rank 0: alltoallv #1 .*, of a transform along axes 0 and 2 by fftn\n",
            "rank 1: alltoallv #1 .*, of a transform along axes 0 and 1 by fftn\n",
        ),
        env=LATE,
        status=1,
        silent=("WRONG",),
    ),
}
