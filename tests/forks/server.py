"""Forks a process for each request of client.py. That is quick: JAX has been imported.

    python server.py SOCKET

Tests start some 500 ranks, and each would take a second to import JAX. mpi4jax and MPI are imported
by the forked process itself: what they find at import is what tests are about.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
import warnings

import compiled_once  # noqa: F401
import jax.export
import jax.extend.core  # as mpi4jax does
import jax.numpy  # noqa: F401
from client import LENGTH, STATUS

PR_SET_PDEATHSIG = 1  # of Linux's prctl

# Out of the way of descriptors that a client passes on by number.
HIGH = 500


def receive(connection):
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 250)
    text = connection.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
    arguments, environment, folder, numbers = json.loads(text)
    return arguments, environment, folder, dict(zip(numbers, files, strict=True))


def become(environment, folder, files):
    """This process, as if the client had executed it."""
    os.setpgid(0, 0)
    # The server may be killed before it sees that the client is gone, with nobody left to end this.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for number, file in files.items()}
    os.closerange(3, HIGH)
    for number, file in high.items():
        os.dup2(file, number)
    os.closerange(HIGH, 2 * HIGH)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def serve(path):
    """Serves until it is terminated; in a forked process it returns what Python is to run."""
    listener = socket.socket(socket.AF_UNIX)
    # Who sees the socket may connect at once.
    listener.bind(f"{path}.new")
    listener.listen(100)
    os.rename(f"{path}.new", path)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not listener:
                tend(selector, key)
                continue
            connection, _ = listener.accept()
            try:
                arguments, environment, folder, files = receive(connection)
            except (ConnectionError, struct.error):  # the client was killed
                connection.close()
                continue
            child = os.fork()
            if child == 0:
                # Now, not when Python collects them: their numbers will be the client's by then.
                for file in (connection, *(key.fileobj for key in selector.get_map().values())):
                    os.close(file) if isinstance(file, int) else file.close()
                selector.close()
                become(environment, folder, files)
                return arguments
            for file in files.values():
                os.close(file)
            of_child = (child, os.pidfd_open(child), connection)
            for file in of_child[1:]:
                selector.register(file, selectors.EVENT_READ, of_child)


def tend(selector, key):
    """The client sends a signal, or is gone; or the child has ended."""
    child, pidfd, connection = key.data
    if key.fd not in selector.get_map():
        return  # the child has ended, in the same round
    if key.fileobj is connection:
        try:
            wanted = connection.recv(1)
        except ConnectionError:
            wanted = b""
        if not wanted:
            selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, wanted[0] if wanted else signal.SIGKILL)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ConnectionError):
        connection.send(STATUS.pack(status))
    for file in (pidfd, connection.fileno()):
        if file in selector.get_map():
            selector.unregister(file)
    connection.close()
    os.close(pidfd)


if __name__ == "__main__":
    # What was imported is never collected: forked processes share its pages.
    gc.freeze()
    with warnings.catch_warnings():
        # JAX warns of forks, because of threads that it has not started yet.
        warnings.simplefilter("ignore", RuntimeWarning)
        program, *rest = serve(sys.argv[1])
    del sys.path[0]  # of this file
    if program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        # Not by runpy, which clears the module before what waits for the exit has run.
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        if program == "-c":
            source, sys.argv, name, folder = rest[0], ["-c", *rest[1:]], "<string>", ""
        else:
            with open(program) as file:
                source = file.read()
            sys.argv, name, folder = [program, *rest], program, os.path.dirname(program)
            main.__file__ = program
        sys.path.insert(0, folder)
        exec(compile(source, name, "exec"), main.__dict__)
