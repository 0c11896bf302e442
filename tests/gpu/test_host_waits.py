"""Which operations wait on the host with NCCL: those that `docs/transports.md` lists."""

from stand_ins import HERE

# All others are expected not to wait. The host reads the counts of a ragged exchange, and the
# request in a wait; the others go through host memory.
WAITS = {
    "iallreduce": 1,
    "ragged_alltoall": 1,
    "allreduce BAND of int16": 2,
    "reduce BAND of int16": 2,
    "scan BAND of int16": 2,
    "exscan BAND of int16": 2,
    "allreduce PROD of complex64": 2,
    "scan of a large array": 2,
}


def test_only_the_operations_of_the_list_wait_on_the_host(mpirun, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl"}
    result = mpirun(2, HERE / "host_waits.py", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.rpartition(": ") for line in result.stdout.splitlines()]
    found = {name: float(waits) for name, _, waits in lines}
    assert len(found) > 80
    assert {name: waits for name, waits in found.items() if waits} == WAITS
