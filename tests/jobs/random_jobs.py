"""Random jobs that are correct, and the same with one fault each.

A job is a list of steps that all ranks know, each done by some ranks. Every rank does its steps in
the order of the list, so there is always a step that all who do it have come to: a correct job
cannot hang. Ranks sleep, are stopped, end early, import mpi4jax late or never, and do
their part of a collective through mpi4py, or in a thread; threads communicate at the same time,
each on a communicator of its own; communicators are split, renamed, freed and made again.
Ghost cells are exchanged. Exit handlers, registered before or after the import, communicate too.
Threads of a C library call Python back, which communicates. Trees are reduced.
Each rank has settings of its own, which mean the same.
Operations are started, and waited for later or never (random_started.py). Loops exchange messages,
and many communicators are alive (random_mismatches.py). Around them, servers are
asked, pipes are full, ranks are traced, and mpi4py communicates (random_outside.py). On two hosts,
the network is out of order for a time, or forever (random_network.py).
"""

import random
from dataclasses import dataclass, field

import c_threads
import random_faults
import random_mismatches
import random_network
import random_outside
import random_started
from random_faults import DIFFERENT_SETTINGS, SAYS

PRELUDE = """\
import atexit, os, signal, subprocess, sys, threading, time, traceback
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
from mpi4py import MPI
world, rank, size = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pending, handlers = [], []
def mine(k): return np.full(3, k + rank, np.float32)
def block(k): return np.array([-1, *mine(k), -1], np.float32)
def check(y, expected):
    expected = np.full(3, expected) if np.isscalar(expected) else np.array(expected)
    np.testing.assert_array_equal(np.asarray(y), expected)
def later(y, expected): pending.append((y, expected))
def stop(seconds):
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
def fork():
    child = os.fork()
    if child == 0: os._exit(0)
    os.waitpid(child, 0)
def threads(*work):
    all = [threading.Thread(target=f) for f in work]
    for t in all: t.start()
    for t in all: t.join()
"""
PRELUDE += """\
def at_exit():
    try:
        for handler in handlers: handler()
    except BaseException:
        traceback.print_exc()
        world.Abort(1)
"""
PRELUDE += 'LIBRARY = os.environ.get("CALLS_LATER")\n' + c_threads.PRELUDE
PRELUDE += random_started.PRELUDE + random_outside.PRELUDE + random_network.PRELUDE
PRELUDE += random_mismatches.PRELUDE
PRELUDE += "def main():\n"
ENDING = """
main()
for y, expected in pending: check(y, expected)
print("right", rank, flush=True)
"""

# Of a setting, texts that mean the same, or concern one rank alone.
SETTINGS = {
    "MPI4JAX_CHECK": ["", "samples", "Samples"],
    "MPI4JAX_TRANSPORT": ["", "mpi", "staged"],
    "MPI4JAX_REPORT_AFTER": ["1", "3", "30"],
}


@dataclass
class Comm:
    """A communicator: its variable, and the ranks of `COMM_WORLD` in it, by their ranks in it."""

    name: str
    ranks: list[int]
    # `COMM_WORLD`, a duplicate of it, or a duplicate of such a duplicate: no rank confuses it.
    is_known: bool = False


