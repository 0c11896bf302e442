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

import toolchain  # noqa: E402

MPI = toolchain.find_mpi()

DEPENDENCIES = ["jax>=0.7", "jaxlib>=0.7", "mpi4py>=4.0.1", "numpy"]

BUILD_INFO = '''\
"""Written by the build: the MPI that mpi4jax._native was built for."""

vendor = {0.vendor!r}
version = {0.version!r}
found = {0.found!r}
'''


class BuildPy(build_py):
    def run(self):
        if not self.editable_mode:
            # Else modules that are gone from the sources would stay in the wheel.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        package = ROOT / "python" if self.editable_mode else Path(self.build_lib)
        (package / "mpi4jax" / "_build_info.py").write_text(BUILD_INFO.format(MPI))


class BuildRust(build_rust):
    def run(self):
        environment = toolchain.cargo_environment()
        toolchain.forget_other_mpicc(environment)
        os.environ.update(environment)
        super().run()


setup(
    version=toolchain.from_cargo_toml("version"),
    install_requires=DEPENDENCIES + ([MPI.requirement] if MPI and MPI.requirement else []),
    rust_extensions=[
        RustExtension(
            "mpi4jax._native",
            binding=Binding.PyO3,
            py_limited_api=True,
            features=["python"],
            debug=False,  # also where it is installed with `pip install -e`
            quiet=True,  # what went wrong, rather than every command of cargo
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_py": BuildPy, "build_rust": BuildRust},
)
