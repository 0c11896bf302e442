"""XLA's own compiler and runtime for GPUs, on a CUDA driver of ours: what they give our handlers.

It needs JAX's CUDA plugin in jaxlib's version, which the tests do not install, and no GPU:
`pip install --no-deps jax-cuda12-plugin==V jax-cuda12-pjrt==V`, without any library of NVIDIA's.
"""

import importlib.util
import os
import re
import stat
from pathlib import Path

import jaxlib
import pytest
from libraries import compile_library, mpicc

FAKES = Path(__file__).resolve().parent / "fake"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

pytestmark = [
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="no CUDA plugin of JAX (see tests/gpu/test_plugin.py)",
    ),
]

# Older XLAs record no call that has a state.
RECORDS = tuple(map(int, jaxlib.__version__.split(".")[:3])) >= (0, 9, 1)

# By these names XLA looks for them.
LIBRARIES = ["libcudart.so.12", "libcudart.so.13", "libcudnn.so.9", "libnvidia-ml.so.1"]

# XLA assembles what it compiles, also where that has no kernel; nothing reads the outcome.
PTXAS = """\
#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 12.9, V12.9.86"; exit 0 ;; esac
while [ $# -gt 0 ]; do
    case $1 in -o) to=$2; shift ;; -*) ;; *) from=$1 ;; esac
    shift
done
cp "$from" "$to"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The environment of a machine with a GPU."""
    folder = tmp_path_factory.mktemp("machine")
    compiler = mpicc()

    def found_as(name, *arguments, **options):
        """A library that is the same one for all who load it by its name."""
        compile_library(folder / name, *arguments, f"-Wl,-soname,{name}", **options)

    found_as("libcuda.so.1", FAKES / "plugin.c", "-lpthread")
    for name in LIBRARIES:
        (folder / name).symlink_to("libcuda.so.1")
    found_as("libnccl.so.2", FAKES / "nccl.c", "-ldl", compiler=compiler)
    (folder / "aware.c").write_text("int MPIX_Query_cuda_support(void) { return 1; }")
    found_as("libaware.so", folder / "aware.c")
    ptxas = folder / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text(PTXAS)
    ptxas.chmod(ptxas.stat().st_mode | stat.S_IXUSR)
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(
            [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        ).rstrip(":"),
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cuda",
        # There is nothing to check: no cuBLAS, no cuFFT.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "MPI4JAX_LIBCUDA": "",
        "MPI4JAX_LIBNCCL": "",
        "MPI4JAX_USE_CUDA_MPI": "",
    }, folder


# Transport, and what else is set.
RUNS = {
    "staged": {},
    "cuda-mpi": {"FAKE_CUDA_REACHED": "1", "LD_PRELOAD": "{folder}/libaware.so"},
    "nccl": {},
    "nccl graphs": {"MPI4JAX_NCCL_GRAPHS": "1"},
    "auto": {},
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("run", RUNS)
def test_all_ops(mpirun, machine, tmp_path, run, ranks):
    env, folder = machine
    log = tmp_path / "cuda.log"
    settings = {name: value.format(folder=folder) for name, value in RUNS[run].items()}
    transport = run.split()[0]
    env = {**env, **settings, "MPI4JAX_TRANSPORT": transport, "FAKE_CUDA_LOG": str(log)}
    result = mpirun(ranks, FAKES / "started.py", env=env, time_limit=90)
    assert result.returncode == 0, result.stdout + result.stderr
    chosen = "nccl" if transport == "auto" else transport
    assert f"GPU: {chosen} (MPI4JAX_TRANSPORT={transport}" in result.stdout
    counts = re.findall(r"kernels (\d+) graphs (\d+)", log.read_text())
    assert len(counts) == ranks
    for kernels, graphs in counts:
        assert kernels == "0"
        assert (int(graphs) > 0) == (run == "nccl graphs" and RECORDS)


HALO = """
import jax, jax.numpy as jnp
from jax._src import hardware_utils
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
hardware_utils.has_visible_nvidia_gpu = lambda: True
comm = MPI.COMM_WORLD
torus = comm.Create_cart([comm.size, 1], [True, True])
x = jnp.zeros((256, 4096))
f = mpi4jax.jit(lambda x: nt.halo_exchange(x, torus, width=2), donate_argnums=0)
memory = f.lower(x).compile().memory_analysis()
assert memory.alias_size_in_bytes == x.nbytes
assert memory.temp_size_in_bytes < x.nbytes / 20
for _ in range(3):
    x = f(x)
x.block_until_ready()
print("filled")
"""


@pytest.mark.parametrize("run", ["nccl", "nccl graphs"])
def test_xla_packs_a_halo_exchange_and_fills_the_block_in_place(mpirun, machine, tmp_path, run):
    """With kernels, which do nothing here; CUDA graphs have them too."""
    env, _ = machine
    log = tmp_path / "cuda.log"
    env = {**env, **RUNS[run], "FAKE_CUDA_KERNELS": "skip", "FAKE_CUDA_LOG": str(log)}
    result = mpirun(2, "-c", HALO, env={**env, "MPI4JAX_TRANSPORT": "nccl"}, time_limit=90)
    assert result.stdout.count("filled") == 2, result.stdout + result.stderr
    for kernels in re.findall(r"kernels (\d+)", log.read_text()):
        # At least one that packs, and one for each of eight neighbours.
        assert int(kernels) >= 9


def test_who_touches_the_memory_of_a_gpu_dies(mpirun, machine):
    """Else it would show nothing that staging reads none."""
    env, folder = machine
    env = {**env, "MPI4JAX_TRANSPORT": "cuda-mpi", "LD_PRELOAD": f"{folder}/libaware.so"}
    result = mpirun(1, "-X", "faulthandler", FAKES / "program.py", env=env)
    assert "Segmentation fault" in result.stderr
