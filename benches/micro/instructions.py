"""Instructions of a 4-byte allreduce, by layers of the core.

    python benches/micro/instructions.py

Runs execute.rs under callgrind (`apt-get install valgrind`). Unlike times, the numbers do
not depend on what else the machine does. XLA, whose part a fake takes, is not counted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "build_support"))

import toolchain  # noqa: E402

CALLS, REPEATS = 1000, 20  # the second as in execute.rs
LIMIT = 695


def program() -> str:
    """The benchmark, compiled as the package is, with lines."""
    build = toolchain.cargo_environment(toolchain.find_mpi())
    env = {**os.environ, **build, "CARGO_PROFILE_BENCH_DEBUG": "line-tables-only"}
    command = "cargo bench --no-default-features --bench execute --no-run --message-format=json"
    lines = subprocess.run(
        command.split(), cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    made = [json.loads(line).get("executable") for line in lines if line.startswith("{")]
    return next(filter(None, reversed(made)))


def measure(executable: str) -> Counter[tuple[str, str]]:
    """Instructions of all calls, by object and source file."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += ["--toggle-collect=*bench_execute*", executable, str(CALLS)]
        prefix = Path(sys.prefix)  # of an MPI from PyPI
        paths = [str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        env = {**os.environ, "OMPI_MCA_btl": "self"}
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
        env.setdefault("OPAL_PREFIX", str(prefix))
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        if result.returncode:
            sys.exit(result.stdout + result.stderr)
        return parsed(out.read_text())


def parsed(text: str) -> Counter[tuple[str, str]]:
    """Sums the exclusive costs of a callgrind file."""
    names: dict[str, dict[str, str]] = {"ob": {}, "f": {}}
    costs: Counter[tuple[str, str]] = Counter()
    obj = file = ""
    skip = False
    for line in text.splitlines():
        if match := re.fullmatch(r"(ob|fl|fi|fe)=(\(\d+\))(?: (.*))?", line):
            kind, number, name = match.groups()
            known = names["ob" if kind == "ob" else "f"]
            name = known.setdefault(number, name or "")
            obj, file = (name, file) if kind == "ob" else (obj, name)
        elif match := re.fullmatch(r"(cob|cfi|cfl)=(\(\d+\)) (.*)", line):
            names["ob" if match[1] == "cob" else "f"].setdefault(match[2], match[3])
        elif line.startswith("calls="):
            skip = True  # the next line has the cost of what is called
        elif match := re.fullmatch(r"[+*\d-]\S* (\d+)", line):
            if not skip:
                costs[obj, file] += int(match[1])
            skip = False
    return costs


def layer(obj: str, file: str, executable: str) -> str:
    if obj != executable:
        return Path(obj).name
    if match := re.search(r"(?:^|/)src/(\w+)", file.removeprefix(str(ROOT))):
        if "/library/" in file or ".cargo/" in file or "rustc" in file:
            return "Rust's and other libraries, inlined"
        return f"src/{match[1]}"
    return "Rust's and other libraries, inlined"


def main() -> None:
    executable = program()
    layers: Counter[str] = Counter()
    for (obj, file), cost in measure(executable).items():
        if "tests/rust" in file or "benches/" in file:
            continue
        layers[layer(obj, file, executable)] += cost
    n = CALLS * REPEATS
    ours = 0
    for name, cost in layers.most_common():
        if cost >= n:
            print(f"{cost / n:8.1f}  {name}")
        ours += cost if name.startswith(("src/", "Rust")) else 0
    print(f"{ours / n:8.1f}  ours, of at most {LIMIT}")
    sys.exit(ours / n > LIMIT)


if __name__ == "__main__":
    main()
