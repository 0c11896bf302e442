"""Measurements: contenders, keys, ratios of rounds, and how numbers are written."""

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


class Key(NamedTuple):
    ranks: int
    op: str
    nbytes: int
    contender: str
    mode: str
    where: str = ""


# Seconds, or page faults, of one operation in each round.
Results = dict[Key, list[float]]
# {(ranks, where): {contender: seconds of a step in each round}}
Models = dict[tuple[int, str], dict[str, list[float]]]


class Run(NamedTuple):
    """All that is known of a run of the benchmarks."""

    date: str
    minutes: float
    machine: str
    load: float
    rounds: int
    seconds: float
    size: list[int]
    notes: list[str]
    results: Results
    faults: Results
    models: Models


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
    """Return a warning, if other programs ran already."""
    if load < 0.5 * cores():
        return [f"The load average before was {load:.1f}.", ""]
    return [
        f"**The machine was busy**: a load average of {load:.1f} on {cores()} cores before it",
        "began. Ranks that wait for each other then wait for other programs too: take no figure of",
        "two or more ranks for what a quiet machine would show.",
        "",
    ]


def ratio(above: list[list[float]], below: list[list[float]]) -> tuple[float, float, float]:
    """Return the ratios of the sums in each round: their median, and their quartiles."""
    return spread(rounds_of(above, below))


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def interval(values: list[float]) -> float:
    """Return the 95 % interval of the median, as a part of it; of few values, infinity.

    From the order of the values alone: they may be distributed as they like.
    """
    ordered, n = sorted(values), len(values)
    if n < 6:  # even from the least to the most it is not 95 %
        return float("inf")
    # The number of values below the median is binomial.
    below = max(1, int((n - 1.96 * n**0.5) / 2))
    return (ordered[n - below] - ordered[below - 1]) / statistics.median(ordered)


def rounds_of(above: list[list[float]], below: list[list[float]]) -> list[float]:
    """Return the ratio of the sums in each round."""
    rounds = zip(zip(*above, strict=True), zip(*below, strict=True), strict=True)
    return [sum(a) / sum(b) for a, b in rounds]


KNOWN = 0.05


def ratio_name(value: float, low: float, high: float, known: float = 0.0) -> str:
    """With a ~ if the median is not known well enough."""
    digits = ".0f" if value >= 100 else ".2f"
    mark = "~" if known > KNOWN else ""
    return f"{mark}{value:{digits}} ({low:{digits}} to {high:{digits}})"


def ratio_of(above: list[list[float]], below: list[list[float]]) -> str:
    values = rounds_of(above, below)
    return ratio_name(*spread(values), interval(values))
