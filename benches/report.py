"""docs/benchmarks.md: tables and plots of what benches/run.py has measured."""

import datetime
import json
import statistics
from pathlib import Path

from measurements import (
    GLOO,
    HALO,
    NEW,
    OLD,
    Key,
    Models,
    Results,
    Run,
    busy,
    machine,
    ratio,
    ratio_of,
    size_name,
    time_name,
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
                row.append(ratio_of(terms[:1], terms[1:]) if all(terms) else "")
            ratios.append(row)
        title = f"{ranks} rank{'s' if ranks > 1 else ''}{where}"
        columns = ["op", "size", *(title for title, *_ in COLUMNS)]
        out += [f"### {title}: time of one operation", "", *grid(columns, times)]
        out += [f"### {title}: ratios", ""]
        out += grid(["op", "size", *(title for title, *_ in RATIOS)], ratios)
    return out


# ---- The model

MODEL_RATIOS = [(NEW, OLD), (HALO, OLD)]

MODEL_NOTES = """\
*0.9.1* runs the same program. Computation and memory bandwidth limit it, and it communicates once
per step: no package can make it much faster.
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
Contenders alternate in one run, so that other load on the machine affects all of them.
A time is the median of its rounds, on the slowest rank. A ratio is the median of the ratios within
the rounds, with their quartiles in brackets. There are {rounds} rounds of about {milliseconds:g} ms
(a third as many from 4 MiB on){more}. A `~` marks a median that is not known to 5 %: its 95 %
interval is wider. Figures of different runs are not comparable.

In brackets behind a time are the page faults of one operation, on the rank that has most. From
1 MiB on, each contender runs until their number is steady.

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

Operands that an operation returns unchanged (`bcast` on the root, `gather` and `reduce` elsewhere)
are not returned from the functions here: a jitted function copies an argument that it returns.
"""


MODE_NAMES = {"eager": "eager", "jit": "jitted", "loop": "in a loop", "chain": "in a chain"}


def summary(results: Results, models: Models) -> list[str]:
    """What to know of it all, where it was measured."""
    rows = []

    def add(what, op, nbytes, *modes, ranks=2):
        times = [results.get(Key(ranks, op, nbytes, *mode)) for mode in modes]
        if all(times):
            value = ratio_of(times[:1], times[1:])
            rows.append([what, f"{op}, {size_name(nbytes)}, n = {ranks}", value])

    add("eager: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "eager"), (NEW, "eager"))
    add("jitted: 0.9.1 / mpi4jax", "allreduce", 4, (OLD, "jit"), (NEW, "jit"))
    add("jitted: gloo / mpi4jax", "allreduce", 4, (GLOO, "jit"), (NEW, "jit"))
    add("in a loop: 0.9.1 / mpi4jax", "sendrecv", 4, (OLD, "loop"), (NEW, "loop"))
    for nbytes in (2**22, 2**24, 2**26):
        add("jitted: 0.9.1 / mpi4jax", "allgather", nbytes, (OLD, "jit"), (NEW, "jit"))
        add("jitted: mpi4jax / raw MPI", "allgather", nbytes, (NEW, "jit"), (NEW, "raw"))
    # What loses to another package is said here too.
    for key, other in ((key, other) for key in results for other in (OLD, GLOO)):
        if key.contender == NEW and key.mode in MODE_NAMES and not key.where:
            times = results.get(key._replace(contender=other))
            if times and ratio([times], [results[key]])[0] < 1:
                case = (key.op, key.nbytes, (other, key.mode), (NEW, key.mode))
                add(f"{MODE_NAMES[key.mode]}: {other} / mpi4jax", *case, ranks=key.ranks)
    for new, old in MODEL_RATIOS:
        for (ranks, where), times in models.items():
            if value := model_ratio(times, new, old):
                what = f"shallow water: {old} / {new}"
                rows.append([what, f"n = {ranks}, {where}", value])
    return ["## In short", "", *grid(["times", "of", "ratio"], rows)] if rows else []


CALLS = """\
![What one allreduce of 4 bytes costs from C, from Python, in a jitted loop, jitted and eager, \
with mpi4jax, 0.9.1 and JAX's own collectives, on a logarithmic axis](benchmarks-calls.png)
"""
BY_SIZE = """\
![The time of a jitted call by size, from 4 bytes to 64 MiB, of MPI, mpi4jax, 0.9.1 and JAX's own \
collectives](benchmarks-sizes.png)
"""


def page(run: Run, folder: Path) -> str:
    """benchmarks.md and its pictures in a folder; the text."""
    import matplotlib

    matplotlib.use("Agg")
    import plots

    longer = any(len(times) > run.rounds for times in run.results.values())
    more = ", and more while a ratio is not known and time is left" if longer else ""
    how = HOW.format(rounds=run.rounds, milliseconds=run.seconds * 1e3, more=more)
    out = ["# Benchmarks", "", "<!-- Made by `make bench`: do not edit. -->", ""]
    out += [f"Measured on {run.date} by `make bench`, in {run.minutes:.0f} minutes.", ""]
    out += [f"{run.machine}.", "", *busy(run.load)]
    out += summary(run.results, run.models)
    if run.results:
        plots.plot_calls(run.results, folder / "benchmarks-calls.png")
        plots.plot_sizes(run.results, folder / "benchmarks-sizes.png")
        out += [CALLS, BY_SIZE]
    out += ["## How", "", how]
    if run.notes:
        out += ["**Not measured**", "", *(f"- {note}" for note in run.notes), ""]
    if run.results:
        out += ["## Operations", "", *operations(run.results, run.faults)]
    if run.models:
        plots.plot_model(run.models, folder / "benchmarks-model.png")
        out += ["## Shallow-water model", ""]
        cells = f"{run.size[0]} x {run.size[1]} cells"
        out += [
            f"`examples/shallow_water.py --benchmark`, {cells}. More ranks than there are cores",
            "share them.",
            "",
            "![Steps per second of each contender on 1, 2 and 4 ranks](benchmarks-model.png)",
            "",
            *model_table(run.models),
            MODEL_NOTES,
        ]
    text = "\n".join(out).rstrip() + "\n"
    (folder / "benchmarks.md").write_text(text)
    return text


def write(bench, folder: Path, seconds: float) -> str:
    """The page of what has been measured, and a file from which it can be made again."""
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
    # python benches/report.py: after a change of this file or of plots.py
    again(DATA / "benchmarks.json", Path(__file__).resolve().parent.parent / "docs")
