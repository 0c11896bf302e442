"""Merge the timelines of the ranks of a job, and draw them.

    MPI4JAX_TRACE=trace.json mpiexec -n 4 python program.py  # writes trace.0.json and so on
    mpi4jax timeline trace.*.json --output merged.json --png merged.png

The result opens in https://ui.perfetto.dev and chrome://tracing. Ranks' clocks are aligned by the
ends of collectives that no rank leaves before all have come. In each collective, the time until
the last rank has come is marked as waiting; the rest is transfer. The first call of each operation
is counted apart, because ranks then wait for others that compile. Nothing here needs MPI or JAX, so
`mpi4jax timeline` runs this file without the package around it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

Event = dict[str, Any]
# An occurrence of a collective: the communicator's key, what identifies its members, and the number
# of the collective.
Occurrence = tuple[str, str, int]

# The legend of the time that a rank spends outside of MPI.
_OUTSIDE = "outside of operations"
# Ranks and source lines that are printed.
_MOST = 16
# No rank leaves these collectives before all ranks have begun them.
_SYNCHRONISING = ("allgather", "allreduce", "alltoall", "barrier")


def load(path: Path) -> list[Event]:
    """Return the events of one rank; the file of a job that was aborted lacks its end."""
    text = path.read_text()
    while True:
        try:
            events: list[Event] = json.loads(text.rstrip().rstrip(",") + "\n]")
            return events
        except json.JSONDecodeError as error:
            text, _, rest = text.rpartition("\n")
            if not rest or not text:
                raise ValueError(f"{path} is not a timeline of mpi4jax: {error}") from error


def _collectives(events: list[Event]) -> dict[Occurrence, dict[int, Event]]:
    found: dict[Occurrence, dict[int, Event]] = {}
    for event in events:
        args = event["args"]
        if event["ph"] == "X" and args["record"]["collective"]:
            occurrence = args["key"], args["members"], args["record"]["sequence"]
            found.setdefault(occurrence, {})[event["pid"]] = event
    return found


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def offsets(events: list[Event]) -> dict[int, float]:
    """Return by how many microseconds each rank's clock is ahead of the clock of the lowest rank.

    The ranks of one host have one clock.
    """
    hosts = {event["pid"]: event["args"].get("host", "") for event in events if event["ph"] == "M"}
    first = min(hosts)
    differences: dict[str, list[float]] = {host: [] for host in hosts.values()}
    for by_rank in _collectives(events).values():
        reference = by_rank.get(first)
        if reference is None or reference["name"] not in _SYNCHRONISING:
            continue
        for rank, event in by_rank.items():
            differences[hosts[rank]].append(_end(event) - _end(reference))
    ahead = {host: statistics.median(d) if d else 0.0 for host, d in differences.items()}
    ahead[hosts[first]] = 0.0
    return {rank: ahead[host] for rank, host in sorted(hosts.items())}


def _place(event: Event) -> tuple[str, str]:
    """Return the function of mpi4jax that the user has called, or "", and the user's line."""
    site = event["args"]["record"].get("site") or "an unknown line"
    function, _, line = site.rpartition(" at ")
    return function, line


def merge(events: list[Event]) -> list[Event]:
    """Return all events on one clock that starts at 0.

    Waits are events of their own, and so are the functions of mpi4jax that the user has called:
    each lasts as long as an operation inside of it.
    """
    ahead = offsets(events)
    spans = [{**e, "ts": e["ts"] - ahead[e["pid"]]} for e in events if e["ph"] == "X"]
    start = min((e["ts"] for e in spans), default=0.0)
    for event in spans:
        event["ts"] -= start
    waits = []
    for by_rank in _collectives(spans).values():
        last = max(event["ts"] for event in by_rank.values())
        for event in by_rank.values():
            wait = min(max(last - event["ts"], 0.0), event["dur"])
            event["args"] = {**event["args"], "wait_us": wait, "transfer_us": event["dur"] - wait}
            waits.append({**event, "name": "wait", "cat": "wait", "dur": wait, "args": {}})
    around = []
    called = set()
    for event in sorted(spans, key=lambda e: float(e["ts"])):
        record, (function, _) = event["args"]["record"], _place(event)
        what = (record.get(name) for name in ("site", "dtype", "count", "source", "dest"))
        call = event["pid"], event["name"], *what
        event["args"] = {**event["args"], "first": call not in called}
        called.add(call)
        if function:
            around.append({**event, "name": function, "cat": "function", "args": {}})
    # Viewers show an event inside of an earlier one of the same time. Sorting keeps this order.
    found = [*around, *spans, *(w for w in waits if w["dur"] > 0)]
    found.sort(key=lambda e: (e["ts"], -e["dur"]))
    return [*(e for e in events if e["ph"] == "M"), *found]


def _operations(events: list[Event]) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["cat"] == "mpi"]


