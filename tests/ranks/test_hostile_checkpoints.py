"""Checkpoints that somebody else has made to do harm, with right checksums.

`load` and `save` raise an error in words, and read, write and remove nothing outside of the
checkpoint's directory. `CHECKPOINTS=100000 python tools/run_tests.py -n 1
tests/ranks/test_hostile_checkpoints.py -k random` tests more random ones, and CHECKPOINTS_SEED=1
others; `make fuzz` and `make test-matrix` do both. For a run of more than 110 s, add
`-o faulthandler_timeout=0`: faulthandler may crash where it prints the stack of a running thread.
"""

import json
import os
import random
import shutil
import zlib

import numpy as np
import pytest
from mpi4py import MPI

from mpi4jax import Layout, checkpoints
from mpi4jax._numerics import index as indexes, store

pytestmark = pytest.mark.ranks(1)
SELF = MPI.COMM_SELF
MANY = int(os.environ.get("CHECKPOINTS", "0")) or (
    5000 if os.environ.get("MPI4JAX_TEST_ALL") == "1" else 300
)
SEED = int(os.environ.get("CHECKPOINTS_SEED", "0"))
TREE = {"n": 3, "x": np.arange(64.0).reshape(8, 8)}
LIKE = {"n": 0, "x": np.zeros((8, 8))}


def text_of(content, check=None):
    """The text of an index; with any content, its checksum is right."""
    body = (content if isinstance(content, str) else json.dumps(content)[:-1]).encode(
        errors="surrogatepass"
    )
    return b'%b, "crc32": %d}\n' % (body, zlib.crc32(body) if check is None else check)


def content_of(path):
    found = json.loads((path / "index.json").read_text())
    del found["crc32"]
    return found


def put(content, keys, value):
    *parents, last = keys
    for key in parents:
        content = content[key]
    content[last] = value


# Where the index has another value, and which: each kind of place with each kind of fault.
ROWS, SHAPE = ("tables", 1, "rows"), ("tables", 1, "shape")
VALUES = {
    ("format",): [None, 2, "mpi4jax checkpoint, version 1", "mpi4jax checkpoint, version 3"],
    ("identity",): [None, 7, "", "0" * 31, "A" * 32, "../" * 10 + "ab", "\uff10" * 32],
    ("subdirectory",): [
        *(None, 1, [], "", ".", "..", "/", "arrays-1/", "./arrays-1", "arrays-1/../../precious"),
        *("arrays-0", "arrays--1", "arrays-01", "arrays-\uff11", "arrays-1\0", "arrays-1\n"),
        *("{outside}/arrays-1", "../precious/arrays-1", "arrays-" + "9" * 5000, "arrays-7"),
    ],
    ("files",): [None, "1", True, 1.0, 0, -1, 2**31, 10**30],
    ("arrays",): [None, {}, 5, "xx", [None], [[]], [{}], [[], []], [5]],
    ("arrays", 1): [None, [], {"name": "['x']"}, {"name": "['x']", "dtype": "float64"}],
    ("arrays", 1, "name"): [None, 5, ["x"]],
    ("arrays", 1, "more"): ["another key"],
    ("arrays", 1, "dtype"): [
        None,
        8,
        "",
        "O",
        "object",
        "U8",
        "V8",
        "float128",
        "datetime64",
        "x" * 9999,
    ],
    ("arrays", 1, "table"): [None, "1", True, 1.0, -1, 2, 10**30],
    ("tables",): [None, {}, [], [None], [{}], [[[], [[0]]]]],
    ("tables", 1): [None, [], {"shape": [8, 8]}, {"rows": []}],
    SHAPE: [None, 8, [], [8], [8, 8, 1], [8, -8], [8, "8"], [8, 8.0], [True, 8], [8] * 65],
    (*SHAPE, 0): [0, 9, 2**62, 2**63, 10**12, 10**400],
    ROWS: [None, {}, [], [[]], [0], [[0, 0, 8]], [[0, 0, 8, 0, 8, 0]], [[0, 0, 4, 0, 8]]],
    (*ROWS, 0): [None, 0, {}, [0, 0, 8, 0, 7], [0, 1, 8, 0, 8], [0, 8, 0, 0, 8], [0, 0, 8, 4, 4]],
    (*ROWS, 0, 0): [-1, 1, 2**31, 10**30, None, "0", False],
    (*ROWS, 0, 1): [-1, 8, 9, 0.0, [0], "0"],
    (*ROWS, 0, 2): [-8, 0, 16, 2**63, 8.0],
}
CONTENTS = {
    "two files, in disorder": [[1, 0, 4, 0, 8], [0, 4, 8, 0, 8]],
    "one file twice": [[0, 0, 4, 0, 8], [0, 4, 8, 0, 8]],
    "overlap": [[0, 0, 5, 0, 8], [1, 3, 8, 0, 8]],
    "gap and overlap": [[0, 0, 4, 0, 8], [1, 0, 8, 4, 8]],
    "a file that is not there": [[1, 0, 8, 0, 8]],
}
TEXTS = {
    "empty": b"",
    "zeros": bytes(400),
    "no checksum": b'{"format": "mpi4jax checkpoint, version 2"}\n',
    "a number": text_of("7"),
    "no JSON": text_of('{"format": '),
    "not a number": text_of('{"format": NaN'),
    "deep": text_of("[" * 10**6),
    "deep objects": text_of('{"format":' * 10**5),
    "digits": text_of('{"format": ' + "9" * 10**6),
    "another encoding": text_of('{"format": "mpi4jax"').decode().encode("utf-16"),
    "bytes": b'\xff\xfe, "crc32": 1}\n',
    "checksum": text_of("{", check=12),
    "long checksum": text_of("{", check=10**40),
}


