"""Libraries of transports: where they are found, absent, too old, incomplete, broken."""

import shutil

import pytest
from libraries import compile_library
from stand_ins import INFO, NOWHERE

LIBRARIES = {
    "libcuda.so.1": ("MPI4JAX_LIBCUDA", "cuda:staged", "12.0"),
    "libnccl.so.2": ("MPI4JAX_LIBNCCL", "cuda:nccl", "2.18"),
    "libucp.so.0": ("MPI4JAX_LIBUCP", "cpu:ucx", "1.11"),
}


def why_not(python, transport, env):
    code = f"import mpi4jax; print(mpi4jax.transport_info().unavailable.get({transport!r}))"
    result = python(code, env)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("soname", LIBRARIES)
def test_missing_libraries_are_named(python, fakes, soname):
    variable, transport, _ = LIBRARIES[soname]
    why = why_not(python, transport, {**fakes, variable: f"/nowhere/{soname}"})
    assert f"{soname} cannot be loaded (/nowhere/{soname}: " in why


@pytest.mark.parametrize("soname", LIBRARIES)
def test_missing_functions_are_named(python, fakes, tmp_path, soname):
    variable, transport, needed = LIBRARIES[soname]
    source = tmp_path / "empty.c"
    source.write_text("int cuInit(unsigned flags) { return 0; }")
    library = compile_library(tmp_path / soname, source)
    why = why_not(python, transport, {**fakes, variable: library})
    assert f"{library} has no function " in why
    assert f"at least version {needed}" in why


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_CUDA_VERSION": "11080"}, "is version 11.8, expected at least 12.0"),
        ({"FAKE_CUDA_BROKEN": "100"}, "cuInit returned error code 100: no CUDA-capable device"),
        ({"FAKE_CUDA_BROKEN": "9999"}, "error code 9999: unknown error"),
        ({"FAKE_CUDA_DEVICES": "0"}, "finds no device"),
        ({"FAKE_NCCL_VERSION": "21403"}, "is version 2.14.3, expected at least 2.18"),
    ],
)
def test_unusable_cuda_says_why(python, fakes, settings, words):
    out = python(INFO, {**fakes, **settings}).stdout
    assert words in out
    assert out.endswith("True\n" if "FAKE_NCCL_VERSION" in settings else "False\n")


def test_nccl_is_found_where_the_packages_of_jax_keep_it(python, fakes, tmp_path):
    env = {**fakes, "PYTHONPATH": ""}
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mpi4jax; "
        "print(mpi4jax.transport_info().unavailable.get('cuda:nccl'))"
    )
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(env.pop("MPI4JAX_LIBNCCL"), folder)
    assert python(code, env).stdout == "None\n"


def test_ucx_that_is_not_there_is_an_error_on_all_ranks(mpirun):
    env = {**NOWHERE, "MPI4JAX_TRANSPORT": "ucx", "MPI4JAX_LIBUCP": "/nowhere/libucp.so.0"}
    code = """
try: import mpi4jax
except RuntimeError as error: print(error)
"""
    result = mpirun(2, "-c", code, env=env)
    assert result.stdout.count("libucp.so.0 cannot be loaded") == 2, result
    assert result.stdout.count("MPI4JAX_TRANSPORT=mpi") == 2
