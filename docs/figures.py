"""Draws the figures that need a run.

    python docs/figures.py [timeline] [film] [gallery]

timeline.png is of the first program of docs/performance.md, jet.webp of the shallow-water example,
gallery/ of the others. Pictures that need no run: docs/pictures.py.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
GALLERY = DOCS / "gallery"
sys.path.insert(0, str(DOCS.parent / "tools"))


def timeline() -> None:
    import run_examples

    from mpirun import captured

    block = next(run_examples.blocks(DOCS / "performance.md"))
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


def film(begin_day: float = 3.5, end_day: float = 10.0, frame_hours: float = 6.0) -> None:
    """From the day on which the jet begins to meander: before, nothing is to be seen."""
    from PIL import Image, ImageSequence

    from mpirun import captured

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DOCS.parent / "examples" / "shallow_water.py"), "--halo"]
        command += ["--days", str(end_day), "--frame-hours", str(frame_hours)]
        command += ["--save-animation", "jet.webp"]
        job = captured(2, command, cwd=folder, time_limit=400)
        assert job.returncode == 0, job.stderr
        with Image.open(Path(folder) / "jet.webp") as whole:
            frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(whole)]
    frames = frames[round(begin_day * 24 / frame_hours) :]
    frames[0].save(
        DOCS / "jet.webp", save_all=True, append_images=frames[1:], duration=130, loop=0,
        quality=60, method=6,
    )  # fmt: skip
    GALLERY.mkdir(exist_ok=True)
    small(frames[-1], GALLERY / "shallow_water.webp")


def small(picture: Any, path: Path) -> None:
    """A picture of the gallery, 480 pixels wide."""
    picture = picture.convert("RGB")
    picture.resize((480, 480 * picture.height // picture.width)).save(path, quality=80, method=6)


# Example: ranks, and arguments beside --save-figure.
EXAMPLES = {
    "finite_volumes.py": (2, []),
    "navier_stokes.py": (2, ["--points", "48", "--steps", "120", "--group", "10"]),
    "particles.py": (4, []),
    "recover_initial_height.py": (2, []),
}


def gallery() -> None:
    from PIL import Image

    from mpirun import captured

    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, arguments) in EXAMPLES.items():
            command = [sys.executable, str(DOCS.parent / "examples" / name), *arguments]
            command += ["--save-figure", "picture.png"]
            job = captured(ranks, command, cwd=folder, time_limit=300)
            assert job.returncode == 0, job.stderr
            with Image.open(Path(folder) / "picture.png") as picture:
                small(picture, GALLERY / name.replace(".py", ".webp"))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("timeline", "film", "gallery"):
        globals()[name]()