def link(path, name, target):
    shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(target)


def pipe(path, name):
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)


def directory(path, name):
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()


def sparse(path, name, size):
    with (path / name).open("ab") as file:
        file.truncate(size)


def hard_link(path, name, target):
    (path / name).unlink()
    os.link(target, path / name)


BLOCKS = "arrays-1/0.blocks"
# What is in the place of a file: `precious` is a checkpoint of the user's, with the same arrays.
FILES = {
    "index: link": lambda path, out: link(path, "index.json", out / "precious/index.json"),
    "index: link to a device": lambda path, out: link(path, "index.json", "/dev/zero"),
    "index: link to nothing": lambda path, out: link(path, "index.json", out / "made"),
    "index: pipe": lambda path, out: pipe(path, "index.json"),
    "index: directory": lambda path, out: directory(path, "index.json"),
    "index: large": lambda path, out: sparse(path, "index.json", 2**40),
    "new index: link": lambda path, out: link(path, "index.json.new", out / "precious/index.json"),
    "arrays: link": lambda path, out: link(path, "arrays-1", out / "precious/arrays-1"),
    "arrays: file": lambda path, out: (
        shutil.rmtree(path / "arrays-1"),
        (path / "arrays-1").touch(),
    ),
    "arrays: missing": lambda path, out: shutil.rmtree(path / "arrays-1"),
    "others: link": lambda path, out: link(path, "arrays-2", out / "precious/arrays-1"),
    "blocks: link": lambda path, out: link(path, BLOCKS, out / "precious" / BLOCKS),
    "blocks: hard link": lambda path, out: hard_link(path, BLOCKS, out / "precious" / BLOCKS),
    "blocks: pipe": lambda path, out: pipe(path, BLOCKS),
    "blocks: directory": lambda path, out: directory(path, BLOCKS),
    "blocks: large": lambda path, out: sparse(path, BLOCKS, 2**40),
    "blocks: missing": lambda path, out: (path / BLOCKS).unlink(),
    "lock: link": lambda path, out: link(path, "unfinished.json", out / "precious/index.json"),
    "lock: link to nothing": lambda path, out: link(path, "unfinished.json", out / "made"),
    "lock: pipe": lambda path, out: pipe(path, "unfinished.json"),
    "lock: other's": lambda path, out: (path / "unfinished.json").write_text("not finished"),
}
#: Of these, `load` needs nothing.
HARMLESS = {"new index: link", "others: link", *(name for name in FILES if name[:4] == "lock")}
KINDS = {
    **{f"{'.'.join(map(str, k))}={str(v)[:30]!r}": (k, v) for k, vs in VALUES.items() for v in vs},
    **{name: ((*ROWS,), rows) for name, rows in CONTENTS.items()},
    **TEXTS,
    **FILES,
}


