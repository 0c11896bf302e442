"""The small programs of benches/third_party.py, on this package alone."""

import sys

import numpy as np
import pytest
import third_party
from contenders import Job
from report import NEW, OLD

for module in ("equinox", "flax.nnx", "optax"):
    pytest.importorskip(module)
# Two jobs of two ranks at a time are enough.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("small programs")]


@pytest.mark.parametrize(("name", "ranks"), [("nnx", 1), ("equinox", 1), ("cg", 2)])
def test_small_programs_take_steps_in_turns(name, ranks, monkeypatch):
    monkeypatch.setitem(third_party.ENVIRONMENT, OLD, third_party.ENVIRONMENT[NEW])
    monkeypatch.setitem(third_party.PROGRAMS, name, third_party.PROGRAMS[name]._replace(steps=2))
    times, versions = third_party.compare(sys.executable, name, ranks, rounds=2, seconds=0)
    assert [len(times[who]) for who in (NEW, OLD)] == [2, 2]
    assert all(seconds > 0 for seconds in times[NEW] + times[OLD])
    assert versions["jax"]


def test_results_that_differ_are_no_figure(monkeypatch):
    monkeypatch.setitem(third_party.ENVIRONMENT, OLD, third_party.ENVIRONMENT[NEW])
    monkeypatch.setattr(third_party, "difference", lambda a, b: float("nan"))
    with pytest.raises(RuntimeError, match="results differ"):
        third_party.compare(sys.executable, "cg", 1, rounds=1, seconds=0)


def test_the_conjugate_gradient_solves_it():
    worker = third_party.ROOT / "benches" / "on_small.py"
    env = third_party.ENVIRONMENT[NEW]
    with Job(NEW, sys.executable, 2, worker=worker, arguments=["cg"], env=env) as job:
        job.ask("start")
        (total, square, *_), _ = job.ask("result")
    b = np.random.default_rng(0).normal(size=(256, 256))
    # In Fourier space the operator is a product.
    waves = 2 * np.cos(2 * np.pi * np.fft.fftfreq(256))
    x = np.fft.ifft2(np.fft.fft2(b) / (5 - waves[:, None] - waves)).real
    np.testing.assert_allclose([total, square], [x.sum(), (x**2).sum()], rtol=1e-8)
