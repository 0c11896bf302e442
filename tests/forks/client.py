"""`python -I -S client.py SOCKET ARGUMENTS...` is `python ARGUMENTS...`, forked by a server.

Under mpiexec it stands for the rank: the forked process has its environment, its directory and its
files, those that the launcher has opened for it included. Signals are passed on, the exit status is
passed back, and the forked process does not outlive this one.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LENGTH = struct.Struct("I")
STATUS = struct.Struct("i")


def ask(server, arguments, environment, folder, files):
    """A connection to a new process. Files: its descriptors, and which of ours each of them is."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    request = [arguments, environment, folder, list(files)]
    text = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(text))], list(files.values()))
    connection.sendall(text)
    return connection


def wait(connection):
    """Its exit status; minus a signal's number if that has ended it."""
    answer = connection.recv(STATUS.size, socket.MSG_WAITALL)
    return STATUS.unpack(answer)[0] if answer else -signal.SIGKILL


def main():
    # Once `listdir` has returned, its own descriptor is closed.
    ours = [int(name) for name in os.listdir("/proc/self/fd")]
    files = {n: n for n in ours if os.path.exists(f"/proc/self/fd/{n}")}
    # A job of MPICH is known by its launcher, and the forked process is not its child.
    environment = {"PMI_JOBID": f"forked-{os.getppid()}"}
    environment |= os.environ
    connection = ask(sys.argv[1], sys.argv[2:], environment, os.getcwd(), files)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = wait(connection)
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
