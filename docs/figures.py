"""Draws the figures that need a run or a table.

    python docs/figures.py [timeline] [film] [scaling]

timeline.png is of the first program of docs/timeline.md, jet.gif of the shallow-water example, and
scaling.png of the first table of docs/scaling.md. Pictures that need neither: docs/pictures.py.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tools"))

BLUE, ORANGE, GREEN = "#0b4f8a", "#e8903a", "#5a8f5a"


def timeline() -> None:
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


def film_colours() -> list[tuple[float, ...]]:
    """Of the map of colours in the film, and the greys of its text."""
    from matplotlib import colormaps

    greys = [(i / 7, i / 7, i / 7) for i in range(8)]
    return [*greys, *(colormaps["RdBu_r"](i / 39) for i in range(40))]


def film(begin_day: float = 3.5, end_day: float = 10.0, frame_hours: float = 6.0) -> None:
    """From the day on which the jet begins to meander: before, nothing is to be seen."""
    from PIL import Image, ImageSequence

    from mpirun import captured

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DOCS.parent / "examples" / "shallow_water.py"), "--halo"]
        command += ["--days", str(end_day), "--frame-hours", str(frame_hours)]
        command += ["--save-animation", "jet.gif"]
        job = captured(2, command, cwd=folder, time_limit=400)
        assert job.returncode == 0, job.stderr
        with Image.open(Path(folder) / "jet.gif") as whole:
            frames = [
                frame.convert("RGB").resize((640, 640 * frame.height // frame.width))
                for frame in ImageSequence.Iterator(whole)
            ]
    palette = Image.new("P", (1, 1))
    palette.putpalette([round(255 * part) for colour in film_colours() for part in colour[:3]])
    frames = frames[round(begin_day * 24 / frame_hours) :]
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(
        DOCS / "jet.gif", save_all=True, append_images=frames[1:], duration=130, loop=0,
        optimize=True,
    )  # fmt: skip


def scaling() -> None:
    """The speed-up by the number of ranks, for each size of the model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = re.findall(
        r"^\| (\d+ x \d+) \| (\d+) \| [^|]+ \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|",
        (DOCS / "scaling.md").read_text().partition("## Weak")[0],
        re.MULTILINE,
    )
    sizes = list(dict.fromkeys(row[0] for row in rows))
    ranks = sorted({int(row[1]) for row in rows})
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot(ranks, ranks, "--", color="grey", label="linear")
    styles = zip(sizes, (BLUE, ORANGE, GREEN), "os^", strict=True)
    for size, colour, marker in styles:
        points = [(int(n), *map(float, v)) for name, n, *v in rows if name == size]
        n, middle, low, high = zip(*points, strict=True)
        axes.plot(n, middle, marker=marker, color=colour, label=f"{size} cells")
        axes.vlines(n, low, high, color=colour)
    axes.set(xlabel="ranks, one core each", ylabel="speed-up", title="Strong scaling")
    axes.set_xticks(ranks)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(DOCS / "scaling.png", dpi=110)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("timeline", "film", "scaling"):
        {"timeline": timeline, "film": film, "scaling": scaling}[name]()
