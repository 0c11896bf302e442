"""Diagrams of the pages: each function returns the text of one SVG (see pictures.py)."""

from collections.abc import Callable

from drawing import COLORS, EMPTY, REDUCED, Canvas

MUTED = "#555"
RANK_BOX = "#f6f6f6"
ALERT = "#f4b6ae"


def processes() -> str:
    """Draw one program on three processes, and an allreduce between them."""
    canvas = Canvas(420, 250, "One program runs as three processes, which exchange their arrays")
    canvas.text(210, 22, "mpiexec -n 3 python program.py", 14, weight="bold")
    for rank in range(3):
        x = 10 + rank * 136
        canvas.box(x, 36, 126, 96, RANK_BOX, ' rx="6"')
        canvas.text(x + 63, 56, f"rank {rank}", 14, weight="bold")
        canvas.text(x + 63, 76, "program.py", 13, color=MUTED)
        canvas.box(x + 18, 88, 90, 30, COLORS[rank])
        canvas.text(x + 63, 108, f"x = {rank + 1}.0", 14)
        canvas.arrow((x + 63, 132), (x + 63, 154))
        canvas.arrow((x + 63, 184), (x + 63, 206))
        canvas.box(x + 18, 208, 90, 30, REDUCED)
        canvas.text(x + 63, 228, "6.0", 14)
    canvas.box(10, 156, 398, 28, "#ffffff", ' rx="6"')
    canvas.text(210, 175, "y = mpi4jax.allreduce(x): the sum, on all ranks", 13)
    return canvas.svg()


def which() -> str:
    """Draw the choice between the three interfaces."""
    canvas = Canvas(420, 372, "Which interface: jax.shard_map, mpi4jax.shard_map, or operations")
    questions = (
        (
            ("Does it run on TPUs, or on GPUs only,", "as one program on all devices?"),
            ("jax.jit with shardings,", "or jax.shard_map"),
        ),
        (
            ("Is there a function for shard_map, or do", "all ranks have blocks of equal shape?"),
            ("mpi4jax.shard_map",),
        ),
    )
    y = 12
    for i, (question, answer) in enumerate(questions):
        canvas.box(10, y, 400, 52, RANK_BOX, ' rx="18"')
        for j, line in enumerate(question):
            canvas.text(210, y + 22 + 18 * j, line, 14)
        canvas.arrow((210, y + 52), (210, y + 74))
        canvas.text(222, y + 68, "yes", 13, "start", color=MUTED)
        height = 24 + 18 * len(answer)
        canvas.box(110, y + 76, 200, height, COLORS[i], ' rx="6"')
        for j, line in enumerate(answer):
            canvas.text(210, y + 98 + 18 * j, line, 14, weight="bold")
        end = y + 76 + 60 + 16
        canvas.arrow((40, y + 52), (40, end))
        canvas.text(50, y + 68, "no", 13, "start", color=MUTED)
        y = end + 2
    canvas.box(10, y, 400, 50, COLORS[2], ' rx="6"')
    canvas.text(210, y + 20, "operations of mpi4jax", 14, weight="bold")
    canvas.text(210, y + 39, "messages, uneven blocks, neighbors, MPI codes", 13)
    return canvas.svg()


def cells(canvas: Canvas, x: float, y: float, values: list[str], rank: int, size: int = 36) -> None:
    """A row of cells with a ghost cell at both ends, which has the neighbor's color."""
    for i, value in enumerate(values):
        ghost = i in (0, len(values) - 1)
        color = COLORS[1 - rank if ghost else rank]
        style = ' fill-opacity="0.5" stroke-dasharray="4 3"' if ghost else ""
        canvas.box(x + i * size, y, size, 30, color, style)
        canvas.text(x + (i + 0.5) * size, y + 20, value, 13)


