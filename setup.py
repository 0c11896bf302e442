"""What pyproject.toml cannot say: version, dependencies and build steps that depend on the MPI."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools_rust import Binding, RustExtension
from setuptools_rust.build import build_rust

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_support"))

from address import absolute_links, project_urls  # noqa: E402

import toolchain  # noqa: E402

MPIS = toolchain.find_mpis()
# Where there is none, the build says so.
MODULES = {f"mpi4jax._native_{mpi.abi}": mpi for mpi in MPIS} or {"mpi4jax._native": None}

DEPENDENCIES = ["jax>=0.7", "jaxlib>=0.7", "mpi4py>=4.0.1", "numpy"]


class BuildPy(build_py):
    def run(self):
        if not self.editable_mode:
            # Else modules that are gone from the sources would stay in the wheel.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildRust(build_rust):
    def run_for_extension(self, extension):
        environment = toolchain.cargo_environment(MODULES[extension.name])
        toolchain.forget_other_mpicc(environment)
        if self.inplace or os.environ.get("MPI4JAX_TEST_STAND_INS"):
            # `pip install -e`, for tests: they replace a GPU's driver by their own.
            extension.features = ["python", "stand-ins"]
        os.environ.update(environment)
        self.verbose = 0  # the names of the crates, not each command
        super().run_for_extension(extension)


setup(
    version=toolchain.version(),
    long_description=absolute_links((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    install_requires=DEPENDENCIES + [mpi.requirement for mpi in MPIS if mpi.requirement],
    rust_extensions=[
        RustExtension(
            name,
            binding=Binding.PyO3,
            py_limited_api=True,
            features=["python"],
            debug=False,  # also where it is installed with `pip install -e`
            quiet=False,  # `pip install -v` shows what cargo compiles
        )
        for name in MODULES
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_py": BuildPy, "build_rust": BuildRust},
)
