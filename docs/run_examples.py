"""Runs the Python blocks of the documentation, each as a job of its own.

    python docs/run_examples.py [-k TEXT] [FILES]

In the Markdown files, comments stand before blocks. Of a ```python block,
    <!-- ranks: 2 -->    it is for two ranks, else for one;
    <!-- ranks: 2, file: solver.py, status: 97, with: NAME=VALUE -->
                         it is saved by that name, else as example.py, runs with that variable, and
                         the job's exit status is that. Any of these may be left out.
Of a ```text block,
    <!-- output -->      it is what the block above prints, in any order of the lines, because the
                         order of ranks varies;
    <!-- errors -->      it is a part of what the block above prints on standard error, except for
                         times, paths and the rank that reports.
Both begin with the command, which `python docs/operations.py` writes (`with_commands`).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FILES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

sys.path.insert(0, str(ROOT / "tools"))

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

COMMAND = re.compile(r"\A\$ .*\n")

# What differs from run to run in reports. Any of the ranks that wait may report.
SPEAKER = re.compile(r"^r\d+ \||(?<=last operations of )rank \d+", re.MULTILINE)
TIME = re.compile(r"\b[\d.]+(e-\d+)? (s|ms|us)\b")
PATH = re.compile(r"/tmp/\S+")


def lasting(report: str) -> str:
    return SPEAKER.sub("rank ...", PATH.sub("/tmp/...", TIME.sub("... s", report)))


@dataclass
class Block:
    file: Path
    line: int
    code: str
    ranks: int = 1
    program: str = "example.py"
    status: int = 0
    env: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    errors: str | None = None

    @property
    def name(self) -> str:
        return f"{self.file.name}:{self.line}"

    @property
    def command(self) -> str:
        """What a user types."""
        before = "".join(f"{k}={v} " for k, v in self.env.items())
        start = f"mpiexec -n {self.ranks} " if self.ranks > 1 else ""
        return f"{before}{start}python {self.program}"

    def differs(self, job: subprocess.CompletedProcess[str]) -> str | None:
        """Return what is wrong with the job, if anything."""
        if job.returncode != self.status:
            return f"exit status {job.returncode}\n{job.stdout}{job.stderr}"
        if self.errors is not None and lasting(self.errors) not in lasting(job.stderr):
            return f"expected errors:\n{self.errors}\ngot:\n{job.stderr}"
        if self.output is None:
            return None
        expected, got = (
            sorted(text.split("\n")) for text in (self.output.strip(), job.stdout.strip())
        )
        if expected == got:
            return None
        return f"expected output:\n{self.output}\ngot:\n{job.stdout}"


def marked(file: Path, line: int, mark: str, code: str) -> Block:
    """Return a block, with what the comment before it says."""
    block = Block(file, line, code)
    for name, value in re.findall(r"(\w+): ([^,]+)", mark):
        if name in ("ranks", "status"):
            setattr(block, name, int(value))
        elif name == "file":
            block.program = value
        elif name == "with":
            variable, _, setting = value.partition("=")
            block.env[variable] = setting
        else:
            raise ValueError(f"{block.name}: {mark}")
    return block


def blocks(file: Path) -> Iterator[Block]:
    """Yield the Python blocks of a Markdown file, with their expected outputs."""
    text = file.read_text()
    last = None
    for match in BLOCK.finditer(text):
        mark = match["mark"] or ""
        if match["language"] == "python":
            if last:
                yield last
            line = text.count("\n", 0, match.start("text")) + 1
            last = marked(file, line, mark, match["text"])
        elif mark in ("output", "errors") and last:
            setattr(last, mark, COMMAND.sub("", match["text"]))
    if last:
        yield last


def with_commands(text: str) -> str:
    """Return a page on which each output begins with the command that it is of."""
    last = Block(Path(), 0, "")

    def shown(match: re.Match[str]) -> str:
        nonlocal last
        mark = match["mark"] or ""
        if match["language"] == "python":
            last = marked(Path(), 0, mark, "")
        elif mark in ("output", "errors"):
            text = COMMAND.sub("", match["text"])
            return f"<!-- {mark} -->\n```text\n$ {last.command}\n{text}```"
        return match[0]

    return BLOCK.sub(shown, text)


def run(block: Block, time_limit: float = 120) -> str | None:
    """Run a block; what is wrong, or None."""
    from mpirun import captured

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / block.program).write_text(block.code)
        command = [sys.executable, block.program]
        job = captured(block.ranks, command, cwd=folder, time_limit=time_limit, env=block.env)
    return block.differs(job)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="", metavar="TEXT", help="only blocks whose name contains it")
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    options = parser.parse_args()
    failed = count = 0
    for file in options.files:
        if not file.exists():
            continue
        for block in blocks(file):
            if options.k not in block.name:
                continue
            start = time.monotonic()
            wrong = run(block)
            count, failed = count + 1, failed + bool(wrong)
            verdict = f"FAILED\n{wrong}" if wrong else "ok"
            print(
                f"{block.name} n={block.ranks} ({time.monotonic() - start:.0f} s) {verdict}",
                flush=True,
            )
    print(f"{count - failed} of {count} blocks passed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
