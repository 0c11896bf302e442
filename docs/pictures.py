"""Draws the SVG pictures of the documentation: `python docs/pictures.py`.

A picture is text that a function below returns. A test compares each file with its function.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from diagrams import DIAGRAMS
from drawing import COLORS, EMPTY, REDUCED, Canvas

DOCS = Path(__file__).resolve().parent

# ---- Collectives: a row of cells for each rank, before and after

# Rank 0's values are A, or A0, A1 and A2; rank 1's are B; rank 2's are C.
LETTERS = "ABC"
CELL, GAP = 26, 8

Rows = tuple[str, str, str]  # of each rank, its cells with blanks between; "-" is a cell unused
COLLECTIVES: dict[str, tuple[Rows, Rows]] = {
    "bcast": (("A", "-", "-"), ("A", "A", "A")),
    "scatter": (("A0 A1 A2", "-", "-"), ("A0", "A1", "A2")),
    "gather": (("A", "B", "C"), ("A B C", "B", "C")),
    "allgather": (("A", "B", "C"), ("A B C", "A B C", "A B C")),
    "alltoall": (("A0 A1 A2", "B0 B1 B2", "C0 C1 C2"), ("A0 B0 C0", "A1 B1 C1", "A2 B2 C2")),
    "reduce": (("A", "B", "C"), ("A+B+C", "B", "C")),
    "allreduce": (("A", "B", "C"), ("A+B+C", "A+B+C", "A+B+C")),
    "reduce_scatter": (
        ("A0 A1 A2", "B0 B1 B2", "C0 C1 C2"),
        ("A0+B0+C0", "A1+B1+C1", "A2+B2+C2"),
    ),
    "scan": (("A", "B", "C"), ("A", "A+B", "A+B+C")),
    "exscan": (("A", "B", "C"), ("0", "A", "A+B")),
    "permute": (("A", "B", "C"), ("0", "A", "B")),
    "sendrecv": (("A", "B", "C"), ("C", "A", "B")),
}
# Said below a picture, where the call has arguments that matter.
CALLS = {
    "bcast": "bcast(x, root=0)",
    "scatter": "scatter(x, root=0)",
    "gather": "gather(x, root=0)",
    "reduce": "reduce(x, op=SUM, root=0)",
    "allreduce": "allreduce(x, op=SUM)",
    "reduce_scatter": "reduce_scatter(x, op=SUM)",
    "scan": "scan(x, op=SUM)",
    "exscan": "exscan(x, op=SUM)",
    "permute": "permute(x, [(0, 1), (1, 2)])",
    "sendrecv": "sendrecv, to the right",
}


def color(value: str) -> str:
    if value in ("-", "0"):
        return EMPTY
    return REDUCED if "+" in value else COLORS[LETTERS.index(value[0])]


def width_of(value: str) -> float:
    return CELL if len(value) <= 2 else CELL + 8.0 * (len(value) - 2)


def collective(name: str) -> str:
    before, after = COLLECTIVES[name]
    canvas = Canvas(270, 150, f"{name} on three ranks, before and after")
    canvas.text(135, 20, CALLS.get(name, f"{name}(x)"), 14, weight="bold")
    for rank in range(3):
        y = 36 + rank * (CELL + GAP)
        canvas.text(10, y + 18, f"rank {rank}", 11, "start", color="#555")
        for left, rows in ((54, before), (168, after)):
            x = float(left)
            for value in rows[rank].split():
                style = ' stroke-dasharray="3 3"' if value == "-" else ""
                canvas.box(x, y, width_of(value), CELL, color(value), style)
                if value != "-":
                    canvas.text(x + width_of(value) / 2, y + 17, value, 12)
                x += width_of(value)
        canvas.arrow((140, y + CELL / 2), (160, y + CELL / 2))
    return canvas.svg()


# ---- A mesh in one process, and ranks with a communicator


def worlds() -> str:
    canvas = Canvas(
        640, 260, "shard_map: one process with a mesh; mpi4jax: a process for each rank"
    )
    canvas.text(160, 24, "shard_map: a mesh", 17, weight="bold")
    canvas.text(480, 24, "mpi4jax: a communicator", 17, weight="bold")
    canvas.box(20, 40, 280, 150, "#f6f6f6")
    canvas.text(160, 62, "one process, one program, a global array", 13)
    for i, left in enumerate((40, 165)):
        canvas.box(left, 78, 115, 96, COLORS[i])
        canvas.text(left + 57.5, 100, f"device {i}", 14)
        canvas.text(left + 57.5, 126, f"x[{2 * i}:{2 * i + 2}]", 14)
        canvas.text(left + 57.5, 156, 'psum(x, "i")', 13)
    for i, left in enumerate((340, 490)):
        canvas.box(left, 40, 130, 150, "#f6f6f6")
        canvas.text(left + 65, 62, f"process {i}", 13)
        canvas.box(left + 8, 78, 114, 96, COLORS[i])
        canvas.text(left + 65, 100, f"rank {i}", 14)
        canvas.text(left + 65, 126, "x: its own array", 13)
        canvas.text(left + 65, 156, "allreduce(x)", 13)
    canvas.text(160, 216, "XLA compiles the collective", 13)
    canvas.text(480, 216, "XLA calls MPI", 13)
    canvas.arrow((405, 234), (560, 234))
    canvas.arrow((560, 234), (405, 234))
    canvas.arrow((97, 234), (222, 234))
    canvas.arrow((222, 234), (97, 234))
    return canvas.svg()


# ---- Blocks and ghost cells

SIDE, BLOCK, SQUARE = 6, 3, 44


def blocks() -> str:
    """Draw a grid in four blocks, and one of the blocks with its ghost cells."""
    canvas = Canvas(640, 64 + SIDE * SQUARE + 34, "A grid in four blocks, and one with ghost cells")

    def cell(x: float, y: float, row: int, column: int, ghost: bool = False) -> None:
        row, column = row % SIDE, column % SIDE
        fill = COLORS[row // BLOCK * 2 + column // BLOCK]
        style = ' fill-opacity="0.5" stroke-dasharray="4 3"' if ghost else ""
        canvas.box(x, y, SQUARE, SQUARE, fill, style)
        canvas.text(x + SQUARE / 2, y + SQUARE / 2 + 5, str(row * SIDE + column))

    def frame(x: float, y: float) -> None:
        canvas.box(x, y, BLOCK * SQUARE, BLOCK * SQUARE, "none", ' stroke-width="3"', "black")

    left, top = 20, 64
    canvas.text(left + SIDE * SQUARE / 2, 24, "the grid, in four blocks", 17)
    for row in range(SIDE):
        for column in range(SIDE):
            cell(left + column * SQUARE, top + row * SQUARE, row, column)
    for rank in range(4):
        row, column = divmod(rank, 2)
        frame(left + column * BLOCK * SQUARE, top + row * BLOCK * SQUARE)
        x = left + (column + 0.5) * BLOCK * SQUARE
        canvas.text(x, top - 10 if row == 0 else top + SIDE * SQUARE + 20, f"rank {rank}")

    left = 370
    canvas.text(left + 2.5 * SQUARE, 24, "the array of rank 0", 17)
    top = 64 + SQUARE // 2
    for row in range(-1, BLOCK + 1):
        for column in range(-1, BLOCK + 1):
            ghost = not (0 <= row < BLOCK and 0 <= column < BLOCK)
            cell(left + (column + 1) * SQUARE, top + (row + 1) * SQUARE, row, column, ghost)
    frame(left + SQUARE, top + SQUARE)
    canvas.text(left + 2.5 * SQUARE, top + 5 * SQUARE + 20, "dashed: ghost cells")
    return canvas.svg()


# ---- Derivatives

# Name: values of the two ranks before and after, forward; cotangents after and before, backward.
DERIVATIVES = {
    "allreduce": ((("A", "B"), ("A+B", "A+B")), (("g", "g"), ("g", "g"))),
    "pvary": ((("w", "w"), ("w", "w")), (("g0+g1", "g0+g1"), ("g0", "g1"))),
}
REPLICATED = {"w", "g", "A+B", "g0+g1"}


def pvary() -> str:
    """allreduce and pvary: what is a sum in one direction is the identity in the other."""
    canvas = Canvas(620, 300, "allreduce and pvary, forward and backward, on two ranks")
    canvas.text(205, 24, "forward", 16, weight="bold")
    canvas.text(475, 24, "backward", 16, weight="bold")
    for i, (name, passes) in enumerate(DERIVATIVES.items()):
        top = 44 + i * 118
        canvas.text(16, top + 46, name, 15, "start", "bold")
        for j, columns in enumerate(passes):
            left = 110 + j * 270
            for k, values in enumerate(columns):
                x = left + k * 120
                for rank, value in enumerate(values):
                    y = top + rank * 40
                    fill = REDUCED if value in REPLICATED else COLORS[rank]
                    canvas.box(x, y, 70, 30, fill)
                    canvas.text(x + 35, y + 20, value, 14)
            for rank in range(2):
                y = top + rank * 40 + 15
                ends = ((left + 74, y), (left + 116, y))
                canvas.arrow(*(ends if j == 0 else ends[::-1]))
            sums = (j == 0) == (name == "allreduce")
            canvas.text(left + 95, top + 94, "sum over ranks" if sums else "identity", 13)
    canvas.text(
        16, 286, "gray: the same on all ranks; colored: one value for each rank", 13, "start"
    )
    return canvas.svg()


# ---- Layers

PYTHON = ("#eef7ee", "#5a8f5a")
RUST = ("#fdf3e7", "#b5793a")
OTHERS = ("#f2f2f2", "#888")


def architecture() -> str:
    """Layers, from the user's program down to the MPI library."""
    canvas = Canvas(700, 500, "Layers of mpi4jax, from the user's program down to the MPI library")

    def layer(
        x: float, y: float, width: float, kind: tuple[str, str], title: str, words: str = ""
    ) -> None:
        height = 56 if words else 36
        canvas.box(x, y, width, height, kind[0], ' rx="6"', kind[1])
        canvas.text(x + 12, y + 23, title, 14, "start", "bold")
        canvas.text(x + 12, y + 43, words, 13, "start", color="#333")

    layer(20, 40, 430, OTHERS, "the user's program: eager calls, jit, grad, vmap")
    layer(20, 100, 430, PYTHON, "operations", "arguments, pytrees, communicators, eager calls")
    layer(
        20, 180, 430, PYTHON, "primitives", "types, batching, derivatives, program order, lowering"
    )
    layer(20, 260, 430, OTHERS, "JAX and XLA: compile the program, run it on XLA's threads")
    layer(20, 320, 430, RUST, "handler", "decodes and checks a custom call")
    layer(20, 400, 430, RUST, "transports", "mpi, staged, cuda-mpi, nccl, ucx")
    layer(20, 456 + 24, 430, OTHERS, "the MPI library that mpi4py has loaded")
    layer(480, 180, 200, PYTHON, "JAX's internals", "all uses, in one place")
    layer(480, 320, 200, RUST, "record", "operations of this rank")
    layer(480, 400, 200, RUST, "watchdog", "reports, timeouts")
    canvas.height = 530
    for y, end in ((76, 98), (156, 178), (236, 258), (296, 318), (376, 398), (456, 478)):
        canvas.arrow((235, y), (235, end))
    canvas.text(245, 250, "a custom call for each operation", 12, "start", color="#555")
    canvas.text(245, 312, "XLA's foreign-function interface", 12, "start", color="#555")
    canvas.arrow((450, 208), (478, 208))
    canvas.arrow((450, 348), (478, 348))
    canvas.arrow((580, 376), (580, 398))
    for x, kind, words in ((480, PYTHON, "Python"), (560, RUST, "Rust")):
        canvas.box(x, 48, 14, 14, kind[0], "", kind[1])
        canvas.text(x + 20, 60, words, 13, "start")
    return canvas.svg()


DRAWN: dict[str, Callable[[], str]] = {
    "architecture.svg": architecture,
    "pictures/blocks.svg": blocks,
    "pictures/pvary.svg": pvary,
    "pictures/worlds.svg": worlds,
    **{f"pictures/{name}.svg": partial(collective, name) for name in COLLECTIVES},
    **{f"pictures/{name}.svg": draw for name, draw in DIAGRAMS.items()},
}


def main() -> None:
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (DOCS / name).write_text(draw())


if __name__ == "__main__":
    main()
