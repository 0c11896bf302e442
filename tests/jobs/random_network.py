"""Outages of the network between two hosts, in random jobs (random_jobs.py)."""

PRELUDE = """\
def outage(seconds):
    # The cable between the hosts is out of order for a time, or forever.
    subprocess.run(f"{os.environ['LINK']} down", shell=True, check=True)
    if seconds: subprocess.Popen(["sh", "-c", f"sleep {seconds}; {os.environ['LINK']} up"])
"""


class Network:
    """The steps, of a `Maker`."""

    def outage(self, seconds=None):
        """The cable is interrupted while the steps that follow communicate."""
        seconds = seconds or self.random.choice([5, 10, 20])
        # TCP repeats what was lost after pauses that double.
        self.job.sleeps += 2 * seconds
        self.job.add([self.random.choice(self.alive)], f"outage({seconds})")

    def link(self):
        """Hosts ask each other on a link that the default communicator opens."""
        # Open MPI aborts the job if it cannot connect two ranks, so they are connected before.
        self.job.add(self.alive, "dealt(world)")
        if not self.late:
            self.job.add(self.alive, "mpi4jax.default_comm()")

    def cut(self):
        """The cable is interrupted forever, and then all ranks wait for each other."""
        ranks = self.alive
        self.job.add(ranks, "nt.barrier(comm=world); mpi4jax.flush()")
        self.job.add([self.random.choice(ranks)], "outage(0)")
        self.job.add(ranks, "time.sleep(1)")
        what = "nt.allreduce(mine(0), MPI.SUM, comm=world).block_until_ready()"
        self.job.add(ranks, what)
