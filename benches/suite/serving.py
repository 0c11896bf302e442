"""What a rank of a contender does: it answers what benches/suite/contenders.py asks, over a socket.

Between two questions it waits in a read, which leaves the processor to the other contenders.
"""

import json
import socket
import sys

import jax
from mpi4py import MPI


def serve(functions):
    """Call functions by name, until the driver hangs up. sys.argv: SOCKET CONTENDER ..."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    with connection.makefile("rw") as driver:

        def say(**message):
            driver.write(json.dumps(message) + "\n")
            driver.flush()

        library, *_ = MPI.Get_library_version().splitlines()[0].split(",")
        versions = {"jax": jax.__version__, "mpi": library}
        say(contender=sys.argv[2], rank=MPI.COMM_WORLD.rank, versions=versions)
        for line in driver:
            request = json.loads(line)
            say(answer=functions[request.pop("function")](**request))
