"""Draws the pictures of the documentation: `python docs/figures.py`.

blocks.svg is text, and a test holds it against this file. timeline.png is of a job that runs here.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tools"))

COLOURS = ["#9ecae8", "#f7c08a", "#a8d8a0", "#d9b3e0"]
CELL, SIDE, BLOCK = 44, 6, 3


def blocks() -> str:
    """A grid that is cut into four blocks, and one of them with its ghost cells."""
    out = []

    def text(x: float, y: float, words: str, size: int = 15) -> None:
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle"'
        out.append(f"<text {place}>{words}</text>")

    def cell(x: float, y: float, row: int, column: int, ghost: bool = False) -> None:
        row, column = row % SIDE, column % SIDE
        colour = COLOURS[row // BLOCK * 2 + column // BLOCK]
        style = ' fill-opacity="0.5" stroke-dasharray="4 3"' if ghost else ""
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" fill="{colour}" '
            f'stroke="#555"{style}/>'
        )
        text(x + CELL / 2, y + CELL / 2 + 5, str(row * SIDE + column))

    def frame(x: float, y: float) -> None:
        side = BLOCK * CELL
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{side}" height="{side}" fill="none" '
            'stroke="black" stroke-width="3"/>'
        )

    left, top = 20, 64
    text(left + SIDE * CELL / 2, 24, "the grid, in four blocks", 17)
    for row in range(SIDE):
        for column in range(SIDE):
            cell(left + column * CELL, top + row * CELL, row, column)
    for rank in range(4):
        row, column = divmod(rank, 2)
        frame(left + column * BLOCK * CELL, top + row * BLOCK * CELL)
        x = left + (column + 0.5) * BLOCK * CELL
        text(x, top - 10 if row == 0 else top + SIDE * CELL + 20, f"rank {rank}")

    left = 370
    text(left + 2.5 * CELL, 24, "what rank 0 holds", 17)
    top = 64 + CELL / 2
    for row in range(-1, BLOCK + 1):
        for column in range(-1, BLOCK + 1):
            ghost = not (0 <= row < BLOCK and 0 <= column < BLOCK)
            cell(left + (column + 1) * CELL, top + (row + 1) * CELL, row, column, ghost)
    frame(left + CELL, top + CELL)
    text(left + 2.5 * CELL, top + 5 * CELL + 20, "dashed: ghost cells")
    width, height = 640, 64 + SIDE * CELL + 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(out) + "\n</svg>\n"
    )


def timeline() -> None:
    """The picture that docs/timeline.md shows, of the first program of that page."""
    import run_examples

    from mpirun import captured

    block = next(run_examples.blocks(DOCS / "timeline.md"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "uneven.py").write_text(block.code)
        job = captured(
            block.ranks, [sys.executable, "uneven.py"], cwd=folder, time_limit=120,
            env={"MPI4JAX_TRACE": "trace.json"},
        )  # fmt: skip
        assert job.returncode == 0, job.stderr
        files = sorted(file.name for file in Path(folder).glob("trace.*.json"))
        command = [sys.executable, "-m", "mpi4jax.timeline", *files, "--png", "timeline.png"]
        subprocess.run(command, cwd=folder, check=True)
        shutil.copy(Path(folder) / "timeline.png", DOCS / "timeline.png")


if __name__ == "__main__":
    (DOCS / "blocks.svg").write_text(blocks())
    timeline()
