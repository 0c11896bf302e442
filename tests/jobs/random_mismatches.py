"""Steps of random jobs (random_jobs.py) in which ranks do the same, or one of them does not.

In a correct job, each step communicates and checks its results. As a fault, one rank takes another
tag, does one step of a loop too few, exchanges ghost cells along another axis, or passes another
operand or reduction to a collective that is compared late: on the last of many communicators, or
after its root has gone on to later ones.
"""

PRELUDE = """\
def square(k): return np.full((4, 4), k + rank, np.float32)
def repeated(f, times):
    return jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: f(x), x))
"""

# For each fault, the step that makes it, and what the output says. `{rank}` is the rank that waits,
# or whose operation differs, and `{line}` is the line of its operation.
WAITS = r"rank {rank} is in recv from .*, tag \d+.*program.py:{line}"
DIFFERS = r"(?s)the operations of the ranks do not match \(.*rank {rank}: NAME #[^\n]*y:{line}"
MISMATCHES = {
    "takes another tag": ("tagged", WAITS),
    "does a step of a loop too few": ("steps", WAITS),
    "exchanges along another axis": ("along", DIFFERS.replace("NAME", "halo_exchange")),
    "differs on the last of 40 communicators": ("on_many", DIFFERS.replace("NAME", "allreduce")),
    "differs behind a root that is far ahead": ("behind", DIFFERS.replace("NAME", "bcast")),
}
# Those whose communicator the program has made; the others are of messages, or on the default one.
ON_A_DUPLICATE = ("exchanges along another axis", "differs on the last of 40 communicators")
DIFFERENCES = (*ON_A_DUPLICATE, "differs behind a root that is far ahead")
# What a rank says of another one that has counted fewer duplicates of `COMM_WORLD`.
NOT_COMPARED = "imported mpi4jax after MPI_COMM_WORLD was duplicated, and this rank before"
SAYS = {name: says for name, (_, says) in MISMATCHES.items()}