@dataclass
class Job:
    """A program for some ranks.

    Attributes:
        sleeps: for how many seconds ranks sleep, all in all.
        fault: its name, rank and line, for a faulty one.
        is_mixed: whether some ranks do their part of a collective through mpi4py.
        tells_apart: whether it is known which communicator of a rank is which of another.
        is_late: whether some ranks import mpi4jax later than others.
        unfinished: how many operations are not waited for when their communicator is freed.
        setting: how the setting that one rank alone has is reported.
        mute: the rank whose standard error nobody reads.
    """

    seed: int
    size: int
    lines: list[str] = field(default_factory=list)
    sleeps: float = 0
    fault: tuple[str, int, int] | None = None
    is_mixed: bool = False
    tells_apart: bool = True
    is_late: bool = False
    unfinished: int = 0
    setting: str = ""
    mute: list[int] = field(default_factory=list)

    def says(self) -> str:
        """What is found in the output of a faulty one."""
        name, rank, line = self.fault
        if rank in self.mute and name in random_outside.SAID_AT_STDERR:
            return ""
        # Whichever rank notices it says so, at its standard error alone.
        if self.mute and name in random_mismatches.DIFFERENCES:
            return ""
        # It may have done its part by mpi4py, or on a communicator of the same ranks that it freed.
        freed = any("free(" in x.lower() for x in self.lines)
        text = SAYS[name]
        if name.startswith("ends") and (self.is_mixed or freed):
            text = (
                r"can never complete: rank {rank} has finished|ranks? [-, \d]+ (?:is|are) finished"
            )
        # Where numbers are shifted, a collective looks like an earlier one of another rank.
        is_unsure = {"receives from each other": self.is_mixed}
        is_unsure["takes communicators in another order"] = freed or not self.tells_apart
        if is_unsure.get(name):
            text = "deadlock|has not completed"
        # Collectives of ranks that have not counted the same duplicates are not compared.
        if self.is_late and name in random_mismatches.ON_A_DUPLICATE:
            text += f"|{random_mismatches.NOT_COMPARED}|deadlock|r{{rank}}.*an uncaught exception"
        return text.format(rank=rank, line=line, value=self.setting)

    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return PRELUDE + "    global mpi4jax, nt\n" + body + ENDING

    def add(self, ranks: list[int], what: str) -> None:
        """Some ranks do something."""
        if ranks:
            self.lines.append(f"if rank in {tuple(ranks)}: {what}")

    def line(self) -> int:
        """The number of the line that was added last."""
        return PRELUDE.count("\n") + 1 + len(self.lines)