def halo() -> str:
    """Draw a halo exchange, and its backward pass."""
    canvas = Canvas(420, 350, "A halo exchange between two ranks, and its backward pass")
    rows = (
        (
            "forward: halo_exchange",
            "copy",
            22,
            (["", "a", "b", "c", "d"], ["c", "d", "e", "f", ""]),
        ),
        (
            "backward: cotangents",
            "add",
            192,
            (["", "a", "b", "c+c'", "d'"], ["c'", "d+d'", "e", "f", ""]),
        ),
    )
    for title, action, top, (upper, lower) in rows:
        canvas.text(10, top, title, 15, "start", "bold")
        for rank, values in enumerate((upper, lower)):
            y = top + 16 + rank * 84
            canvas.text(10, y + 20, f"rank {rank}", 13, "start", color=MUTED)
            cells(canvas, 70 + rank * 104, y, values, rank, 46)
        first, second = top + 46, top + 100
        left = (70 + 3.5 * 46, 174 + 0.5 * 46)
        right = (70 + 4.5 * 46, 174 + 1.5 * 46)
        down = ((left[0], first), (left[1], second))
        up = ((right[1], second), (right[0], first))
        for line in (down, up):
            canvas.arrow(*(line if action == "copy" else line[::-1]))
        canvas.text(292, top + 76, f"{action} between", 13, "start", color=MUTED)
        canvas.text(292, top + 92, "cell and ghost cell", 13, "start", color=MUTED)
    return canvas.svg()


def plan() -> str:
    """Owned and ghost rows of a plan, with fill and add."""
    canvas = Canvas(420, 250, "Owned rows and needed rows of two ranks, moved by fill and add")
    owned = ((0, 4, 5), (1, 2, 3))
    needed = ((1, 3), (0, 4))
    for rank in range(2):
        x = 10 + rank * 208
        canvas.box(x, 10, 192, 200, RANK_BOX, ' rx="6"')
        canvas.text(x + 96, 30, f"rank {rank}", 14, weight="bold")
        canvas.text(x + 10, 52, "owned_ids", 13, "start", color=MUTED)
        for i, row in enumerate(owned[rank]):
            canvas.box(x + 10 + i * 50, 60, 46, 30, COLORS[rank])
            canvas.text(x + 33 + i * 50, 80, str(row), 14)
        canvas.text(x + 10, 204, "needed_ids (ghosts)", 13, "start", color=MUTED)
        for i, row in enumerate(needed[rank]):
            style = ' fill-opacity="0.5" stroke-dasharray="4 3"'
            canvas.box(x + 10 + i * 50, 156, 46, 30, COLORS[1 - rank], style)
            canvas.text(x + 33 + i * 50, 176, str(row), 14)
    for rank in range(2):
        for i, row in enumerate(needed[rank]):
            source = owned[1 - rank].index(row)
            start = (10 + (1 - rank) * 208 + 33 + source * 50, 90)
            canvas.arrow(start, (10 + rank * 208 + 33 + i * 50, 154))
    canvas.text(210, 234, "fill(x) goes along the arrows; add(y) sums back against them", 13)
    return canvas.svg()


def report() -> str:
    """Draw the report of the first example of debugging.md, over time."""
    canvas = Canvas(420, 186, "Ranks 0 and 1 wait in allreduce 3; rank 2 has finished")
    for rank in range(3):
        y = 14 + rank * 44
        canvas.text(10, y + 20, f"rank {rank}", 13, "start", color=MUTED)
        for i in range(3):
            if rank == 2 and i == 2:
                canvas.text(286, y + 20, "has finished", 13, "start", weight="bold")
                continue
            waits = i == 2
            x, width = 66 + i * 70, 62 + 130 * waits
            canvas.box(x, y, width, 30, ALERT if waits else COLORS[0], ' rx="4"')
            words = "allreduce #3: waits" if waits else f"#{i + 1}"
            canvas.text(x + width / 2, y + 20, words, 13)
    canvas.arrow((66, 152), (405, 152))
    canvas.text(405, 172, "time", 13, "end", color=MUTED)
    return canvas.svg()


def deadlock() -> str:
    """Draw the waits of a deadlock, as its report has them."""
    canvas = Canvas(420, 170, "Rank 0 waits for rank 1, and rank 1 waits for rank 0: a deadlock")
    for rank in range(2):
        x = 10 + rank * 230
        canvas.box(x, 50, 170, 66, ALERT, ' rx="6"')
        canvas.text(x + 85, 70, f"rank {rank}", 14, weight="bold")
        canvas.text(x + 85, 88, f"recv from {1 - rank}, tag 7", 13)
        canvas.text(x + 85, 106, "solver.py:97", 13, color=MUTED)
    canvas.arrow((95, 50), (95, 24), (325, 24), (325, 48))
    canvas.text(210, 18, "waits for", 13)
    canvas.arrow((325, 116), (325, 142), (95, 142), (95, 118))
    canvas.text(210, 160, "waits for", 13)
    return canvas.svg()