@pytest.fixture
def outside(tmp_path):
    """A directory with what the user has besides the hostile checkpoint."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "note").write_text("mine")
    checkpoints.save(tmp_path / "outside" / "precious", TREE, comm=SELF)
    return tmp_path / "outside"


def everything(folder):
    return {
        str(file): (file.read_bytes(), file.stat().st_mtime_ns) if file.is_file() else None
        for file in folder.rglob("*")
    }


def outcome(function, path, *more):
    """None after success, or the words of an error, which must name the path."""
    found = error = None
    try:
        found = function(path, *more, comm=SELF)
    except OSError as e:
        error = e
    if error is None:
        assert found is None or (found["x"] == TREE["x"]).all()
        return None
    assert str(path) in str(error), error
    assert type(error) is not FileNotFoundError, error
    return str(error)


def test_a_hundred_kinds(outside, tmp_path):
    assert len(KINDS) > 150
    good = tmp_path / "good"
    checkpoints.save(good, TREE, comm=SELF)
    before = everything(outside)
    for number, (name, fault) in enumerate(KINDS.items()):
        path = tmp_path / f"of{number}"
        shutil.copytree(good, path)
        if isinstance(fault, tuple):
            content, (keys, value) = content_of(path), fault
            if isinstance(value, str):
                value = value.replace("{outside}", str(outside / "precious"))
            put(content, keys, value)
            content["files"] = 2 if name in CONTENTS else content.get("files")
            (path / "index.json").write_bytes(text_of(content))
        elif isinstance(fault, bytes):
            (path / "index.json").write_bytes(fault)
        else:
            fault(path, outside)
        words = outcome(checkpoints.load, path, LIKE)
        assert (words is None) == (name in HARMLESS), (name, words)
        assert everything(outside) == before, name
        words = outcome(checkpoints.save, path, TREE)
        assert words is None or "[Errno" not in words or "Is a directory" in words, (name, words)
        assert everything(outside) == before, name
        if words is None:
            assert outcome(checkpoints.load, path, LIKE) is None
    assert not (outside / "made").exists()


def changed(value, rng):
    """Another value of JSON, most often one that is like the old one."""
    if rng.random() < 0.2 or value in ([], {}):
        return rng.choice([None, True, 0, -1, 2**31, 2**63, 10**25, 1.5, "", "..", [], [0], {}])
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        parts = [changed(value[at], rng)], [], [value[at]] * 2, [value[at], value[0]]
        return value[:at] + rng.choice(parts) + value[at + 1 :]
    if isinstance(value, dict) and value:
        key = rng.choice([*value])
        return value | {key: changed(value[key], rng)}
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return rng.choice([value + 1, value - 1, value * 2, -value, value + 0.5])
    at = rng.randrange(len(value) + 1)
    return value[:at] + rng.choice(["", "/", ".", "0", "\0", "\ud800", "x"]) + value[at + 1 :]


def with_right_checksums(data, index):
    """A file of blocks with the checksums of what it has."""
    blocks, size, tiles = index.blocks(0)
    begin = store._HEADER.size
    if len(data) != begin + size + 4 * tiles + 4:
        return data
    ends = []
    for number, block in blocks.items():
        shape = tuple(s.stop - s.start for s in block.window)
        count = int(np.prod(shape)) * indexes.DTYPES[index.arrays[number].dtype].itemsize
        at = begin + block.offset
        ends.append(zlib.crc32(data[at : at + count]))
    end = np.array(ends, "<u4").tobytes()
    check = zlib.crc32(data[:begin] + end).to_bytes(4, "little")
    return data[: begin + size] + end + check


@pytest.mark.timeout(120 + MANY // 100)
def test_random_changes(outside, tmp_path):
    """Of the index and of the files, with right checksums: a value, or one kind of error."""
    rng, path, before = random.Random(SEED), tmp_path / "x", everything(outside)
    rows = Layout((8, 8), {0: 1})
    checkpoints.save(path, TREE, {"n": None, "x": rows}, comm=SELF)
    good, data = content_of(path), (path / BLOCKS).read_bytes()
    index = indexes.decode((path / "index.json").read_bytes())
    counts = {"value": 0, "OSError": 0, "ValueError": 0}
    for _ in range(MANY):
        content = good
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            content = changed(content, rng)
        if rng.random() < 0.3:
            content = good
        text = bytearray(text_of(content))
        if rng.random() < 0.05:
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        (path / "index.json").write_bytes(text)
        other = bytearray(data)
        if rng.random() < 0.3:
            at = rng.randrange(len(other))
            other[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            other = with_right_checksums(bytes(other), index)
        (path / BLOCKS).write_bytes(other)
        found = error = None
        try:
            found = checkpoints.load(path, LIKE, comm=SELF)
        except (OSError, ValueError) as e:
            error = e
        assert error is None or (str(path) in str(error) and type(error) in (OSError, ValueError))
        assert error is not None or found["x"].shape == (8, 8)
        counts["value" if error is None else type(error).__name__] += 1
    assert min(counts.values()) > 0, counts
    assert everything(outside) == before
    assert {p.name for p in path.iterdir()} == {"index.json", "arrays-1"}
