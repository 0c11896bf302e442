"""What `mpi4jax.timeline` prints of many ranks."""

import json
import re

from mpi4jax import timeline

RANKS = 40


def events(rank):
    """Four calls of an allreduce, to which rank 7 comes last but for the first call, which rank 0
    compiles, and two operations of a function."""
    late = 900.0 if rank == 7 else 10.0 * rank
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"host": "a"}}
    for number in range(4):
        record = {"collective": True, "sequence": number, "site": "model.py:3"}
        args = {"key": "world", "members": "m", "record": record, "bytes": 400, "messages": None}
        start = 2000.0 * number
        common = {"ph": "X", "cat": "mpi", "pid": rank, "tid": 0, "args": args}
        begin = (990.0 if rank == 0 else 0.0) if number == 0 else late
        yield {**common, "name": "allreduce", "ts": start + begin, "dur": 1000 - begin}
    record = {"collective": False, "site": "halo_add at model.py:9"}
    args = {"key": "world", "members": "m", "record": record, "bytes": 5000, "messages": 2}
    for begin in (9000.0, 9010.0):
        yield {**common, "name": "isend", "ts": begin, "dur": 5.0, "args": args}
        yield {**common, "name": "wait for isend", "ts": begin + 5, "dur": 1.0, "args": args}


def test_ranks_and_lines(tmp_path, capsys):
    files, merged = [], tmp_path / "merged.json"
    for rank in range(RANKS):
        files.append(str(tmp_path / f"trace.{rank}.json"))
        (tmp_path / f"trace.{rank}.json").write_text(json.dumps([*events(rank)])[:-1])
    assert timeline.main([*files, "-o", str(merged)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "the 16 of 40 ranks that waited least, for which the others wait:"
    columns = [re.split("  +", line) for line in lines[1:]]
    assert columns[0] == [
        *("operations", "messages", "size", "time", "waiting", "first calls", "clock")
    ]
    # Of 8 operations of rank 7, 3 allreduces of 100 us and 2 operations of 6 us are no first calls.
    assert columns[1] == [
        *("rank 7", "8", "4", "11.6 kB", "0.306 ms", "0.000 ms", "1.006 ms", "+0.0 us")
    ]
    assert sum(line.startswith("rank ") for line in lines) == 16
    # The ranks but 7 begin at 0, 10 and so on, and wait until 900.
    begins = [10.0 * rank for rank in range(RANKS) if rank != 7]
    took = 3 * (sum(1000 - b for b in begins) + 100) / 1e3
    wait = 3 * sum(900 - b for b in begins) / 1e3
    first = (39 * 1000 + 10) / 1e3
    total = f"{took + RANKS * 0.006:.3f} ms", f"{wait:.3f} ms", f"{first + RANKS * 0.006:.3f} ms"
    assert columns[17] == ["sum of all ranks", "320", "160", "464.0 kB", *total]
    at = lines.index("by source line, of all ranks:")
    assert lines[at + 1] == (
        f"allreduce at model.py:3: 160 calls on 40 ranks, 64.0 kB, {took / RANKS:.3f} ms per rank, "
        f"of which {wait / RANKS:.3f} ms waiting (least on rank 7); "
        f"first calls {first / RANKS:.3f} ms"
    )
    sent = "160 messages, 400.0 kB"
    assert [line.partition(" ms per rank; ")[::2] for line in lines[at + 2 : at + 5]] == [
        (f"halo_add at model.py:9: 160 calls on 40 ranks, {sent}, 0.006", "first calls 0.006 ms"),
        (f"isend: 80 calls on 40 ranks, {sent}, 0.005", "first calls 0.005 ms"),
        ("wait for isend: 80 calls on 40 ranks, 0 bytes, 0.001", "first calls 0.001 ms"),
    ]
    # A viewer shows what begins first around the others.
    of_rank = [e for e in json.loads(merged.read_text())["traceEvents"] if e["pid"] == 7]
    assert [e["name"] for e in of_rank if e["ph"] == "X"][-4:] == [
        *("halo_add", "isend", "halo_add", "wait for isend")
    ]
