"""Every example, run as users run it: a job of its own."""

import re
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SHALLOW_WATER = EXAMPLES / "shallow_water.py"

# In one process, for its states of the model.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("examples")]


@pytest.fixture
def example(mpirun):
    """example(ranks, script, *arguments): what it prints, if it ends well."""

    def run(ranks, script, *arguments):
        job = mpirun(ranks, EXAMPLES / script, *arguments, time_limit=240)
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    return run


def test_all_examples_are_tested():
    run = re.findall(r'\bexample\(\s*\w+,\s*"(\w+\.py)"', Path(__file__).read_text())
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_global_sum(example, ranks):
    printed = example(ranks, "global_sum.py")
    total = float(sum(range(ranks)))
    expected = [f"rank {r}: {np.full(3, total)}" for r in range(ranks)]
    assert sorted(printed.splitlines()) == expected


def test_send_recv(example):
    assert sorted(example(2, "send_recv.py", "--reverse").splitlines()) == [
        "rank 0 received [10. 11. 12.]",
        "rank 1 received [0. 1. 2.]",
    ]


def test_ring_attention(example, run_job, tmp_path):
    assert "3 parts; gradients differ by" in example(3, "ring_attention.py")
    alone = run_job(1, EXAMPLES / "ring_attention.py", "--devices", "3", cwd=tmp_path)
    assert "3 parts; gradients differ by" in alone.stdout, alone.stderr


def test_transformer(example):
    """On two meshes of four ranks, and then on one rank, from the same checkpoint."""
    pytest.importorskip("tensorstore")
    meshes = [f"--mesh={mesh}" for mesh in ("2,1,2", "1,2,2", "1,1,1")]
    assert "as in one process: True" in example(4, "transformer.py", *meshes)


@pytest.mark.parametrize("ranks", [1, 3])
def test_pipeline(example, ranks):
    printed = example(ranks, "pipeline.py").splitlines()
    names = ("gpipe", "one forward, one backward")
    words = "loss and gradient are right: True"
    assert sorted(printed) == [f"rank {r}: {name}: {words}" for r in range(ranks) for name in names]


def test_jax_distributed(example):
    words = "psum by gloo [3. 3. 3.], allreduce of it by MPI [6. 6. 6.], 2 devices in all"
    assert words in example(2, "jax_distributed.py")


def test_checkpoint(example, tmp_path):
    """One rank gets SIGTERM; other numbers of ranks go on, and end where one rank ends at once."""

    def run(ranks, folder, steps, *more):
        options = [
            "--directory",
            tmp_path / folder,
            "--size",
            23,
            10,
            "--steps",
            steps,
            "--every",
            9,
        ]
        return example(ranks, "checkpoint.py", *map(str, options), *more)

    assert "stops at step 13" in run(3, "run", 40, "--preempt-at", "13")
    assert "goes on at step 13, on 4 ranks" in run(4, "run", 31)
    printed = run(2, "run", 40)
    assert "goes on at step 31, on 2 ranks" in printed
    squares = re.compile("ends at step 40 with a sum of squares of (.*)")
    alone = squares.search(run(1, "alone", 40))[1]
    np.testing.assert_allclose(float(squares.search(printed)[1]), float(alone), rtol=1e-5)
    assert squares.search(run(1, "alone", 40))[1] == alone, "that job had ended"


@pytest.mark.parametrize("ranks", [1, 4])
def test_plasma(example, ranks):
    """No charge is lost, and electrons oscillate with the plasma frequency."""
    lines = example(ranks, "plasma.py", "--cells", "30").splitlines()
    found = [
        re.fullmatch(r"\d half periods: charge 960.0, amplitude (.*)", line)[1] for line in lines
    ]
    np.testing.assert_allclose([*map(float, found)], [0.5, -0.5, 0.5], atol=0.02)


def test_two_level(example):
    """The coarse problem saves iterations."""
    counts = re.findall(r"(\d+) iterations, converged: True", example(3, "two_level.py"))
    none, jacobi, two = map(int, counts)
    assert two < jacobi < none


