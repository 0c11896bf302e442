"""Faults: what a report says of ranks that cannot answer, or are in MPI without this package."""

from faults import FIRST_LINE, Fault

FAULTS = {
    # A stopped process can answer no question: the others read its state from the system.
    "a report of a rank that is stopped": Fault(
        "pids = comm.allgather(os.getpid())\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "elif rank == 0:\n"
        "    while open(f'/proc/{pids[1]}/stat').read().rpartition(')')[2].split()[0] != 'T':\n"
        "        time.sleep(0.1)\n"
        "    threading.Timer(3, os.kill, (pids[0], signal.SIGUSR1)).start()\n"
        "    threading.Timer(20, os.kill, (pids[1], signal.SIGCONT)).start()\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        (
            r"allreduce #1 .* has waited for \d+ s: rank 1 is stopped: process",
            r"report \(SIGUSR1\)",
            r"rank 1 is stopped: process \d+ .*gets no time \(SIGSTOP, or a debugger\)",
            "the end 0",
            "the end 1",
            "the end 2",
        ),
        status=0,
        ranks=3,
        env={"MPI4JAX_REPORT_AFTER": "2"},
        silent=("aborting the job", "can never complete"),
        time_limit=80,
    ),
    # Rank 1 is in MPI while the ranks that wait for it make reports, one of them of all ranks.
    "reports while a rank communicates through mpi4py": Fault(
        "pids, out = comm.allgather(os.getpid()), np.ones(3, np.float32)\n"
        "if rank == 0: threading.Timer(6, os.kill, (pids[0], signal.SIGUSR1)).start()\n"
        "if rank == 1: comm.Recv(out, source=2)\n"
        "if rank == 2:\n"
        "    for _ in range(16): comm.sendrecv(rank, dest=rank, source=rank); time.sleep(1)\n"
        "    comm.Send(out, dest=1)\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        (
            (
                r"allreduce #1 .* has waited for \d+ s: rank 1 is in no operation; .*Python is "
                rf"at .*fault.py:{FIRST_LINE + 2}\b"
            ),
            r"report \(SIGUSR1\)",
            rf"rank 2 is in no operation; .*Python is at .*fault.py:{FIRST_LINE + 4}\b",
            "the end 0",
            "the end 1",
            "the end 2",
        ),
        status=0,
        ranks=3,
        env={"MPI4JAX_REPORT_AFTER": "2"},
        silent=("aborting the job", "can never complete", "deadlock"),
        time_limit=80,
    ),
}
