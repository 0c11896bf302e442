"""docs/benchmarks.md: tables and plots of what benches/run.py has measured."""

import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

NEW = "mpi4jax"
OLD = "0.9.1"
HALO = "mpi4jax, halo_exchange"
GLOO = "gloo"

# For the times of all rounds.
DATA = Path(__file__).with_name("results")


class Key(NamedTuple):
    ranks: int
    op: str
    nbytes: int
    contender: str
    mode: str
    where: str = ""


# Seconds, or page faults, of one operation in each round.
Results = dict[Key, list[float]]


def size_name(nbytes: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def time_name(seconds: float) -> str:
    """Three digits in the unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(versions: dict) -> str:
    model = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((s.split(": ")[1] for s in lines if s.startswith("model name")), model)
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{model}, {cores()} cores; Python {python}, JAX {versions.get('jax')}, "
        f"MPI: {versions.get('mpi')}"
    )


def busy(load: float) -> list[str]:
    """A warning, if other programs ran already."""
    if load < 0.5 * cores():
        return [f"The load average before was {load:.1f}.", ""]
    return [
        f"**The machine was busy**: a load average of {load:.1f} on {cores()} cores before it",
        "began. Ranks that wait for each other then wait for other programs too: take no figure of",
        "two or more ranks for what a quiet machine would show.",
        "",
    ]


def ratio(above: list[list[float]], below: list[list[float]]) -> tuple[float, float, float]:
    """The ratios of the sums in each round: their median, and their quartiles."""
    rounds = zip(zip(*above, strict=True), zip(*below, strict=True), strict=True)
    return spread([sum(a) / sum(b) for a, b in rounds])


def spread(values: list[float]) -> tuple[float, float, float]:
    """The median and the quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def ratio_name(value: float, low: float, high: float) -> str:
    digits = ".0f" if value >= 100 else ".2f"
    return f"{value:{digits}} ({low:{digits}} to {high:{digits}})"


# ---- Operations

# Title, contender, mode
COLUMNS = (
    ("raw loop", NEW, "raw"),
    ("mpi4py", NEW, "mpi4py"),
    ("in a loop", NEW, "loop"),
    ("in a chain", NEW, "chain"),
    ("jitted", NEW, "jit"),
    ("jitted, donated", NEW, "donated"),
    ("eager", NEW, "eager"),
    ("0.9.1 in a loop", OLD, "loop"),
    ("0.9.1 in a chain", OLD, "chain"),
    ("0.9.1 jitted", OLD, "jit"),
    ("0.9.1 eager", OLD, "eager"),
    ("gloo in a chain", GLOO, "chain"),
    ("gloo jitted", GLOO, "jit"),
)

# Title, and which time is divided by which
RATIOS = (
    ("in a loop / raw loop", (NEW, "loop"), (NEW, "raw")),
    ("jitted / (no-op + raw)", (NEW, "jit"), (NEW, "noop"), (NEW, "raw")),
    ("jitted / mpi4py", (NEW, "jit"), (NEW, "mpi4py")),
    ("0.9.1 / ours, in a loop", (OLD, "loop"), (NEW, "loop")),
    ("0.9.1 / ours, in a chain", (OLD, "chain"), (NEW, "chain")),
    ("0.9.1 / ours, jitted", (OLD, "jit"), (NEW, "jit")),
    ("0.9.1 / ours, eager", (OLD, "eager"), (NEW, "eager")),
    ("gloo / ours, in a chain", (GLOO, "chain"), (NEW, "chain")),
    ("gloo / ours, jitted", (GLOO, "jit"), (NEW, "jit")),
)


def cases(results: Results) -> dict[tuple[int, str], list[tuple[str, int]]]:
    """{(ranks, where): (operation, size)} of what was measured."""
    found: dict[tuple[int, str], dict] = {}
    for key in results:
        found.setdefault((key.ranks, key.where), {})[key.op, key.nbytes] = None
    return {place: list(measured) for place, measured in found.items()}


def grid(titles: list[str], rows: list[list[str]]) -> list[str]:
    """A table, without columns that are empty."""
    full = [i for i in range(len(titles)) if any(row[i] for row in rows)]

    def line(cells):
        return "| " + " | ".join(cells[i] for i in full) + " |"

    rule = "| " + " | ".join("---" if i < 2 else "---:" for i in full) + " |"
    return [line(titles), rule, *map(line, rows), ""]


def cell(seconds: list[float] | None, faults: list[float] | None) -> str:
    """The median time, with the pages that one operation had to wait for, if any."""
    if not seconds:
        return ""
    missing = round(statistics.median(faults)) if faults else 0
    return time_name(statistics.median(seconds)) + (f" ({missing})" if missing else "")


def operations(results: Results, faults: Results) -> list[str]:
    out = []
    for (ranks, where), measured in cases(results).items():
        times, ratios = [], []
        for op, nbytes in measured:
            name = [op, "" if op == "barrier" else size_name(nbytes)]

            def of(contender, mode, case=(ranks, op, nbytes), where=where):
                return results.get(Key(*case, contender, mode, where))

            keys = [Key(ranks, op, nbytes, who, mode, where) for _, who, mode in COLUMNS]
            times.append([*name, *(cell(results.get(key), faults.get(key)) for key in keys)])
            row = list(name)
            for _, above, *below in RATIOS:
                terms = [of(*above), *(of(*one) for one in below)]
                row.append(ratio_name(*ratio(terms[:1], terms[1:])) if all(terms) else "")
            ratios.append(row)
        title = f"{ranks} rank{'s' if ranks > 1 else ''}{where}"
        columns = ["op", "size", *(title for title, *_ in COLUMNS)]
        out += [f"### {title}: time of one operation", "", *grid(columns, times)]
        out += [f"### {title}: ratios", ""]
        out += grid(["op", "size", *(title for title, *_ in RATIOS)], ratios)
    return out


STYLES = {
    (NEW, "raw"): ("raw MPI, C loop", "black", "--", ""),
    (NEW, "mpi4py"): ("mpi4py", "0.55", "--", ""),
    (NEW, "noop"): ("jitted no-op", "0.55", ":", ""),
    (NEW, "loop"): ("mpi4jax, in a jitted loop", "#0b4f8a", "-", "o"),
    (NEW, "jit"): ("mpi4jax, jitted", "#2a8fd8", "-", "s"),
    (NEW, "eager"): ("mpi4jax, eager", "#8cc8f0", "-", "^"),
    (OLD, "loop"): ("0.9.1, in a jitted loop", "#8a2f0b", "-", "o"),
    (OLD, "jit"): ("0.9.1, jitted", "#e06a2a", "-", "s"),
    (OLD, "eager"): ("0.9.1, eager", "#f5b48c", "-", "^"),
    (GLOO, "jit"): ("JAX's own (gloo), jitted", "#3a8a4d", "-", "s"),
}


def plot_operations(results: Results, path: Path) -> None:
    """Time by size, for each of the operations that were measured at all sizes."""
    import matplotlib.pyplot as plt

    sizes = sorted({key.nbytes for key in results if key.op in ("allreduce", "sendrecv")})
    places = {
        op: [place for place, measured in cases(results).items() if op in dict(measured)]
        for op in ("allreduce", "sendrecv")
    }
    places = {op: where for op, where in places.items() if where}
    columns = max(map(len, places.values()), default=1)
    figure, axes = plt.subplots(
        max(1, len(places)), columns, figsize=(3.2 * columns + 2, 3.4 * len(places) + 0.6),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    handles = {}
    for row, (op, where_measured) in zip(axes, places.items(), strict=False):
        for ax, (ranks, where) in zip(row, where_measured, strict=False):
            for (contender, mode), (label, colour, line, marker) in STYLES.items():
                keys = [k for k in results if k == Key(ranks, op, k.nbytes, contender, mode, where)]
                if keys:
                    times = [statistics.median(results[key]) * 1e6 for key in keys]
                    (handles[label],) = ax.plot(
                        [key.nbytes for key in keys], times, line, color=colour, marker=marker, ms=4
                    )
            ax.set(xscale="log", yscale="log", title=f"{op}, n = {ranks}{where}")
            ax.set_xticks(sizes, [size_name(nbytes) for nbytes in sizes], fontsize=7)
            ax.minorticks_off()
            ax.grid(alpha=0.3)
    figure.supylabel("time of one operation (us)")
    figure.legend(handles.values(), handles.keys(), loc="outside right center")
    save(figure, path)


# ---- The model

Models = dict[tuple[int, str], dict[str, list[float]]]

MODEL_RATIOS = [(NEW, OLD), (HALO, OLD)]

MODEL_NOTES = """\
*0.9.1* runs our example, the same program. It is bound by computing and memory and exchanges once
per step, so no package can make it much faster.
"""


def model_ratio(times: dict[str, list[float]], new: str, old: str) -> str:
    """How much faster the model is with ``new``; empty if one of them was not measured."""
    if new not in times or old not in times:
        return ""
    return ratio_name(*ratio([times[old]], [times[new]]))


def model_table(models: Models) -> list[str]:
    names = list(dict.fromkeys(name for times in models.values() for name in times))
    rows = []
    for (ranks, where), times in models.items():
        row = [str(ranks), where]
        row += [
            f"{1 / statistics.median(times[name]):.1f}" if name in times else "" for name in names
        ]
        row += [model_ratio(times, new, old) for new, old in MODEL_RATIOS]
        rows.append(row)
    titles = ["ranks", "where", *(f"{name}, steps/s" for name in names)]
    return grid([*titles, *(f"{new} over {old}" for new, old in MODEL_RATIOS)], rows)


def plot_model(models: Models, path: Path) -> None:
    import matplotlib.pyplot as plt

    colours = {NEW: "#2a8fd8", HALO: "#0b4f8a", OLD: "#e06a2a"}
    names = [name for name in colours if any(name in times for times in models.values())]
    figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * 0.2 for k in range(len(models))]
        speeds = [
            1 / statistics.median(times[name]) if name in times else 0 for times in models.values()
        ]
        ax.bar(at, speeds, 0.19, color=colours[name], label=name)
    ax.set_xticks(range(len(models)), [f"n = {ranks}\n{where}" for ranks, where in models])
    ax.set(ylabel="steps per second", title="shallow-water model")
    ax.legend()
    save(figure, path)


# ---- The page


def save(figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


HOW = """\
Contenders take turns in one run, so that what else happens on the machine happens to all of them.
A time is the median of {rounds} rounds (half as many from 4 MiB on) of about {milliseconds:g} ms,
on the slowest rank; a ratio is the median of the ratios within the rounds, with their quartiles in
brackets. Figures of different runs are not comparable.

In brackets behind a time are the page faults of one operation, on the rank that has most: pages of
memory that it had to wait for. From 1 MiB on, each contender runs until their number is steady.

- *raw loop*: the MPI function in a loop in C, on pages of its own. *mpi4py*: on NumPy arrays,
  called from Python.
- *in a loop*: a jitted `fori_loop` on the same input each time, as in the raw loop; *in a chain*
  each result is the next input.
- *jitted*, *eager*: calls from Python, each waited for. *donated*: each call is given the result of
  the one before, to overwrite.
- *0.9.1*: mpi4jax 0.9.1 with the same JAX, MPI and mpi4py, in an environment of its own.
- *gloo*: JAX's own collectives between processes (`psum` and the like under `shard_map`, with
  `jax_cpu_collectives_implementation="gloo"`), for the operations that it has.
- *no-op*: a jitted function that does nothing.

What an operation gives back as it was (`bcast` on the root, `gather` and `reduce` elsewhere) is not
returned from the functions here: a jitted function copies an argument that it returns.
"""


def summary(results: Results, models: Models) -> list[str]:
    """What to know of it all, where it was measured."""
    rows = []

    def add(what, op, nbytes, *modes, ranks=2):
        times = [results.get(Key(ranks, op, nbytes, *mode)) for mode in modes]
        if all(times):
            value = ratio_name(*ratio(times[:1], times[1:]))
            rows.append([what, f"{op}, {size_name(nbytes)}, n = {ranks}", value])

    add("eager: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "eager"), (NEW, "eager"))
    add("jitted: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "jit"), (NEW, "jit"))
    add("jitted: gloo / mpi4jax", "allreduce", 4, (GLOO, "jit"), (NEW, "jit"))
    add("in a loop: 0.9.1 / mpi4jax", "sendrecv", 4, (OLD, "loop"), (NEW, "loop"))
    for nbytes in (2**22, 2**24, 2**26):
        add("jitted: 0.9.1 / mpi4jax", "allgather", nbytes, (OLD, "jit"), (NEW, "jit"))
        add("jitted: mpi4jax / raw MPI", "allgather", nbytes, (NEW, "jit"), (NEW, "raw"))
    # What loses to the other package is said here too.
    for key in results:
        if key.contender == NEW and key.mode in ("jit", "loop", "chain") and not key.where:
            old = results.get(key._replace(contender=OLD))
            if old and ratio([old], [results[key]])[0] < 1:
                case = (key.op, key.nbytes, (OLD, key.mode), (NEW, key.mode))
                how = {"jit": "jitted"}.get(key.mode, f"in a {key.mode}")
                add(f"{how}: 0.9.1 / mpi4jax", *case, ranks=key.ranks)
    for new, old in MODEL_RATIOS:
        for (ranks, where), times in models.items():
            if value := model_ratio(times, new, old):
                what = f"shallow water: {old} / {new}"
                rows.append([what, f"n = {ranks}, {where}", value])
    return ["## In short", "", *grid(["times", "of", "ratio"], rows)] if rows else []


def write(bench, folder: Path, seconds: float) -> str:
    """benchmarks.md and its pictures in a folder; the text."""
    import matplotlib

    matplotlib.use("Agg")
    args, results = bench.args, bench.results
    today = datetime.datetime.now(datetime.UTC).date()
    how = HOW.format(rounds=args.rounds, milliseconds=args.seconds * 1e3)
    out = ["# Benchmarks", "", "<!-- Made by `make bench`: do not edit. -->", ""]
    out += [f"Measured on {today} by `make bench`, in {seconds / 60:.0f} minutes.", ""]
    out += [f"{machine(bench.versions)}.", "", *busy(bench.load_before)]
    out += [*summary(results, bench.models), "## How", "", how]
    if bench.notes:
        out += ["**Not measured**", "", *(f"- {note}" for note in bench.notes), ""]
    if results:
        plot_operations(results, folder / "benchmarks-operations.png")
        out += ["## Operations", "", "![Time by size](benchmarks-operations.png)", ""]
        out += operations(results, bench.faults)
    if bench.models:
        plot_model(bench.models, folder / "benchmarks-model.png")
        out += ["## Shallow-water model", ""]
        cells = f"{args.size[0]} x {args.size[1]} cells"
        out += [
            f"`examples/shallow_water.py --benchmark`, {cells}, the median of {args.model_rounds}",
            "rounds. More ranks than there are cores share them.",
            "",
            "![Steps per second](benchmarks-model.png)",
            "",
            *model_table(bench.models),
            MODEL_NOTES,
        ]
    raw = {
        "machine": machine(bench.versions),
        "results": [[*key, values, bench.faults.get(key)] for key, values in results.items()],
        "models": [[*key, times] for key, times in bench.models.items()],
    }
    DATA.mkdir(exist_ok=True)
    (DATA / "benchmarks.json").write_text(json.dumps(raw))
    text = "\n".join(out).rstrip() + "\n"
    (folder / "benchmarks.md").write_text(text)
    return text
