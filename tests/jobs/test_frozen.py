"""A rank whose process gets no time, though it is not stopped."""

import contextlib
import re
import uuid
from pathlib import Path

import pytest
from faults import PRELUDE

GROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified")

# Rank 0 is frozen for 25 s while the others wait.
PROGRAM = """
from pathlib import Path
group = Path(GROUP)
def freeze(on):
    old = group / "freezer.state"
    if old.exists(): old.write_text("FROZEN" if on else "THAWED")
    else: (group / "cgroup.freeze").write_text("1" if on else "0")
if rank == 0: (group / "cgroup.procs").write_text(str(os.getpid()))
comm.Barrier()
if rank == 1:
    time.sleep(1)
    freeze(True)
    threading.Timer(25, freeze, (False,)).start()
if rank == 0: time.sleep(5)
wait(nt.allreduce(x, MPI.SUM)); print("the end", rank)
"""


@pytest.fixture
def group():
    for root in GROUPS:
        folder = Path(root) / f"mpi4jax-test-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / "freezer.state").exists() or (folder / "cgroup.freeze").exists():
                yield folder
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("this user can make no cgroup that can be frozen")


def test_other_ranks_report_while_one_is_frozen(run_job, tmp_path, group):
    (tmp_path / "program.py").write_text(PRELUDE + PROGRAM.replace("GROUP", repr(str(group))))
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path), "MPI4JAX_REPORT_AFTER": "3"}
    result = run_job(3, "program.py", cwd=tmp_path, env=env, time_limit=80)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("the end") == 3, output
    pattern = r"allreduce #1 .* has waited for \d+ s: rank 0 is "
    assert re.search(pattern, output), output
