"""Merge the dumps that the ranks of a job have left, and say who diverged first.

    python -m mpi4jax.report DIRECTORY

The directory is named at the end of the watchdog's report, or is one (``MPI4JAX_DUMP_DIR``) that
contains such directories; then the newest is taken. Nothing here needs MPI or JAX: the file may
be copied and run by itself.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import sys
from pathlib import Path
from typing import Any

from ._job.job import rank_names

Dump = dict[str, Any]
Record = dict[str, Any]
# A communicator as all its ranks know it: key, how often it was made again under that name, and
# members' ranks in COMM_WORLD, the first and the last of each run.
Group = tuple[str, int, tuple[tuple[int, int], ...]]

# What must be equal on all ranks, where the op has it.
_COMPARED = ("op", "reduction", "dtype", "root")


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


def _group(comm: dict[str, Any]) -> Group:
    return comm["key"], comm.get("generation", 1), tuple(map(tuple, comm["world"]))


@functools.cache
def _world(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


def group_of(dump: Dump, record: Record) -> Group:
    return _group(dump["communicators"][record["comm"]])


def _signature(record: Record) -> tuple[Any, ...]:
    count = None if record["any_size"] else record["count"]
    return (*(record[name] for name in _COMPARED), count)


def _collectives(dumps: dict[int, Dump]) -> dict[Group, dict[int, dict[int, Record]]]:
    """Records of collectives by communicator, rank and number."""
    found: dict[Group, dict[int, dict[int, Record]]] = {}
    for rank, dump in dumps.items():
        for comm in dump["communicators"]:
            found.setdefault(_group(comm), {}).setdefault(rank, {})
        for record in dump["records"]:
            if record["collective"]:
                found[group_of(dump, record)][rank][record["sequence"]] = record
    return found


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


def divergences(dumps: dict[int, Dump]) -> list[tuple[float, str]]:
    """Where ranks did different things on a communicator: (time, words), one per communicator."""
    found = []
    for group, ranks in _collectives(dumps).items():
        key, _, runs = group
        numbers = sorted({n for records in ranks.values() for n in records})
        for number in numbers:
            records = {rank: of[number] for rank, of in sorted(ranks.items()) if number in of}
            by_signature: dict[tuple[Any, ...], list[int]] = {}
            for rank, record in records.items():
                by_signature.setdefault(_signature(record), []).append(rank)
            # Ranks that never came; not those whose recorder has forgotten.
            counts = {
                rank: next(
                    c["collectives"] for c in dumps[rank]["communicators"] if _group(c) == group
                )
                for rank in ranks
            }
            behind = [rank for rank, count in counts.items() if count < number]
            behind += [rank for rank in _world(runs) if rank in dumps and rank not in ranks]
            if len(by_signature) < 2 and not behind:
                continue
            start = min(record["started"] for record in records.values())
            parts = [
                f"{rank_names(members)}: {records[members[0]]['text']}"
                for members in by_signature.values()
            ]
            if len(by_signature) > 1:
                words = f"operations of the ranks do not match at collective #{number} of {key}:"
                found.append((start, "\n    ".join([words, *parts])))
            else:
                late = "; ".join(f"rank {rank}: {dumps[rank]['state']}" for rank in sorted(behind))
                words = f"{rank_names(sorted(behind))} never called the collective of {parts[0]}"
                found.append((start, f"{words}\n    {late}"))
            break
    return sorted(found)


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
    if found := divergences(dumps):
        lines.append("who diverged first:")
        lines += [f"  {words}" for _, words in found]
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