@pytest.mark.parametrize("ranks", [1, 3])
def test_multigrid_does_not_depend_on_the_ranks(example, ranks):
    printed = example(ranks, "multigrid.py", "--levels", "2", "--steps", "20")
    none, cycle = map(int, re.findall(r"(\d+) iterations, TOLERANCE", printed))
    assert cycle < none / 4
    gradient, difference, first, last = map(float, re.findall(r"-?\d\S+e-\d+", printed))
    np.testing.assert_allclose(gradient, difference, rtol=1e-3)
    error = float(re.search(r"conductivity (\S+)", printed)[1])
    np.testing.assert_allclose([first, last, error], [3.98e-4, 5.04e-6, 0.3655], rtol=5e-3)


def shallow_water(example, ranks, path, *how, days="0.3"):
    size = ["--size", "48", "24"]
    example(ranks, "shallow_water.py", *size, "--days", days, "--save-state", path, *how)
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def final_state():
    """`final_state(example, folder, ranks, *how)`: computed once."""
    states = {}

    def state(example, folder, *case):
        if case not in states:
            ranks, *how = case
            states[case] = shallow_water(example, ranks, folder / "state.npz", *how)
        return states[case]

    return state


def test_shallow_water_does_not_depend_on_the_ranks(example, tmp_path, final_state):
    one = final_state(example, tmp_path, 1)
    several = final_state(example, tmp_path, 4)
    assert several.keys() == one.keys() == {"u", "v", "h", "vorticity", "seconds"}
    for name, field in one.items():
        np.testing.assert_allclose(
            several[name], field, rtol=1e-5, atol=1e-5 * np.abs(field).max(), err_msg=name
        )


def test_shallow_water_with_halo_exchange(example, tmp_path, final_state):
    """The same arithmetic on the same numbers."""
    messages = final_state(example, tmp_path, 4)
    halo = final_state(example, tmp_path, 4, "--halo")
    for name, field in messages.items():
        scale = np.abs(field).max()
        np.testing.assert_allclose(halo[name], field, rtol=0, atol=2e-6 * scale, err_msg=name)


