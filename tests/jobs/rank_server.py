"""Ranks in a fraction of the time: JAX is imported once, by a server; each rank is forked from it.

    mpiexec -n 3 python -S rank_server.py SOCKET PROGRAM    a rank that is a client of the server
    python rank_server.py SOCKET                             the server

A client hands over its environment, and its files for output; it ends as its rank does, and its
rank with it. Only with Open MPI, whose ranks find it by what the environment says.
"""

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import sys

FILES = 3  # standard input, output, error


def client(path, program):
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = json.dumps([dict(os.environ), os.getcwd(), program]).encode()
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", range(FILES)))]
    server.sendmsg([len(request).to_bytes(4, "big")], files)
    server.sendall(request)
    status = json.loads(server.makefile().readline() or "1")
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL's cannot be changed
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        signal.pause()
    os._exit(status)


def receive(connection):
    """What a client asks for, and its files."""
    size = FILES * array.array("i").itemsize
    length, extra, *_ = connection.recvmsg(4, socket.CMSG_SPACE(size))
    files = array.array("i")
    for _, _, data in extra:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    request = connection.makefile("rb").read(int.from_bytes(length, "big"))
    return json.loads(request), list(files)


def rank(request, files):
    """Be a rank: runs its program, to the end of Python's and C's functions for the end."""
    environment, folder, program = request
    for target, file in enumerate(files):
        os.dup2(file, target)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [program]
    with open(program) as file:
        return compile(file.read(), program, "exec")


def serve(path):
    """Forks ranks until standard input ends; in a rank, returns its code."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    ready = selectors.DefaultSelector()
    for file in (listener, wake, sys.stdin):
        ready.register(file, selectors.EVENT_READ)
    ranks = {}  # connections by process
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for process in ranks:
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = receive(connection)
                process = os.fork()
                if process == 0:
                    for inherited in (listener, connection, ready, *ranks.values()):
                        inherited.close()
                    os.close(wake), os.close(woken)
                    return rank(request, files)
                for file in files:
                    os.close(file)
                ranks[process] = connection
                ready.register(connection, selectors.EVENT_READ, process)
            elif key.fileobj == wake:
                os.read(wake, 4096)
                with contextlib.suppress(ChildProcessError):
                    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                        connection = ranks.pop(ended[0])
                        with contextlib.suppress(OSError):
                            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                        with contextlib.suppress(KeyError):
                            ready.unregister(connection)
                        connection.close()
            else:  # the client has ended: so does its rank
                ready.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        client(*sys.argv[1:])
    import warnings

    import jax.numpy  # noqa: F401
    import numpy
    import numpy.random  # noqa: F401

    warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, about forks and threads
    exec(serve(sys.argv[1]), {"__name__": "__main__"})
