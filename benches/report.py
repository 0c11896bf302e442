"""Tables and plots of what benches/run.py has measured."""

import os
import platform
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

NEW = "mpi4jax"
OLD = "0.9.1"


class Key(NamedTuple):
    ranks: int
    op: str
    nbytes: int
    contender: str
    mode: str


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


def machine(versions: dict) -> str:
    model = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((s.split(": ")[1] for s in lines if s.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"Python": python, "JAX": versions["jax"], "MPI": versions["mpi"]}
    load = f"{os.getloadavg()[0]:.1f}"
    return f"{model}, {cores} cores, load average {load} at the end; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )


def ratio(above: list[list[float]], below: list[list[float]]) -> tuple[float, float, float]:
    """Of the sums of the least times, and the quartiles of the ratios of the rounds."""
    best = sum(map(min, above)) / sum(map(min, below))
    rounds = zip(zip(*above, strict=True), zip(*below, strict=True), strict=True)
    return best, *quartiles([sum(a) / sum(b) for a, b in rounds])


def difference(more: list[float], less: list[float]) -> tuple[float, float, float]:
    """Of the least times, in microseconds, and the quartiles of the differences of the rounds."""
    rounds = [(a - b) * 1e6 for a, b in zip(more, less, strict=True)]
    return (min(more) - min(less)) * 1e6, *quartiles(rounds)


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def ratio_name(value: float, low: float, high: float) -> str:
    digits = ".0f" if value >= 100 else ".2f"
    return f"{value:{digits}} ({low:{digits}} to {high:{digits}})"


COLUMNS = (
    ("raw loop", NEW, "raw"),
    ("mpi4py", NEW, "mpi4py"),
    ("no-op jit", NEW, "noop"),
    ("eager", NEW, "eager"),
    ("mpi4jax.jit", NEW, "mpi4jax.jit"),
    ("jax.jit", NEW, "jax.jit"),
    ("in a loop", NEW, "loop"),
    ("in a chain", NEW, "chain"),
    ("0.9.1 eager", OLD, "eager"),
    ("0.9.1 jax.jit", OLD, "jax.jit"),
    ("0.9.1 in a loop", OLD, "loop"),
    ("0.9.1 in a chain", OLD, "chain"),
)


def markdown(results: dict[Key, list[float]], machine: str) -> str:
    out = ["# Latency", "", machine, ""]
    out += [
        "Time of one operation, the least of all rounds. Calls from Python are waited for one by",
        "one; the no-op is a jitted identity of 4 bytes. In a loop: a jitted `fori_loop` on the",
        "same input each time, as in the raw loop; in a chain each result is the next input, and",
        "XLA copies it.",
        "",
    ]
    columns = [c for c in COLUMNS if any(k.contender == c[1] for k in results)]
    for ranks, op in dict.fromkeys((key.ranks, key.op) for key in results):
        out += [f"## {op}, {ranks} rank{'s' if ranks > 1 else ''}", ""]
        out += ["| size | " + " | ".join(name for name, *_ in columns) + " |"]
        out += ["| --- |" + " ---: |" * len(columns)]
        for nbytes in dict.fromkeys(k.nbytes for k in results if k[:2] == (ranks, op)):
            keys = [Key(ranks, op, nbytes, contender, mode) for _, contender, mode in columns]
            cells = [time_name(min(results[key])) if key in results else "" for key in keys]
            out += [f"| {size_name(nbytes)} | " + " | ".join(cells) + " |"]
        out += [""]
    return "\n".join([*out, *goals(results), ""])


def goals(results: dict[Key, list[float]]) -> list[str]:
    out = [
        "## Goals",
        "",
        "Ratios of the least times, in brackets the quartiles over the rounds.",
        "",
        "| op | ranks | size | what | goal | measured | |",
        "| --- | ---: | ---: | --- | --- | --- | --- |",
    ]
    cases = dict.fromkeys(key[:3] for key in results)
    biggest = max(nbytes for *_, nbytes in cases)
    for ranks, op, nbytes in cases:

        def times(contender, mode, case=(ranks, op, nbytes)):
            return results.get(Key(*case, contender, mode))

        def row(what, goal, measured, unit="", case=(ranks, op, nbytes)):
            met = [value >= goal if goal >= 1000 else value <= goal for value in measured]
            verdict = "met" if met[0] else "within noise" if any(met) else "**missed**"
            case = f"{case[1]} | {case[0]} | {size_name(case[2])}"
            goal = f"{'>=' if goal >= 1000 else '<='} {goal}{unit}"
            out.append(f"| {case} | {what} | {goal} | {ratio_name(*measured)}{unit} | {verdict} |")

        raw, loop, jit = times(NEW, "raw"), times(NEW, "loop"), times(NEW, "mpi4jax.jit")
        if nbytes == 4:
            if old := times(OLD, "eager"):
                row("0.9.1 eager / eager", 1000, ratio([old], [times(NEW, "eager")]))
            row("mpi4jax.jit / (no-op jit + raw)", 1.25, ratio([jit], [times(NEW, "noop"), raw]))
            row("in a loop - raw", 0.2, difference(loop, raw), " us")
        if nbytes == biggest and biggest > 4:
            row("in a loop / raw", 1.1, ratio([loop], [raw]))
        if old := times(OLD, "jax.jit"):
            row("jax.jit / 0.9.1 jax.jit", 1, ratio([times(NEW, "jax.jit")], [old]))
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
}


def plot(results: dict[Key, list[float]], op: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = list(dict.fromkeys(key.ranks for key in results))
    figure, panels = plt.subplots(
        1, len(ranks), figsize=(5.2 * len(ranks) + 1.5, 5), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, n in zip(panels[0], ranks, strict=True):
        for (contender, mode), (label, colour, line, marker) in STYLES.items():
            keys = [k for k in results if k == Key(n, op, k.nbytes, contender, mode)]
            if keys:
                sizes = [key.nbytes for key in keys]
                best = [min(results[key]) * 1e6 for key in keys]
                axes.plot(sizes, best, line, color=colour, marker=marker, ms=4, label=label)
        axes.set(xscale="log", yscale="log", xlabel="size", title=f"{op}, n = {n}")
        sizes = sorted({key.nbytes for key in results})
        axes.set_xticks(sizes, [size_name(nbytes) for nbytes in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("time of one operation (us)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=150)
    plt.close(figure)
