"""What the benchmark report computes, from times that are given."""

from types import SimpleNamespace

import placements
import quick
import report
from measurements import GLOO, KNOWN, NEW, OLD, Key, interval, ratio_name


def bench(results, models, notes=()):
    args = SimpleNamespace(rounds=3, seconds=0.001, size=[48, 24], model_rounds=3)
    return SimpleNamespace(
        args=args,
        results=results,
        models=models,
        faults={Key(2, "allreduce", 4, NEW, "loop"): [7.0, 8.0, 9.0]},
        notes=list(notes),
        versions={},
        load_before=0.1,
    )


def test_report(tmp_path, monkeypatch):
    times = {"raw": 1e-6, "loop": 1.5e-6, "jit": 6e-6, "noop": 4e-6, "eager": 8e-6, "psum": 6e-6}
    results = {Key(2, "allreduce", 4, NEW, m): [t, 2 * t, t] for m, t in times.items()}
    results[Key(2, "allreduce", 4, OLD, "jit")] = [60e-6] * 3
    results[Key(2, "allreduce", 4, GLOO, "jit")] = [660e-6] * 3
    results[Key(2, "allreduce", 4, OLD, "loop")] = [1e-6] * 3
    models = {(2, "one host"): {NEW: [0.1, 0.1, 0.2], OLD: [0.2, 0.2, 0.2]}}
    monkeypatch.setattr(report, "DATA", tmp_path / "data")
    text = report.write(bench(results, models, ["gloo: gone"]), tmp_path, 60)
    lines = text.splitlines()
    assert text in (tmp_path / "measurements.md").read_text()
    for file in ("sizes.png", "times.csv", "ratios.csv"):
        assert f"(benchmarks-{file})" in text
    for picture in ("calls", "sizes"):
        assert (tmp_path / f"benchmarks-{picture}.png").stat().st_size > 1000
    assert "- gloo: gone" in lines
    assert "**The machine was busy**" not in text
    of = "allreduce, 4 B, n = 2"
    # The median and the quartiles of 10, 5, 10.
    assert f"| jitted: 0.9.1 / mpi4jax | {of} | ~10.00 (7.50 to 10.00) |" in lines
    assert f"| jitted psum: gloo / mpi4jax | {of} | ~110 (82 to 110) |" in lines
    assert "- 0.9.1, in a loop, n = 2: allreduce of 4 B 0.67." in lines
    assert "| 2 | one host | 10.0 | 5.0 | ~2.00 (1.50 to 2.00) |" in lines
    times = (tmp_path / "benchmarks-times.csv").read_text().splitlines()
    assert "2,one host,allreduce,4,in a loop,1.5e-06,8" in times  # with its page faults
    ratios = (tmp_path / "benchmarks-ratios.csv").read_text().splitlines()
    assert '2,one host,allreduce,4,"0.9.1 / ours, jitted",10.0,7.5,10.0,no' in ratios

    again = (tmp_path / "measurements.md").read_text()
    report.again(tmp_path / "data" / "benchmarks.json", tmp_path)
    assert (tmp_path / "measurements.md").read_text() == again


def test_interval_of_the_median():
    """It narrows with the number of rounds, and does not mind one that is far off."""
    assert interval([1.0] * 5) == float("inf")
    rounds = [1.0, 1.1] * 6
    assert interval(rounds) == interval([*rounds[:-1], 99.0]) > KNOWN
    assert interval([1.0, 1.01] * 6) < KNOWN
    # Of 20 values, the 95 % interval is from the 5th or 6th to the 15th or 16th.
    assert 10 <= interval([float(x) for x in range(1, 21)]) * 10.5 <= 11
    name = ratio_name
    assert (name(2.0, 1.0, 3.0, 0.06), name(2.0, 1.0, 3.0, 0.04)) == (
        "~2.00 (1.00 to 3.00)",
        "2.00 (1.00 to 3.00)",
    )


def test_quick_figures_name_what_is_worse():
    kept = {"a": 2.0, "b": 2.0, "c": 2.0}
    measured = {"a": [2.3] * 9, "b": [2.1] * 9, "c": [2.0, 2.3, 2.4], "new": [9.0]}
    assert quick.worse(measured, kept) == ["a: 2.30, it was 2.00"]
    assert len(quick.FIGURES) == 7


def test_rounds_of_two_placements_are_parted():
    near = [{"raw": 0.3 + 0.01 * i, NEW: 0.5, OLD: 1.0} for i in range(6)]
    far = [{"raw": 0.6 + 0.01 * i, NEW: 0.8, OLD: 0.4} for i in range(6)]
    found = placements.sorted_by_latency([*far, *near])
    assert found == {"near": near, "far": far}
    rows = placements.table("allreduce", found)
    assert "0.50 (0.50 to 0.50)" in rows[0]
    assert "2.00 (2.00 to 2.00)" in rows[1]
    # Few rounds of the other kind, or latencies that are alike, are no second placement.
    assert placements.sorted_by_latency([*near, *far[:2]]).keys() == {"one placement only"}
    assert placements.sorted_by_latency(near).keys() == {"one placement only"}


def test_a_round_in_which_the_placement_changed_counts_for_none():
    def job(*latencies):
        answers = iter(latencies)
        return SimpleNamespace(
            measure=lambda mode, *_: (next(answers) if mode == "raw" else 1.0, 0.0)
        )

    counts = {"raw": 1, NEW: 1}
    assert placements.measure({NEW: job(0.3, 0.31)}, "allreduce", counts)[NEW] == 1.0
    assert placements.measure({NEW: job(0.3, 0.6)}, "allreduce", counts) is None
