"""`mpi4jax check PROGRAM` reads a program and names what asks JAX about the job."""

import re
from pathlib import Path

import pytest

import mpi4jax_check as check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-shard-map.md"
MULTIHOST = "jax.experimental.multihost_utils"


def names(source):
    return [(use.line, use.name) for use in check.read(source)[0]]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import jax\nn = jax.device_count()", [(2, "jax.device_count")]),
        ("import jax as j\nf = j.process_index", [(2, "jax.process_index")]),
        ("from jax import devices as d\nd()", [(2, "jax.devices")]),
        ("def f():\n    return jax.host_id()\nimport jax", [(2, "jax.host_id")]),
        (
            "from jax.experimental import multihost_utils\nmultihost_utils.assert_equal(1)",
            [(2, f"{MULTIHOST}.assert_equal")],
        ),
        (
            "import jax.experimental.multihost_utils as u\nu.global_array_to_host_local_array(1)",
            [(2, f"{MULTIHOST}.global_array_to_host_local_array")],
        ),
        (
            f"from {MULTIHOST} import process_allgather\nprocess_allgather(1)",
            [(2, f"{MULTIHOST}.process_allgather")],
        ),
        ("import jax\njax.jit(f, in_shardings=s)", [(2, "jax.jit with in_shardings")]),
        (
            "import functools, jax\n@functools.partial(jax.jit, out_shardings=s)\ndef f(): ...",
            [(2, "jax.jit with out_shardings")],
        ),
        # Local devices, mpi4jax's functions of the same names, and names of the program.
        ("import jax\njax.local_devices()\njax.jit(f)\njax.local_device_count()", []),
        ("from mpi4jax.sharding import jit, make_mesh\njit(f, in_shardings=make_mesh())", []),
        ("class A:\n    def device_count(self): ...\nA().device_count()", []),
    ],
)
def test_uses(source, found):
    assert names(source) == found


def test_all_names_of_the_page_that_differ():
    lines = PAGE.read_text().partition("<!-- asked of JAX -->\n")[2].partition("\n\n")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:4] for line in lines.splitlines()[2:]]
    differ = [row for row in rows if row[1].split("`")[1] != row[2].split("`")[1]]
    assert len(differ) > 8
    imports = "import jax, numpy as np\nfrom jax.experimental import multihost_utils\n"
    for expression, *_ in differ:
        assert names(imports + expression.strip("`")), expression


def test_the_command(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text("import jax\nprint(jax.process_count())\n")
    assert check.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{program}:2: jax.process_count is 1\n1 uses" in printed
    assert "mpi4jax run --jax-distributed" in printed
    starts = 'import jax\njax.distributed.initialize(cluster_detection_method="mpi4py")\n'
    (tmp_path / "start.py").write_text(starts)
    assert check.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"start.py:2: {check.START} tells JAX about all ranks" in printed
    assert "process_count" not in printed
    (tmp_path / "start.py").write_text("def\n")
    assert check.main([str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert check.main([str(tmp_path / "no.py")]) == 2


def test_the_programs_of_this_repository(capsys):
    """None is told about one rank where it needs all: `ring_attention.py` runs on devices too."""
    examples = {path for path in (ROOT / "examples").glob("*.py") if check.main([str(path)])}
    assert examples == {ROOT / "examples" / "ring_attention.py"}
