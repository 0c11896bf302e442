"""The tables of docs/measurements.md, from what run.sh prints.

python tests/gpu/figures.py table.txt
"""

import re
import sys
from pathlib import Path

TRANSPORTS = ("staged", "nccl", "cuda-mpi", "ucx")
SIZES = {"1": "1 KiB", "64": "64 KiB", "4096": "4 MiB", "65536": "64 MiB"}
ROW = re.compile(r"([\w.-]+) +([\w-]+) +(\d) ranks  ")
FIGURE = re.compile(r" +(.+?) +([\d.]+) us\b")


def figures(text: str) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the microseconds of each figure, by the row that has printed it."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    row = None
    for line in text.splitlines():
        if match := ROW.match(line):
            row = match[1], match[2], int(match[3])
        elif row and (match := FIGURE.match(line)):
            found.setdefault(row, {})[re.sub(" +", " ", match[1])] = float(match[2])
    return found


def table(head: list[str], lines: list[list[float | str | None]]) -> str:
    """Return a table in Markdown. A figure that is missing is an empty cell."""

    def cell(value: float | str | None) -> str:
        return "" if value is None else value if isinstance(value, str) else f"{value:,.0f}"

    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(cell(x) for x in line)} |\n" for line in [head, rule, *lines])


def bandwidth(found: dict[tuple[str, str, int], dict[str, float]]) -> str:
    """Return the time of a call of each transport, beside copies by hand and mpi4jax 0.9.1."""
    lines: list[list[float | str | None]] = []
    for ranks in sorted({key[2] for key in found if key[0] == "bandwidth"}):
        of = {name: found.get(("bandwidth", name, ranks), {}) for name in TRANSPORTS}
        older = found.get(("bandwidth-0.9.1", "staged", ranks), {})
        for op in ("allreduce", "sendrecv"):
            for kib, size in SIZES.items():
                name = f"{op} {kib} KiB"
                by_hand = of["staged"].get(f"{op} by hand {kib} KiB")
                times = [of[transport].get(name) for transport in TRANSPORTS]
                if any(times):
                    what = f"{ranks} rank{'s'[: ranks > 1]}, `{op}` {size}"
                    lines.append([what, *times, by_hand, older.get(name)])
    return table(["us", *(f"`{t}`" for t in TRANSPORTS), "by hand", "0.9.1 (copies)"], lines)


def loops(found: dict[tuple[str, str, int], dict[str, float]]) -> str:
    """Return the time of an operation in a loop, a column for each transport and number of
    ranks."""
    columns = {key[1:]: rows for key, rows in found.items() if key[0] == "loops"}
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    head = ["us", *(f"`{transport}`, {ranks}" for transport, ranks in columns)]
    return table(head, [[name, *(rows.get(name) for rows in columns.values())] for name in names])


def main() -> None:
    """Print the date and the device, and both tables."""
    text = Path(sys.argv[1]).read_text()
    found = figures(text)
    print("; ".join(text.splitlines()[:2]), bandwidth(found), loops(found), sep="\n\n")


if __name__ == "__main__":
    main()
