"""Writes what benches/suite/run.py has measured into docs/measurements.md, and all of it as CSV."""

import csv
import datetime
import json
import statistics
import sys
from pathlib import Path

from measurements import (
    GLOO,
    HALO,
    KNOWN,
    NEW,
    OLD,
    Key,
    Models,
    Results,
    Run,
    busy,
    interval,
    machine,
    ratio,
    ratio_of,
    rounds_of,
    size_name,
    spread,
)

# For the times of all rounds.
DATA = Path(__file__).with_name("results")

# ---- Operations

# Title, contender, mode
COLUMNS = (
    ("raw loop", NEW, "raw"),
    ("mpi4py", NEW, "mpi4py"),
    ("in a loop", NEW, "loop"),
    ("in a chain", NEW, "chain"),
    ("jitted", NEW, "jit"),
    ("jitted, donated", NEW, "donated"),
    ("psum, jitted", NEW, "psum"),
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
    ("gloo / ours, psum", (GLOO, "jit"), (NEW, "psum")),
)


def grid(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table, without columns that are empty."""
    full = [i for i in range(len(titles)) if any(row[i] for row in rows)]

    def line(cells):
        return "| " + " | ".join(cells[i] for i in full) + " |"

    rule = "| " + " | ".join("---" if i < 2 else "---:" for i in full) + " |"
    return [line(titles), rule, *map(line, rows), ""]


def times_table(results: Results, faults: Results) -> list[list]:
    """Return the rows of benchmarks-times.csv: a row for each operation, and way to call it."""
    names = {(contender, mode): name for name, contender, mode in COLUMNS}
    rows: list[list] = [["ranks", "hosts", "operation", "bytes", "call", "seconds", "page faults"]]
    for key, seconds in results.items():
        if name := names.get((key.contender, key.mode)):
            missing = round(statistics.median(faults[key])) if faults.get(key) else 0
            median = float(f"{statistics.median(seconds):.3g}")
            hosts = key.where.removeprefix(" on ") or "one host"
            rows.append([key.ranks, hosts, key.op, key.nbytes, name, median, missing])
    return rows


def ratios_table(results: Results) -> list[list]:
    """Return the rows of benchmarks-ratios.csv: medians of the ratios in each round, with
    quartiles."""
    rows: list[list] = [
        [
            "ranks",
            "hosts",
            "operation",
            "bytes",
            "ratio",
            "median",
            "lower",
            "upper",
            "known to 5 %",
        ]
    ]
    for ranks, op, nbytes, where in dict.fromkeys((k[0], k[1], k[2], k.where) for k in results):
        for title, above, *below in RATIOS:
            keys = [Key(ranks, op, nbytes, *way, where) for way in (above, *below)]
            if all(results.get(key) for key in keys):
                values = rounds_of([results[keys[0]]], [results[key] for key in keys[1:]])
                digits = [float(f"{value:.3g}") for value in spread(values)]
                known = "yes" if interval(values) <= KNOWN else "no"
                hosts = where.removeprefix(" on ") or "one host"
                rows.append([ranks, hosts, op, nbytes, title, *digits, known])
    return rows


def write_csv(rows: list[list], path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


# ---- The model

MODEL_RATIOS = [(NEW, OLD), (HALO, OLD)]

MODEL_NOTES = """\
Computation and memory bandwidth limit it: no package can make it much faster.
"""


def model_ratio(times: dict[str, list[float]], new: str, old: str) -> str:
    """How much faster the model is with ``new``; empty if one of them was not measured."""
    if new not in times or old not in times:
        return ""
    return ratio_of([times[old]], [times[new]])


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


# ---- The page


HOW = """\
Contenders alternate in one run. A time is the median of its rounds on the slowest rank, a ratio the
median of the ratios within the rounds, with quartiles. There are {rounds} rounds of about
{milliseconds:g} ms (a third as many from 4 MiB on){more}. `~` marks a median that is not known to
5 % (95 % interval). Figures of different runs are not comparable. Page faults were counted for one
operation, on the rank with most.

- *raw loop*: the MPI function in a loop in C. *mpi4py*: on NumPy arrays, from Python.
- *in a loop*: a jitted `fori_loop` on the same input; *in a chain*: each result is the next input.
- *jitted*, *eager*: calls from Python, each waited for. *donated*: each overwrites the result of
  the one before.
- *psum*: `psum` in `mpi4jax.shard_map`, the function that gloo runs.
- *0.9.1*: mpi4jax 0.9.1 with the same JAX, MPI and mpi4py.
- *gloo*: JAX's own collectives between processes (`psum` and the like under `shard_map`).
- *no-op*: a jitted function that does nothing.

Operands that an operation returns unchanged are not returned here: a jitted function would copy
them.
"""


BEGIN = "<!-- measurements: benchmarks, made by `make bench`: do not edit. -->\n"
END = "<!-- end of the benchmarks -->\n"
MODE_NAMES = {"eager": "eager", "jit": "jitted", "loop": "in a loop", "chain": "in a chain"}


def summary(results: Results, models: Models) -> list[str]:
    """Return a summary of what was measured."""
    rows = []

    def add(what, op, nbytes, *modes, ranks=2):
        times = [results.get(Key(ranks, op, nbytes, *mode)) for mode in modes]
        if all(times):
            value = ratio_of(times[:1], times[1:])
            rows.append([what, f"{op}, {size_name(nbytes)}, n = {ranks}", value])

    add("eager: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "eager"), (NEW, "eager"))
    add("jitted: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "jit"), (NEW, "jit"))
    for nbytes in (4, 2**16, 2**22):
        add("jitted psum: gloo / mpi4jax", "allreduce", nbytes, (GLOO, "jit"), (NEW, "psum"))
    add("in a loop: mpi4jax / raw MPI", "sendrecv", 4, (NEW, "loop"), (NEW, "raw"))
    add("jitted: mpi4jax / raw MPI", "allgather", 2**26, (NEW, "jit"), (NEW, "raw"))
    if value := model_ratio(models.get((2, "one host"), {}), HALO, OLD):
        rows.append([f"shallow water: {OLD} / {HALO}", "n = 2", value])
    out = ["### In short", "", *grid(["times", "of", "ratio"], rows)] if rows else []
    lost = slower(results)
    return (
        [*out, "Slower than another package, whose time over ours is:", "", *lost, ""]
        if lost
        else out
    )


def slower(results: Results) -> list[str]:
    """Return the cases in which another package was faster, by package, mode and number of
    ranks."""
    lost: dict[str, list[str]] = {}
    for key in results:
        for other in (OLD, GLOO):
            if key.contender == NEW and key.mode in MODE_NAMES and not key.where:
                times = results.get(key._replace(contender=other))
                value = ratio([times], [results[key]])[0] if times else 1
                if value < 1:
                    size = "" if key.op == "barrier" else f" of {size_name(key.nbytes)}"
                    where = f"{other}, {MODE_NAMES[key.mode]}, n = {key.ranks}"
                    lost.setdefault(where, []).append(f"{key.op}{size} {value:.2f}")
    return [f"- {where}: {', '.join(cases)}." for where, cases in lost.items()]


BY_SIZE = """\
![The time of a jitted call by size, from 4 bytes to 64 MiB, of MPI, mpi4jax, 0.9.1 and JAX's own \
collectives](benchmarks-sizes.png)

All operations, sizes and ways to call: [times](benchmarks-times.csv) and \
[ratios](benchmarks-ratios.csv).
"""


def page(run: Run, folder: Path) -> str:
    """Write the section of benchmarks into measurements.md in a directory; return its text."""
    import matplotlib

    matplotlib.use("Agg")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plots"))
    import plots

    longer = any(len(times) > run.rounds for times in run.results.values())
    more = ", and more while a ratio is not known and time is left" if longer else ""
    how = HOW.format(rounds=run.rounds, milliseconds=run.seconds * 1e3, more=more)
    out = ["## Benchmarks", ""]
    out += [f"Measured on {run.date} by `make bench`, in {run.minutes:.0f} minutes.", ""]
    out += [f"{run.machine}.", "", *busy(run.load)]
    out += summary(run.results, run.models)
    if run.results:
        plots.plot_calls(run.results, folder / "benchmarks-calls.png")
        plots.plot_sizes(run.results, folder / "benchmarks-sizes.png")
        write_csv(times_table(run.results, run.faults), folder / "benchmarks-times.csv")
        write_csv(ratios_table(run.results), folder / "benchmarks-ratios.csv")
        out += [BY_SIZE]
    out += ["### How", "", how]
    if run.notes:
        out += ["**Not measured**", "", *(f"- {note}" for note in run.notes), ""]
    if run.models:
        out += ["### Shallow-water model", ""]
        cells = f"{run.size[0]} x {run.size[1]} cells"
        out += [
            f"`examples/shallow_water.py --benchmark`, {cells}. More ranks than there are cores",
            "share them.",
            "",
            *model_table(run.models),
            MODEL_NOTES,
        ]
    text = "\n".join(out).rstrip() + "\n"
    file = folder / "measurements.md"
    whole = file.read_text() if file.exists() else f"{BEGIN}{END}"
    before, _, rest = whole.partition(BEGIN)
    file.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")
    return text


def write(bench, folder: Path, seconds: float) -> str:
    """Return the page of what has been measured, and a file from which it can be made again."""
    args = bench.args
    run = Run(
        date=str(datetime.datetime.now(datetime.UTC).date()),
        minutes=seconds / 60,
        machine=machine(bench.versions),
        load=bench.load_before,
        rounds=args.rounds,
        seconds=args.seconds,
        size=list(args.size),
        notes=bench.notes,
        results=bench.results,
        faults=bench.faults,
        models=bench.models,
    )
    raw = run._asdict()
    raw["results"] = [[*key, times, run.faults.get(key)] for key, times in run.results.items()]
    raw["models"] = [[*key, times] for key, times in run.models.items()]
    del raw["faults"]
    DATA.mkdir(exist_ok=True)
    (DATA / "benchmarks.json").write_text(json.dumps(raw))
    return page(run, folder)


def again(file: Path, folder: Path) -> None:
    """The page once more, of an earlier run."""
    raw = json.loads(file.read_text())
    rows = raw.pop("results")
    results = {Key(*key): times for *key, times, _ in rows}
    faults = {Key(*key): missing for *key, _, missing in rows if missing}
    models = {tuple(key): times for *key, times in raw.pop("models")}
    page(Run(**raw, results=results, faults=faults, models=models), folder)


if __name__ == "__main__":
    # python benches/suite/report.py: after a change of this file or of plots.py
    again(DATA / "benchmarks.json", Path(__file__).resolve().parent.parent.parent / "docs")
