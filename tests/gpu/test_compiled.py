"""What XLA makes of the operations on a GPU, where JAX's CUDA plugin is installed.

JAX's own `jax.lax.map` ends the process without ptxas, so that is asked for too.
"""

import importlib.util
import os

import pytest
from stand_ins import HERE, NOWHERE, RANKS

PACKAGES = "jax_plugins.xla_cuda13", "nvidia.cu13.bin"


def is_there(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.timeout(400)
def test_every_op_is_compiled(mpirun):
    missing = [package for package in PACKAGES if not is_there(package)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    path = os.pathsep.join(map(str, (RANKS, HERE.parent / "forks", HERE.parent.parent / "tools")))
    # JAX 0.12 and newer would look for the CUDA libraries that only a program on a GPU needs.
    env = {**NOWHERE, "PYTHONPATH": path, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    result = mpirun(2, HERE / "compiled.py", env=env, time_limit=360)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.count("all are compiled") == 2