def prism(canvas: Canvas, x: float, y: float, size: tuple[float, float, float], fill: str) -> None:
    """A box in oblique projection: width, height and depth; (x, y) is its lower left front."""
    width, height, depth = size
    dx, dy = 0.5 * depth, -0.4 * depth
    front = [(x, y), (x + width, y), (x + width, y - height), (x, y - height)]
    top = [front[3], front[2], (x + width + dx, y - height + dy), (x + dx, y - height + dy)]
    side = [front[1], (x + width + dx, y + dy), top[2], front[2]]
    for points, opacity in ((top, 0.6), (side, 0.8), (front, 1)):
        path = " ".join(f"{px:g},{py:g}" for px, py in points)
        canvas.elements.append(f'<polygon points="{path}" fill="white"/>')
        canvas.elements.append(
            f'<polygon points="{path}" fill="{fill}" fill-opacity="{opacity}" stroke="#555"/>'
        )


def slabs() -> str:
    """Draw an array of three axes in slabs and in pencils, on four ranks."""
    canvas = Canvas(420, 260, "An array in four slabs, and in two by two pencils")
    canvas.text(105, 22, "slabs: {0: 4}", 14, weight="bold")
    canvas.text(315, 22, "pencils: {0: 2, 1: 2}", 14, weight="bold")
    for i in range(4):
        prism(canvas, 30, 190 - i * 30, (110, 30, 80), COLORS[i])
        canvas.text(85, 181 - i * 30, f"rank {i}", 13)
    for row in range(2):
        for column in range(2):
            rank = 2 * (1 - row) + column
            x, y = 240 + column * 55, 190 - row * 60
            prism(canvas, x, y, (55, 60, 80), COLORS[rank])
            canvas.text(x + 27, y - 25, f"rank {rank}", 13)
    canvas.text(105, 222, "one exchange", 13)
    canvas.text(105, 240, "up to n ranks", 13)
    canvas.text(315, 222, "two exchanges", 13)
    canvas.text(315, 240, "up to n * n ranks", 13)
    return canvas.svg()


# Title: of each of two ranks, which of 3 layers it has (rows from, to, of 2), and which samples.
FULL, UPPER, LOWER, NONE = (0, 2), (0, 1), (1, 2), (0, 0)
WAYS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]], str, str]] = {
    "data parallel": ([FULL] * 3, [FULL] * 3, "half", "gradients"),
    "with overlap": ([FULL] * 3, [FULL] * 3, "half", "gradients, by layer"),
    "sharded": ([FULL, UPPER, NONE], [NONE, LOWER, FULL], "half", "weights, gradients"),
    "sharded by layers": ([UPPER] * 3, [LOWER] * 3, "half", "each layer"),
    "tensor parallel": ([UPPER] * 3, [LOWER] * 3, "all", "activations"),
    "pipeline parallel": ([FULL, FULL, NONE], [NONE, NONE, FULL], "all", "activations"),
    "sequence parallel": ([FULL] * 3, [FULL] * 3, "tokens", "activations"),
    "expert parallel": ([FULL, UPPER, FULL], [FULL, LOWER, FULL], "half", "samples"),
}


