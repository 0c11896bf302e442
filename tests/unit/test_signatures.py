"""Signatures of the ops, with tokens and without."""

import inspect

import pytest
from mpi4py import MPI
from table import ROWS

import mpi4jax
from mpi4jax import notoken

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
