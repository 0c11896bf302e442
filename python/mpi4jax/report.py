"""Merge the dumps that the ranks of a job have left, and say who diverged first.

    python -m mpi4jax.report DIRECTORY

The directory is named at the end of the watchdog's report, or is one (``MPI4JAX_DUMP_DIR``) that
contains such directories; then the newest is taken.
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
# A communicator, named alike on all its ranks: key, how often it was made again under that name,
# and members' ranks in COMM_WORLD, the first and the last of each run.
Group = tuple[str, int, tuple[tuple[int, int], ...]]

# Fields that must be equal on all ranks, if the op has them.
_COMPARED = ("op", "reduction", "dtype", "root")


# Fields that a report needs: of a dump, and of the items of its lists.
_FIELDS: dict[str, dict[str, Any]] = {
    "": {
        "rank": int, "size": int, "host": str, "pid": int, "time": (int, float), "reason": str,
        "state": str, "python": list, "communicators": list, "records": list,
    },
    "python": {"file": str, "line": int, "function": str},
    "communicators": {"key": str, "world": list, "collectives": int},
    "records": {
        "comm": int, "op": str, "reduction": (str, type(None)), "dtype": (str, type(None)),
        "root": int, "count": int, "any_size": bool, "collective": bool, "sequence": int,
        "state": str, "started": (int, float), "text": str,
    },
}  # fmt: skip


def _check(item: Any, where: str) -> None:
    for name, kind in _FIELDS[where].items():
        if not isinstance(item, dict) or not isinstance(item.get(name), kind):
            raise ValueError(f"of another version of mpi4jax: {where or 'file'} has no {name!r}")


def read(file: Path) -> Dump:
    """Return the dump in a file.

    Raises:
        ValueError: if the file is not a dump, or is incomplete.
        OSError: if the file cannot be read.
    """
    try:
        dump: Dump = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged, or not a dump: {error}") from error
    _check(dump, "")
    for where in ("python", "communicators", "records"):
        for item in dump[where]:
            _check(item, where)
    for comm in dump["communicators"]:
        for run in comm["world"]:
            if not (isinstance(run, list) and [type(n) for n in run] == [int, int]):
                raise ValueError("of another version of mpi4jax: a communicator has no ranks")
    if any(not 0 <= it["comm"] < len(dump["communicators"]) for it in dump["records"]):
        raise ValueError("of another version of mpi4jax: a record has no communicator")
    if file.name != f"rank{dump['rank']}.json":
        raise ValueError(f"it is the dump of rank {dump['rank']}")
    return dump


def _time(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def load(directory: Path) -> tuple[dict[int, Dump], list[str]]:
    """Return the dumps in a directory by rank; or those in its newest subdirectory that has any.

    Each host of a job has a directory: those beside it, with another host's name, are of the job.

    Returns:
        the dumps, and what is wrong with files that are none.

    Raises:
        FileNotFoundError: if there are no dumps.
    """
    jobs = [*directory.glob("mpi4jax-*/*/"), *directory.glob("*/")]
    for folder in (directory, *sorted(jobs, key=_time, reverse=True)):
        files = sorted(folder.glob("rank*.json"))
        if not files:
            continue
        if "+" in folder.name:
            job, _, _ = folder.resolve().name.rpartition("+")
            files = sorted(folder.resolve().parent.glob(f"{glob.escape(job)}+*/rank*.json"))
        dumps, wrong = {}, []
        for file in files:
            try:
                dump = read(file)
                dumps[dump["rank"]] = dump
            except (ValueError, OSError) as error:
                wrong.append(f"{file}: {error}")
        return dumps, wrong
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
    """Return where ranks did different things on a communicator: (time, words), one per
    communicator."""
    found = []
    for group, ranks in _collectives(dumps).items():
        key, _, runs = group
        numbers = sorted({n for records in ranks.values() for n in records})
        for number in numbers:
            records = {rank: of[number] for rank, of in sorted(ranks.items()) if number in of}
            by_signature: dict[tuple[Any, ...], list[int]] = {}
            for rank, record in records.items():
                by_signature.setdefault(_signature(record), []).append(rank)
            # Ranks that never came, except those whose recorder may have overwritten the record.
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
    """Return the merged report, as text."""
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
    parser.add_argument("directory", type=Path, help="the one that the watchdog's report names")
    options = parser.parse_args(arguments)
    try:
        dumps, wrong = load(options.directory)
    except OSError as error:
        print(f"mpi4jax.report: {error}", file=sys.stderr)
        return 1
    for words in wrong:
        print(f"mpi4jax.report: left out: {words}", file=sys.stderr)
    if not dumps:
        print(f"mpi4jax.report: no file in {options.directory} is a dump", file=sys.stderr)
        return 1
    print(report(dumps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