def training() -> str:
    """Draw the eight ways to distribute training, on two ranks."""
    canvas = Canvas(420, 640, "Eight ways to distribute training over two ranks")
    for i, (title, (first, second, samples, exchanged)) in enumerate(WAYS.items()):
        left, top = 6 + (i % 2) * 208, 6 + (i // 2) * 158
        canvas.box(left, top, 200, 150, RANK_BOX, ' rx="6"')
        canvas.text(left + 100, top + 20, title, 14, weight="bold")
        for rank, layers in enumerate((first, second)):
            x = left + 12 + rank * 94
            for j, (begin, end) in enumerate(layers):
                canvas.box(x + 28 * j, top + 32, 22, 48, EMPTY)
                if end > begin:
                    y, height = top + 32 + 24 * begin, 24 * (end - begin)
                    canvas.box(x + 28 * j, y, 22, height, COLORS[rank])
            canvas.box(x, top + 88, 78, 14, EMPTY)
            if samples == "all":
                canvas.box(x, top + 88, 78, 14, COLORS[2])
            else:
                canvas.box(x + 39 * rank, top + 88, 39, 14, COLORS[2])
            canvas.text(x + 39, top + 118, f"rank {rank}", 12, color=MUTED)
        canvas.text(left + 100, top + 140, f"exchange: {exchanged}", 12)
    return canvas.svg()


def node() -> str:
    """Ranks, cores, GPUs, and the threads of a rank."""
    canvas = Canvas(420, 330, "Two ranks on a node with eight cores and two GPUs")
    canvas.text(10, 20, "a node: 8 cores, 2 GPUs", 14, "start", "bold")
    for rank in range(2):
        x = 10 + rank * 204
        canvas.box(x, 30, 196, 116, RANK_BOX, ' rx="6"')
        canvas.text(x + 98, 50, f"rank {rank}", 14, weight="bold")
        for core in range(4):
            canvas.box(x + 10 + core * 45, 60, 40, 30, COLORS[rank])
            canvas.text(x + 30 + core * 45, 80, f"{4 * rank + core}", 13)
        canvas.box(x + 10, 100, 175, 34, COLORS[rank])
        canvas.text(x + 98, 122, f"GPU {rank}", 13)
    canvas.text(10, 176, "the threads of a rank", 14, "start", "bold")
    threads = (
        ("Python's main thread", "calls operations, compiles"),
        ("XLA's pool, one thread per core", "computes, and calls MPI"),
        ("mpi4jax's progress thread", "moves pending operations on"),
        ("mpi4jax's watchdog", "sleeps; reports a hang"),
    )
    for i, (name, task) in enumerate(threads):
        y = 188 + i * 34
        canvas.box(10, y, 400, 28, COLORS[3] if "mpi4jax" in name else REDUCED, ' rx="4"')
        canvas.text(20, y + 19, name, 13, "start", "bold")
        canvas.text(402, y + 19, task, 12, "end", color=MUTED)
    return canvas.svg()


def call() -> str:
    """Draw the life of one call, from Python to MPI."""
    canvas = Canvas(420, 452, "The life of one call, from mpi4jax.allreduce to MPI_Allreduce")
    python, xla, rust = COLORS[2], REDUCED, COLORS[1]
    stages = (
        ("traced", 4),
        ("compiled", 2),
        ("at each run", 3),
    )
    steps = (
        (python, "mpi4jax.allreduce(x)", "ops/allreduce.py: checks arguments"),
        (python, "run(Call)", "_call/call.py: traced or eager"),
        (python, "pack the leaves by dtype", "_op/packing.py"),
        (python, "bind mpi4jax_allreduce", "a primitive with an ordered effect"),
        (python, "emit a custom call", "_compile/lowering.py: with an XLA token"),
        (rust, "decode its description", "src/xla/description.rs"),
        (rust, "handler", "src/xla: checks buffers, records"),
        (rust, "transport", "src/transport: mpi, staged, nccl, ..."),
        (xla, "MPI_Allreduce", "the library that mpi4py has loaded"),
    )
    y, i = 8, 0
    for title, count in stages:
        height = count * 46 + 4
        canvas.box(4, y, 412, height, "#fbfbfb", ' rx="6" stroke-dasharray="4 3"')
        canvas.elements.append(
            f'<text transform="translate(22 {y + height / 2:g}) rotate(-90)" font-size="12" '
            f'text-anchor="middle" fill="{MUTED}">{title}</text>'
        )
        for color, name, place in steps[i : i + count]:
            canvas.box(36, y + 6, 372, 38, color, ' rx="4"')
            canvas.text(46, y + 22, name, 13, "start", "bold")
            canvas.text(46, y + 38, place, 12, "start", color="#333")
            y += 46
            i += 1
        y += 10
    return canvas.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "call": call,
    "deadlock": deadlock,
    "halo": halo,
    "node": node,
    "plan": plan,
    "processes": processes,
    "report": report,
    "slabs": slabs,
    "training": training,
    "which": which,
}
