"""What JAX gives on virtual devices of one process, computed once for all runs of the tests."""

import hashlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

from reference import COMM, RANK

from mpirun import environment_outside_mpi

REFERENCES = Path(__file__).parent.parent.parent / ".cache" / "references"


def on_devices(program: str, *arguments: object, sources: str) -> object:
    """Run ``python program *arguments file``, which writes a pickle; all ranks get its contents.

    ``sources`` names the files that the result depends on, as a pattern in this directory.
    """
    out = None
    if RANK == 0:
        files = sorted(Path(__file__).parent.glob(sources))
        versions = sorted(f"{of.name} {of.version}" for of in importlib.metadata.distributions())
        text = b"".join(f.read_bytes() for f in files) + "\n".join(versions).encode()
        name = "-".join([hashlib.sha256(text).hexdigest()[:16], *map(str, arguments)])
        file = REFERENCES / name
        if not file.exists():
            REFERENCES.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(f".{os.getpid()}")
            command = [sys.executable, program, *map(str, arguments), str(new)]
            subprocess.run(command, check=True, env=environment_outside_mpi(), timeout=500)
            new.rename(file)
        out = pickle.loads(file.read_bytes())
    return COMM.bcast(out)
