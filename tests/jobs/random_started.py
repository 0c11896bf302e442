"""What random jobs (random_jobs.py) start, and wait for later, or never.

Requests are waited for after other steps, by each rank in an order of its own; what nobody waits
for is on a communicator that is freed. Programs may still run when theirs is.
"""

from dataclasses import dataclass

PRELUDE = """\
def slow(x):
    y = jax.lax.fori_loop(0, 150, lambda _, y: jnp.sin(y @ y), jnp.ones((150, 150)))
    return x + 0 * y[0, 0]
def beside(f, comm):
    def g(x):
        r = f(x)
        y = nt.allreduce(mpi4jax.after(r, x), MPI.MAX, comm=comm)
        return mpi4jax.wait(r, after=y)
    return jax.jit(g)
def carried(f, times):
    return jax.jit(lambda x: jax.lax.scan(lambda r, _: (f(x), mpi4jax.wait(r)), f(x), length=times))
def check_all(y, expected): [check(row, expected) for row in y]
def free(comm):
    # MPICH does not say so while a request is under way: then programs have to come before.
    if "MPICH" in MPI.Get_library_version() and "mpi4jax" in globals(): mpi4jax.flush()
    comm.Free()
"""


@dataclass
class Op:
    """A collective: what starts it (`x` is its operand), mpi4py's, and what the i-th rank gets."""

    name: str
    arguments: str
    raw: str
    result: str
    requests: int = 1


OPS = [
    Op("iallreduce", "x, MPI.SUM", "Iallreduce({x}, {out}, MPI.SUM)", "k * n + sum(ranks)"),
    Op("ireduce", "x, MPI.SUM, {root}", "Ireduce({x}, {out}, MPI.SUM, {root})",
       "k * n + sum(ranks) if i == root else None"),
    Op("ibcast", "x, {root}", "Ibcast({out}, {root})", "k + ranks[root]"),
    Op("iscan", "x, MPI.SUM", "Iscan({x}, {out}, MPI.SUM)", "k * (i + 1) + sum(ranks[: i + 1])"),
    Op("ipermute", "x, [(i, (i + 1) % {n}) for i in range({n})]", "", "k + ranks[i - 1]"),
    Op("isendrecv", "x, x, {left}, {right}", "", "k + ranks[i - 1]", 2),
]  # fmt: skip


@dataclass
class Started:
    """What a rank has started on a communicator, and how it waits for it.

    Attributes:
        requests: how many operations it is; 0: mpi4py's, which have to be waited for.
    """

    comm: object
    rank: int
    wait: str
    requests: int = 1


