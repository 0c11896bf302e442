"""What `mpi4jax.timeline` prints of many ranks."""

import json

from mpi4jax import timeline

RANKS = 40


def events(rank):
    """Three calls of an allreduce, to which rank 7 comes last, and one of a send."""
    late = 900.0 if rank == 7 else 10.0 * rank
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"host": "a"}}
    for number in range(3):
        record = {"collective": True, "sequence": number, "site": "model.py:3"}
        args = {"key": "world", "members": "m", "record": record}
        start = 2000.0 * number
        common = {"ph": "X", "cat": "mpi", "pid": rank, "tid": 0, "args": args}
        yield {**common, "name": "allreduce", "ts": start + late, "dur": 1000 - late}
    args = {"key": "world", "members": "m", "record": {"collective": False, "site": "model.py:9"}}
    yield {**common, "name": "send", "ts": 9000.0, "dur": 5.0, "args": args}


def test_ranks_and_lines(tmp_path, capsys):
    files = []
    for rank in range(RANKS):
        files.append(str(tmp_path / f"trace.{rank}.json"))
        (tmp_path / f"trace.{rank}.json").write_text(json.dumps([*events(rank)])[:-1])
    assert timeline.main([*files, "-o", str(tmp_path / "merged.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the 16 of 40 ranks that waited least, for which the others wait:"
    assert lines[1].startswith("rank 7: 4 operations, 0.305 ms, of which 0.000 ms waiting")
    assert sum(line.startswith("rank ") for line in lines) == 16
    # The ranks but 7 begin at 0, 10 and so on, and wait until 900.
    begins = [10.0 * rank for rank in range(RANKS) if rank != 7]
    took = 3 * (sum(1000 - b for b in begins) + 100) / RANKS / 1e3
    wait = 3 * sum(900 - b for b in begins) / RANKS / 1e3
    at = lines.index("by source line, of all ranks:")
    allreduce = f"allreduce at model.py:3: 120 calls on 40 ranks, {took:.3f} ms per rank"
    waiting = f", of which {wait:.3f} ms waiting; least on rank 7"
    send = "send at model.py:9: 40 calls on 40 ranks, 0.005 ms per rank"
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [allreduce + waiting, send]