def test_shallow_water_writes_pictures(example, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    printed = example(
        2,
        "shallow_water.py",
        *("--size", "48", "24", "--days", "0.5", "--frame-hours", "3"),
        *("--save-figure", tmp_path / "last.png", "--save-animation", tmp_path / "all.gif"),
    )
    assert "steps per second" in printed
    with image.open(tmp_path / "last.png") as picture:
        assert picture.format == "PNG"
        assert len(np.unique(picture.convert("RGB"))) > 50
        picture.load()
    with image.open(tmp_path / "all.gif") as film:
        assert film.format == "GIF"
        assert film.n_frames == 5
        film.seek(4)
        film.load()


def particles(example, ranks, path, *how):
    number = ["--particles", "3000", "--steps", "60"]
    printed = example(ranks, "particles.py", *number, "--save", path, *how)
    assert f"3000 particles on {ranks} ranks, 60 steps: 0 lost" in printed
    with np.load(path) as file:
        return dict(file)


def test_particles_do_not_depend_on_the_ranks(example, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "particles.png"
    one = particles(example, 1, tmp_path / "one.npz")
    four = particles(example, 4, tmp_path / "four.npz", "--save-figure", picture)
    assert picture.stat().st_size > 10_000
    assert one["number"].tolist() == four["number"].tolist() == list(range(3000))
    # A place at the edge of the box may be rounded to the other side.
    apart = np.abs(four["place"] - one["place"])
    np.testing.assert_allclose(np.minimum(apart, 1 - apart), 0, atol=1e-4)
    assert four["counts"].shape == (61, 4)
    assert (four["counts"].sum(axis=1) == 3000).all()
    assert four["counts"][0].max() > 2900, "a drop"
    assert (four["counts"].max(axis=0) > 100).all(), "each rank has some in the end"


@pytest.mark.parametrize("ranks", [2, 3])
def test_particles_are_balanced(example, tmp_path, ranks):
    plain = particles(example, ranks, tmp_path / "plain.npz")
    found = particles(example, ranks, tmp_path / "balanced.npz", "--balance", "10")
    assert found["number"].tolist() == [*range(3000)]
    apart = np.abs(found["place"] - plain["place"])
    np.testing.assert_allclose(np.minimum(apart, 1 - apart), 0, atol=1e-4)
    # After the first ten steps; the drop itself is on one rank.
    largest = [each["counts"][10:].max(axis=1).mean() * ranks / 3000 for each in (plain, found)]
    assert largest[1] < 0.9 * largest[0]


def test_particles_without_room_are_not_lost_in_silence(mpirun):
    job = mpirun(2, EXAMPLES / "particles.py", "--particles", "300", "--capacity", "200")
    assert job.returncode != 0
    assert "argument 'capacity' must be at least the " in job.stderr
    assert "rows that rank 0 receives (" in job.stderr


def recovered_height(example, ranks, path, *how):
    size = ["--size", "32", "16", "--steps", "8", "--group", "4", "--iterations", "6"]
    printed = example(ranks, "recover_initial_height.py", *size, "--save", path, *how)
    assert "in 6 iterations, error of the height 0.0 %" in printed
    with np.load(path) as file:
        return dict(file)


def test_recover_initial_height_does_not_depend_on_the_ranks(example, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "recovered.png"
    one = recovered_height(example, 1, tmp_path / "one.npz", "--save-figure", picture)
    assert picture.stat().st_size > 10_000
    assert np.abs(one["gradient"]).max() > 0.1
    four = recovered_height(example, 4, tmp_path / "four.npz")
    for name in ("gradient", "truth", "recovered"):
        np.testing.assert_allclose(
            four[name], one[name], atol=1e-4 * np.abs(one[name]).max(), err_msg=name
        )
    for result in (one, four):
        assert result["losses"][-1] < 1e-6 * result["losses"][0]
        np.testing.assert_allclose(result["recovered"], result["truth"], atol=1e-3)


def test_data_parallel_training_is_that_of_one_process(example, tmp_path):
    pytest.importorskip("optax")
    losses = []
    for ranks in (1, 3):
        example(ranks, "data_parallel.py", "--steps", "200", "--save", tmp_path / "run.npz")
        with np.load(tmp_path / "run.npz") as run:
            losses.append(run["losses"])
            # Sums of 240 numbers of float32 in another order, through 200 steps.
            assert run["difference"] < (1e-7 if ranks == 1 else 1e-4)
    assert losses[0][-1] < 0.05 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_finite_volumes_do_not_depend_on_the_ranks(example, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tracer.png"
    runs = []
    for ranks, how in ((1, []), (2, ["--save-figure", picture])):
        size = ["--corners", "300", "--steps", "8", "--save", tmp_path / "run.npz"]
        assert "mass changed by" in example(ranks, "finite_volumes.py", *size, *how)
        with np.load(tmp_path / "run.npz") as file:
            runs.append(dict(file))
    assert picture.stat().st_size > 10_000
    one, two = runs
    # The inner product of the adjoint with its initial value is the goal.
    np.testing.assert_allclose(one["product"], one["goal"], rtol=1e-4)
    for name in ("last", "gradient"):
        scale = np.abs(one[name]).max()
        np.testing.assert_allclose(two[name], one[name], atol=1e-4 * scale, err_msg=name)


def test_navier_stokes_does_not_depend_on_the_ranks(example, tmp_path):
    gradients = []
    for ranks, how in ((1, ["--slabs"]), (2, [])):
        size = ["--points", "12", "--steps", "4", "--group", "2", "--save", tmp_path / "run.npz"]
        example(ranks, "navier_stokes.py", *size, *how)
        with np.load(tmp_path / "run.npz") as run:
            gradients.append(run["gradient"])
            np.testing.assert_allclose(run["predicted"], run["tried"], rtol=1e-2)
            assert run["energies"][0] > run["energies"][-1]
    one, two = gradients
    np.testing.assert_allclose(two, one, atol=1e-5 * np.abs(one).max())


def test_channel_does_not_depend_on_the_ranks(example, tmp_path):
    """The pressure leaves no divergence, and the gradient agrees with finite differences."""
    runs = []
    for ranks in (1, 3):
        size = ["--points", "10", "--steps", "5", "--save", tmp_path / "run.npz"]
        printed = example(ranks, "channel.py", *size)
        energy, divergence, slope, difference = map(float, re.findall(r"\d\S*e-\d+", printed))
        assert energy > 1e-6
        assert divergence < 1e-14
        np.testing.assert_allclose(slope, difference, rtol=1e-5)
        with np.load(tmp_path / "run.npz") as file:
            runs.append(dict(file))
    for name, field in runs[0].items():
        np.testing.assert_allclose(runs[1][name], field, atol=1e-12 * np.abs(field).max())
