"""mpiexec on "hosts": namespaces of this machine with cables, a switch and TCP between them.

    python tools/two_hosts.py [--hosts N] [--mbit RATE] RANKS_PER_HOST PROGRAM [ARGUMENTS...]

Each host has its own network, host name and `/dev/shm`. It shows what a network costs where there
is none, and lets tests interrupt it. It needs root, iproute2's `ip` and Open MPI 5, and with --mbit
iproute2's `tc`.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
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
    name = f"mjprobe{os.getpid()}"
    bridge = ["ip", "-n", name, "link", "add", "switch", "type", "bridge"]
    memory = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    try:
        for command in (["ip", "netns", "add", name], bridge, memory):
            probe = subprocess.run(command, capture_output=True, text=True)
            if probe.returncode != 0:
                return probe.stderr.strip()
    finally:
        ip("netns", "del", name, check=False)
    return None


@dataclass(frozen=True)
class Hosts:
    """Hosts that are set up.

    Attributes:
        mpiexec: the start of a command line, with options that put ranks on the hosts in turn.
        names: the network namespaces, and what `hostname` says in them.
        cables: the end of each host's cable.
    """

    mpiexec: list[str]
    names: list[str]
    cables: list[str]

    def cut(self, host: int = 0) -> None:
        """Interrupts the cable of a host."""
        ip("-n", self.names[host], "link", "set", self.cables[host], "down")


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


def limit(name: str, cable: str, mbit: int) -> None:
    """Limits what this end of the cable sends."""
    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    ip("netns", "exec", name, "tc", "qdisc", "add", "dev", cable, "root", *bucket)


def send_signal(name: str, number: int) -> None:
    """Sends a signal to all processes of a host."""
    command = ["ip", "netns", "pids", name]
    pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def beginning(name: str, has_board: bool) -> str:
    """Commands that set the name of a host, and its `/dev/shm`, read-only if it has no board."""
    memory = "mount -t tmpfs -o size=64m,mode=1777 none /dev/shm"
    if not has_board:
        memory += " && mount -o remount,ro /dev/shm"
    return f"hostname {name} && {memory}"


@contextmanager
def hosts(
    count: int = 2, mbit: int | None = None, without_board: Collection[int] = ()
) -> Iterator[Hosts]:
    """Sets hosts up, with cables of `mbit` Mbit/s, and takes them away again.

    On the hosts in `without_board`, `/dev/shm` is read-only.
    """
    prefix = f"mj{os.getpid()}"
    names = [f"{prefix}-{i + 1}" for i in range(count)]
    addresses = [f"10.88.{os.getpid() % 250}.{i + 1}" for i in range(count)]
    cables = [f"{prefix}v{i + 1}" for i in range(count)]
    switch = f"{prefix}-0"
    begin = [beginning(name, i not in without_board) for i, name in enumerate(names)]

    with tempfile.TemporaryDirectory() as folder:
        # Stands for ssh: AGENT HOST COMMAND...
        agent = Path(folder) / "agent"
        cases = [
            f"{address}) host={name}; begin={shlex.quote(first)};;\n"
            for address, name, first in zip(addresses, names, begin, strict=True)
        ]
        agent.write_text(
            f"#!/bin/bash\ncase $1 in\n{''.join(cases)}esac\nshift\n"
            'exec ip netns exec $host unshare --uts --mount bash -c "$begin && $*"\n'
        )
        agent.chmod(0o755)
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
            ip("-n", switch, "link", "set", "switch", "up")
            for name, address, cable in zip(names, addresses, cables, strict=True):
                port = f"{cable}s"
                ends = ["netns", name, "type", "veth", "peer", "name", port, "netns", switch]
                ip("link", "add", cable, *ends)
                ip("-n", switch, "link", "set", port, "master", "switch", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", cable, "up")
                if mbit:
                    limit(name, cable, mbit)
            start = f'{begin[0]} && exec "$@"'
            inside = ["ip", "netns", "exec", names[0], "unshare", "--uts", "--mount"]
            inside += ["bash", "-c", start, "-"]
            options = ["--prtemca", "plm_ssh_agent", str(agent), "--mca", "pml", "ob1"]
            options += ["--mca", "btl", "tcp,self"]
            options += ["--host", ",".join(f"{address}:64" for address in addresses)]
            options += ["--map-by", "node:OVERSUBSCRIBE"]
            yield Hosts([*inside, mpirun.find_mpiexec(sys.executable), *options], names, cables)
        finally:
            # Open MPI does not end what runs on a host whose cable is interrupted.
            for name in names:
                send_signal(name, signal.SIGKILL)
            for name in (*names, switch):
                ip("netns", "del", name, check=False)


def passed_on() -> list[str]:
    """Options of mpiexec for PASSED, and for our own."""
    names = [name for name in os.environ if name in PASSED or name.startswith("MPI4JAX_")]
    return [word for name in names for word in ("-x", name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, help="rate of each cable, either way")
    parser.add_argument("ranks_per_host", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    if why := missing():
        raise SystemExit(why)
    with hosts(options.hosts, options.mbit) as several:
        ranks = str(options.hosts * options.ranks_per_host)
        job = [*several.mpiexec, *passed_on(), "-n", ranks, *command]
        return subprocess.run(job, env=mpirun.environment_outside_mpi()).returncode


if __name__ == "__main__":
    sys.exit(main())
