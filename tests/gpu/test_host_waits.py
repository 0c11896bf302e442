"""Which operations wait on the host with NCCL: those that `docs/transports.md` lists."""

from stand_ins import HERE

# All others are expected not to wait. The counts of a ragged exchange are read on the host.
WAITS = {"ragged_alltoall": 1}


def test_only_the_operations_of_the_list_wait_on_the_host(mpirun, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl"}
    result = mpirun(2, HERE / "host_waits.py", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.rpartition(": ") for line in result.stdout.splitlines()]
    found = {name: float(waits) for name, _, waits in lines}
    assert len(found) > 15
    assert {name: waits for name, waits in found.items() if waits} == WAITS
