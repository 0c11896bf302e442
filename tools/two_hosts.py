"""mpiexec on two "hosts": network namespaces of this machine with a cable and TCP between them.

    python tools/two_hosts.py [--mbit RATE] RANKS_PER_HOST PROGRAM [ARGUMENTS...]

It shows what a network costs where there is none, and lets tests interrupt it. It needs root,
iproute2's `ip` and Open MPI 5, and with --mbit iproute2's `tc`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import mpirun

# What ranks on the other host need to know; mpiexec passes nothing on by itself.
PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "JAX_PLATFORMS", "XLA_FLAGS", "OMP_NUM_THREADS")


def missing() -> str | None:
    """Why it cannot be done here."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "there is no `ip` (iproute2) or no `unshare` (util-linux)"
    launcher = [mpirun.find_mpiexec(sys.executable), "--version"]
    version = subprocess.run(launcher, capture_output=True, text=True).stdout
    if "Open MPI) 5." not in version:
        return "the options of mpiexec are those of Open MPI 5"
    name = f"probe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode != 0:
        return probe.stderr.strip()
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


@dataclass(frozen=True)
class Hosts:
    """Two hosts that are set up.

    Attributes:
        mpiexec: the start of a command line, with options that put ranks on the hosts in turn.
        names: the network namespaces, and what `hostname` says in them.
        cables: the two ends of the cable.
    """

    mpiexec: list[str]
    names: list[str]
    cables: list[str]

    def cut(self) -> None:
        """Cuts the cable."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "down")


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


def limit(name: str, cable: str, mbit: int) -> None:
    """What this end of the cable sends takes its time."""
    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    ip("netns", "exec", name, "tc", "qdisc", "add", "dev", cable, "root", *bucket)


def end_all(name: str) -> None:
    """Ends what still runs on a host: Open MPI does not, where its cable is interrupted."""
    command = ["ip", "netns", "pids", name]
    pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(mbit: int | None = None) -> Iterator[Hosts]:
    """Sets the two hosts up, with a cable of `mbit` Mbit/s, and takes them away again."""
    names = [f"mj{os.getpid()}-{i}" for i in (1, 2)]
    addresses = [f"10.88.{os.getpid() % 250}.{i}" for i in (1, 2)]
    cables = [f"mj{os.getpid()}v{i}" for i in (1, 2)]

    with tempfile.TemporaryDirectory() as folder:
        # Stands for ssh: AGENT HOST COMMAND...
        agent = Path(folder) / "agent"
        agent.write_text(
            "#!/bin/bash\n"
            f"[ $1 = {addresses[0]} ] && host={names[0]} || host={names[1]}\n"
            "shift\n"
            'exec ip netns exec $host unshare --uts bash -c "hostname $host; $*"\n'
        )
        agent.chmod(0o755)
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for name, address, cable in zip(names, addresses, cables, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", cable, "up")
                if mbit:
                    limit(name, cable, mbit)
            start = f'hostname {names[0]}; exec "$@"'
            inside = ["ip", "netns", "exec", names[0], "unshare", "--uts", "bash", "-c", start, "-"]
            options = ["--prtemca", "plm_ssh_agent", str(agent), "--mca", "pml", "ob1"]
            options += ["--mca", "btl", "tcp,self"]
            options += ["--host", ",".join(f"{address}:64" for address in addresses)]
            options += ["--map-by", "node:OVERSUBSCRIBE"]
            yield Hosts([*inside, mpirun.find_mpiexec(sys.executable), *options], names, cables)
        finally:
            for name in names:
                end_all(name)
                ip("netns", "del", name, check=False)


def passed_on() -> list[str]:
    """Options of mpiexec for PASSED, and for our own."""
    names = [name for name in os.environ if name in PASSED or name.startswith("MPI4JAX_")]
    return [word for name in names for word in ("-x", name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=int, help="rate of the cable, either way")
    parser.add_argument("ranks_per_host", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    if why := missing():
        raise SystemExit(why)
    with hosts(options.mbit) as two:
        job = [*two.mpiexec, *passed_on(), "-n", str(2 * options.ranks_per_host), *command]
        return subprocess.run(job, env=mpirun.environment_outside_mpi()).returncode


if __name__ == "__main__":
    sys.exit(main())
