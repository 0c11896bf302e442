"""Runs the Python blocks of the documentation, each as a job of its own.

    python docs/run_examples.py [-k TEXT] [FILES]

In the Markdown files,
    <!-- ranks: 2 -->    before a ```python block says how many ranks it is for (else one);
    <!-- output -->      before a ```text block says that it is what the block above prints, the
                         lines in any order (ranks print when they like).
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FILES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

sys.path.insert(0, str(ROOT / "tools"))

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    file: Path
    line: int
    ranks: int
    code: str
    output: str | None = None

    @property
    def name(self) -> str:
        return f"{self.file.name}:{self.line}"

    def differs(self, printed: str) -> str | None:
        """What is wrong with the output, if anything."""
        if self.output is None:
            return None
        expected, got = (
            sorted(text.split("\n")) for text in (self.output.strip(), printed.strip())
        )
        if expected == got:
            return None
        return f"expected output:\n{self.output}\ngot:\n{printed}"


def blocks(file: Path) -> Iterator[Block]:
    """The Python blocks of a Markdown file, with their expected outputs."""
    text = file.read_text()
    last = None
    for match in BLOCK.finditer(text):
        mark = match["mark"] or ""
        if match["language"] == "python":
            if last:
                yield last
            ranks = re.fullmatch(r"ranks: (\d+)", mark)
            line = text.count("\n", 0, match.start("text")) + 1
            last = Block(file, line, int(ranks[1]) if ranks else 1, match["text"])
        elif mark == "output" and last:
            last.output = match["text"]
    if last:
        yield last


def run(block: Block, time_limit: float = 120) -> str | None:
    """Run a block; what is wrong, or None."""
    from mpirun import captured

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "example.py"
        program.write_text(block.code)
        command = [sys.executable, str(program)]
        job = captured(block.ranks, command, cwd=folder, time_limit=time_limit)
    if job.returncode != 0:
        return f"exit status {job.returncode}\n{job.stdout}{job.stderr}"
    return block.differs(job.stdout)


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
