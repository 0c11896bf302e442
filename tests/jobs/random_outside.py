"""What goes on around random jobs (random_jobs.py), without the knowledge of the package.

Custom calls wait for a server, standard error is a full pipe that nobody reads, ranks are traced by
a debugger, and programs communicate by mpi4py alone, on communicators of any kind.
"""

import shutil

PRELUDE = """\
def serve(seconds):
    return subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo"], stdout=subprocess.PIPE).stdout
def ask(server, x):
    # The thread of XLA's that runs a custom call waits for the answer.
    def wait(x):
        server.readline()
        return np.asarray(x)
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
def fill_stderr():
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True: os.write(write, b"x" * 4096)
    except BlockingIOError: pass
    os.set_blocking(write, True)
    os.dup2(write, 2)
def trace(seconds):
    command = ["strace", "-o", "/dev/null", "-e", "trace=none", "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    tracer.terminate()
    tracer.wait()
def among(comm, ranks):
    return comm.Create_group(comm.group.Incl(ranks))
def merged(comm):
    # Both halves, in the order of the whole.
    half = comm.Split(comm.rank % 2, comm.rank)
    between = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    return between.Merge(comm.rank % 2).Split(0, comm.rank)
def copied(comm):
    new, request = comm.Idup()
    request.Wait()
    return new
def dealt(comm):
    out = np.zeros(comm.size, np.int32)
    comm.Alltoall(np.full(comm.size, comm.rank, np.int32), out)
    np.testing.assert_array_equal(out, np.arange(comm.size))
def passed(comm):
    n, r = comm.size, comm.rank
    got = comm.sendrecv(r, (r + 1) % n, source=(r - 1) % n)
    assert got == (r - 1) % n
"""

# What has the same ranks as another communicator, in the same order.
COPIES = ["copied({0})", "{0}.Create({0}.group)", "{0}.Split_type(MPI.COMM_TYPE_SHARED, {0}.rank)"]


class Outside:
    """The steps, of a `Maker`."""

    def asks(self):
        """A custom call waits for a server; another rank waits for what is sent then."""
        if not (pairs := self.pairs()):
            return
        (comm, a, b), k, seconds = self.random.choice(pairs), self.number(), self.pauses()
        at, name = comm.ranks.index, comm.name
        self.job.add([a], f"s{k} = serve({seconds})")
        send = f"nt.send(ask(s{k}, x), {at(b)}, tag={k}, comm={name})"
        function = self.random.choice(["jax.jit(lambda x: {})", "(lambda x: {})"]).format(send)
        send = f"{function}(jnp.asarray(mine({k})))"
        self.job.add([a], f"{send}; mpi4jax.flush()")
        self.job.add([b], f"check(nt.recv(mine(0), {at(a)}, tag={k}, comm={name}), {k + a})")

    def pauses(self):
        seconds = self.random.choice([1, 5, 9])
        self.job.sleeps += seconds
        return seconds

    def mute(self):
        """Nobody reads what a rank says, and the pipe is full."""
        # The line about an outage that lasts is in no report.
        if not self.job.mute and not (self.two_hosts and self.fault):
            self.job.mute = [self.random.choice(self.alive)]
            self.job.add(self.job.mute, "fill_stderr()")

    def traced(self):
        if shutil.which("strace") is not None:
            self.job.add([self.random.choice(self.alive)], f"trace({self.pauses()})")

    def by_mpi4py(self):
        """All ranks communicate by mpi4py alone, whether they have imported the package or not."""
        if usable := self.usable():
            comm = self.random.choice(usable)
            what = self.random.choice(["dealt({0})", "passed({0})", "{0}.Barrier()"])
            self.job.add([r for r in comm.ranks if r not in self.late], "mpi4jax.flush()")
            self.job.add(comm.ranks, what.format(comm.name))

    def made_by_mpi4py(self):
        """A communicator of the user's, of a kind of MPI's."""
        if not (usable := self.usable()):
            return
        comm, name = self.random.choice(usable), f"c{self.number()}"
        kind, some = self.random.choice(self.kinds(comm))
        ranks = [comm.ranks[i] for i in some]
        self.job.add(ranks if "among" in kind else comm.ranks, f"{name} = {kind.format(comm.name)}")
        self.job.tells_apart = False
        self.unknown.append(ranks)
        self.comms.append(type(comm)(name, ranks))

    def kinds(self, comm):
        n = len(comm.ranks)
        some = sorted(self.random.sample(range(n), self.random.randint(1, n)))
        everybody = list(range(n))
        copies = [kind for kind in COPIES if "SHARED" not in kind or not self.two_hosts]
        kinds = [(kind, everybody) for kind in copies] + [(f"among({{0}}, {some})", some)]
        return kinds + [("merged({0})", everybody)] * (n > 1)


STEPS = [Outside.asks, Outside.mute, Outside.traced, Outside.by_mpi4py, Outside.made_by_mpi4py]

# Faults of such kinds, as in random_faults.py.
FAULTS = {
    "asks a server that never answers": "ask(os.fdopen(os.pipe()[0]), mine(0)).block_until_ready()",
    "waits for a thread that computes": "e0 = threading.Event(); call_later(e0.set, 999, 4); "
    "e0.wait()",
    "receives by mpi4py what nobody sends": "{comm}.recv(source=MPI.ANY_SOURCE, tag=997)",
}
SAYS = {
    **dict.fromkeys(FAULTS, r"rank {rank} is in no operation.*program.py:{line}"),
    # The line of the callback.
    "asks a server that never answers": r"rank {rank} is in no operation.*program.py:\d+ in wait",
}
# What only the rank itself says, and no report.
SAID_AT_STDERR = ("raises", "never waits")
