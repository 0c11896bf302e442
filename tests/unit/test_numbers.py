"""Numbers with a unit on the pages come from the measurements, or are constants of the code."""

import inspect
import re
from pathlib import Path

import jax
import pytest
import run_examples
import speeds

from mpi4jax._compile import reductions
from mpi4jax._jax import combining

ROOT = Path(__file__).resolve().parent.parent.parent
UNIT = (
    r"us|ms|ns|s|seconds?|minutes?|GB/s|MB/s|%|times (?:a second|as |slower|faster)|GiB|MiB|KiB|MB"
)
NUMBER = re.compile(rf"(?<![\w.])\d[\d.,]* (?:{UNIT})(?!\w)")
FIGURE = re.compile(r"<!-- figure: \w+ -->.*?<!-- end -->")

# Pages, or sections, whose numbers are their subject.
OWN = {
    "measurements.md": "the home of what was measured, with dates",
    "scaling.md": "counted by tests/jobs/test_counts.py, or a model with the parameters beside it",
    "CONTRIBUTING.md": "how long its commands take, with the date",
    "reference-*.md": "made from the docstrings",
    "releasing.md": "what the services allow",
}
# Numbers that are not the project's, and what says so.
OTHERS = {
    "75 %": "JAX's default of XLA_PYTHON_CLIENT_MEM_FRACTION",
    "50 us": "Linux's timer slack",
    "64 MB": "Docker's default size of /dev/shm",
    "2 to 6 minutes": "the time to build, as in CONTRIBUTING.md",
    "10 GB/s": "an assumption of solvers.md, from which it computes the next",
    "12 ns": "5 more vectors, 24 bytes of memory traffic for each element, at 10 GB/s",
}


def constant(file, name):
    """The value of a constant in Rust or Python: a number, a shift, or a number of some unit."""
    text = (ROOT / file).read_text()
    found = re.search(rf"{name}\b[^=\n]*= (?:Duration::from_\w+\()?([\d._]+(?: << \d+)?)\)?;", text)
    assert found, (file, name)
    number, _, shift = found[1].replace("_", "").partition(" << ")
    return float(number) * 2 ** int(shift or 0)


def default(name):
    text = (ROOT / "python" / "mpi4jax" / "_job" / "watch.py").read_text()
    return float(re.search(rf'seconds\("{name}", ([\d.]+)\)', text)[1])


def of_jax(name, newer):
    """The default of a timeout of `jax.distributed`, which JAX 0.7 does not have."""
    known = inspect.signature(jax.distributed.initialize).parameters.get(name)
    return known.default if known else newer


def of_the_code():
    """Numbers as the pages write them, from the code."""
    decide, watchdog = "src/watch/decide.rs", "src/watch/watchdog.rs"
    board = (ROOT / "src/board/tests.rs").read_text()
    stuck, warning = default("MPI4JAX_DEADLOCK_AFTER"), constant(decide, "WARN_AFTER")
    judged = constant(decide, "JUDGE_AFTER") + constant(decide, "PATIENCE")
    progress = (ROOT / "src/transport/requests/progress.rs").read_text()
    longest = int(re.search(r"PAUSES.*from_millis\((\d+)\)\)", progress)[1])
    yield from (f"{kib} KiB" for kib in re.findall(r"(\d+) << 10, \"docs/", board))
    for seconds in (
        *(stuck, stuck - warning, warning, default("MPI4JAX_REPORT_AFTER")),
        judged + constant(watchdog, "LOOK"),
        constant(watchdog, "ASK_AFTER"),
        constant("src/watch/link.rs", "ANSWER_TIME"),
        constant(watchdog, "ONE_REQUEST") / 1000,
        of_jax("heartbeat_timeout_seconds", 100),
        of_jax("shutdown_timeout_seconds", 300),
    ):
        yield from (f"{seconds:.0f} seconds", f"{seconds:.0f} s")
    yield f"{100 * constant(watchdog, 'BUSY'):.0f} %"
    yield f"{1000 // longest} times a second"
    yield f"{constant('src/transport/mpi/waiting.rs', 'POLLS'):.0f} us"
    yield f"{constant('src/transport/mpi/waiting.rs', 'LONGEST'):.0f} ms"
    yield f"{constant('src/transport/pool.rs', 'DEFAULT_MIB'):.0f} MiB"
    yield f"{constant('src/xla/pages.rs', 'LEAST') / 2**20:.0f} MiB"
    yield f"{combining.LIMIT >> 20} MiB"
    yield f"{combining.LARGE >> 10} KiB"
    yield f"{reductions.GATHERED_BYTES >> 20} MiB"


def prose(text):
    """A page without programs and tables that a script makes."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    return re.sub(r"<!-- operations: \w+ -->.*?<!-- end -->", "", text, flags=re.S)


def unknown(text, known):
    """The numbers of a page that are neither figures nor among those that are known.

    A line with a figure may also say for which size of an array it was measured, or how late a rank
    or a packet was.
    """
    for line in prose(text).splitlines():
        for found in NUMBER.findall(plain := FIGURE.sub("FIGURE", line)):
            is_size = "FIGURE" in plain and found.split()[1] in ("MiB", "KiB", "us", "ms")
            if not is_size and found not in known:
                yield found


FILES = [file for file in run_examples.FILES if not any(file.match(pattern) for pattern in OWN)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_numbers_are_measured_or_of_the_code(file):
    text = file.read_text()
    for words in OTHERS:
        text = text.replace(words, "")
    assert [*unknown(text, {*of_the_code()})] == []


def test_other_numbers_are_found():
    text = "1.5 us\n20 % of <!-- figure: a -->3<!-- end --> s for 1 MiB\n`4 ms`, 92 KiB, 3 ranks"
    assert [*unknown(text, {"92 KiB"})] == ["1.5 us", "20 %", "4 ms"]


def test_figures_come_from_the_tables():
    """Each is used on a page, and quotes one cell: a number, or a range of numbers."""
    pages = "".join(file.read_text() for file in run_examples.FILES)
    assert {*re.findall(r"<!-- figure: (\w+) -->", pages)} == {*speeds.FIGURES}
    for name, figure in speeds.FIGURES.items():
        assert re.fullmatch(r"[\d.]+(?: to [\d.]+)?(?: us| ms)?", figure()), name
    with pytest.raises(ValueError, match="not enough values"):
        speeds.cell("A port from mpi4py", "8 x 9", "mpi4jax")
