"""A tree as one message: an allreduce of many leaves, and one of what `ravel_pytree` makes of them.

    python tools/mpirun.py -n 2 benches/micro/trees.py

Each line: compile seconds of CPU, then microseconds a call, the best of several rounds in turn.
"""

import time

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import mpi4jax.notoken as mpi4jax

CASES = {"100 leaves of 4 KiB": (100, 1 << 10, 100), "8 leaves of 4 MiB": (8, 1 << 20, 4)}
LOOP, ROUNDS = 5, 12


def tree(x):
    return mpi4jax.allreduce(x)


def raveled(x):
    flat, back = ravel_pytree(x)
    return back(mpi4jax.allreduce(flat))


def gradient(f):
    def loss(x):
        return sum(jnp.vdot(y, y) for y in jax.tree.leaves(f(x)))

    return jax.grad(loss)


def looped(f):
    def body(_, x):
        return jax.tree.map(lambda y: y * 0.5, f(x))

    return lambda x: jax.lax.fori_loop(0, LOOP, body, x)


def measured(functions, x, calls):
    compiled, compile_time = {}, {}
    for name, f in functions.items():
        lowered = jax.jit(f).lower(x)
        start = time.process_time()
        compiled[name] = lowered.compile()
        compile_time[name] = time.process_time() - start
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, f in compiled.items():
            mpi4jax.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(f(x))
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    return {name: (compile_time[name], 1e6 * best[name]) for name in functions}


def main():
    rank = mpi4jax.default_comm().rank
    for case, (leaves, size, calls) in CASES.items():
        x = {f"layer {i}": jnp.full(size, i, jnp.float32) for i in range(leaves)}
        for what, of in (("forward", lambda f: f), ("gradient", gradient), ("loop", looped)):
            found = measured({"tree": of(tree), "ravel_pytree": of(raveled)}, x, calls)
            if rank == 0:
                print(f"{case}, {what}:", flush=True)
                for name, (seconds, us) in found.items():
                    print(f"  {name:12} compiled in {seconds:.2f} s, {us:9.1f} us", flush=True)


if __name__ == "__main__":
    main()
