"""Compiles every op for a GPU, on a machine without one.

For that JAX's CUDA plugin needs no driver, and of CUDA's libraries only the compiler.

It prints the name of each program before XLA has it, which may end the process.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from reference import Started
from table import cases

from mpi4jax import notoken

# What the compiler asks of a GPU (an H100), in the text form of XLA's GpuTargetConfigProto.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# XLA takes slices and updates into a call from some size on.
PAYLOAD = (1 << 16,)
# What a program that has been compiled ends with: when it is loaded, an op's call has no driver.
NO_DRIVER = "cannot be used: libcuda.so.1"


def sliced(run):
    """The op on a slice, and a slice updated by its result."""

    def f(xs):
        return jax.tree.map(lambda y: jnp.zeros((3, *y.shape), y.dtype).at[1].set(y), run(xs[1]))

    return f


def gradient(run):
    def loss(xs):
        return sum(jnp.sum(jnp.abs(y) ** 2) for y in jax.tree.leaves(sliced(run)(xs)))

    return jax.grad(loss)


def programs(case):
    def run(x):
        return case.run("notoken", x)

    yield "slices", sliced(run)
    yield "loop", lambda xs: jax.lax.map(run, xs)
    if case.linear:
        yield "gradient", gradient(run)
    if hasattr(notoken, f"i{case.name}") and not case.row.call:
        yield "started", sliced(lambda x: case.run(Started(), x))


def main():
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", target_config=H100, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("gpu",))
    on_gpu = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for case in cases():
        x = jax.ShapeDtypeStruct((3, *case.shape(PAYLOAD)), np.float32, sharding=on_gpu)
        for name, f in programs(case):
            print(f"{case} {name}", flush=True)
            try:
                jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).compile()
            except jax.errors.JaxRuntimeError as error:
                if NO_DRIVER not in str(error):
                    raise
    print("all are compiled")


sys.exit(main())
