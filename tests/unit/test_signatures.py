"""Signatures of the ops, with tokens and without, and of the classes of operations."""

import dataclasses
import dis
import inspect

import pytest
from mpi4py import MPI
from table import ROWS

import mpi4jax
from mpi4jax import notoken
from mpi4jax._op.operation import OPERATIONS

DEFAULTS = {
    "comm": None,
    "token": None,
    "status": None,
    "axes": None,
    "width": 1,
    "corners": True,
    "border": None,
    "op": MPI.SUM,
    "root": 0,
    "sendtag": 0,
    "recvtag": MPI.ANY_TAG,
    ("send", "tag"): 0,
    ("recv", "tag"): MPI.ANY_TAG,
    ("recv", "source"): MPI.ANY_SOURCE,
}


@pytest.mark.parametrize("name", ROWS)
def test_signatures(name):
    signature = inspect.signature(getattr(mpi4jax, name))
    bare = signature.replace(
        parameters=[
            p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()
        ],
        return_annotation=signature.empty,
    )
    assert str(bare) == ROWS[name].signature
    for parameter in signature.parameters.values():
        default = DEFAULTS.get((name, parameter.name), DEFAULTS.get(parameter.name, inspect._empty))
        assert parameter.default == default, parameter

    without = inspect.signature(getattr(notoken, name))
    assert [*without.parameters, "token"] == [*signature.parameters]
    with pytest.raises(TypeError, match="token"):
        getattr(notoken, name)(*[0] * (len(without.parameters)), token=None)


@pytest.mark.parametrize("name", [name for name in ROWS if hasattr(mpi4jax, f"i{name}")])
def test_signatures_of_nonblocking_functions(name):
    """A receive that matches any source and any tag has no derivative, so neither is a default."""
    parameters = dict(inspect.signature(getattr(notoken, name)).parameters)
    parameters.pop("status", None)
    expected = {p.name: p.default for p in parameters.values()}
    defaults = {"source": inspect.Parameter.empty, "tag": 0, "recvtag": 0}
    expected |= {argument: defaults[argument] for argument in expected.keys() & defaults.keys()}
    found = inspect.signature(getattr(notoken, f"i{name}")).parameters
    assert {p.name: p.default for p in found.values()} == expected


@pytest.mark.parametrize("module", [mpi4jax, notoken], ids=["tokens", "notoken"])
def test_names_of_functions(module):
    """`help` and tracebacks show the name that a program uses, also of functions that are made."""
    functions = [f for f in (getattr(module, n) for n in module.__all__) if inspect.isfunction(f)]
    assert {"allreduce", "iallreduce"} <= {f.__name__ for f in functions}
    for f in functions:
        assert f.__name__ == f.__qualname__
        assert getattr(module, f.__name__) is f


@pytest.mark.parametrize("name", ROWS)
def test_constructors_of_operations(name):
    """The constructor makes one call, for any number of fields, and does what `dataclass` says."""
    cls = OPERATIONS[name]
    called = [i for i in dis.get_instructions(cls.__init__) if i.opname.startswith("CALL")]
    assert len(called) == 1

    required = [f for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    every = {f.name: f"value of {f.name}" for f in dataclasses.fields(cls)}
    for given in (every, {f.name: every[f.name] for f in required}):
        op, expected = cls(**given), object.__new__(cls)
        cls.__init__.__wrapped__(expected, **given)
        assert [*vars(op).items()] == [*vars(expected).items()]
        assert op == expected
        assert hash(op) == hash(expected)
    positional = [f.name for f in required if not f.kw_only]
    assert cls(*map(every.get, positional)) == op
    for field in every:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(op, field, None)
    for wrong in (positional[1:], [*positional, "unknown"]):
        with pytest.raises(TypeError, match=f"{cls.__name__}.__init__"):
            cls(**dict.fromkeys(wrong))
