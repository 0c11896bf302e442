"""Faults, and what looks like some: ranks that wait."""

from faults import FIRST_LINE, HUNG, HUNG_STATUS, TIMED, Fault

FAULTS = {
    # ---- Ranks that wait
    "a send without a receiver at exit": Fault(
        "if rank == 0: nt.send(jnp.ones(1 << 20), 1)",
        (
            r"send to 1, tag 0 \(1048576 x float32\).* can never complete: rank 1 has finished",
            "rank 1 is finished",
        ),
        status=HUNG_STATUS,
    ),
    **{
        f"a {words} on one rank": Fault(
            call + "; mpi4jax.flush()",
            (
                rf"rank 0 is in {op}.*, fault.py:{FIRST_LINE}",
                "start the program with mpiexec -n 2",
            ),
            status=HUNG_STATUS,
            ranks=1,
            env={"MPI4JAX_DEADLOCK_AFTER": "3"},
        )
        for words, call, op in [
            ("receive", "nt.recv(x, 0)", "recv from 0"),
            ("receive from any rank", "nt.recv(x)", "recv from any rank"),
            ("started receive", "nt.wait(nt.irecv(x, 0))", "wait for irecv from 0"),
            ("large send", "nt.send(jnp.ones(1 << 20), 0)", "send to 0"),
        ]
    },
    "a small send without a receiver at exit": Fault(
        "if rank == 0: nt.send(x, 1, tag=4)\nwait(nt.allreduce(x, MPI.SUM))",
        ("r1 .*warning: a message from 0, tag 4, .* was never received",),
        status=0,
    ),
    "a time-out in a scan": Fault(
        "step = lambda c, i: (nt.allreduce(c, MPI.SUM), i)\n"
        "f = mpi4jax.jit(lambda x, i: jax.lax.scan(step, x, i)[0])\n"
        # Ranks compile for different times, which the time limit must not see.
        "i = jnp.arange(3 + 2 * (rank == 0)); f = f.lower(x, i).compile(); comm.Barrier()\n"
        "wait(f(x, i))\ntime.sleep(60)",
        (
            HUNG,
            f"rank 0 is in allreduce #4 .*fault.py:{FIRST_LINE}",
            "rank 1 .*last one was allreduce #3",
        ),
        status=HUNG_STATUS,
        env=TIMED,
    ),
    "a receive beside computation, from a rank that has finished": Fault(
        "f = jax.jit(lambda x, m: (nt.recv(x, 1), m @ m))\nif rank == 0: wait(f(x, jnp.eye(400)))",
        (f"rank 0 is in recv .*fault.py:{FIRST_LINE}", "rank 1 has finished"),
        status=HUNG_STATUS,
    ),
    "a rank that spins": Fault(
        "comm.Barrier()\nif rank == 1:\n    while True: pass\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, rf"rank 1 is in no operation.*Python is at .*fault.py:{FIRST_LINE + 2}"),
        status=HUNG_STATUS,
        env=TIMED,
    ),
    "a rank in C that keeps Python's lock": Fault(
        "comm.Barrier()\nif rank == 1: sum(range(10**11))\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, "rank 1 is in no operation.*; C code keeps Python's lock"),
        status=HUNG_STATUS,
        env=TIMED,
    ),
    # A signal would end a sleep in C.
    "a rank that is looked at does not wake up": Fault(
        "f = jax.jit(lambda x: nt.allreduce(x)).lower(x).compile(); comm.Barrier()\n"
        "import ctypes\nif rank == 1: print('left', ctypes.PyDLL(None).sleep(7))\n"
        "wait(f(x))",
        ("s: rank 1 is in no operation; C code keeps Python's lock; .*; the job", "left 0"),
        status=0,
        env={"MPI4JAX_REPORT_AFTER": "1"},
    ),
    "a rank that compiles": Fault(
        "def long(x):\n"
        "    comm.Barrier()\n"
        # Long enough that the timeout falls into one stage, and not between two.
        "    for i in range(60000): x = jnp.sin(x) * i\n"
        "    return x\n"
        "if rank == 1: wait(jax.jit(long)(x))\n"
        "else: comm.Barrier()\n"
        "wait(nt.allreduce(x, MPI.SUM))",
        (HUNG, r"rank 1 is in no operation; JAX (traces|lowers|compiles)"),
        status=HUNG_STATUS,
        env=TIMED,
    ),
    # The rank sleeps for longer than a job takes that is ended at the timeout, even if MPI blocks.
    "a rank that is slow, where a time-out does not end the job": Fault(
        "f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.SUM)).lower(x).compile(); comm.Barrier()\n"
        "if rank == 1: time.sleep(13)\nwait(f(x)); print('the end', rank)",
        (HUNG, "rank 1 is in no operation", "the job continues", "the end 0", "the end 1"),
        status=0,
        env={"MPI4JAX_ON_TIMEOUT": "continue", **TIMED},
        silent=(f"(?s){HUNG}.*{HUNG}",),  # one report of a wait is enough
    ),
    "a rank that others wait for long, without a time-out": Fault(
        "f = jax.jit(lambda x: nt.allreduce(x)).lower(x).compile(); comm.Barrier()\n"
        "if rank == 1: time.sleep(10)\nwait(f(x)); print('the end', rank)",
        (
            (
                r"allreduce #1 .* has waited for \d+ s: rank 1 is in no operation; "
                rf".*Python is at .*fault.py:{FIRST_LINE + 1} in .*the job continues"
            ),
            r"has waited for [4-8] s: rank 1",
            "the end 0",
            "the end 2",
        ),
        status=0,
        ranks=3,
        env={"MPI4JAX_REPORT_AFTER": "2"},
        silent=("last operations", "can never complete"),
    ),
    "a part of a program without a time-out": Fault(
        "if rank == 1: time.sleep(5)\n"
        "with mpi4jax.time_limit(None): wait(nt.allreduce(x, MPI.SUM))\n"
        "print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        silent=("mpi4jax:",),
        env=TIMED,
    ),
    "a time-out that no clock can show": Fault(
        "with mpi4jax.time_limit(0.5): pass\n"
        "if rank == 1: time.sleep(4)\n"
        "with mpi4jax.time_limit(1e20): wait(nt.allreduce(x, MPI.SUM))\n"
        # Its operation begins when Python has come to the end of the block.
        "w, step = jnp.ones((400, 400)), lambda i, w: jnp.tanh(w @ w)\n"
        "late = jax.jit(lambda w: jax.lax.fori_loop(0, 300, step, w)[0, :3]); wait(late(w))\n"
        "comm.Barrier()\n"
        "with mpi4jax.time_limit(2):\n"
        "    if rank == 0: nt.allreduce(late(w), MPI.SUM)\n"
        "time.sleep(60)",
        (
            r"allreduce #2 .* has not completed after time_limit\(2 s\)",
            r"rank 1 is in no operation.*fault.py:\d+",
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_TIMEOUT": "1e20", "MPI4JAX_REPORT_AFTER": "1e20"},
        silent=("panicked",),
    ),
    # ---- Messages that no rank receives, and collectives that differ
    **{
        f"a wrong tag, {name}": Fault(
            "if rank == 0: nt.send(x, 1, tag=1)\n" + program, says, status=HUNG_STATUS, env=env
        )
        for name, program, says, env in [
            (
                "and no other message",
                "wait(nt.recv(x, 1, tag=3) if rank == 0 else nt.recv(x, 0, tag=2))",
                (
                    (
                        r"deadlock: rank 0 is in recv from 1, tag 3 .*rank 1, which is in recv "
                        r"from 0, tag 2 .* \(rank 0 has sent it a message with tag 1\), and "
                    ),
                ),
                {"MPI4JAX_DEADLOCK_AFTER": "3"},
            ),
            (
                "and another wrong tag",
                (
                    "if rank == 0: nt.send(x, 1, tag=4)\n"
                    "wait(nt.recv(x, 1, tag=3) if rank == 0 else nt.recv(x, 0, tag=2))"
                ),
                ("deadlock: rank 0 is in recv from 1, tag 3 .*rank 1, which is in recv from 0",),
                {"MPI4JAX_DEADLOCK_AFTER": "3"},
            ),
            (
                "before a collective",
                "else: wait(nt.recv(x, 0, tag=2))\nwait(nt.allreduce(x))",
                (
                    (
                        r"deadlock: rank 0 is in allreduce #1 .*rank 1, which is in recv from 0, "
                        r"tag 2 .* \(rank 0 has sent it a message with tag 1\)"
                    ),
                ),
                {"MPI4JAX_DEADLOCK_AFTER": "3"},
            ),
            (
                "of a rank that finishes",
                "else: wait(nt.recv(x, 0, tag=2))",
                (
                    "recv from 0, tag 2 .* can never complete: rank 0 has finished",
                    "rank 0 has sent a message with tag 1 to rank 1, which has not received it",
                ),
                {},
            ),
            (
                "of an old message",
                (
                    "there, how = 1 - rank, dict(sendtag=3, recvtag=3)\n"
                    "for i in range(9): nt.allreduce(nt.sendrecv(x, x, there, there, **how))\n"
                    "wait(nt.recv(x, 1 - rank, tag=3))"
                ),
                ("deadlock: rank 0 is in recv from 1, tag 3",),
                {"MPI4JAX_DEADLOCK_AFTER": "3"},
            ),
        ]
    },
    "a message on another communicator than its receiver's": Fault(
        "c = comm.Dup()\nif rank == 0: nt.send(x, 1)\nwait(nt.recv(x, 1 - rank, comm=c))",
        (
            r"deadlock: rank 0 is in recv from 1, .*rank 1, which is in recv from 0, ",
            r"    send to 1, tag 0 \(3 x float32\) on mpi4jax.default, fault.py",
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
    ),
    "a receiver that leaves a loop one step early": Fault(
        "for i in range(4 - rank):\n"
        "    if rank == 0: nt.send(x, 1, tag=i)\n"
        "    else: wait(nt.recv(x, 0, tag=i))\n"
        "wait(nt.allreduce(x) if rank == 0 else nt.recv(x, 0, tag=9))",
        ("rank 0 is in allreduce #1 .* waits for rank 1, which is in recv from 0, tag 9",),
        status=HUNG_STATUS,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
    ),
    "a message that comes late": Fault(
        "if rank == 0: nt.send(x, 1, tag=1); time.sleep(6); nt.send(x, 1, tag=2)\n"
        "else: wait(nt.recv(x, 0, tag=2)); wait(nt.recv(x, 0, tag=1))\n"
        "print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
    ),
    "collectives that differ, on a communicator that mpi4py may use": Fault(
        "wait(nt.reduce_scatter(jnp.ones((2, 6)), comm=comm) if rank == 0\n"
        "    else nt.gatherv(jnp.ones(6), [6, 6], 1, comm=comm))",
        (
            "operations of the ranks may not match",
            (
                r"rank 0 is in reduce_scatter #1 .*rank 1, which is in gatherv #1 .* waits "
                "for rank 0; the operations of the ranks do not match: let all ranks call the same"
            ),
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
    ),
    # ---- Ranks that wait for each other: a proof
    "a deadlock of receives": Fault(
        "wait(nt.recv(x, 1 - rank, tag=7))",
        (
            (
                rf"deadlock: rank 0 is in recv from 1, tag 7 .*, fault.py:{FIRST_LINE}, and waits "
                rf"for rank 1, which is in recv from 0, tag 7 .*, fault.py:{FIRST_LINE}, .*; let "
                "one of them send first, or use sendrecv"
            ),
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
    ),
    "a deadlock of two communicators in different order": Fault(
        "a, b = comm.Dup(), comm.Dup()\n"
        "f = lambda c: wait(nt.allreduce(x, MPI.SUM, comm=c))\n"
        "f(a if rank == 0 else b); f(b if rank == 0 else a)",
        (
            "deadlock: rank 0 is in allreduce .* rank 1, which is in allreduce .*, on another comm",
            "let all ranks use the communicators in the same order",
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
        silent=("all ranks have called it",),
    ),
    # ---- What only looks like one
    "another thread ends what looks like a deadlock": Fault(
        "comm.Barrier()\n"
        "def serve(): time.sleep(20); nt.send(x, 1, tag=1)\n"
        "if rank == 0: t = threading.Thread(target=serve); t.start(); wait(nt.recv(x, 1, tag=2))\n"
        "else: wait(nt.recv(x, 0, tag=1)); nt.send(x, 0, tag=2)\n"
        "mpi4jax.flush(); print('the end', rank)",
        (
            (
                r"this looks like a deadlock: .*; aborting the job in 2\d\d s unless a rank "
                r"goes on \(MPI4JAX_DEADLOCK_AFTER\)"
            ),
            "the end 0",
            "the end 1",
        ),
        status=0,
        silent=("can never complete", "aborting the job \\("),
    ),
    "a thread that has communicated goes on": Fault(
        "e = threading.Event()\n"
        "def serve():\n"
        "    wait(nt.allreduce(x, MPI.SUM)); e.set(); time.sleep(12); nt.send(x, 1, tag=1)\n"
        "t = threading.Thread(target=serve); t.start(); e.wait()\n"
        "if rank == 0: wait(nt.recv(x, 1, tag=2, comm=comm))\n"
        "else: wait(nt.recv(x, 0, tag=1)); nt.send(x, 0, tag=2, comm=comm)\n"
        "mpi4jax.flush(); print('the end', rank)".replace(
            "nt.send(x, 1, tag=1)", "rank == 0 and nt.send(x, 1, tag=1)"
        ),
        ("the end 0", "the end 1"),
        status=0,
        env={"MPI4JAX_DEADLOCK_AFTER": "3"},
        silent=("deadlock",),
    ),
    "a program of a thread that has ended ends what looks like a deadlock": Fault(
        "a, b = comm.Dup(), comm.Dup()\n"
        "step, w = lambda i, w: jnp.tanh(w @ w), jnp.ones((400, 400))\n"
        "work = jax.jit(lambda w, n: jax.lax.fori_loop(0, n, step, w)[0])\n"
        "late = jax.jit(lambda w, n: nt.send(work(w, n), 1, comm=a))\n"
        "if rank == 0:\n"
        # On a machine of any speed, this takes about 12 seconds.
        "    wait(work(w, 1)); t = time.time(); wait(work(w, 50))\n"
        "    n = int(50 * 12 / (time.time() - t))\n"
        "    t = threading.Thread(target=late, args=(w, n)); t.start(); t.join()\n"
        "    wait(nt.recv(x, 1, comm=b))\n"
        "else: nt.send(nt.recv(w[0], 0, comm=a)[:3], 0, comm=b)\n"
        "mpi4jax.flush(); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        silent=("can never complete", "aborting the job"),
        time_limit=90,
    ),
    "a main thread in mpi4py ends what looks like a deadlock": Fault(
        "out = np.ones(3, np.float32)\n"
        "if rank == 0:\n"
        "    t = threading.Thread(target=lambda: wait(nt.recv(x, 1, tag=2))); t.start()\n"
        "    comm.Recv(out, 2); nt.send(x, 1, tag=1); mpi4jax.flush(); t.join()\n"
        "elif rank == 1: wait(nt.recv(x, 0, tag=1)); nt.send(x, 0, tag=2)\n"
        "else: time.sleep(9); comm.Send(out, 0)\n"
        "mpi4jax.flush(); print('the end', rank)",
        ("the end 0", "the end 1", "the end 2"),
        status=0,
        ranks=3,
        silent=("mpi4jax:",),
    ),
    "ranks in communicators that cannot be told apart": Fault(
        "a, b = comm.Split(0, rank), comm.Split(0, rank)\n"
        "wait(nt.allreduce(x, MPI.SUM, comm=b if rank else a))",
        (
            "unless they are on different communicators of the same ranks, which is a deadlock",
            "has not completed after MPI4JAX_TIMEOUT=10 s",
        ),
        status=HUNG_STATUS,
        env={"MPI4JAX_REPORT_AFTER": "2", "MPI4JAX_TIMEOUT": "10"},
    ),
    "communicators that have several names": Fault(
        "c = comm.Split(0, rank); c.Set_name(f'of rank {rank}')\n"
        "def add(a, b, _): time.sleep(7); np.frombuffer(b, 'f4')[:] += np.frombuffer(a, 'f4')\n"
        "op = MPI.Op.Create(add, commute=True)\n"
        "print('the sum', wait(nt.allreduce(x, op, comm=c))[0])",
        ("the sum 2.0",),
        status=0,
        silent=("aborting the job",),
    ),
    "a slow collective on communicators that each rank has numbered on its own": Fault(
        "own = [MPI.COMM_SELF.Dup() for _ in range(3 * rank)]\n"
        "def add(a, b, _): time.sleep(7); np.frombuffer(b, 'f4')[:] += np.frombuffer(a, 'f4')\n"
        "op = MPI.Op.Create(add, commute=True)\n"
        "for c in (comm.Dup(), comm.Split(0, rank)): y = wait(nt.allreduce(x, op, comm=c))\n"
        "print('the sum', y[0])",
        ("the sum 2.0",),
        status=0,
        silent=("mpi4jax:",),
    ),
    "two threads free communicators": Fault(
        "a, b = comm.Dup(), comm.Dup()\n"
        "if rank == 1: comm.recv(source=0); time.sleep(8)\n"
        "r = [mpi4jax.iallreduce(x, MPI.SUM, comm=c) for c in (a, b)]; mpi4jax.flush()\n"
        "if rank == 0: comm.send(None, 1)\n"
        "threads = [threading.Thread(target=c.Free) for c in (a, b)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "print('the end', rank)",
        (
            (
                r"the freeing of communicator .*has waited for \d+ s: rank 1 is in no operation; "
                rf".*Python is at .*fault.py:{FIRST_LINE + 1}"
            ),
            "the end 0",
            "the end 1",
        ),
        status=0,
        env={"MPI4JAX_REPORT_AFTER": "2"},
        library="Open MPI",
    ),
    # ---- Ranks that wait, and are served in the end; ways to ask them
    "half of an exchange with a rank that has finished is done": Fault(
        "if rank == 0: wait(nt.recv(x, 1))\n"
        "if rank == 1: wait(nt.sendrecv(x, x, source=2, dest=0))\n"
        "if rank == 2: time.sleep(8); nt.send(x, 1)\n"
        "mpi4jax.flush(); print('the end', rank)",
        ("the end 0", "the end 1", "the end 2"),
        status=0,
        ranks=3,
        silent=("mpi4jax:",),
    ),
    "a communicator that is freed, and made again under its name": Fault(
        "c = comm.Dup(); c.Set_name('again'); wait(nt.barrier(comm=c)); mpi4jax.flush(); c.Free()\n"
        "c = comm.Dup(); c.Set_name('again'); nt.barrier(comm=c); mpi4jax.flush()\n"
        "if rank == 2: time.sleep(8)\n"
        "wait(nt.reduce(x, MPI.SUM, root=1, comm=c)); print('the end', rank)",
        ("the end 0", "the end 1", "the end 2"),
        status=0,
        ranks=3,
        silent=("mpi4jax:",),
    ),
    "an MPI that one thread may call": Fault(
        "if rank == 1: time.sleep(60)\nwait(nt.allreduce(x, MPI.SUM))",
        (HUNG, "rank 0 is in allreduce #1", "rank 1 is in no operation", "mpi4jax.report /"),
        status=HUNG_STATUS,
        env={"MPI4PY_RC_THREAD_LEVEL": "serialized", **TIMED},
        fork=False,
    ),
    "two threads that both need the default communicator first": Fault(
        "work = lambda: mpi4jax.default_comm()\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "wait(nt.allreduce(x, MPI.SUM)); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        env={"LATE": "1"},
        silent=("mpi4jax:",),
    ),
}