class Mismatches:
    """The steps, of a `Maker`. `wrong` is the rank that makes the mistake, on `comm`.

    With a mistake, each returns the rank that the report names, and its line.
    """

    def tagged(self, comm=None, wrong=None):
        """Two messages at once, in both directions, each with a tag."""
        pairs = [p for p in self.pairs() if wrong is None or (p[0] is comm and wrong in p[1:])]
        if not pairs:
            return None
        (comm, a, b), at = self.random.choice(pairs), lambda r: comm.ranks.index(r)
        k, waits, name = self.number(), self.random.choice([a, b]), comm.name
        sends = {a: k, b: k}
        if wrong is not None:
            sends[b if waits == a else a] += 500
        found = None
        for r, other in ((a, b), (b, a)):
            send = f"nt.send(mine({k}), {at(other)}, tag={sends[r]}, comm={name})"
            receive = f"check(nt.recv(mine(0), {at(other)}, tag={k}, comm={name}), {k + other})"
            self.job.add([r], f"{send}; {receive}")
            found = (r, self.job.line()) if r == waits else found
        return found

    def steps(self, comm=None, wrong=None):
        """Each rank sends to the next one and receives from the one before, in a loop."""
        if comm is None and not (usable := self.all_here()):
            return None
        comm = comm or self.random.choice(usable)
        k, n, times, name = self.number(), len(comm.ranks), self.random.randint(2, 5), comm.name
        found = None
        for i, r in enumerate(comm.ranks):
            before = comm.ranks[i - 1]
            send = f"nt.send(mine({k}), {(i + 1) % n}, tag={k}, comm={name})"
            receive = f"nt.recv(mine(0), {(i - 1) % n}, tag={k}, comm={name})"
            some = times - (r == wrong)
            if self.random.random() < 0.5:
                function = f"lambda x: ({send.replace(f'mine({k})', 'x')}, {receive})[1]"
                what = f"check(repeated({function}, {some})(mine({k})), {k + before})"
            else:
                check = f"check({receive}, {k + before})"
                what = f"[({send}, {check}) for _ in range({some})]"
            self.job.add([r], what)
            found = (r, self.job.line()) if before == wrong else found
        return found

    def along(self, comm=None, wrong=None):
        """Ghost cells of a square block, along one of its axes."""
        if comm is None and not (usable := self.all_here()):
            return None
        comm = comm or self.random.choice(usable)
        k, n, axis = self.number(), len(comm.ranks), self.random.randrange(2)
        self.job.add(comm.ranks, f"g{k} = {comm.name}.Create_cart([{n}, 1], [True, True])")
        # Of the same ranks and name, two that are no duplicates are not compared.
        if wrong is not None and comm.ranks in self.unknown:
            self.job.add(comm.ranks, f"g{k}.Set_name('square')")
        self.unknown.append(comm.ranks)
        found = None
        for i, r in enumerate(comm.ranks):
            mine = 1 - axis if r == wrong else axis
            y = f"nt.halo_exchange(square({k}), g{k}, axes=({mine}, None))"
            y += "[1]" if mine else "[:, 1]"
            ends = [k + comm.ranks[(i + d) % n] for d in (-1, 1)]
            self.job.add([r], self.checked(y, [ends[0], k + r, k + r, ends[1]]))
            found = (r, self.job.line()) if r == wrong else found
        return found

    def on_many(self, comm=None, wrong=None):
        """Collectives on 40 communicators that stay alive, then another one on the last of them."""
        if comm is None and not (usable := self.all_here()):
            return None
        comm = comm or self.random.choice(usable)
        k = self.number()
        total = k * len(comm.ranks) + sum(comm.ranks)
        self.job.add(comm.ranks, f"m{k} = [{comm.name}.Dup() for _ in range(40)]")
        # Duplicates of what is no duplicate of `MPI_COMM_WORLD` are known by their names alone.
        if wrong is not None and not comm.is_known:
            self.job.add(
                comm.ranks, f"[c.Set_name('one of 40: ' + str(i)) for i, c in enumerate(m{k})]"
            )
        self.unknown += [comm.ranks] * (not comm.is_known)
        once = f"check(nt.allreduce(mine({k}), MPI.SUM, comm=c), {total})"
        self.job.add(comm.ranks, f"[{once} for c in m{k}]")
        found = None
        for r in comm.ranks:
            what, op = f"mine({k})", "SUM"
            if r == wrong and self.random.random() < 0.5:
                what += ".astype(int)"
            elif r == wrong:
                op = "MAX"
            y = f"nt.allreduce({what}, MPI.{op}, comm=m{k}[-1])"
            self.job.add([r], f"check({y}, {total})")
            found = (r, self.job.line()) if r == wrong else found
        self.job.add(comm.ranks, f"mpi4jax.flush(); [free(c) for c in m{k}]")
        return found

    def behind(self, comm=None, wrong=None):
        """The root of broadcasts does not wait for the others, which begin later.

        With a mistake they are on the default communicator. There a difference that is found after
        the broadcasts aborts the job.
        """
        usable = [c for c in self.all_here() if wrong is None or c.ranks == [*range(self.job.size)]]
        if not usable:
            return None
        comm = self.random.choice(usable)
        is_default = wrong is not None or (
            len(comm.ranks) == self.job.size and self.random.random() < 0.5
        )
        name = "None" if is_default else comm.name
        root = self.random.choice([r for r in comm.ranks if r != wrong])
        k, times = self.number(), self.random.randint(13, 30)
        self.job.sleeps += 3
        found = None
        for r in comm.ranks:
            x = f"mine({k})[:1 + i % 3]"
            if r == wrong:
                x = f"({x} if i else {x}.astype(int))"
            y = f"nt.bcast({x}, {comm.ranks.index(root)}, comm={name})"
            if r != root:
                y = f"check({y}, [{k + root}] * (1 + i % 3))"
            wait = "" if r == root else "mpi4jax.flush(); time.sleep(3); "
            self.job.add([r], f"{wait}[{y} for i in range({times})]")
            found = (r, self.job.line()) if r == wrong else found
        return found


STEPS = [
    Mismatches.tagged,
    Mismatches.steps,
    Mismatches.along,
    Mismatches.on_many,
    Mismatches.behind,
]
