"""One term for one thing: pages, docstrings, comments and messages use the terms of MPI, JAX and
NumPy.

`TERMS` lists words that readers of those packages would have to learn anew, with the term to use
instead. A word that is right in a place is listed in `ALLOWED`, with that place.
"""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Name: what is not written, as a regular expression; what to write instead.
TERMS = {
    "time-out": (r"\btime-outs?\b", "timeout"),
    "folder": (r"(?<!--)\bfolders?\b", "directory"),
    "stand-in": (r"(?<!feature )`?\bstand-ins?\b", "fake"),
    "room": (r"\brooms?\b", "layer, module; space, capacity"),
    "scalar product": (r"\bscalar products?\b", "inner product"),
    "for ever": (r"\bfor ever\b", "a deadlock; forever"),
    "so many": (r"\bso many\b", "give the number a name"),
    "as many as": (r"\bas many as\b", "give the number a name"),
    "is an error": (r"\b(is|are) an error\b", "raises ..."),
    "job is ended": (r"\bjobs? (is|are|was) ended\b|\bend(s|ed)? the job\b", "aborts the job"),
    "cannot end": (r"\bcannot end\b|\bnever ends?\b", "can never complete"),
    "rim": (r"\brims?\b", "boundary cells, interface cells"),
    "is none": (r"\b(that|which) is none\b|`` is none\b", "is not a ..."),
    "started operation": (r"\bstarted operations?\b", "nonblocking operation"),
    "non-blocking": (r"\b[Nn]on-blocking\b", "nonblocking"),
    "cut": (r"\b(is|are) cut\b|\bcut (axes|axis|into)\b", "decomposed, partitioned"),
    "the most": (r"\bthe most (iterations|restarts)\b", "the maximum number of"),
    "what goes for it": (r"\bwhat goes for\b", "say it plainly"),
    "16-bit sums": (r"\b16-bit sums\b", "half-precision reductions"),
    "message of an allreduce": (r"\bmessages? for scalar\b", "global reduction"),
    "that of": (
        r"\b([Tt]hat|[Tt]hose) of\b",
        "the noun",
    ),
    "as of": (r"\b[Aa]s of\b(?! (today|now|version))", "as for, like"),
    "of which": (
        (
            r"(?<!\bone )(?<!\ball )(?<!\bsome )(?<!\beach )(?<!\bmost )(?<!\bhalf )(?<!\bboth )"
            r"(?<!\bnone )(?<!\bseveral )\bof which \w"
        ),
        "a relative clause, or a second sentence",
    ),
    "pvary by JAX": (r"JAX inserts `+pvary", '`jax.lax.pcast(..., to="varying")`'),
    "spelling": (
        (
            r"\b(\w+alis|optimis|recognis|minimis|maximis|stabilis|synchronis|organis)(e[sd]?|ing|ation)\b"
            r"|\b(neighbour|behaviour|colour)(s|ed|ing|hood)?\b|\bgrey\b"
        ),
        "American spelling",
    ),
}

# File, and terms that may stand there.
ALLOWED: dict[str, set[str]] = {
    "CODE_OF_CONDUCT.md": {"spelling"},
    "docs/clusters.md": {"job is ended"},  # Slurm ends the job
    "docs/debugging.md": {"job is ended", "cannot end"},  # a report
    "docs/recipes.md": {"job is ended"},
    "docs/grids.md": {"spelling"},  # an attribute
    "docs/architecture.md": {"spelling"},  # a file
    "docs/reference-jobs.md": set(TERMS),
    "tests/unit/test_words.py": set(TERMS),
}


def pages():
    yield from [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for folder in (*PACKAGE, *BESIDE):
        for name in ("README.md", "DECISIONS.md"):
            yield from (ROOT / folder).rglob(name)


# The strings of `PACKAGE` are read too, and not the others, which quote what the package or MPI
# prints.
PACKAGE = ("python", "src")
BESIDE = ["benches", "build_support", "docs", "examples", "packaging", "tests", "tools", "ucx-sys"]

# Code in a sentence.
QUOTED = re.compile(r"``[^`]*``|`[^`\n]*`|:\w+:`[^`]*`|^ *(>>>|\.\.\.).*$", re.M)


def comments(file):
    """Each comment: consecutive lines of it together, without the marks."""
    text = file.read_text()
    if file.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [(t.start, t.string.lstrip("#: ")) for t in tokens if t.type == tokenize.COMMENT]
    else:  # Rust, in which a string with "//" and a space before it does not occur
        found = [
            ((number, match.start()), match[1])
            for number, line in enumerate(text.splitlines(), 1)
            if (match := re.search(r"(?:^|(?<=\s))//[/!]?(?:\s+(.*))?$", line))
        ]
    together = []
    for (line, column), words in found:
        if together and together[-1][0] == (line - 1, column):
            together[-1] = (line, column), f"{together[-1][1]}\n{words or ''}"
        else:
            together.append(((line, column), words or ""))
    yield from (QUOTED.sub("``", words) for _, words in together)


def raw_prose(file):
    text = file.read_text()
    if file.suffix in (".py", ".rs"):
        yield from comments(file)
    if file.suffix == ".md":
        fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.S | re.M)
        text = fence.sub(lambda m: m[2] if m[1] == "text" else "", text)
        yield re.sub(r"`[^`\n]*`|\]\([^)]*\)", "``", text)
    elif file.suffix == ".py":
        yield from (QUOTED.sub("``", words) for words in strings(ast.parse(text), is_package(file)))
    elif is_package(file):
        for line in text.splitlines():
            if not line.lstrip().startswith("//"):
                yield from (m for m in re.findall(r'"((?:[^"\\]|\\.)*)"', line) if " " in m)


def is_package(file):
    return file.relative_to(ROOT).parts[0] in PACKAGE


def strings(tree, all_of_them):
    """The strings of a program with a space, or its docstrings alone."""
    for node in ast.walk(tree):
        if all_of_them:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.value
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@functools.cache
def prose(file):
    """What a reader reads as text, with single spaces: a page without code; the comments and
    docstrings of a program, and the strings of the package."""
    return [" ".join(words.split()) for words in raw_prose(file)]


SOURCES = [
    file
    for folder in (*PACKAGE, *BESIDE)
    for suffix in ("py", "rs")
    for file in (ROOT / folder).rglob(f"*.{suffix}")
]


def test_comments_are_read(tmp_path):
    """Lines of one comment are one sentence; marks, code and strings are no words of it."""
    file = tmp_path / "a.py"
    file.write_text("x = '# no'  # beside it\n# one\n# sentence of `code`\n")
    assert [*comments(file)] == ["beside it", "one\nsentence of ``"]
    file = tmp_path / "a.rs"
    file.write_text('let x = "http://no"; // beside it\n//! one\n//! sentence\n\n/// and\n')
    assert [*comments(file)] == ["beside it", "one\nsentence", "and"]


@pytest.mark.parametrize("term", TERMS)
def test_terms(term):
    pattern, instead = re.compile(TERMS[term][0]), TERMS[term][1]
    wrong = []
    for file in [*pages(), *SOURCES]:
        place = str(file.relative_to(ROOT))
        if term in ALLOWED.get(place, ()):
            continue
        for text in prose(file):
            for found in pattern.finditer(" ".join(text.split())):
                around = " ".join(text.split())[max(0, found.start() - 40) : found.end() + 30]
                wrong.append(f"{place}: ... {around} ...")
    assert wrong == [], f"write: {instead}"
