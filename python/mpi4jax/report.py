"""Merge the dumps that the ranks of a job have left: where each is, and what it did before.

    python -m mpi4jax.report DIRECTORY

The directory is named at the end of the watchdog's report, or is one (``MPI4JAX_DUMP_DIR``) that
contains such directories; then the newest is taken.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from pathlib import Path
from typing import Any

from ._job.job import rank_names

Dump = dict[str, Any]


def load(directory: Path) -> dict[int, Dump]:
    """The dumps in a directory by rank; or those in its newest subdirectory that has any.

    Each host of a job has a directory: those beside it, with another host's name, are of the job.

    Raises:
        FileNotFoundError: there are none.
    """
    jobs = [*directory.glob("mpi4jax-*/*/"), *directory.glob("*/")]
    folders = [directory, *sorted(jobs, key=lambda p: -p.stat().st_mtime)]
    for folder in folders:
        files = sorted(folder.glob("rank*.json"))
        if files:
            if "+" in folder.name:
                job, _, _ = folder.resolve().name.rpartition("+")
                files = sorted(folder.resolve().parent.glob(f"{glob.escape(job)}+*/rank*.json"))
            return {dump["rank"]: dump for dump in (json.loads(f.read_text()) for f in files)}
    raise FileNotFoundError(f"there are no dumps (rank*.json) in {directory}")


def _states(dumps: dict[int, Dump]) -> list[str]:
    by_state: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        by_state.setdefault(dump["state"], []).append(rank)
    lines = [
        f"{rank_names(ranks)} {'are' if len(ranks) > 1 else 'is'} {state}"
        for state, ranks in sorted(by_state.items(), key=lambda item: -len(item[1]))
    ]
    size = next(iter(dumps.values()))["size"]
    if missing := sorted(set(range(size)) - set(dumps)):
        lines.append(
            f"{rank_names(missing)} left no dump: ended, stopped, without mpi4jax, or on a host "
            "that does not share the directory"
        )
    return lines


def _is_foreign(file: str) -> bool:
    return any(
        part in file for part in ("/site-packages/", "/dist-packages/", "/mpi4jax/_", "<frozen ")
    )


def report(dumps: dict[int, Dump]) -> str:
    """The merged report, as text."""
    first = min(dumps.values(), key=lambda dump: dump["time"])
    left = f"{len(dumps)} of {first['size']} ranks left a dump"
    lines = [f"{left}; rank {first['rank']}: {first['reason']}"]
    lines += [f"  {line}" for line in _states(dumps)]
    for rank, dump in sorted(dumps.items()):
        lines.append(f"last operations of rank {rank} ({dump['host']}, process {dump['pid']}):")
        for record in dump["records"][-5:]:
            ago = dump["time"] - record["started"]
            lines.append(
                f"  {record['text']}: {record['state']}, started {ago:.3f} s before the dump"
            )
        for frame in [f for f in dump["python"] if not _is_foreign(f["file"])][:8]:
            lines.append(f"    at {frame['file']}:{frame['line']} in {frame['function']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpi4jax.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(report(load(options.directory)))
    except FileNotFoundError as error:
        print(f"mpi4jax.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
