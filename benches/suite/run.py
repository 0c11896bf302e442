"""Speed against raw MPI, mpi4py, mpi4jax 0.9.1 and JAX's own collectives: docs/measurements.md.

    python benches/suite/run.py                             # everything, in some fifteen minutes
    python benches/suite/run.py --only latency --ops allreduce --bytes 4 --output DIRECTORY

Contenders take turns, A B A B ..., so that what else happens on the machine happens to all of them.
Measurements are short and many: a figure is the median of its rounds, and a ratio the median of the
ratios within the rounds. There are more rounds where a ratio is not known to 5 %, until --minutes
are over. A contender that is not there, or that fails, is left out, and the report
says so.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "programs"))

import measurements
import report
import shallow_water
from contenders import ROOT, Job, reference_python
from measurements import GLOO, NEW, OLD, Key, Results

import two_hosts

ALL = ["allreduce", "sendrecv", "allgather", "alltoall", "barrier", "bcast"]
ALL += ["gather", "reduce", "scan", "scatter"]
# These two are measured also on one rank and on two hosts.
MAIN = ["allreduce", "sendrecv"]
BYTES = [4, 2**16, 2**20, 2**22, 2**24, 2**26]
ALONE_BYTES = [4, 2**16, 2**20, 2**24]
FEW_BYTES = [4, 2**16, 2**22]
# From here on, a call takes so long that dispatch does not matter, and faults do.
LARGE = 2**22
# Who measures what. The no-op has no operation and no size.
MODES = {
    NEW: ["raw", "mpi4py", "noop", "eager", "jit", "loop", "chain", "donated", "psum"],
    OLD: ["eager", "jit", "loop", "chain"],
    GLOO: ["jit", "chain"],
}
OF_LARGE = {
    NEW: ["raw", "noop", "jit", "loop", "chain", "donated", "psum"],
    OLD: ["jit", "loop", "chain"],
    GLOO: ["jit"],
}
# Only these have results that can go in again.
CHAINED = {"allreduce", "alltoall", "scan", "sendrecv"}
OF_GLOO = {"allgather", "allreduce", "alltoall", "sendrecv"}
SECTIONS = ["latency", "model", "hosts"]
# What may go wrong with one contender without the others' being affected.
FAILURES = (OSError, RuntimeError, ValueError, SystemExit, subprocess.SubprocessError)


def modes(contender: str, op: str, nbytes: int) -> list[str]:
    if contender == GLOO and op not in OF_GLOO:
        return []
    found = (OF_LARGE if nbytes >= LARGE else MODES)[contender]
    of_some = {"chain": CHAINED, "donated": CHAINED, "psum": {"allreduce"}}
    return [mode for mode in found if op in of_some.get(mode, {op})]


class Bench:
    """What has been measured, and what could not be."""

    def __init__(self, args):
        self.args = args
        self.results: Results = {}
        self.faults: Results = {}
        self.models: dict[tuple[int, str], dict[str, list[float]]] = {}
        self.notes: list[str] = []
        self.versions = {}
        self.load_before = os.getloadavg()[0]
        self.begin = time.monotonic()
        self.pythons = {NEW: sys.executable}
        if not args.no_reference:
            try:
                self.pythons[OLD] = reference_python()
            except FAILURES as error:
                self.note("mpi4jax 0.9.1 could not be installed", error)

    def note(self, what: str, why: object) -> None:
        if isinstance(why, subprocess.CalledProcessError):
            why = f"it ended with status {why.returncode}"
        elif isinstance(why, subprocess.TimeoutExpired):
            why = f"no end after {why.timeout:g} s"
        lines = str(why).strip().splitlines()
        line = lines[0] if lines else type(why).__name__
        # Of paths, the names of files: the rest is nobody's business.
        self.notes.append(f"{what}: {re.sub(r'(/[^/ ]+)*/', '', line)}")
        print(self.notes[-1], flush=True)

    def start(self, stack: ExitStack, ranks: int, where: str = "", **launch) -> dict[str, Job]:
        """Return the jobs of all contenders that start; `where` is for what does not."""
        jobs = {}
        pythons = dict(self.pythons)
        if ranks > 1 and not where:
            pythons[GLOO] = sys.executable
        for contender, python in pythons.items():
            try:
                jobs[contender] = Job(contender, python, ranks, **launch)
                stack.callback(jobs[contender].close)
            except FAILURES as error:
                self.note(f"{contender} did not start on {ranks} ranks{where}", error)
        if NEW in jobs:
            self.versions = jobs[NEW].versions
        return jobs

    def compare(self, jobs: dict[str, Job], op: str, nbytes: int, ranks: int, where="") -> None:
        """Measure an operation with all of them."""
        print(f"{op}, {ranks} ranks, {measurements.size_name(nbytes)}{where}", flush=True)
        seconds = self.args.seconds
        rounds = self.args.rounds if nbytes < LARGE else max(3, self.args.rounds // 3)
        iterations, times, faults = {}, {}, {}

        def attempt(contender, function):
            try:
                function()
            except FAILURES as error:
                what = f"{contender} failed in {op} on {ranks} ranks{where}, and was left out then"
                self.note(what, error)
                del jobs[contender]

        def prepare(contender):
            for mode in modes(contender, op, nbytes):
                if nbytes >= 2**20 and mode != "raw":
                    jobs[contender].warm(mode, op, nbytes)
                count = enough(jobs[contender], mode, op, nbytes, seconds)
                iterations[contender, mode] = count
                times[contender, mode], faults[contender, mode] = [], []

        def turn(contender):
            for mode in modes(contender, op, nbytes):
                count = iterations[contender, mode]
                passed, missing = jobs[contender].measure(mode, op, nbytes, count)
                times[contender, mode].append(passed)
                faults[contender, mode].append(missing)

        for contender in list(jobs):
            attempt(contender, lambda: prepare(contender))  # noqa: B023
        done = 0
        while done < rounds or (done < 4 * rounds and self.has_time() and not known(times, jobs)):
            for contender in list(jobs):
                attempt(contender, lambda: turn(contender))  # noqa: B023
            done += 1
        for (contender, mode), values in times.items():
            if contender in jobs:
                key = Key(ranks, op, nbytes, contender, mode, where)
                self.results[key], self.faults[key] = values, faults[contender, mode]

    def has_time(self) -> bool:
        """For more rounds than the least."""
        return time.monotonic() < self.begin + 60 * self.args.minutes

    def latency(self) -> None:
        args = self.args
        for ranks in args.ranks:
            with ExitStack() as stack:
                jobs = self.start(stack, ranks)
                for op in args.ops:
                    if op not in MAIN and ranks == 1:
                        continue
                    sizes = args.bytes or (ALONE_BYTES if ranks == 1 else BYTES)
                    for nbytes in [4] if op == "barrier" else sizes:
                        self.compare(jobs, op, nbytes, ranks)

    def model(self) -> None:
        """The shallow-water example."""
        commands = shallow_water.contenders(self.pythons.get(OLD))
        for ranks in self.args.model_ranks:
            self.run_model(commands, ranks, "one host", ())

    def run_model(self, commands, ranks, where, mpiexec) -> None:
        arguments = ["--size", *map(str, self.args.size), "--steps", str(self.args.steps)]
        print(f"shallow water, {ranks} ranks, {where}", flush=True)
        times = {name: [] for name in commands}
        for _ in range(self.args.model_rounds):
            for name in list(times):
                try:
                    seconds = shallow_water.seconds_per_step(
                        commands[name], ranks, mpiexec, arguments
                    )
                    times[name].append(seconds)
                except FAILURES as error:
                    self.note(f"shallow water, {name}, {ranks} ranks, {where}", error)
                    del times[name]
        if times:
            self.models[ranks, where] = times

    def hosts(self) -> None:
        """Two hosts: given by --two-hosts, else made of network namespaces."""
        with ExitStack() as stack:
            if self.args.two_hosts:
                mpiexec, options = shlex.split(self.args.two_hosts), []
            elif why := two_hosts.missing():
                return self.note("nothing was measured on two hosts", why)
            else:
                mpiexec = stack.enter_context(two_hosts.hosts()).mpiexec
                options = two_hosts.passed_on()
            where = " on two hosts"
            with ExitStack() as started:
                jobs = self.start(started, 2, where, mpiexec=mpiexec, options=options)
                for op in MAIN:
                    for nbytes in self.args.bytes or FEW_BYTES:
                        self.compare(jobs, op, nbytes, 2, where)
            if "model" in self.args.only:
                commands = shallow_water.contenders(self.pythons.get(OLD))
                self.run_model(commands, 2, "two hosts, TCP", [*mpiexec, *options])


def known(times: dict[tuple[str, str], list[float]], contenders) -> bool:
    """Return whether the median of each ratio is known to 5 %."""
    for _, *terms in report.RATIOS:
        of = [times.get(term) for term in terms if term[0] in contenders]
        ratios = measurements.rounds_of(of[:1], of[1:]) if len(of) == len(terms) and all(of) else []
        if ratios and measurements.interval(ratios) > measurements.KNOWN:
            return False
    return True


def enough(job: Job, mode: str, op: str, nbytes: int, seconds: float) -> int:
    """Return how many iterations take about that long."""
    iterations = 1
    while True:
        passed = iterations * job.measure(mode, op, nbytes, iterations)[0]
        if passed > seconds / 2:
            # A call that loops makes its arrays anew: that must not count for much.
            least = 1 if mode not in ("loop", "chain") else 20 if passed < 0.02 else 5
            return max(least, round(iterations * seconds / passed))
        iterations *= min(10, round(seconds / passed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--ops", nargs="+", choices=ALL, default=ALL, metavar="OP")
    parser.add_argument("--bytes", nargs="+", type=int, help="of a rank's block")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--minutes", type=float, default=12, help="after which there are no more rounds than that"
    )
    parser.add_argument("--seconds", type=float, default=0.005, help="of one measurement")
    parser.add_argument("--model-ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--model-rounds", type=int, default=3)
    parser.add_argument("--size", nargs=2, type=int, default=[3600, 1800], metavar=("NX", "NY"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--two-hosts",
        metavar="MPIEXEC",
        help="mpiexec and options that put one rank on each of two hosts: 'mpiexec --host a,b'",
    )
    parser.add_argument("--no-reference", action="store_true", help="leave mpi4jax 0.9.1 out")
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    args = parser.parse_args()

    begin = time.monotonic()
    bench = Bench(args)
    for section in SECTIONS:
        if section in args.only:
            getattr(bench, section)()
    args.output.mkdir(parents=True, exist_ok=True)
    table = report.write(bench, args.output, time.monotonic() - begin)
    print(table)
    print(f"In {args.output}: measurements.md and its pictures")


if __name__ == "__main__":
    main()
