"""Faults: ranks that do different things."""

import re

from faults import CHECK, DIFFERENT, ENDS_JOB, FIRST_LINE, Fault

AFTERWARDS = r"the operations of the ranks do not match \(set MPI4JAX_CHECK=0"
OF_FUNCTION = r"in shard_map of <lambda>\(\[0\]: float32"
# On a communicator that the program may use through mpi4py too: the job goes on.
MAYBE = "the operations of the ranks may not match"
LOOP = "jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + f(x), jnp.zeros_like(x)))"
# The counts of two ranks.
OTHER = "[2, 1] if rank else [1, 1]"
# The program has not asked for the default communicator.
LATE = {"LATE": "1"}

FAULTS = {
    # ---- Ranks that do different things, under MPI4JAX_CHECK
    **{
        f"wrong {what}": Fault(
            f"wait({first} if rank == 0 else {other})",
            (
                DIFFERENT,
                rf"expected rank 0: {says[0]}.*, fault.py:{FIRST_LINE}",
                rf"actual   rank 1: {says[1]}.*, fault.py:{FIRST_LINE}",
            ),
            env=CHECK,
        )
        for what, first, other, *says in [
            ("op", "nt.scan(x)", "nt.allreduce(x)", r"scan #1 \(SUM, 3 x f", "allreduce #1"),
            ("reduction", "nt.scan(x, MPI.MAX)", "nt.scan(x)", r"scan #1 \(MAX", r"scan #1 \(SUM"),
            ("dtype", "nt.scan(x.astype(int))", "nt.scan(x)", ".* 3 x int32", ".* 3 x float32"),
            ("count", "nt.scan(x)", "nt.scan(jnp.ones(4))", ".* 3 x float32", ".* 4 x float32"),
            ("root", "nt.bcast(x, 0)", "nt.bcast(x, 1)", r"bcast #1 \(root 0", r".* \(root 1"),
        ]
    },
    "wrong count in a loop": Fault(
        "n = 3 + rank\n"
        "step = lambda i, x: nt.allreduce(x, MPI.SUM)\n"
        "f = mpi4jax.jit(lambda x: jax.lax.fori_loop(0, n, step, x))\n"
        "wait(f(x)); wait(nt.bcast(x, 0))",
        (DIFFERENT, "rank 0: bcast #4", "rank 1: allreduce #4"),
        env=CHECK,
    ),
    "unequal blocks of a shard_map": Fault(
        "mesh, rows = nt.Mesh(), jax.sharding.PartitionSpec('i')\n"
        "f = lambda x: jax.lax.psum(x, 'i')\n"
        "f = nt.shard_map(f, mesh=mesh, in_specs=rows, out_specs=jax.sharding.PartitionSpec())\n"
        "wait(jax.jit(f)(jnp.ones(3 + rank)))",
        (
            DIFFERENT,
            rf"rank 0: allreduce #1 \(SUM, 3 x .*{FIRST_LINE + 1}, {OF_FUNCTION}\[3\] P\('i',?\)\)",
            rf"rank 1: allreduce #1 \(SUM, 4 x .*{FIRST_LINE + 1}, {OF_FUNCTION}\[4\] P\('i',?\)\)",
        ),
        env=CHECK,
    ),
    **{
        f"a mean over unequal blocks of a shard_map{', compared' * (env == CHECK)}": Fault(
            "mesh, rows = nt.Mesh(), jax.sharding.PartitionSpec('i')\n"
            "f = lambda x: jax.lax.pmean(x.mean(), 'i')\n"
            "whole = jax.sharding.PartitionSpec()\n"
            "f = nt.shard_map(f, mesh=mesh, in_specs=rows, out_specs=whole)\n"
            f"wait({'jax.jit(f)' if jit else 'f'}(jnp.ones(3 + rank)))",
            (
                DIFFERENT if env == CHECK else AFTERWARDS,
                rf"rank 0: allreduce #1 \(SUM, 1 x .*, {OF_FUNCTION}\[3\] P\('i',?\)\)",
                rf"rank 1: allreduce #1 \(SUM, 1 x .*, {OF_FUNCTION}\[4\] P\('i',?\)\)",
            ),
            env=env,
        )
        for env, jit in ((CHECK, False), (LATE, True))
    },
    **{
        f"one of {n + 2} arguments of a shard_map differs{', compared' * (env == CHECK)}": Fault(
            "mesh, rows = nt.Mesh(), jax.sharding.PartitionSpec('i')\n"
            "f = lambda ws, batch: jax.lax.pmean(ws['w0'] * batch['image'].mean(), 'i')\n"
            "whole = jax.sharding.PartitionSpec()\n"
            "f = nt.shard_map(f, mesh=mesh, in_specs=(whole, rows), out_specs=whole)\n"
            f"ws = {{f'w{{k}}': jnp.ones(2) for k in range({n})}}\n"
            "wait(f(ws, {'image': jnp.ones((3 + rank, 2)), 'label': jnp.ones(3)}))",
            (
                DIFFERENT if env == CHECK else AFTERWARDS,
                *(
                    rf"rank {rank}: allreduce #[12] \(SUM, 2 x .*, in shard_map of <lambda>\(\[1\]"
                    rf"\['image'\]: float32\[{3 + rank},2\] P\('i',?\); the others are equal\)"
                    for rank in range(2)
                ),
            ),
            env=env,
        )
        for n, env in [(6, LATE), (40, CHECK)]
    },
    "sums in another order in a shard_map": Fault(
        "mesh, rows = nt.Mesh(), jax.sharding.PartitionSpec('i')\n"
        "def f(x):\n"
        "    if rank:\n        return jax.lax.psum(jax.lax.pmax(x, 'i'), 'i')\n"
        "    return jax.lax.pmax(jax.lax.psum(x, 'i'), 'i')\n"
        "f = nt.shard_map(f, mesh=mesh, in_specs=rows, out_specs=jax.sharding.PartitionSpec())\n"
        "wait(jax.jit(f)(jnp.ones(3)))",
        (
            DIFFERENT,
            rf"rank 0: allreduce #1 \(SUM, 3 x .*:{FIRST_LINE + 4}\n",
            rf"rank 1: allreduce #1 \(MAX, 3 x .*:{FIRST_LINE + 3}\n",
        ),
        env=CHECK,
    ),
    "a plan for ghosts that one rank has made anew, when others have passed": Fault(
        "c = comm.Dup()\n"
        "old, new = (nt.ghosts.Plan([rank], [rank ^ 1], comm=c) for _ in range(2))\n"
        "wait(new.fill(jnp.ones(1)))\n"
        "if rank == 0: time.sleep(3)\n"
        "y = wait((old if rank == 0 else new).fill(jnp.ones(1)))\n"
        "if rank == 0: print('WRONG')",
        (AFTERWARDS, r"rank 0: .*, of ghosts.Plan 1\n", r"rank [13]: .*, of ghosts.Plan 2\n"),
        ranks=4,
        env=LATE,
        status=1,
        silent=("WRONG", MAYBE),
    ),
    "axes of a mesh in another order": Fault(
        "mesh, whole = nt.Mesh((2, 2), ('i', 'j')), jax.sharding.PartitionSpec()\n"
        "a, b = ('i', 'j') if rank else ('j', 'i')\n"
        "f = lambda x: jax.lax.psum(jax.lax.pmax(x, a), b)\n"
        "f = nt.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)\n"
        "print('WRONG', wait(jax.jit(f)(x)))",
        (AFTERWARDS, r"rank 0: .*MAX, .*\.comm\((i|j)\)", r"rank [12]: .*SUM, .*\.comm\((i|j)\)"),
        ranks=4,
        env=LATE,
        status=1,
        silent=("WRONG",),
    ),
    **{
        f"sums over axes of a mesh in another order, {words}": Fault(
            "mesh = nt.Mesh((2, 2), ('i', 'j'))\n"
            "P, axes = jax.sharding.PartitionSpec, ('j', 'i') if rank == 3 else ('i', 'j')\n"
            "f = lambda x: [x := jax.lax.psum(x, axis) for axis in axes][-1]\n"
            "f = nt.shard_map(f, mesh=mesh, in_specs=P('i', 'j'), out_specs=P())\n"
            f"print('WRONG', wait({call}(jnp.ones((3, 3)))))",
            (
                AFTERWARDS,
                rf"rank 3: .*comm\([ij]\), .*:{FIRST_LINE + 2}, {OF_FUNCTION}.*that varies over",
                rf"rank [12]: .*comm\([ij]\), .*:{FIRST_LINE + 2}, {OF_FUNCTION}.*is replicated",
                "in different orders: write the names of the axes in a list",
            ),
            ranks=4,
            env=LATE,
            status=1,
            silent=("WRONG",),
        )
        for words, call in [("jitted", "jax.jit(f)"), ("eager", "f"), ("loop", LOOP)]
    },
    "messages along axes of a mesh in another order": Fault(
        "mesh = nt.Mesh((2, 2), ('i', 'j'))\n"
        "P, axes = jax.sharding.PartitionSpec, ('j', 'i') if rank == 3 else ('i', 'j')\n"
        "f = lambda x: [x := x + jax.lax.ppermute(x, axis, [(0, 1)]) for axis in axes][-1]\n"
        "f = nt.shard_map(f, mesh=mesh, in_specs=P('i', 'j'), out_specs=P('i', 'j'))\n"
        "g = jax.jit(jax.grad(lambda x: f(x).sum()))\n"
        "wait(g(x[None])); comm.Barrier(); wait(g(x[None]))",
        (
            "shard_map: the ranks run the collectives of '<lambda>' in different orders",
            r"on this rank ppermute over \['i'\], ppermute over \['j'\]\.",
        ),
        ranks=4,
        env=LATE,
        status=0,
    ),
    # ---- Trees of as many bytes, whose leaves would be taken for each other
    **{
        f"trees with other {what}{', compared' * checked}": Fault(
            f"t = {trees[0]} if rank == 0 else {trees[1]}\n"
            f"jax.block_until_ready({'jax.jit(lambda t: ' * jit}{call}{')(t)' * jit})\n"
            # A rank that has finished has no records that another rank could name.
            "MPI.COMM_WORLD.Barrier()",
            (
                DIFFERENT if checked else MAYBE,
                rf"rank 0: .*, of {re.escape(words[0])}",
                rf"rank 1: .*, of {re.escape(words[1])}",
            ),
            status=None if checked else 0,
            env=CHECK if checked else LATE,
        )
        for what, call, jit, trees, words in [
            (
                "shapes",
                "nt.allreduce(t)",
                False,
                ('{"a": jnp.ones(3), "b": x[:2]}', '{"a": jnp.ones(2), "b": x}'),
                ("['a'] (3), ['b'] (2)", "['a'] (2), ['b'] (3)"),
            ),
            (
                "keys",
                "nt.bcast(t)",
                True,
                ('{"a": x, "b": x}', '{"b": x, "c": x}'),
                ("['a'] (3), ['b'] (3)", "['b'] (3), ['c'] (3)"),
            ),
            (
                "axes",
                "nt.scan(t)",
                True,
                ("jnp.ones((2, 3))", "jnp.ones((3, 2, 1))"),
                ("(2, 3)", "(3, 2)"),
            ),
            (
                "rows",
                "nt.wait(nt.iallgather(t))",
                False,
                ("[x, jnp.ones((1, 2))]", "(jnp.ones(2), x)"),
                ("[0] (3), [1] (2)", "[0] (2), [1] (3)"),
            ),
        ]
        for checked in (False, True)
    },
    **{
        f"a plan for ghosts that one rank has made anew, {words}": Fault(
            f"c = {of}\n"
            "make = lambda: nt.ghosts.Plan([rank], [1 - rank], comm=c)\n"
            "old, new = make(), make()\n"
            "for _ in range(3): wait(new.fill(jnp.ones(1)))\n"
            f"f = {function}\n"
            "print('WRONG', wait(f(new if rank else old)))",
            (
                DIFFERENT if env == CHECK else AFTERWARDS,
                r"rank 0: i?alltoallv.*, of ghosts.Plan 1\n",
                r"rank 1: i?alltoallv.*, of ghosts.Plan 2\n",
            ),
            env=env,
            status=1,
            silent=("WRONG",),
        )
        for words, of, function, env in [
            ("compared", "None", "lambda plan: plan.fill(jnp.ones(1))", CHECK),
            ("in silence", "None", "lambda plan: jax.jit(plan.fill)(jnp.ones(1))", LATE),
            ("on COMM_WORLD", "comm", "lambda plan: plan.add(jnp.ones(1))", LATE),
            ("started", "comm", "lambda plan: nt.wait(plan.ifill(jnp.ones(1)))", LATE),
            (
                "in a gradient",
                "comm.Dup()",
                "lambda plan: jax.grad(lambda x: plan.fill(x).sum())(jnp.ones(1))",
                LATE,
            ),
        ]
    },
    "ghost cells of trees with other keys": Fault(
        "c = comm.Create_cart([size], periods=[True])\n"
        "wait(nt.halo_exchange({'a': jnp.ones(9), 'b' if rank else 'c': jnp.ones(9)}, c))",
        (DIFFERENT, r"rank 0: .*, of \['a'\], \['c'\]", r"rank 1: .*, of \['a'\], \['b'\]"),
        env=CHECK,
    ),
    "a message between trees with other keys": Fault(
        "if rank == 0:\n    nt.send({'a': x, 'b': x}, 1)\n"
        "else:\n    wait(nt.recv({'a': x, 'c': x}, 0))",
        (
            MAYBE,
            r"rank 0: send to 1.*, of \['a'\] \(3\), \['b'\] \(3\)",
            r"rank 1: recv from 0.*, of \['a'\] \(3\), \['c'\] \(3\)",
        ),
        status=0,
    ),
    "a message of a tree to a template of one axis": Fault(
        "if rank == 0:\n    nt.send({'a': x, 'b': x}, 1)\n    nt.send(jnp.ones((2, 3)), 1)\n"
        "else:\n    wait([nt.recv(jnp.ones(6), 0), nt.recv(jnp.ones(6), 0)])",
        (),
        status=0,
        silent=("mpi4jax:",),
    ),
    "containers of other kinds are no fault": Fault(
        "t = [x, jnp.ones((1, 2))] if rank == 0 else (x, jnp.ones(2))\n"
        "wait(nt.allreduce(t)); wait(nt.allreduce(jnp.ones(1) if rank else 1.0))",
        (),
        status=0,
        env=CHECK,
        silent=("mpi4jax:",),
    ),
    "wrong widths of ghost cells": Fault(
        "c = comm.Create_cart([size], periods=[True])\n"
        "wait(nt.halo_exchange(jnp.ones(9), c, width=1 + rank))",
        (DIFFERENT, r"rank 0: halo_exchange #1.*, widths 1\+1", r"rank 1: .*, widths 2\+2"),
        env=CHECK,
    ),
    # MPICH's own line comes first, and no error handler is asked: ours comes at the exit.
    "sizes that differ, where the library ends the job": Fault(
        "wait(nt.scan(jnp.ones(3 if rank else 50000)))",
        (
            r"Fatal error in .*Scan: Message truncated",
            rf"r1 .*: a library has ended this rank in scan #1 .*, .*fault.py:{FIRST_LINE}",
        ),
        env={"MPI4JAX_CHECK": "0"},
        library="MPICH",
    ),
    "more rows than there is room for": Fault(
        "counts = jnp.array([2, 2])\n"
        "wait(nt.ragged_alltoall(jnp.ones(4), counts, 4 if rank else 3))",
        (
            r"'capacity' must be at least the 4 rows that rank 0 receives.*, got .*, fault.py",
            ENDS_JOB,
        ),
        status=1,
    ),
    "counts that disagree": Fault(
        "send, recv = ([1, 2], [1, 1]) if rank == 0 else ([3, 0], [2, 0])\n"
        "wait(nt.alltoallv(jnp.ones(3), send, recv))",
        (r"r0 \| received 3 elements from rank 1, expected 1: the counts of the two ranks must",),
        env=CHECK,
    ),
    **{
        f"counts that disagree in a {words}": Fault(
            # The second rank has no rows, by its own counts.
            "counts = [2, 1] if rank == 0 else [3, 0]\n" + call,
            # Whichever rank says so first may end the other before it does.
            (r"r\d .*the counts differ between ranks: this one has \[(2, 1|3, 0)\] .*; expected ",),
            env={"MPI4JAX_CHECK": "0"},
        )
        for words, call in [
            ("reduction", "wait(nt.reduce_scatterv(jnp.ones(3), counts))"),
            ("started one", "wait(nt.wait(nt.ireduce_scatterv(jnp.ones(3), counts)))"),
        ]
    },
    # Each of these would give values of memory that nothing has written.
    **{
        f"counts that differ between ranks{words}": Fault(
            f"f = lambda x: {call}\nprint('WRONG', wait(f(jnp.ones(1))))\ntime.sleep(1)",
            (
                says,
                rf"rank 0: i?allgatherv #1 .*:{FIRST_LINE}, with counts \[1, 1\] \(in elements\)",
                rf"rank 1: i?allgatherv #1 .*:{FIRST_LINE}, with counts \[2, 1\] \(in elements\)",
            ),
            env=env,
            status=status,
            silent=silent,
        )
        for words, call, says, env, status, silent in [
            ("", f"nt.allgatherv(x, {OTHER})", AFTERWARDS, LATE, 1, ("WRONG",)),
            (", compared", f"nt.allgatherv(x, {OTHER})", DIFFERENT, CHECK, 1, ("WRONG",)),
            (", started", f"nt.wait(nt.iallgatherv(x, {OTHER}))", AFTERWARDS, LATE, 1, ("WRONG",)),
            (" of mpi4py", f"nt.allgatherv(x, {OTHER}, comm=comm)", AFTERWARDS, {}, 1, ("WRONG",)),
        ]
    },
    "a wrong array on the root": Fault(
        "block = nt.grids.Block((6,), comm.Create_cart([2], [True]), width=1)\n"
        "wait(nt.scatter_blocks(jnp.ones(7 if rank == 0 else 6), block))",
        (r"ValueError: scatter_blocks: argument 'x' has shape \(7,\); expected \(6,\)", ENDS_JOB),
        status=1,
    ),
    "rows for each rank that differ between ranks": Fault(
        "c = comm.Create_cart([2])\nwait(nt.scatter_blocks(jnp.ones(8 if rank == 0 else 6), c))",
        (MAYBE, r"rank 0: .*that add up to 8 elements", r"rank 1: .*that add up to 6 elements"),
        status=1,
    ),
    "a line per role is no fault": Fault(
        "if rank:\n    y = jax.jit(lambda x: nt.bcast(x, 0))(x)\n"
        "else:\n    y = jax.jit(lambda x: nt.bcast(x, 0))(x)\n"
        "wait(y); y = wait(nt.sendrecv(x, x, 1 - rank, 1 - rank))\n"
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(x))",
        (),
        status=0,
        env=CHECK,
        silent=("mpi4jax:",),
    ),
    "wrong dtype of a message": Fault(
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(x.astype(int), 0))",
        (
            AFTERWARDS,
            rf"rank 0: send to 1, tag 0 \(3 x float32\) .*, fault.py:{FIRST_LINE}",
            rf"rank 1: recv from 0, tag 0 \(3 x int32\) .*, fault.py:{FIRST_LINE}",
        ),
        env={**CHECK, **LATE},
        status=1,
    ),
    # ---- The same without
    "a message too short": Fault(
        "nt.send(x, 1) if rank == 0 else wait(nt.recv(jnp.ones(5), 0))",
        (
            "r1 .*MPI_Recv received 3 items from rank 0, expected 5",
            rf"in recv from 0, any tag \(5 x float32\) .*, fault.py:{FIRST_LINE}",
        ),
    ),
    "a message too long": Fault(
        # Ranks 2 and 1 of the world are 0 and 1 of it.
        "c = comm.Split(rank == 0, -rank); c.Set_name('own')\n"
        "f = mpi4jax.jit(lambda x: nt.recv(x, 0, comm=c))\n"
        "if rank == 2: nt.send(x, 1, comm=c)\n"
        "if rank == 1: wait(f(jnp.ones(2)))\n"
        "wait(nt.barrier())",
        (
            "r1 .*MPI_Recv returned error code .*: .*[Tt]runcat",
            rf"in recv from 0, any tag \(2 x float32\) on own, fault.py:{FIRST_LINE + 1}",
            "the same shape and dtype on the two ranks",
        ),
        ranks=3,
        silent=("MPI4JAX_CHECK",),  # with which it would be the same
    ),
    "another dtype in silence, after a long loop": Fault(
        "step = lambda i, x: nt.allreduce(x, MPI.MAX)\n"
        "wait(jax.jit(lambda x: jax.lax.fori_loop(0, 1000, step, x))(x))\n"
        "wait(nt.allreduce(3 if rank == 0 else 2.5, MPI.SUM))",
        (
            AFTERWARDS,
            rf"  rank 0: allreduce #1001 \(SUM, 1 x int32\) .*, fault.py:{FIRST_LINE + 2}",
            rf"  rank [12]: allreduce #1001 \(SUM, 1 x float32\) .*, fault.py:{FIRST_LINE + 2}",
        ),
        ranks=3,
        env=LATE,
        status=1,
    ),
    "another dtype of a message in silence": Fault(
        "wait(nt.send(jnp.arange(3), 1) if rank == 0 else nt.recv(jnp.zeros(3)))",
        (
            AFTERWARDS,
            rf"  rank 0: send to 1, tag 0 \(3 x int32\) on mpi4jax.default, fault.py:{FIRST_LINE}",
            rf"  rank 1: recv from 0, tag 0 \(3 x float32\) on .*, fault.py:{FIRST_LINE}",
        ),
        env=LATE,
        status=1,
    ),
    # The first run of a line returns nothing wrong, neither where ranks meet nor where one sends
    # before the others have come, or comes last.
    **{
        f"another dtype in the first run of {what}": Fault(
            f"y = {call}\nprint('WRONG', wait(y), flush=True) if rank in {wrong} else wait(y)",
            (
                AFTERWARDS,
                rf"rank \d: {what.partition(',')[0]}.* #1 .*int32.*:{FIRST_LINE}",
                "rank .*float32",
            ),
            ranks=4,
            env=LATE,
            status=1,
            silent=("WRONG",),
        )
        # The ranks whose result would be wrong.
        for what, wrong, call in [
            (
                "allreduce",
                (0, 1, 2, 3),
                "jax.jit(lambda y: nt.allreduce(y))(x if rank != 2 else jnp.arange(3))",
            ),
            # The root and rank 2, which are no neighbors, are done before their neighbors come.
            (
                "bcast",
                (2,),
                "nt.bcast(time.sleep(3) or x if rank % 2 else jnp.arange(3) if rank else x, 0)",
            ),
            # The results of the others are right, and they have them before rank 2 comes.
            (
                "bcast, to which the rank comes last",
                (2,),
                "nt.bcast(time.sleep(3) or jnp.arange(3) if rank == 2 else x, 0)",
            ),
            (
                "scatter",
                (1, 2, 3),
                "nt.scatter(x if rank else time.sleep(2) or jnp.zeros((4, 3), int), 0)",
            ),
            ("scan", (1, 2, 3), "nt.scan(x if rank else jnp.arange(3))"),
        ]
    },
    # One rank says one of them: each has a job of its own.
    "another dtype of an exchange on the program's communicator": Fault(
        "c = comm.Split(0, -rank)\n"
        "a, b = jnp.arange(1, 4), jnp.ones(3)\n"
        "wait(nt.sendrecv(b if rank else a, b, 1 - c.rank, 1 - c.rank, comm=c))",
        (
            MAYBE,
            # Each sends what the other one receives in another type.
            rf"rank \d: send to \d, tag 0 \(3 x (int|float)32\) on .*, fault.py:{FIRST_LINE + 2}",
            rf"rank \d: sendrecv from \d, tag 0 \(3 x (int|float)32\) on .*:{FIRST_LINE + 2}",
            "so the job goes on",
        ),
        env=LATE,
        status=0,
    ),
    "another dtype of a started message on the program's communicator": Fault(
        "c = comm.Split(0, -rank)\n"
        "a, b = jnp.arange(1, 4), jnp.ones(3)\n"
        "r = mpi4jax.isend(a, 0, tag=5, comm=c) if rank == 0 else None\n"
        "if rank == 1: r = mpi4jax.irecv(b, MPI.ANY_SOURCE, tag=5, comm=c)\n"
        "wait(mpi4jax.wait(r))",
        (
            MAYBE,
            # A rank may have begun to wait for its message when the two are compared.
            r"rank 0: (wait for )?isend to 0, tag 5 \(3 x int32\) on ",
            r"rank 1: (wait for )?irecv from 1, tag 5 \(3 x float32\) on ",
            "so the job goes on",
        ),
        env=LATE,
        status=0,
    ),
    "another dtype on the program's communicator": Fault(
        "c = comm.Create_cart([size])\n"
        "for _ in range(3): wait(nt.bcast(x, 0, comm=c))\n"
        "wait(nt.allreduce(3 if rank == 0 else 2.5, comm=c))\n"
        "wait(nt.allreduce(x, comm=c))",
        (
            AFTERWARDS,
            rf"  rank 0: allreduce #4 \(SUM, 1 x int32\) .*, fault.py:{FIRST_LINE + 2}",
            rf"  rank 1: allreduce #4 \(SUM, 1 x float32\) .*, fault.py:{FIRST_LINE + 2}",
        ),
        status=1,
    ),
    **{
        f"another dtype on {words}": Fault(
            f"c = {of}\nprint('WRONG', wait(nt.allreduce(3 if rank == 0 else 2.5, comm=c)))",
            (AFTERWARDS, "rank 0: allreduce #1 .*int32", "rank 1: allreduce #1 .*float32"),
            env=LATE,
            status=1,
            silent=("WRONG",),
        )
        for words, of in [("COMM_WORLD", "comm"), ("a duplicate", "comm.Dup()")]
    },
    "exchanges of trees one after another are no fault": Fault(
        "ring = dict(source=1 - rank, dest=1 - rank)\n"
        "a = {'t': (jnp.arange(3), jnp.ones(2)), 'w': jnp.ones(3)}\n"
        "b = {'f': jnp.ones(2), 'i': jnp.arange(3)}\n"
        "f = lambda t: (nt.sendrecv(t, t, **ring)['f'] ** 2).sum()\n"
        "for k in range(5):\n"
        "    y = nt.sendrecv(a, a, **ring), jax.jit(jax.grad(f, allow_int=True))(b)\n"
        "    z = nt.sendrecv(b, b, **ring)\n"
        "jax.block_until_ready((y, z)); print('the end', rank)",
        ("the end 0", "the end 1"),
        status=0,
        silent=("mpi4jax:",),
    ),
    # The rank of ours is held at its part, which mpi4py's does not wait for.
    **{
        f"mpi4py's part of {words} is no fault": Fault(
            "c, i, out, six = comm.Dup(), np.ones(3, 'f'), np.ones(3, 'f'), np.ones(6, 'f')\n"
            f"r = ({raw}) if rank == 0 else {ours}\n"
            "wait(nt.allreduce(x, comm=c))\n"
            "if r is not None: r.Wait()\n"
            "print('the end', rank)",
            ("the end 0", "the end 1"),
            env=LATE,
            status=0,
            silent=("do not match",),
        )
        for words, raw, ours in [
            ("a bcast", "c.Bcast(i)", "[wait(nt.bcast(x, 0, comm=c))].clear()"),
            (
                "an iallreduce",
                "c.Iallreduce(i, out)",
                "[mpi4jax.wait(mpi4jax.iallreduce(x, comm=c))].clear()",
            ),
            # The first rank does not wait for the second one, which has no rows.
            (
                "an allgatherv in which only one rank has rows",
                "[c.Allgatherv(i, [out, [3, 0]]), wait(nt.allgatherv(x, [3, 3], comm=c))].clear()",
                "[nt.allgatherv(x[:0], [3, 0], comm=c), c.Allgatherv(i, [six, [3, 3]])].clear()",
            ),
        ]
    },
    "what differs rightly": Fault(
        "c, n, other = comm.Dup(), jnp.arange(1, 4), 1 - rank\n"
        "one = lambda f, g: wait(f()) if rank == 0 else wait(g())\n"
        # Parts of mpi4py's: what is the fourth collective on one rank is the third on the other.
        "i = np.ones(1, 'i')\n"
        "one(lambda: c.Allreduce(i, 1 * i), lambda: nt.allreduce(1, comm=c))\n"
        "for y in (x, n, x): wait(nt.allreduce(y, comm=c))\n"
        "one(lambda: nt.reduce(n, comm=c), lambda: c.Reduce(np.int32([1, 2, 3]), None))\n"
        "one(lambda: c.Send(np.float32([1, 2, 3]), 1), lambda: nt.recv(x, 0, comm=c))\n"
        "one(lambda: nt.send(n, 1, comm=c), lambda: c.Recv(np.empty(3, 'i'), 0))\n"
        # What has no type but its bytes, and what has one value in several.
        "one(lambda: nt.send(x.view('u1'), 1), lambda: nt.recv(x, 0))\n"
        "one(lambda: nt.send(0 * n, 1), lambda: nt.recv(x, 0))\n"
        "one(lambda: nt.send(jnp.complex64([1, 2j]), 1), lambda: nt.recv(jnp.ones(4), 0))\n"
        "both = lambda f: [t.start() or t for t in map(lambda y: threading.Thread("
        "target=f, args=(y,)), (x, n, x.astype('f2')))]\n"
        "for t in both(lambda y: wait(nt.sendrecv(y, y, other, other, sendtag=y.dtype.num,"
        " recvtag=y.dtype.num))): t.join()",
        (MAYBE,),
        env=LATE,
        status=0,
        silent=("do not match", "Error"),
    ),
}
