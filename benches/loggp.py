"""LogGP's parameters of this machine, and what they say of more ranks than it has.

L: latency of the network. o: time that a message keeps a processor busy. g: least time between two
short messages. G: time per byte of a long one. Besides: gamma, the time to add one byte to another.

Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: Incorporating Long Messages into the LogP Model",
SPAA 1995. Measured as in Hoefler, Lichei, Rehm, "Low-Overhead LogGP Parameter Assessment for
Modern Interconnection Networks", IPDPS 2007. The algorithms of allreduce are those of Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.
"""

import math
from dataclasses import dataclass

from contenders import Job

TRAIN = 16  # messages
LARGE = 2**20  # bytes


@dataclass(frozen=True)
class LogGP:
    """In seconds, and seconds per byte."""

    one_way: float  # L + 2 o, of a byte
    overhead: float
    gap: float
    gap_per_byte: float
    gamma: float

    @property
    def latency(self) -> float:
        """Zero where both ranks are busy for all of the time that a message takes."""
        return max(0.0, self.one_way - 2 * self.overhead)

    def message(self, nbytes: int) -> float:
        return self.one_way + max(0, nbytes - 1) * self.gap_per_byte

    def allreduce(self, ranks: int, nbytes: int) -> float:
        """The faster of recursive doubling and of reduce-scatter with allgather."""
        rounds = math.ceil(math.log2(ranks))
        doubling = rounds * (self.message(nbytes) + nbytes * self.gamma)
        part = (ranks - 1) / ranks * nbytes
        halving = 2 * rounds * self.message(1)
        halving += 2 * part * self.gap_per_byte + part * self.gamma
        return min(doubling, halving)


def measure(job: Job, rounds: int = 300) -> LogGP:
    """Between ranks 0 and 1 of a job."""

    def train(messages: int, nbytes: int, delay: float = 0.0) -> float:
        few = rounds if nbytes == 1 else max(10, rounds // 10)
        return job.ask("train", messages=messages, delay=delay, nbytes=nbytes, rounds=few)

    def gap(nbytes: int) -> float:
        return (train(TRAIN, nbytes) - train(1, nbytes)) / (TRAIN - 1)

    # Ranks that wait are scheduled, and caches are filled, in the first trains.
    train(TRAIN, 1)
    there_and_back = train(1, 1)
    delayed = train(TRAIN, 1, there_and_back)
    overhead = max(0.0, (delayed - there_and_back) / (TRAIN - 1) - there_and_back)
    short = max(0.0, gap(1))
    return LogGP(
        one_way=there_and_back / 2,
        overhead=overhead,
        gap=short,
        gap_per_byte=max(0.0, gap(LARGE) - short) / (LARGE - 1),
        gamma=job.ask("add", nbytes=LARGE, rounds=50) / LARGE,
    )
