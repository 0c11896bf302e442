"""Writes the table of transformations in docs/autodiff.md, by tests/ranks/test_transforms.py.

python tools/transformations.py [-n 1,2,3,4]
"""

import argparse
import importlib.metadata
import os
import re
import sys

from run_tests import ROOT, Results, run_tests

PAGE = ROOT / "docs" / "autodiff.md"
RANKING = ["-", "yes", "**no**"]

BEGIN, END = "<!-- transformations -->\n", "<!-- end of transformations -->\n"
TEXT = """\
Each operation is tested under each transformation of JAX (`tests/ranks/transforms.py`): values
and derivatives must equal those of a model of the whole job, which JAX evaluates in one process.
`make table` writes this section. With JAX {jax}, on {ranks} ranks, {passed} checks passed,
{failed} failed. Each pair of operation and transformation ran in {ways} of the two interfaces
(with tokens, and without), alternating with the number of ranks.

"yes" means that all operations of the column pass. Linear operations are those that reduce nothing,
and reductions with SUM. `-` means not applicable, because PROD, MAX and MIN are not linear. Under
`while_loop` only forward mode is tested, and under `custom_vjp` only reverse mode, because JAX has
no other mode there.

{table}
"""


def cells(results: Results) -> dict[str, dict[str, set[str]]]:
    """Return what became of each pair: transformation -> operation -> outcomes."""
    found: dict[str, dict[str, set[str]]] = {}
    outcomes = [(test, "yes") for _, test in results.passed]
    outcomes += [(test, "-") for _, test, _ in results.skipped]
    outcomes += [(test, "**no**") for _, test in results.failed]
    for test, outcome in outcomes:
        match = re.search(r"test_cell\[(.*?)\|(.*?)\|", test)
        if match:
            found.setdefault(match[2], {}).setdefault(match[1], set()).add(outcome)
    return found


def summary(outcomes: dict[str, set[str]]) -> str:
    """Return one cell of the page, of the outcomes of several operations."""
    failed, not_applicable = (
        ", ".join(op for op, found in outcomes.items() if max(found, key=RANKING.index) == worst)
        for worst in ("**no**", "-")
    )
    if failed:
        return f"**no** ({failed})"
    if not any("yes" in found for found in outcomes.values()):
        return "-"
    return f"yes, but for {not_applicable}" if not_applicable else "yes"


def table(found: dict[str, dict[str, set[str]]]) -> str:
    """Return a row for the transformations of equal outcomes. A new operation makes no new
    column."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in found.items():
        kinds: list[dict[str, set[str]]] = [{}, {}]
        for op, outcomes in row.items():
            kinds[op.endswith(("-PROD", "-MAX", "-MIN"))][op] = outcomes
        names.setdefault(tuple(map(summary, kinds)), []).append(name)
    lines = [["transformations", "linear operations", "reductions with PROD, MAX or MIN"]]
    lines += [["---"] * 3, *(["; ".join(same), *row] for row, same in names.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ways(results: Results) -> int:
    """In how many APIs each pair has run."""
    found: dict[str, set[str]] = {}
    for test in [test for _, test in results.passed]:
        pair, _, api = test.rpartition("|")
        found.setdefault(pair, set()).add(api)
    return min(map(len, found.values()))


def page(results: Results, ranks: str) -> str:
    return TEXT.format(
        jax=importlib.metadata.version("jax"),
        ranks=ranks.replace(",", ", "),
        ways=["none", "one", "both"][ways(results)],
        passed=len(results.passed),
        failed=len(results.failed),
        table=table(cells(results)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", default="1,2,3,4", metavar="RANKS", help="default: %(default)s")
    options = parser.parse_args()
    os.environ["MPI4JAX_TEST_ALL"] = "1"
    results = Results()
    for ranks in options.n.split(","):
        arguments = ["tests/ranks/test_transforms.py", "-k", "test_cell"]
        results.add(run_tests(int(ranks), arguments, name="table", time_limit=3600))
    if any("test_cell" not in test for _, test in results.failed):
        return 1  # a run did not end
    before, _, rest = PAGE.read_text().partition(BEGIN)
    section = page(results, options.n)
    PAGE.write_text(f"{before}{BEGIN}{section}{END}{rest.partition(END)[2]}")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
