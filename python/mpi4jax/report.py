"""Say what the ranks of a job did last, and who diverged first.

    python -m mpi4jax.report [DIRECTORY]

The directory is named at the end of the watchdog's report. Without one, the newest job of this user
on this host is taken, also one that runs, or that was killed.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import _native
from ._job.job import rank_names

Dump = dict[str, Any]
Record = dict[str, Any]
# A communicator, named alike on all its ranks: key, how often it was made again under that name,
# and members' ranks in COMM_WORLD, in runs: the first, the last, and the step.
Group = tuple[str, int, tuple[tuple[int, int, int], ...]]

# Fields that must be equal on all ranks, if the op has them.
_COMPARED = ("op", "reduction", "dtype", "root")


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _escaped(value: Any) -> Any:
    """Escape characters of all strings that a terminal acts on, or that could forge lines.

    mpi4jax writes no control characters to a board, but the file may be damaged, or another's.
    """
    if isinstance(value, dict):
        return {key: _escaped(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def _read(board: Path) -> list[Dump]:
    # Opening a FIFO would wait for a process that writes to it.
    if not board.is_file():
        raise ValueError("it is not a regular file")
    dumps: list[Dump] = _escaped(json.loads(_native.read_board(board)))
    return dumps


def _boards(place: Path) -> list[Path]:
    """Return the boards of a job: for the directory of one host, also the boards of the job's other
    hosts."""
    if not (place / "board").exists():
        return [place] if place.exists() and not place.is_dir() else []
    if "+" not in place.name:
        return [place / "board"]
    job, _, _ = place.resolve().name.rpartition("+")
    return sorted(place.resolve().parent.glob(f"{glob.escape(job)}+*/board"))


def load(directory: Path | None = None) -> tuple[dict[int, Dump], list[str]]:
    """Read the boards of a job: the boards in a directory, or the boards of the newest job.

    Returns:
        The states of the ranks, by rank, and what is wrong with files that are no boards.

    Raises:
        FileNotFoundError: if there is no board.
    """
    places = [directory] if directory else [_native.board_place()]
    if directory is None:
        base = Path(os.environ.get("MPI4JAX_DUMP_DIR") or tempfile.gettempdir())
        places.append(base / f"mpi4jax-{os.geteuid()}")
    inside = [path for place in places for path in (*place.glob("*"), *place.glob("mpi4jax-*/*"))]
    wrong = []
    for place in (*places, *sorted(inside, key=_time, reverse=True)):
        dumps: dict[int, Any] = {}
        for board in _boards(place):
            try:
                dumps |= {dump["rank"]: dump for dump in _read(board)}
            except (ValueError, OSError) as error:
                wrong.append(_escaped(f"{board}: {error}"))
        # This process has a board of its own, which does not count.
        if any(dump["pid"] != os.getpid() for dump in dumps.values()):
            return dumps, wrong
    found = "; ".join(wrong) or "no job has left one"
    raise FileNotFoundError(f"there is no board in {_escaped(str(places[0]))}: {found}")


def _group(record: Record) -> Group:
    key, generation, runs = record["comm"]
    return key, generation, tuple(tuple(run) for run in runs)


def _collectives(dumps: dict[int, Dump]) -> dict[Group, dict[int, dict[int, Record]]]:
    """Return the records of collectives by communicator, rank and number."""
    found: dict[Group, dict[int, dict[int, Record]]] = {}
    for rank, dump in dumps.items():
        for record in dump["records"]:
            of = found.setdefault(_group(record), {}).setdefault(rank, {})
            if record["collective"]:
                of[record["sequence"]] = record
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
        lines.append(f"{rank_names(missing)} left nothing: without mpi4jax, or on another host")
    return lines


def divergences(dumps: dict[int, Dump]) -> list[tuple[float, str]]:
    """Return where ranks did different things on a communicator: (time, words), one per
    communicator."""
    found = []
    for group, ranks in _collectives(dumps).items():
        key, _, runs = group
        world = [rank for first, last, step in runs for rank in range(first, last + 1, step)]
        numbers = sorted({n for records in ranks.values() for n in records})
        for number in numbers:
            records = {rank: of[number] for rank, of in sorted(ranks.items()) if number in of}
            by_signature: dict[tuple[Any, ...], list[int]] = {}
            for rank, record in records.items():
                count = None if record["any_size"] else record["count"]
                signature = (*(record[name] for name in _COMPARED), count)
                by_signature.setdefault(signature, []).append(rank)
            # Ranks that never began the collective, except ranks whose recorder may have
            # overwritten the record.
            behind = [rank for rank, of in ranks.items() if max(of, default=0) < number]
            behind += [rank for rank in world if rank in dumps and rank not in ranks]
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
    lines = [f"{len(dumps)} of {first['size']} ranks:"]
    lines += [f"  {line}" for line in _states(dumps)]
    if found := divergences(dumps):
        lines.append("who diverged first:")
        lines += [f"  {words}" for _, words in found]
    for rank, dump in sorted(dumps.items()):
        lines.append(f"last operations of rank {rank} ({dump['host']}, process {dump['pid']}):")
        for record in dump["records"][-5:]:
            ago = max(0.0, dump["time"] - record["started"])
            lines.append(
                f"  {record['text']}: {record['state']}, started {ago:.3f} s before the last"
            )
        for frame in [f for f in dump["python"] if not _is_foreign(f["file"])][:8]:
            lines.append(f"    at {frame['file']}:{frame['line']} in {frame['function']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpi4jax.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", help="the one that a report names; else the newest job"
    )
    options = parser.parse_args(arguments)
    try:
        dumps, wrong = load(options.directory)
    except OSError as error:
        print(f"mpi4jax.report: {error}", file=sys.stderr)
        return 1
    for words in wrong:
        print(f"mpi4jax.report: left out: {words}", file=sys.stderr)
    print(report(dumps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
