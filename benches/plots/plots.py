"""Draws the pictures of docs/measurements.md. Each shows one idea, with one color per contender.

The colors also differ in gray, and each contender has its own marker.
"""

import statistics
from pathlib import Path

from measurements import GLOO, NEW, OLD, Key, Results, size_name

# Contender: name, color, marker.
STYLES = {
    "raw": ("MPI, from C", "black", "D"),
    "mpi4py": ("mpi4py, on NumPy arrays", "#7f7f7f", "x"),
    NEW: ("mpi4jax", "#0b4f8a", "o"),
    OLD: ("mpi4jax 0.9.1", "#e8903a", "s"),
    GLOO: ("JAX's own (gloo)", "#9ad8a8", "^"),
}
MICROSECONDS = 1e6
SMALL = {"textcoords": "offset points", "fontsize": 8}


def save(figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def place_at(results: Results, key: Key) -> float | None:
    """Return the median in microseconds."""
    return statistics.median(results[key]) * MICROSECONDS if key in results else None


def in_words(microseconds: float) -> str:
    if microseconds >= 1e3:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds:.2g} us" if microseconds < 10 else f"{microseconds:.0f} us"


def plot_calls(results: Results, path: Path, ranks: int = 2) -> None:
    """What one call costs: a row for each way to call, a dot for each contender."""
    import matplotlib.pyplot as plt

    rows = {
        "from C or Python": [("raw", NEW, "raw"), ("mpi4py", NEW, "mpi4py")],
        "in a jitted loop": [(NEW, NEW, "loop"), (OLD, OLD, "loop")],
        "jitted": [(NEW, NEW, "jit"), (GLOO, GLOO, "jit"), (OLD, OLD, "jit")],
        "eager": [(NEW, NEW, "eager"), (OLD, OLD, "eager")],
    }
    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for y, dots in enumerate(rows.values()):
        for i, (style, contender, mode) in enumerate(dots):
            x = place_at(results, Key(ranks, "allreduce", 4, contender, mode))
            if x is None:
                continue
            name, colour, marker = STYLES[style]
            # Below each other, so that none hides another that is as fast.
            place = y + 0.26 * (i - (len(dots) - 1) / 2)
            ax.plot(x, place, marker, color=colour, ms=8, mew=2, label=name)
            ax.annotate(in_words(x), (x, place), (9, -3), ha="left", **SMALL)
    ax.set(
        xscale="log", ylim=(len(rows) - 0.5, -0.7), xlabel="microseconds",
        title=f"One allreduce of 4 bytes on {ranks} ranks",
    )  # fmt: skip
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(axis="x", alpha=0.3)
    ax.margins(x=0.1)
    ax.set_xlim(right=4 * ax.get_xlim()[1])  # space for the last label
    legend(figure)
    save(figure, path)


def legend(figure) -> None:
    """Beside the axes, each contender once, in the order of STYLES."""
    found = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = [name for name, *_ in STYLES.values() if name in found]
    figure.legend([found[name] for name in names], names, loc="outside right center", frameon=False)


def plot_sizes(results: Results, path: Path, ranks: int = 2) -> None:
    """How the time of a jitted call grows with the size."""
    import matplotlib.pyplot as plt

    ops = ("allreduce", "sendrecv", "allgather", "alltoall")
    ops = [op for op in ops if any(key.op == op and key.ranks == ranks for key in results)]
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 7.5), sharex=True, sharey=True, layout="constrained"
    )
    lines = [("raw", NEW, "raw"), (NEW, NEW, "jit"), (OLD, OLD, "jit"), (GLOO, GLOO, "jit")]
    for ax, op in zip(axes.flat, ops, strict=False):
        sizes = sorted({k.nbytes for k in results if (k.op, k.ranks, k.where) == (op, ranks, "")})
        for style, contender, mode in lines:
            keys = [Key(ranks, op, nbytes, contender, mode) for nbytes in sizes]
            keys = [key for key in keys if key in results]
            name, colour, marker = STYLES[style]
            ax.plot(
                [key.nbytes for key in keys], [place_at(results, key) for key in keys],
                "--" if style == "raw" else "-", color=colour, marker=marker, ms=5, label=name,
            )  # fmt: skip
        ax.set(xscale="log", yscale="log", title=op)
        shown = [nbytes for nbytes in sizes if nbytes in (4, 2**16, 2**20, 2**26)] or sizes
        ax.set_xticks(shown, [size_name(nbytes) for nbytes in shown], rotation=30)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("microseconds")
    figure.suptitle(f"A jitted call on {ranks} ranks, by size", fontsize=12)
    legend(figure)
    save(figure, path)
