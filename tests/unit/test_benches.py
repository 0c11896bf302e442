"""What the benchmark report computes, from times that are given."""

import subprocess
from types import SimpleNamespace

import loggp
import pytest
import report
import run
from report import GLOO, NEW, OLD, Key

NETWORK = loggp.LogGP(one_way=5e-6, overhead=1e-6, gap=2e-6, gap_per_byte=1e-9, gamma=1e-10)


def test_loggp_of_two_ranks_is_one_message():
    assert NETWORK.latency == pytest.approx(3e-6)
    assert NETWORK.allreduce(2, 1) == pytest.approx(5e-6 + 1e-10)
    assert NETWORK.allreduce(1024, 1) == pytest.approx(10 * NETWORK.allreduce(2, 1))


def test_loggp_of_large_messages_hardly_depends_on_the_ranks():
    large = 2**30
    few, many = NETWORK.allreduce(16, large), NETWORK.allreduce(10_000, large)
    assert few < many < 1.1 * few
    assert many == pytest.approx(2 * large * 1e-9 + large * 1e-10, rel=0.01)


class FakeJob:
    """A network of which everything is known."""

    def ask(self, function, nbytes, rounds, messages=1, delay=0.0):
        n, bytes_after_first = messages, nbytes - 1
        if function == "add":
            return nbytes * NETWORK.gamma
        there_and_back = 2 * NETWORK.message(nbytes)
        between = NETWORK.gap if delay == 0.0 else NETWORK.overhead + delay
        return there_and_back + (n - 1) * (between + bytes_after_first * NETWORK.gap_per_byte)


def test_loggp_is_measured_as_it_is_defined():
    measured = loggp.measure(FakeJob())
    for name in ("one_way", "overhead", "gap", "gap_per_byte", "gamma", "latency"):
        assert getattr(measured, name) == pytest.approx(getattr(NETWORK, name)), name


def bench(results, models, notes=()):
    args = SimpleNamespace(rounds=3, seconds=0.001, size=[48, 24], model_rounds=3)
    return SimpleNamespace(
        args=args,
        results=results,
        models=models,
        networks={"shared memory": NETWORK},
        notes=list(notes),
        versions={},
        load_before=0.1,
    )


def test_report(tmp_path, monkeypatch):
    times = {"raw": 1e-6, "loop": 1.5e-6, "mpi4jax.jit": 6e-6, "noop": 4e-6, "eager": 8e-6}
    results = {Key(2, "allreduce", 4, NEW, m): [t, 2 * t, t] for m, t in times.items()}
    results[Key(2, "allreduce", 4, OLD, "jax.jit")] = [60e-6] * 3
    results[Key(2, "allreduce", 4, GLOO, "jax.jit")] = [660e-6] * 3
    models = {(2, "one host"): {NEW: [0.1, 0.1, 0.2], OLD: [0.2, 0.2, 0.2]}}
    models[2, "one host"][report.OLD_EXAMPLE] = [0.5]  # of one round: no spread
    monkeypatch.setattr(report, "DATA", tmp_path / "data")
    text = report.write(bench(results, models, ["gloo: gone"]), tmp_path, 60)
    lines = text.splitlines()
    assert (tmp_path / "benchmarks.md").read_text() == text
    for picture in ("operations", "model", "loggp"):
        assert f"(benchmarks-{picture}.png)" in text
        assert (tmp_path / f"benchmarks-{picture}.png").stat().st_size > 1000
    assert "- gloo: gone" in lines
    assert "**The machine was busy**" not in text
    of = "allreduce, 4 B, n = 2"
    # Of the least times; then the quartiles of 10, 5, 10.
    assert f"| compiled: 0.9.1 / mpi4jax.jit | {of} | 10.00 (7.50 to 10.00) |" in lines
    assert f"| compiled: gloo / mpi4jax.jit | {of} | 110 (82 to 110) |" in lines
    assert "| 2 | one host | 10.0 | 5.0 | 2.0 | 2.00 (1.50 to 2.00) | 5.00 |" in lines


def test_report_of_nothing(tmp_path, monkeypatch):
    """Where no contender could be started."""
    monkeypatch.setattr(report, "DATA", tmp_path / "data")
    empty = bench({}, {}, ["mpi4jax did not start"])
    empty.networks, empty.load_before = {}, 1000.0
    text = report.write(empty, tmp_path, 1)
    assert "- mpi4jax did not start" in text
    assert "**The machine was busy**" in text


def test_notes_name_no_paths(tmp_path):
    it = object.__new__(run.Bench)
    it.notes = []
    it.note("the model", subprocess.CalledProcessError(3, [str(tmp_path), "x"]))
    it.note("the model", subprocess.TimeoutExpired([str(tmp_path)], 300))
    it.note("0.9.1", FileNotFoundError(2, "No such file", str(tmp_path / "mpicc")))
    assert it.notes == [
        "the model: it ended with status 3",
        "the model: no end after 300 s",
        "0.9.1: [Errno 2] No such file: 'mpicc'",
    ]
