"""The shallow-water example that mpi4jax 0.9.1 ships, timed as ours is.

mpiexec -n 2 python benches/reference_example.py ITS_FILE --benchmark --size NX NY --steps N

It has no option for the size of its grid, so the two lines that set it are replaced. Its equations,
grid and time-stepping are those of ours; its steps are written differently, and exchange more.
"""

import argparse
import sys
import time
from pathlib import Path


def program(path: Path, nx: int, ny: int) -> str:
    source = path.read_text()
    for name, cells, wanted in (("nx_global", 360, nx), ("ny_global", 180, ny)):
        line = f"{name} = {cells} + 2\n"
        if source.count(line) != 1:
            raise SystemExit(f"{path} does not say {line!r} once: is it of another version?")
        source = source.replace(line, f"{name} = {wanted} + 2\n")
    return source


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--benchmark", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, default=[3600, 1800])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    sys.argv = [str(args.path)]
    example = {"__name__": "example", "__file__": str(args.path)}
    exec(compile(program(args.path, *args.size), args.path, "exec"), example)

    import jax
    import jax.numpy as jnp

    h, u, v = example["get_initial_conditions"]()
    zeros = jnp.zeros_like(h)
    state = example["ModelState"](h, u, v, zeros, zeros, zeros)
    state = example["shallow_water_step"](state, True)
    run, comm = example["do_multistep"], example["mpi_comm"]
    jax.block_until_ready(run(state, args.steps))
    times = []
    for _ in range(3):
        comm.Barrier()
        begin = time.perf_counter()
        end = jax.block_until_ready(run(state, args.steps))
        comm.Barrier()
        times.append(time.perf_counter() - begin)
    if not all(jnp.isfinite(field).all() for field in end):
        raise SystemExit("the model has become unstable")
    if comm.rank == 0:
        print(f"{args.steps} steps: {args.steps / min(times):.2f} steps per second", flush=True)


if __name__ == "__main__":
    main()