class Starts:
    """The steps, of a `Maker`."""

    def all_here(self):
        """Communicators whose ranks have all imported mpi4jax."""
        return [c for c in self.usable() if not set(c.ranks) & set(self.late)]

    def finish(self, which, losing: float = 0) -> None:
        """Ranks wait for what they have started, or do not with some probability."""
        for one in [one for one in self.under_way if which(one)]:
            self.under_way.remove(one)
            if self.random.random() >= losing:
                self.job.add([one.rank], one.wait)

    def finish_some(self) -> None:
        self.random.shuffle(self.under_way)
        self.finish(lambda _: self.random.random() < 0.5)

    def call_of(self, op: Op, comm, i: int, root: int) -> str:
        n = len(comm.ranks)
        arguments = op.arguments.format(root=root, n=n, left=(i - 1) % n, right=(i + 1) % n)
        return f"mpi4jax.{op.name}({arguments}, comm={comm.name})"

    def expected(self, op: Op, comm, i: int, root: int, k: int):
        names = {"k": k, "n": len(comm.ranks), "ranks": comm.ranks, "i": i, "root": root}
        return eval(op.result, names)

    def checked(self, value: str, expected) -> str:
        how = self.random.choice(["check", "later"])
        return value if expected is None else f"{how}({value}, {expected})"

    def start(self) -> None:
        if usable := self.usable():
            self.start_on(self.random.choice(usable))

    def start_on(self, comm, slowly: bool = False) -> None:
        """All ranks start a collective, some of them by mpi4py."""
        k, late = self.number(), set(comm.ranks) & set(self.late)
        op = self.random.choice([op for op in OPS if op.raw or not late])
        root = self.random.randrange(len(comm.ranks))
        for i, r in enumerate(comm.ranks):
            expected = self.expected(op, comm, i, root, k)
            if r in late or (op.raw and not slowly and self.random.random() < 0.1):
                flush = "" if r in late else "mpi4jax.flush(); "
                call = op.raw.format(x=f"x{k}", out=f"y{k}", root=root)
                memory = f"x{k}, y{k} = mine({k}), mine({k})"
                self.job.add([r], f"{flush}{memory}; r{k} = {comm.name}.{call}")
                wait = f"r{k}.Wait(); {self.checked(f'y{k}', expected)}"
                self.under_way.append(Started(comm, r, wait, 0))
                self.job.is_mixed = True
                continue
            start = f"lambda x: {self.call_of(op, comm, i, root)}"
            if slowly:
                start = f"jax.jit(lambda x: ({start})(slow(x)))"
            elif self.random.random() < 0.3:
                start = f"jax.jit({start})"
            self.job.add([r], f"r{k} = ({start})(mine({k}))")
            wait = self.random.choice(["mpi4jax.wait", "jax.jit(mpi4jax.wait)"])
            wait = self.checked(f"{wait}(r{k})", expected)
            if self.random.random() < 0.1:
                wait = f"threads(lambda: ({wait}, mpi4jax.flush()))"
            self.under_way.append(Started(comm, r, wait, op.requests))

    def start_message(self) -> None:
        """One starts to send, one starts to receive; one of the two may do it at once."""
        if not (pairs := self.pairs()):
            return
        (comm, a, b), k = self.random.choice(pairs), self.number()
        at, started = comm.ranks.index, self.random.choice([{a}, {b}, {a, b}])
        source = self.random.choice([at(a), "MPI.ANY_SOURCE"])
        receive = f"recv(mine(0), {source}, tag={k}, comm={comm.name})"
        send = f"send(mine({k}), {at(b)}, tag={k}, comm={comm.name})"
        # Those who start to receive do so before they wait for another message.
        if b in started:
            self.job.add([b], f"r{k} = mpi4jax.i{receive}")
            wait = self.checked(f"mpi4jax.wait(r{k})", k + a)
            self.under_way.append(Started(comm, b, wait))
        self.job.add([a], f"r{k} = mpi4jax.i{send}" if a in started else f"nt.{send}")
        if a in started:
            self.under_way.append(Started(comm, a, f"mpi4jax.wait(r{k})"))
        if b not in started:
            self.job.add([b], self.checked(f"nt.{receive}", k + a))

    def in_function(self) -> None:
        """Started and waited for in one function, beside a collective or from step to step."""
        if not (usable := self.all_here()):
            return
        comm, k, op = self.random.choice(usable), self.number(), self.random.choice(OPS)
        other = self.random.choice([c for c in usable if c.ranks == comm.ranks])
        root, times = self.random.randrange(len(comm.ranks)), self.random.choice([0, 1, 4])
        for i, r in enumerate(comm.ranks):
            call = f"lambda x: {self.call_of(op, comm, i, root)}"
            expected = self.expected(op, comm, i, root, k)
            if times == 0:
                y = f"beside({call}, {other.name})(mine({k}))"
                self.job.add([r], self.checked(y, expected))
                continue
            check = "" if expected is None else f"; check_all(y{k}, {expected})"
            self.job.add([r], f"r{k}, y{k} = carried({call}, {times})(mine({k})){check}")
            wait = self.checked(f"mpi4jax.wait(r{k})", expected)
            self.under_way.append(Started(comm, r, wait, op.requests))

    def freed(self) -> None:
        """A communicator is made, and freed while something runs on it, early or late."""
        if not (usable := self.all_here()):
            return
        for comm in self.made(self.random.choice(usable)):
            for _ in range(self.random.randint(1, 3)):
                self.start_on(comm, slowly=self.random.random() < 0.5)
            if self.random.random() < 0.3:
                k, program = self.number(), "lambda x: nt.allreduce(slow(x), MPI.SUM, comm="
                expected = k * len(comm.ranks) + sum(comm.ranks)
                what = f"later(jax.jit({program}{comm.name}))(mine({k})), {expected})"
                self.job.add(comm.ranks, what)
            if self.random.random() < 0.7:
                self.job.sleeps += 1.5
                self.job.add([self.random.choice(comm.ranks)], "time.sleep(1.5)")
            self.free_it(comm)

    def free_it(self, comm) -> None:
        """What was started there is waited for before, afterwards, or never."""
        here = lambda one: one.comm is comm
        self.finish(lambda one: here(one) and not (one.requests and self.random.random() < 0.6))
        self.job.add(comm.ranks, f"free({comm.name})")
        self.job.unfinished += sum(one.requests for one in self.under_way if here(one))
        self.finish(here, losing=0.5)
        self.comms = [c for c in self.comms if c is not comm]


STEPS = [
    *[Starts.start] * 4,
    *[Starts.finish_some] * 3,
    *[Starts.start_message] * 2,
    *[Starts.in_function] * 2,
    *[Starts.freed] * 2,
]
