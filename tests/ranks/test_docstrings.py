"""Examples in docstrings run as they stand, on any number of ranks."""

import doctest
import sys
import typing

import pytest
from table import ROWS


def doctests():
    """Every docstring of the package that has examples, once."""
    finder, seen = doctest.DocTestFinder(recurse=False), {}
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "mpi4jax"]:
        for name, value in [("", module), *vars(module).items()]:
            own = str(getattr(value, "__module__", "")).startswith("mpi4jax") or value is module
            own = own and not isinstance(value, typing.ParamSpec)  # Python 3.12's has an example
            if own and getattr(value, "__doc__", None) and ">>>" in value.__doc__:
                for test in finder.find(value, name or module.__name__, globs={}):
                    seen.setdefault(test.docstring, test)
    return list(seen.values())


@pytest.mark.parametrize("example", doctests(), ids=lambda example: example.name)
def test_docstring(example, capsys):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 0


def test_doctests_are_found():
    assert {test.name for test in doctests()} >= {*ROWS, "pvary", "mpi4jax"}