class Total:
    """Total of operations; times are in milliseconds.

    Attributes:
        calls: number of operations.
        messages: messages that were sent to other ranks, without the messages of collectives, which
            the MPI library chooses.
        bytes: bytes of the operands.
        time, waiting: without first calls.
        first: time of first calls, in which ranks wait for others that compile.
        ranks: of these operations.
    """

    def __init__(self, operations: list[Event]):
        took = dict.fromkeys((True, False), 0.0)
        self.waits = dict.fromkeys([event["pid"] for event in operations], 0.0)
        for event in operations:
            took[event["args"]["first"]] += event["dur"] / 1e3
            wait = 0.0 if event["args"]["first"] else event["args"].get("wait_us", 0.0)
            self.waits[event["pid"]] += wait / 1e3
        sent = [e["args"] for e in operations if not e["name"].startswith("wait for ")]
        self.calls, self.ranks = len(operations), len(self.waits)
        self.messages = sum(args.get("messages") or 0 for args in sent)
        self.bytes = sum(args.get("bytes") or 0 for args in sent)
        self.time, self.first, self.waiting = took[False], took[True], sum(self.waits.values())

    def words(self, of: str = "") -> str:
        """Return what all ranks did, with times per rank; ``of``: the operation."""
        words = f"{self.calls} calls{of and f' of {of}'} on {self.ranks} ranks, "
        if self.messages:
            words += f"{self.messages} messages, "
        words += f"{_size(self.bytes)}, {self.time / self.ranks:.3f} ms per rank"
        if self.waiting:
            last = min(self.waits, key=lambda rank: self.waits[rank])
            words += f", of which {self.waiting / self.ranks:.3f} ms waiting (least on rank {last})"
        return f"{words}; first calls {self.first / self.ranks:.3f} ms"


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def by_line(events: list[Event]) -> list[str]:
    """Return what operations took on all ranks, by source line, the longest first.

    Operations of a function of mpi4jax stand below it.
    """
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in _operations(events):
        function, line = _place(event)
        groups.setdefault((function or event["name"], line), []).append(event)
    said = []
    for (name, line), group in groups.items():
        total, by_name = Total(group), dict[str, list[Event]]()
        for event in group:
            by_name.setdefault(event["name"], []).append(event)
        inner = "" if name in by_name else next(iter(by_name))
        words = [f"{name} at {line}: {total.words(inner if len(by_name) == 1 else '')}"]
        if len(by_name) > 1:
            words += [f"{inner}: {Total(of).words()}" for inner, of in by_name.items()]
        said.append((total.time + total.first, words))
    return ["\n      ".join(words) for _, words in sorted(said, reverse=True)]


_COLUMNS = "operations", "messages", "size", "time", "waiting", "first calls", "clock"


def _row(name: str, total: Total, clock: str) -> list[str]:
    times = (f"{time:.3f} ms" for time in (total.time, total.waiting, total.first))
    return [name, str(total.calls), str(total.messages), _size(total.bytes), *times, clock]


def by_rank(events: list[Event], ahead: dict[int, float]) -> list[str]:
    """Return a table of what each rank did, and of the sum; the ranks that waited least if there
    are many."""
    operations = _operations(events)
    of_rank: dict[int, list[Event]] = {rank: [] for rank in ahead}
    for event in operations:
        of_rank[event["pid"]].append(event)
    totals = {rank: Total(of) for rank, of in of_rank.items()}
    shown = list(totals)
    if len(shown) > _MOST:
        shown = sorted(shown, key=lambda rank: totals[rank].waiting)[:_MOST]
    rows = [["", *_COLUMNS]]
    rows += [_row(f"rank {rank}", totals[rank], f"{ahead[rank]:+.1f} us") for rank in shown]
    rows.append(_row("sum of all ranks", Total(operations), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    if len(totals) > _MOST:
        words = f"the {_MOST} of {len(totals)} ranks that waited least, for which the others wait:"
        lines.insert(0, words)
    return lines


def draw(events: list[Event], path: Path) -> None:
    """Draw a row per rank, a color per operation, waiting in gray, and computation in yellow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    spans = [e for e in events if e["ph"] == "X" and e["cat"] != "function"]
    ranks = sorted({e["pid"] for e in spans})
    names = sorted({e["name"] for e in spans} - {"wait"})
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    colours["wait"] = (0.75, 0.75, 0.75, 1.0)
    colours[_OUTSIDE] = (1.0, 0.87, 0.55, 1.0)
    end = max((_end(e) for e in spans), default=0.0) / 1e3
    figure, axes = plt.subplots(figsize=(8, 1.3 + 0.4 * len(ranks)), layout="constrained")
    for rank in ranks:
        axes.broken_barh([(0, end)], (rank - 0.4, 0.8), facecolors=colours[_OUTSIDE])
    for name in [*names, "wait"]:
        for rank in ranks:
            bars = [
                (e["ts"] / 1e3, e["dur"] / 1e3)
                for e in spans
                if (e["name"], e["pid"]) == (name, rank)
            ]
            axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colours[name])
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.legend(
        handles=[Patch(color=colours[name], label=name) for name in [_OUTSIDE, "wait", *names]],
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpi4jax.timeline", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, help="one per rank")
    parser.add_argument("-o", "--output", type=Path, default=Path("timeline.json"))
    parser.add_argument("--png", type=Path, help="draw a picture too (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.png and importlib.util.find_spec("matplotlib") is None:
        print(
            "mpi4jax.timeline: --png needs Matplotlib, which is not installed "
            "(pip install matplotlib)",
            file=sys.stderr,
        )
        return 1
    try:
        events = [event for file in options.files for event in load(file)]
    except (OSError, ValueError) as error:
        print(f"mpi4jax.timeline: {error}", file=sys.stderr)
        return 1
    merged = merge(events)
    options.output.write_text(json.dumps({"traceEvents": merged}))
    print(*by_rank(merged, offsets(events)), sep="\n")
    lines = by_line(merged)
    print("by source line, of all ranks:", *lines[:_MOST], sep="\n  ")
    if len(lines) > _MOST:
        print(f"  and {len(lines) - _MOST} more")
    print(f"wrote {options.output}")
    if options.png:
        draw(merged, options.png)
        print(f"wrote {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
