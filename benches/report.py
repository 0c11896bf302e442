"""docs/benchmarks.md: tables and plots of what benches/run.py has measured."""

import datetime
import json
import math
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

NEW = "mpi4jax"
OLD = "0.9.1"
HALO = "mpi4jax, halo_exchange"
# The shallow-water example that 0.9.1 ships.
OLD_EXAMPLE = "0.9.1's own example"
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


# Seconds of one operation in each round.
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


def rate_name(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


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
    """Of the sums of the least times, and the quartiles of the ratios of the rounds."""
    best = sum(map(min, above)) / sum(map(min, below))
    rounds = zip(zip(*above, strict=True), zip(*below, strict=True), strict=True)
    return best, *quartiles([sum(a) / sum(b) for a, b in rounds])


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


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
    ("mpi4jax.jit", NEW, "mpi4jax.jit"),
    ("eager", NEW, "eager"),
    ("jax.jit", NEW, "jax.jit"),
    ("0.9.1 in a loop", OLD, "loop"),
    ("0.9.1 jax.jit", OLD, "jax.jit"),
    ("0.9.1 eager", OLD, "eager"),
    ("gloo in a chain", GLOO, "chain"),
    ("gloo jax.jit", GLOO, "jax.jit"),
)

# Title, and which time is divided by which
RATIOS = (
    ("in a loop / raw loop", (NEW, "loop"), (NEW, "raw")),
    ("mpi4jax.jit / (no-op + raw)", (NEW, "mpi4jax.jit"), (NEW, "noop"), (NEW, "raw")),
    ("mpi4jax.jit / mpi4py", (NEW, "mpi4jax.jit"), (NEW, "mpi4py")),
    ("0.9.1 / ours, in a loop", (OLD, "loop"), (NEW, "loop")),
    ("0.9.1 / mpi4jax.jit", (OLD, "jax.jit"), (NEW, "mpi4jax.jit")),
    ("0.9.1 / ours, jax.jit", (OLD, "jax.jit"), (NEW, "jax.jit")),
    ("0.9.1 / ours, eager", (OLD, "eager"), (NEW, "eager")),
    ("gloo / ours, in a chain", (GLOO, "chain"), (NEW, "chain")),
    ("gloo / mpi4jax.jit", (GLOO, "jax.jit"), (NEW, "mpi4jax.jit")),
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


def operations(results: Results) -> list[str]:
    out = []
    for (ranks, where), measured in cases(results).items():
        times, ratios, rates = [], [], []
        for op, nbytes in measured:
            name = [op, "" if op == "barrier" else size_name(nbytes)]

            def of(contender, mode, case=(ranks, op, nbytes), where=where):
                return results.get(Key(*case, contender, mode, where))

            here = [of(contender, mode) for _, contender, mode in COLUMNS]
            times.append([*name, *(time_name(min(t)) if t else "" for t in here)])
            if nbytes >= 2**16 and op in ("allreduce", "sendrecv"):
                rates.append([*name, *(rate_name(nbytes / min(t)) if t else "" for t in here)])
            row = list(name)
            for _, above, *below in RATIOS:
                terms = [of(*above), *(of(*one) for one in below)]
                row.append(ratio_name(*ratio(terms[:1], terms[1:])) if all(terms) else "")
            ratios.append(row)
        title = f"{ranks} rank{'s' if ranks > 1 else ''}{where}"
        columns = ["op", "size", *(title for title, *_ in COLUMNS)]
        out += [f"### {title}: time of one operation", "", *grid(columns, times)]
        out += [f"### {title}: ratios", "", "In brackets the quartiles over the rounds.", ""]
        out += grid(["op", "size", *(title for title, *_ in RATIOS)], ratios)
        if rates:
            out += [f"### {title}: bytes of a rank's block per second", "", *grid(columns, rates)]
    return out


STYLES = {
    (NEW, "raw"): ("raw MPI, C loop", "black", "--", ""),
    (NEW, "mpi4py"): ("mpi4py", "0.55", "--", ""),
    (NEW, "noop"): ("jitted no-op", "0.55", ":", ""),
    (NEW, "loop"): ("mpi4jax, in a jitted loop", "#0b4f8a", "-", "o"),
    (NEW, "mpi4jax.jit"): ("mpi4jax.jit", "#2a8fd8", "-", "s"),
    (NEW, "eager"): ("mpi4jax, eager", "#8cc8f0", "-", "^"),
    (OLD, "loop"): ("0.9.1, in a jitted loop", "#8a2f0b", "-", "o"),
    (OLD, "jax.jit"): ("0.9.1, jitted", "#e06a2a", "-", "s"),
    (OLD, "eager"): ("0.9.1, eager", "#f5b48c", "-", "^"),
    (GLOO, "jax.jit"): ("JAX's own (gloo), jitted", "#3a8a4d", "-", "s"),
}


def plot_operations(results: Results, path: Path) -> None:
    """Time by size, for each of the operations that were measured at all sizes."""
    import matplotlib.pyplot as plt

    sizes = sorted({key.nbytes for key in results if key.op in ("allreduce", "sendrecv")})
    sizes = [nbytes for nbytes in sizes if nbytes != 2**22] if len(sizes) > 5 else sizes
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
                    best = [min(results[key]) * 1e6 for key in keys]
                    (handles[label],) = ax.plot(
                        [key.nbytes for key in keys], best, line, color=colour, marker=marker, ms=4
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

MODEL_RATIOS = [(NEW, OLD), (HALO, OLD), (NEW, OLD_EXAMPLE), (HALO, OLD_EXAMPLE)]

MODEL_NOTES = """\
*0.9.1* runs our example, the same program. It is bound by computing and memory and exchanges once
per step, so no package can make it much faster. *0.9.1's own example* is the model as that package
ships it: the same equations, grid, discretisation and time-stepping, but it fills ghost cells
twelve times per step, and XLA makes more passes over memory. It takes a minute to compile, so it is
measured once, at n = 2.
"""


def model_ratio(times: dict[str, list[float]], new: str, old: str) -> str:
    """How much faster the model is with ``new``; empty if one of them was not measured."""
    if new not in times or old not in times:
        return ""
    if len(times[old]) != len(times[new]):  # no rounds in common
        return f"{min(times[old]) / min(times[new]):.2f}"
    return ratio_name(*ratio([times[old]], [times[new]]))


def model_table(models: Models) -> list[str]:
    names = list(dict.fromkeys(name for times in models.values() for name in times))
    rows = []
    for (ranks, where), times in models.items():
        row = [str(ranks), where]
        row += [f"{1 / min(times[name]):.1f}" if name in times else "" for name in names]
        row += [model_ratio(times, new, old) for new, old in MODEL_RATIOS]
        rows.append(row)
    titles = ["ranks", "where", *(f"{name}, steps/s" for name in names)]
    return grid([*titles, *(f"{new} over {old}" for new, old in MODEL_RATIOS)], rows)


def plot_model(models: Models, path: Path) -> None:
    import matplotlib.pyplot as plt

    colours = {NEW: "#2a8fd8", HALO: "#0b4f8a", OLD: "#e06a2a", OLD_EXAMPLE: "#8a2f0b"}
    names = [name for name in colours if any(name in times for times in models.values())]
    figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * 0.2 for k in range(len(models))]
        speeds = [1 / min(times[name]) if name in times else 0 for times in models.values()]
        ax.bar(at, speeds, 0.19, color=colours[name], label=name)
    ax.set_xticks(range(len(models)), [f"n = {ranks}\n{where}" for ranks, where in models])
    ax.set(ylabel="steps per second", title="shallow-water model")
    ax.legend()
    save(figure, path)


# ---- LogGP

RANKS = [2, 4, 16, 128, 1024, 10_000]
ON_A_HOST = 128  # ranks, at most, that share memory
SIZES = [4, 2**16, 2**20]


def parameters(networks: dict) -> list[str]:
    rows = [
        [
            name,
            *(f"{value * 1e6:.3g}" for value in (p.one_way, p.latency, p.overhead, p.gap)),
            *(f"{value * 1e9:.3g}" for value in (p.gap_per_byte, p.gamma)),
        ]
        for name, p in networks.items()
    ]
    titles = [
        "between ranks by",
        "L + 2 o (us)",
        "L (us)",
        "o (us)",
        "g (us)",
        "G (ns/B)",
        "gamma (ns/B)",
    ]
    return grid(titles, rows)


def added(results: Results, mode: str) -> float:
    """What mpi4jax adds to MPI's own 4-byte allreduce, in seconds; on one rank, nobody waits."""
    for ranks in (1, 2):
        key = Key(ranks, "allreduce", 4, NEW, mode)
        if key in results:
            return max(0.0, min(results[key]) - min(results[key._replace(mode="raw")]))
    return 0.0


def percent(share: float) -> str:
    return f"{100 * share:.{0 if share > 0.1 else 1 if share > 0.01 else 2}f} %"


def estimate(networks: dict, results: Results) -> list[str]:
    out = []
    loop, call = added(results, "loop"), added(results, "mpi4jax.jit")
    for network, p in networks.items():
        rows = []
        where = " on two hosts" if "hosts" in network else ""
        for nbytes in SIZES:
            for ranks in RANKS if where else [n for n in RANKS if n <= ON_A_HOST]:
                time = p.allreduce(ranks, nbytes)
                measured = results.get(Key(ranks, "allreduce", nbytes, NEW, "raw", where))
                known = f"{min(measured) / time:.2f}" if measured else ""
                shares = [percent(extra / (time + extra)) for extra in (loop, call)]
                rows.append([size_name(nbytes), str(ranks), time_name(time), known, *shares])
        titles = ["size", "ranks", "allreduce", "measured / estimate"]
        titles += ["share of mpi4jax, in a loop", "share of mpi4jax, one call"]
        out += [f"### Parameters of {network}", "", *grid(titles, rows)]
    return out


def plot_estimate(networks: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(networks), figsize=(4.2 * len(networks) + 1, 3.8), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for ax, (network, p) in zip(axes[0], networks.items(), strict=True):
        most = max(RANKS) if "hosts" in network else ON_A_HOST
        ranks = [*(2**k for k in range(1, int(math.log2(most)) + 1)), most]
        for nbytes in SIZES:
            times = [p.allreduce(n, nbytes) * 1e6 for n in ranks]
            ax.plot(ranks, times, "o-", ms=3, label=size_name(nbytes))
        ax.set(xscale="log", yscale="log", xlabel="ranks", title=f"allreduce, {network}")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("estimated time (us)")
    axes[0][0].legend()
    save(figure, path)


ASSUMPTIONS = """\
LogGP describes a message by its latency L, the time o that it keeps a processor busy on each side,
the least time g between two short ones, and the time G per byte of a long one
([Alexandrov et al., SPAA 1995](https://doi.org/10.1145/215399.215427)). They were measured between
two ranks as in [Hoefler, Lichei, Rehm, IPDPS 2007](https://doi.org/10.1109/IPDPS.2007.370593), the
time gamma to add one byte to another with `MPI_Reduce_local`. An allreduce of `s` bytes on `P`
ranks is then the faster of two algorithms
([Thakur, Rabenseifner, Gropp, IJHPCA 2005](https://doi.org/10.1177/1094342005051521)):

- recursive doubling: `ceil(log2 P) * (L + 2 o + (s - 1) G + s gamma)`
- reduce-scatter, then allgather:
  `2 ceil(log2 P) * (L + 2 o) + 2 (P - 1) / P * s G + (P - 1) / P * s gamma`

What mpi4jax adds to MPI's own time does not depend on the number of ranks: it is what it adds to
the 4-byte allreduce on one rank above.

**Assumed**: every pair of ranks is as far apart as the two that were measured, with a path of its
own; all ranks start together.

**Not covered**: contention, topology, several ranks to one network card, switching between
protocols, noise of the operating system (which grows with the number of ranks), imbalance, other
algorithms of the MPI library, networks with hardware reductions.

These are estimates: nothing here has run on more ranks than the tables above say. How good they are
where it could be measured is in the column "measured / estimate".
"""


# ---- The page


def save(figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


HOW = """\
Contenders take turns in one run, so that what else happens on the machine happens to all of them.
A time is the least of {rounds} rounds of about {milliseconds:g} ms, on the slowest rank; a ratio is
that of two such times, and in brackets are the quartiles of the ratios within the rounds. Figures
of different runs are not comparable.

- *raw loop*: the MPI function in a loop in C. *mpi4py*: on NumPy arrays, called from Python.
- *in a loop*: a jitted `fori_loop` on the same input each time, as in the raw loop; *in a chain*
  each result is the next input, and XLA copies it.
- *mpi4jax.jit*, *jax.jit*, *eager*: calls from Python, each waited for.
- *0.9.1*: mpi4jax 0.9.1 with the same JAX, MPI and mpi4py, in an environment of its own.
- *gloo*: JAX's own collectives between processes (`psum` and the like under `shard_map`, with
  `jax_cpu_collectives_implementation="gloo"`), for the operations that it has.
- *no-op*: a jitted function that does nothing.
"""


def summary(results: Results, models: Models) -> list[str]:
    """What to know of it all, where it was measured."""
    rows = []

    def add(what, op, nbytes, *modes, ranks=2):
        times = [results.get(Key(ranks, op, nbytes, *mode)) for mode in modes]
        if all(times):
            value = ratio_name(*ratio(times[:1], times[1:]))
            rows.append([what, f"{op}, {size_name(nbytes)}, n = {ranks}", value])

    large = max((key.nbytes for key in results), default=0)
    add("eager: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "eager"), (NEW, "eager"))
    add("compiled: 0.9.1 / mpi4jax.jit", "allreduce", 4, (OLD, "jax.jit"), (NEW, "mpi4jax.jit"))
    add("compiled: gloo / mpi4jax.jit", "allreduce", 4, (GLOO, "jax.jit"), (NEW, "mpi4jax.jit"))
    add("in a loop: 0.9.1 / mpi4jax", "sendrecv", 4, (OLD, "loop"), (NEW, "loop"))
    add("in a loop: mpi4jax / raw MPI", "allreduce", large, (NEW, "loop"), (NEW, "raw"))
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
        out += operations(results)
    if bench.models:
        plot_model(bench.models, folder / "benchmarks-model.png")
        out += ["## Shallow-water model", ""]
        cells = f"{args.size[0]} x {args.size[1]} cells"
        out += [
            f"`examples/shallow_water.py --benchmark`, {cells}, the best of {args.model_rounds}",
            "rounds. More ranks than there are cores share them.",
            "",
            "![Steps per second](benchmarks-model.png)",
            "",
            *model_table(bench.models),
            MODEL_NOTES,
        ]
    if bench.networks:
        plot_estimate(bench.networks, folder / "benchmarks-loggp.png")
        out += ["## Estimate for more ranks", "", ASSUMPTIONS, *parameters(bench.networks)]
        out += ["![Estimated allreduce](benchmarks-loggp.png)", ""]
        out += estimate(bench.networks, results)
    raw = {
        "machine": machine(bench.versions),
        "results": [[*key, values] for key, values in results.items()],
        "models": [[*key, times] for key, times in bench.models.items()],
    }
    DATA.mkdir(exist_ok=True)
    (DATA / "benchmarks.json").write_text(json.dumps(raw))
    text = "\n".join(out).rstrip() + "\n"
    (folder / "benchmarks.md").write_text(text)
    return text
