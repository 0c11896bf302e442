# The name of the directory, as Spack wants it: py-mpi4jax.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpi4jax(PythonPackage):
    """MPI collectives for JAX arrays, inside jax.jit, from a Rust core."""

    # The repository has no public address yet (build_support/address.py). Until then, set `git` to the
    # address of your checkout, for example "file:///home/me/mpi4jax".

    license("MIT")

    version("main", branch="main")

    depends_on("c", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-setuptools-rust@1.11:", type="build")
    depends_on("rust@1.88:", type="build")
    depends_on("llvm+clang", type="build")  # bindgen's libclang
    depends_on("mpi")
    depends_on("py-jax@0.7:", type=("build", "run"))
    depends_on("py-jaxlib@0.7:", type=("build", "run"))
    depends_on("py-mpi4py@4.0.1:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))

    def setup_build_environment(self, env):
        env.set("MPICC", self.spec["mpi"].mpicc)
        env.set("LIBCLANG_PATH", self.spec["llvm"].prefix.lib)
