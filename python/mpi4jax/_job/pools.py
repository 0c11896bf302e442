"""Keep worker processes of ``multiprocessing`` from being mistaken for ranks.

A data loader's workers import the program once more, and MPI with it. With the launcher's
variables, MPI would mistake a worker for this rank, and wreck its job. Workers therefore start
without these variables, and MPI in a worker is a job of one process.
"""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Sequence
from typing import Any

# Variables that tell an MPI library its rank, but not its settings (PMIX_MCA_...).
_PREFIXES = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "MPI_LOCAL")

_FIRST = (
    "import os\n"
    "for name in list(os.environ):\n"
    f"    if name.startswith({_PREFIXES}) and '_MCA_' not in name: del os.environ[name]\n"
)


def install() -> None:
    """Install the hook for the start methods ``spawn`` and ``forkserver``.

    A forked child has no MPI.
    """
    original = multiprocessing.util.spawnv_passfds

    def spawn(path: Any, args: Sequence[Any], passfds: Any) -> Any:
        words = list(args)
        command = next((w for w in ("-c", b"-c") if w in words), None)
        if command is not None:
            at = words.index(command) + 1
            first = _FIRST.encode() if isinstance(words[at], bytes) else _FIRST
            words[at] = first + words[at]
        return original(path, words, passfds)

    multiprocessing.util.spawnv_passfds = spawn