class Maker(
    random_started.Starts,
    random_outside.Outside,
    random_network.Network,
    random_mismatches.Mismatches,
    random_faults.Faults,
):
    """Makes a job, step by step."""

    def __init__(self, seed: int, fault: bool, two_hosts: bool = False):
        self.random, self.fault, self.two_hosts = random.Random(seed), fault, two_hosts
        self.job = Job(seed, self.random.choice([2, 3, 3, 4, 5] if seed % 3 else [2, 3]))
        everybody = list(range(self.job.size))
        self.alive, self.comms, self.count = everybody, [Comm("world", everybody, True)], 0
        self.under_way: list[random_started.Started] = []
        # The ranks of communicators that ranks may confuse, if two have the same ranks and name.
        self.unknown: list[list[int]] = []
        self.late = [r for r in everybody if self.random.random() < 0.15]
        # Who has another setting than the others, which all of them can know.
        differs = fault and not two_hosts and seed % 12 == 1
        self.other = self.random.choice(everybody) if differs else None
        if self.other is not None or (two_hosts and (fault or self.random.random() < 0.7)):
            self.late = []
        self.job.is_late = bool(self.late)
        # Those that never do take part in what mpi4py alone can do.
        self.never = [r for r in self.late if not fault and self.random.random() < 0.4]
        self.imports([r for r in everybody if r not in self.late])
        steps = self.random.randint(2, 6) if fault else self.random.randint(6, 12)
        if two_hosts:
            self.link()
        for step in range(steps):
            if two_hosts and not fault and step == steps // 3:
                self.outage()
            self.random.choice(STEPS)(self)
        self.imports([r for r in self.late if r in self.alive and r not in self.never])
        if fault and two_hosts:
            self.cut()
        elif fault:
            self.inject()
        else:
            self.finish(lambda _: True)

    def imports(self, ranks: list[int]) -> None:
        self.late = [r for r in self.late if r not in ranks]
        if ranks:
            early = [r for r in ranks if self.random.random() < 0.5]
            late = [r for r in ranks if r not in early]
            self.job.add(early, "atexit.register(at_exit)")
            for r in ranks:
                if self.random.random() < 0.2:
                    name, values = self.random.choice(list(SETTINGS.items()))
                    value = self.random.choice(values)
                    self.job.add([r], f"os.environ['{name}'] = '{value}'")
            if self.other in ranks:
                name, value = self.random.choice(list(DIFFERENT_SETTINGS.items()))
                self.job.add([self.other], f"os.environ['{name}'] = '{value}'")
                self.job.setting = f'{name} is .*"{value}"'
            self.job.add(ranks, "import mpi4jax; from mpi4jax import notoken as nt")
            self.job.add(late, "atexit.register(at_exit)")

    def usable(self) -> list[Comm]:
        return [comm for comm in self.comms if set(comm.ranks) <= set(self.alive)]

    def pairs(self) -> list[tuple[Comm, int, int]]:
        """Who may send to whom."""
        ready = [r for r in self.alive if r not in self.late]
        return [
            (c, a, b) for c in self.comms for a in c.ranks for b in c.ranks
            if a != b and a in ready and b in ready
        ]  # fmt: skip

    def number(self) -> int:
        self.count += 1
        return self.count

    # ---- Steps

    def collective(self) -> None:
        if not (usable := self.usable()):
            return
        comm, k = self.random.choice(usable), self.number()
        ranks, n = comm.ranks, len(comm.ranks)
        root = self.random.randrange(n)
        total, first = k * n + sum(ranks), k + ranks[root]
        call, raw, expected, at_root = self.random.choice(
            [
                ("allreduce(mine({k}), MPI.SUM", "Allreduce(mine({k}), out)", total, False),
                (
                    "reduce(mine({k}), MPI.SUM, root={root}",
                    "Reduce(mine({k}), out, root={root})",
                    total,
                    True,
                ),
                (
                    "bcast(mine({k}), root={root}",
                    "Bcast(mine({k}) if rank == {world} else out, root={root})",
                    first,
                    False,
                ),
            ]
        )
        names = {"k": k, "root": root, "world": ranks[root]}
        others = [r for r in ranks if r in self.late or self.random.random() < 0.1]
        self.job.is_mixed |= bool(others)
        keep = self.random.choice(["check", "later"])
        for r in ranks:
            is_result = r == ranks[root] or not at_root
            if r in others:
                flush = "" if r in self.late else "mpi4jax.flush(); "
                what = f"{flush}out = np.zeros(3, np.float32); {comm.name}.{raw.format(**names)}"
                what += f"; check(out, {expected})" if is_result and r != ranks[root] else ""
            else:
                what = f"nt.{call.format(**names)}, comm={comm.name})"
                what = f"{keep}({what}, {expected})" if is_result else what
                # What a thread has started and not waited for is not ordered with this one's.
                if self.random.random() < 0.1:
                    what = f"mpi4jax.flush(); threads(lambda: ({what}, mpi4jax.flush()))"
            self.job.add([r], what)

    def barrier(self) -> None:
        if usable := self.all_here():
            comm = self.random.choice(usable)
            self.job.add(comm.ranks, f"nt.barrier(comm={comm.name})")

    def message(self) -> None:
        if not (pairs := self.pairs()):
            return
        (comm, a, b), k = self.random.choice(pairs), self.number()
        tag, name, at = k, comm.name, comm.ranks.index
        source = self.random.choice([at(a), at(a), "MPI.ANY_SOURCE"])
        self.job.add([a], f"nt.send(mine({k}), {at(b)}, tag={tag}, comm={name}); mpi4jax.flush()")
        received = f"nt.recv(mine(0), {source}, tag={tag}, comm={name})"
        self.job.add([b], f"check({received}, {k + a})")

    def chain(self) -> None:
        """Each sends to the next one, in an open chain or a ring, and some end afterwards."""
        if not (usable := self.all_here()):
            return
        comm, k = self.random.choice(usable), self.number()
        n, ring = len(comm.ranks), self.random.random() < 0.5
        for i, r in enumerate(comm.ranks):
            source, dest = i - 1, i + 1
            if ring:
                source, dest = source % n, dest % n
            ends = ["MPI.PROC_NULL" if not 0 <= e < n else e for e in (source, dest)]
            call = f"nt.sendrecv(mine({k}), mine({k}), {ends[0]}, {ends[1]}, comm={comm.name})"
            expected = k + (r if ends[0] == "MPI.PROC_NULL" else comm.ranks[source % n])
            self.job.add([r], f"check({call}, {expected})")

    def at_once(self) -> None:
        """Two threads of each rank, on two communicators; one of the threads may be slow."""
        if not (usable := self.all_here()):
            return
        comm, k = self.random.choice(usable), self.number()
        total, times = k * len(comm.ranks) + sum(comm.ranks), self.random.randint(1, 5)
        self.job.add(
            comm.ranks, f"mpi4jax.flush(); a{k}, b{k} = {comm.name}.Dup(), {comm.name}.Dup()"
        )
        self.unknown += [comm.ranks] * (not comm.is_known)
        slow = self.random.choice(comm.ranks)
        for r in comm.ranks:
            seconds = self.random.choice([0, 0.3, 2]) if r == slow else 0
            self.job.sleeps += seconds
            many = f"check(nt.allreduce(mine({k}), MPI.SUM, comm=a{k}), {total})"
            one = f"check(nt.bcast(mine({k}), root=0, comm=b{k}), {k + comm.ranks[0]})"
            work = [
                f"lambda: [{many} for _ in range({times})]",
                f"lambda: (time.sleep({seconds}), {one})",
            ]
            self.random.shuffle(work)
            self.job.add([r], f"threads({', '.join(work)}); mpi4jax.flush(); a{k}.Free()")

    def halo(self) -> None:
        """Ghost cells in a ring or a row of ranks; some ranks start it and wait for it later."""
        if not (usable := self.all_here()):
            return
        comm, k, periodic = self.random.choice(usable), self.number(), self.random.random() < 0.5
        n = len(comm.ranks)
        self.job.add(comm.ranks, f"g{k} = {comm.name}.Create_cart([{n}], [{periodic}])")
        self.unknown.append(comm.ranks)
        # All ranks start it, or none: MPI matches no blocking collective with a nonblocking one.
        is_started = self.random.random() < 0.5
        for i, r in enumerate(comm.ranks):
            ends = [k + comm.ranks[e % n] if periodic or 0 <= e < n else -1 for e in (i - 1, i + 1)]
            expected = [ends[0], *[k + r] * 3, ends[1]]
            if is_started:
                self.job.add([r], f"r{k} = mpi4jax.ihalo_exchange(block({k}), g{k})")
                wait = self.checked(f"mpi4jax.wait(r{k})", expected)
                self.under_way.append(random_started.Started(comm, r, wait, 0))
            else:
                self.job.add([r], self.checked(f"nt.halo_exchange(block({k}), g{k})", expected))

    def handler(self) -> None:
        """Ranks communicate when they end: all of them, or one with another."""
        if self.fault or self.alive != list(range(self.job.size)) or self.late:
            return
        k, everybody = self.number(), self.alive
        if self.random.random() < 0.5:
            total = k * self.job.size + sum(everybody)
            call = f"check(nt.allreduce(mine({k}), MPI.SUM, comm=world), {total})"
            self.job.add(everybody, f"handlers.append(lambda: {call})")
            return
        a, b = self.random.sample(everybody, 2)
        self.job.add([a], f"handlers.append(lambda: {self.sends(k, b)})")
        receive = f"check(nt.recv(mine(0), {a}, tag={k}, comm=world), {k + a})"
        self.job.add([b], f"handlers.append(lambda: {receive})")

    def sends(self, k: int, dest: int) -> str:
        return f"(nt.send(mine({k}), {dest}, tag={k}, comm=world), mpi4jax.flush())"

    def called_back(self) -> None:
        """A rank waits for one that waits for what a thread of a C library sends there."""
        if c_threads.library() is None or not (pairs := self.pairs()):
            return
        (comm, a, b), k, reply = self.random.choice(pairs), self.number(), self.number()
        seconds, how = self.random.choice([1, 5, 9]), self.random.randrange(len(c_threads.WAYS))
        self.job.sleeps += seconds
        at, name = comm.ranks.index, comm.name
        send = f"nt.send(mine({k}), {at(b)}, tag={k}, comm={name})"
        what = f"f{k} = lambda: ({send}, mpi4jax.flush(), e{k}.set())"
        self.job.add([a], f"e{k} = threading.Event(); {what}; call_later(f{k}, {seconds}, {how})")
        self.job.add([b], f"check(nt.recv(mine(0), {at(a)}, tag={k}, comm={name}), {k + a})")
        back = f"nt.send(mine({reply}), {at(a)}, tag={reply}, comm={name})"
        self.job.add([b], f"{back}; mpi4jax.flush()")
        receive = f"nt.recv(mine(0), {at(b)}, tag={reply}, comm={name})"
        # The thread is in Python until it has come back to C.
        self.job.add([a], f"check({receive}, {reply + b}); e{k}.wait(); time.sleep(0.1)")

    def tree(self) -> None:
        if not (usable := self.all_here()):
            return
        comm, k = self.random.choice(usable), self.number()
        total = k * len(comm.ranks) + sum(comm.ranks)
        leaves = f"{{'a': mine({k}), 'b': (mine({k}), mine({k}))}}"
        what = f"y{k} = nt.allreduce({leaves}, MPI.SUM, comm={comm.name})"
        self.job.add(comm.ranks, f"{what}; check_all(jax.tree.leaves(y{k}), {total})")

    def make(self) -> None:
        if usable := self.usable():
            self.comms += self.made(self.random.choice(usable))

    def made(self, comm: Comm) -> list[Comm]:
        """From a communicator another one, or two."""
        name = f"c{self.number()}"
        if self.random.random() < 0.5:
            self.job.add(comm.ranks, f"{name} = {comm.name}.Dup()")
            self.job.tells_apart &= not self.late
            made = [Comm(name, comm.ranks, comm.is_known)]
        else:
            at = f"{comm.name}.rank"
            self.job.add(comm.ranks, f"{name} = {comm.name}.Split({at} % 2, {at})")
            made = [Comm(name, part) for part in (comm.ranks[::2], comm.ranks[1::2]) if part]
        self.unknown += [one.ranks for one in made if not one.is_known]
        naming = self.random.choice(["none", "same", "own"])
        if naming == "same":
            self.job.add(comm.ranks, f"{name}.Set_name('same')")
        elif naming == "own":
            self.job.add(comm.ranks, f"{name}.Set_name('name' + str(rank))")
        return made

    def free(self) -> None:
        usable = self.usable()
        if not (made := [c for c in usable if c.name != "world"]):
            return
        comm = self.random.choice(made)
        if self.is_enough([c for c in usable if c is not comm]):
            self.free_it(comm)

    def is_enough(self, comms: list[Comm]) -> bool:
        """Whether a fault, if there is to be one, will be noticed."""
        return not self.fault or any(len(c.ranks) > 1 for c in comms)

    def pause(self) -> None:
        how = self.random.choice(["time.sleep", "time.sleep", "stop"])
        longest = [20] if how == "stop" and self.random.random() < 0.3 else []
        seconds = self.random.choice([0.5, 2, 4, 8, *longest])
        self.job.sleeps += seconds
        self.job.add([self.random.choice(self.alive)], f"{how}({seconds})")

    def local(self) -> None:
        what = self.random.choice(
            [
                "open(f'file{rank}', 'w').write('x' * 10000)",
                "subprocess.run(['true'])",
                "fork()",
                "threads(lambda: time.sleep(0.3))",
                "jax.jit(lambda x: jnp.linalg.svd(x @ x.T))(jnp.ones((8, 8)))",
                "jax.jit(lambda x: io_callback(np.sin, x, x, ordered=True))(mine(0))",
            ]
        )
        rank = self.random.choice(self.alive)
        # JAX warns of a fork, on standard error.
        if what != "fork()" or rank not in self.job.mute:
            self.job.add([rank], what)

    def end(self) -> None:
        may_leave = [r for r in self.alive if r != self.other]
        if not may_leave:
            return
        leaves = self.random.choice(may_leave)
        stay = [r for r in self.alive if r != leaves]
        usable = [c for c in self.comms if set(c.ranks) <= set(stay)]
        if stay and leaves not in self.late and self.is_enough(usable):
            self.finish(lambda one: one.rank == leaves)
            ready, k = [r for r in stay if r not in self.late], self.number()
            last = self.random.choice(ready) if ready and self.random.random() < 0.5 else None
            if last is not None and not self.fault:
                # Before the others, which may wait for ranks that go on.
                self.job.add([leaves], f"handlers.insert(0, lambda: {self.sends(k, last)})")
            self.job.add([leaves], "return")
            if last is not None and not self.fault:
                receive = f"check(nt.recv(mine(0), {leaves}, tag={k}, comm=world), {k + leaves})"
                self.job.add([last], receive)
            self.alive = stay
            # Then others take their time.
            self.pause()


STEPS = [
    *random_started.STEPS,
    *random_outside.STEPS,
    *random_mismatches.STEPS,
    *[Maker.collective] * 4,
    *[Maker.message] * 2,
    *[Maker.chain] * 2,
    *[Maker.make] * 2,
    *[Maker.pause] * 2,
    Maker.at_once,
    Maker.called_back,
    Maker.tree,
    *[Maker.halo] * 2,
    Maker.handler,
    Maker.barrier,
    Maker.free,
    Maker.local,
    Maker.end,
]


def correct(seed: int) -> Job:
    return Maker(seed, fault=False).job


def faulty(seed: int) -> Job:
    return Maker(seed, fault=True).job
