"""Merge the timelines of the ranks of a job, and draw them.

    MPI4JAX_TRACE=trace.json mpiexec -n 4 python program.py  # writes trace.0.json and so on
    python -m mpi4jax.timeline trace.*.json --output merged.json --png merged.png

The result opens in https://ui.perfetto.dev and chrome://tracing. Ranks' clocks are aligned by the
ends of collectives that no rank leaves before all have come. In each collective, the time until
the last rank has come is marked as waiting; the rest is transfer. Nothing here needs MPI or JAX.
"""

from __future__ import annotations

import argparse
import collections
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
    """Microseconds by which each rank's clock is ahead of the clock of the lowest rank.

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


def merge(events: list[Event]) -> list[Event]:
    """Return all events on one clock that starts at 0, with the waits as events of their own."""
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
    names = [e for e in events if e["ph"] == "M"]
    return [
        *names,
        *sorted([*spans, *(w for w in waits if w["dur"] > 0)], key=lambda e: (e["ts"], -e["dur"])),
    ]


def by_line(events: list[Event]) -> list[str]:
    """Return what operations took on all ranks, by source line, the longest first."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "wait":
            site = event["args"]["record"].get("site") or "an unknown line"
            groups.setdefault((event["name"], site), []).append(event)
    lines = []
    for (name, site), group in groups.items():
        took, waited = collections.Counter[int](), collections.Counter[int]()
        for event in group:
            took[event["pid"]] += event["dur"]
            waited[event["pid"]] += event["args"].get("wait_us", 0.0)
        total, ranks = sum(took.values()), len(took)
        words = (
            f"{name} at {site}: {len(group)} calls on {ranks} ranks, {total / ranks / 1e3:.3f} ms "
            f"per rank"
        )
        if wait := sum(waited.values()):
            last = min(took, key=lambda rank: waited[rank])
            words += f", of which {wait / ranks / 1e3:.3f} ms waiting; least on rank {last}"
        lines.append((total, words))
    return [words for _, words in sorted(lines, reverse=True)]


def draw(events: list[Event], path: Path) -> None:
    """A picture: a row per rank, a color per operation, waiting in gray, computation in yellow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    spans = [e for e in events if e["ph"] == "X"]
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
    said = []
    for rank, ahead in offsets(events).items():
        spans = [e for e in merged if e["ph"] == "X" and e["pid"] == rank]
        ops = [e for e in spans if e["name"] != "wait"]
        wait = sum(e["dur"] for e in spans if e["name"] == "wait")
        words = (
            f"rank {rank}: {len(ops)} operations, {sum(e['dur'] for e in ops) / 1e3:.3f} ms, "
            f"of which {wait / 1e3:.3f} ms waiting; clock {ahead:+.1f} us"
        )
        said.append((wait, rank, words))
    if len(said) > _MOST:
        print(f"the {_MOST} of {len(said)} ranks that waited least, for which the others wait:")
        said = sorted(said)[:_MOST]
    for *_, words in said:
        print(words)
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
