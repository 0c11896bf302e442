"""No result depends on whether a name of JAX was bound before or after `import mpi4jax`."""

import subprocess
import sys
import textwrap

import pytest

MODULES = ("jax", "jax.numpy", "jax.lax")


def run(program, *args):
    """Return the lines that a new process prints."""
    code = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_public_name_of_jax_is_another_afterwards():
    """Also of all modules of JAX that are loaded; a module of its own may gain submodules."""
    program = """
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
        def names():
            return {
                (module.__name__, name): value
                for key, module in sorted(sys.modules.items())
                if key.split(".")[0] == "jax" and "._" not in key
                for name, value in vars(module).items()
                if not name.startswith("_")
            }
        before = names()
        import mpi4jax, mpi4jax.notoken, mpi4jax.sharding, mpi4jax.training
        after = names()
        print(len(before))
        for key, value in before.items():
            if after.get(key) is not value:
                print(*key)
    """
    count, *differ = run(program, *MODULES)
    assert int(count) > 1000
    assert differ == []


PROGRAM = """
    {0}
    import jax
    import jax.numpy as jnp
    from jax import effects_barrier, jvp, vmap
    {1}
    import time
    import mpi4jax.notoken as mpi4jax
    from mpi4jax._job import flush

    f = lambda x: mpi4jax.allreduce(jnp.sin(x))
    x = jnp.zeros(2)
    y, t = vmap(lambda t: jvp(f, (x,), (t,)), out_axes=(None, 0))(jnp.eye(2))
    print(y.tolist(), t.tolist())
    waited = []
    flush.last = lambda: (waited.append(1), x)[1]
    effects_barrier()
    print(len(waited))
    if hasattr(jax, "set_mesh"):
        from jax import set_mesh
        from jax.sharding import PartitionSpec as P
        with set_mesh(mpi4jax.Mesh()):
            mpi4jax.shard_map(lambda x: x, in_specs=P(), out_specs=P())(x)
"""


@pytest.mark.parametrize("first", ["jax", "mpi4jax"])
def test_names_of_jax_bound_before_and_after(first):
    order = ("import mpi4jax", "") if first == "mpi4jax" else ("", "import mpi4jax")
    assert run(PROGRAM.format(*order)) == ["[0.0, 0.0] [[1.0, 0.0], [0.0, 1.0]]", "1"]
