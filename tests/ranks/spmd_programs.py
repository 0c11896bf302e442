"""Functions for `jax.shard_map`, of which `test_shard_map.py` compares what devices and ranks make.

Each is written with names of JAX alone, for a mesh of `n` along the axis "i", or for one of up to
three axes, "a", "b" and "c". Run as a program, on `n` virtual devices of one process, this writes
what JAX gives for the programs of a kind: `python spmd_programs.py kind n file`.
"""

import pickle
import sys
import warnings

import jax
import numpy as np
import spmd_collectives  # noqa: F401 - each adds its programs
import spmd_inside  # noqa: F401
import spmd_models  # noqa: F401
import spmd_random  # noqa: F401
import spmd_random_grid  # noqa: F401
from spmd import PROGRAMS, arguments, meshes, results


def reference(kind, n):
    """The results of all programs of a kind on n devices, by their names and meshes."""
    found = {}
    for name, p in PROGRAMS.items():
        for shape, axes in meshes(p, n) if p.kind == kind else ():
            devices = np.array(jax.devices()[:n]).reshape(shape)
            mesh = jax.sharding.Mesh(devices, axes)

            def mapped(f, ins, outs, mesh=mesh, p=p):
                how = {"mesh": mesh, "in_specs": ins, "out_specs": outs, **p.how}
                return jax.shard_map(f, check_vma=p.check_vma, **how)

            try:
                out = results(p, axes, mapped, arguments(p, n))
                found[name, shape] = jax.tree.map(np.asarray, out)
            except Exception as error:  # the test says which
                found[name, shape] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    kind, n, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", n)
    warnings.simplefilter("ignore")
    with open(file, "wb") as out:
        pickle.dump(reference(kind, n), out)
