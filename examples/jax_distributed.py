"""Use mpi4jax and JAX's own distributed runtime in one program.

    $ mpiexec -n 2 python examples/jax_distributed.py
    psum by gloo [3. 3. 3.], allreduce of it by MPI [6. 6. 6.], 2 devices in all

With `jax.distributed`, JAX sees the devices of all processes, and arrays may be distributed over
them. Functions of such arrays communicate by JAX's own collectives, such as `psum`: on CPUs by
gloo, on GPUs by NCCL. mpi4jax works on arrays of one local device, such as this process's shard of
a global array. Use the two in separate functions: a function that spans several devices has no
order that MPI could rely on.
"""

import socket

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI

import mpi4jax.notoken as mpi4jax

comm = MPI.COMM_WORLD


def start_jax() -> None:
    """Start JAX's runtime; the processes find each other by way of MPI."""
    one_host = comm.Split_type(MPI.COMM_TYPE_SHARED).size == comm.size
    with socket.socket() as probe:
        probe.bind(("", 0))  # a free port
        port = probe.getsockname()[1]
    host = "127.0.0.1" if one_host else socket.gethostname()
    address = comm.bcast(f"{host}:{port}", root=0)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=comm.size, process_id=comm.rank)


# Before anything asks JAX for its devices.
start_jax()
mesh = jax.make_mesh((comm.size,), ("ranks",))
parted, same = PartitionSpec("ranks"), PartitionSpec()


def sum_of_parts(x):
    return jax.lax.psum(x, "ranks")


by_gloo = jax.jit(jax.shard_map(sum_of_parts, mesh=mesh, in_specs=parted, out_specs=same))


@jax.jit
def by_mpi(x):
    return mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)


# Each process contributes its shard of a global array. The result is the same on all ranks.
mine = np.full(3, comm.rank + 1, np.float32)
whole = jax.make_array_from_process_local_data(NamedSharding(mesh, parted), mine)
here = by_gloo(whole).addressable_data(0)
total = by_mpi(here)

if comm.rank == 0:
    devices = jax.device_count()
    print(f"psum by gloo {here}, allreduce of it by MPI {total}, {devices} devices in all")

# JAX's runtime waits for all processes, so it ends first, and then MPI.
mpi4jax.flush()
jax.distributed.shutdown()
