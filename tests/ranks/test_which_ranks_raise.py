"""What one rank can see and all must know is raised on all ranks: the table of
`docs/troubleshooting.md`, each row with mistakes of one rank. Every public function is in the
table, raises errors about this rank's arguments before it communicates, or does not communicate."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import COMM, RANK, SIZE

import mpi4jax.notoken as m
from mpi4jax import ops

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROWS = m.Layout((2 * SIZE, 2), {0: SIZE})
X = jnp.ones((2, 2))


def raising(batches):
    yield from batches
    raise OSError("no more samples")


def checkpoint(name):
    """A call of `save`, `load` or `append`, with a mistake in one argument."""

    def call(comm, folder, change):
        argument, mistake = change
        good = {"path": folder / "good", "tree": {"x": X}, "layouts": ROWS}
        more = {"time": 0.0, "dims": {"x": "ij"}} if name == "append" else {}
        if name == "load":
            m.checkpoints.save(*good.values(), comm=comm)
        else:
            good["path"] = folder / "5"
        given = {**good, **more} | ({argument: mistake} if argument else {})
        arguments = [given.pop(key) for key in good]
        if name == "wait":
            with m.checkpoints.AsyncCheckpointer() as checkpointer:
                return checkpointer.save(*arguments, **given, comm=comm)
        function = m.output.append if name == "append" else getattr(m.checkpoints, name)
        return function(*arguments, **given, comm=comm)

    return call


def narrow(comm, exchange):
    """One row fewer than the width, in the block of the last rank."""
    cart = comm.Create_cart([SIZE], periods=[True])
    block = m.grids.Block((3 * SIZE - 1,), cart, width=3)
    return exchange(jnp.ones(block.padded_shape), block)


def sent(comm, function, numbers, capacity):
    return getattr(m, function)(jnp.ones(SIZE), np.array(numbers, np.int32), capacity, comm=comm)


def waited(request):
    return m.wait(request)


PATHS = [("path", 5), ("tree", {"x": "text"}), ("layouts", "rows"), ("layouts", m.Layout((3, 3)))]
# Functions of the table: calls with what is right and with a mistake, by the function of the table.
CASES = {
    "ragged_alltoall": [
        (lambda comm, _, n: sent(comm, "ragged_alltoall", [1] * SIZE, n), SIZE, SIZE - 1),
        (lambda comm, _, k: sent(comm, "ragged_alltoall", [k] * SIZE, SIZE), 1, -1),
    ],
    "iragged_alltoall": [
        (
            lambda comm, _, n: waited(m.iragged_alltoall(jnp.ones(SIZE), [1] * SIZE, n, comm=comm)),
            SIZE,
            SIZE - 1,
        )
    ],
    "migrate": [
        (lambda comm, _, k: sent(comm, "migrate", [k] * SIZE, SIZE**2), 0, SIZE),
        (lambda comm, _, n: sent(comm, "migrate", range(SIZE), n), SIZE, SIZE - 1),
    ],
    "halo_exchange": [(lambda comm, _, f: narrow(comm, f), m.halo_exchange, m.halo_exchange)],
    "halo_add": [(lambda comm, _, f: narrow(comm, f), m.halo_add, m.halo_add)],
    "assert_equal": [
        (lambda comm, _, x: m.assert_equal(x, comm=comm), jnp.ones(2), jnp.zeros(2)),
        (lambda comm, _, x: m.assert_equal(x, comm=comm), jnp.ones(2), jnp.ones(3)),
    ],
    "checkpoints.save": [
        (checkpoint("save"), (None, None), change)
        for change in [*PATHS, ("keep", 0), ("keep", "3")]
    ],
    "checkpoints.load": [
        (checkpoint("load"), (None, None), change)
        for change in [*PATHS, ("path", Path("none")), ("tree", {"y": X})]
    ],
    "checkpoints.AsyncCheckpointer": [
        (checkpoint("wait"), (None, None), change)
        for change in PATHS
    ],
    "checkpoints.latest": [
        (lambda comm, folder, path: m.checkpoints.latest(path or folder, comm=comm), None, 5)
    ],
    "output.append": [
        (checkpoint("append"), (None, None), change)
        for change in [*PATHS, ("tree", X), ("dims", {"x": "i"}), ("dims", None), ("time", "now")]
    ],
    "ghosts.Plan": [
        (lambda comm, _, ids: m.ghosts.Plan(ids, [0], comm=comm), [RANK], ids)
        for ids in ([0.5], "ids", None, [0, 0])
    ]
    + [(lambda comm, _, ids: m.ghosts.Plan([RANK], ids, comm=comm), [0], [SIZE])],
    "training.batches": [
        (lambda comm, _, it: [*m.training.batches(it, comm)], [X, X], wrong)
        for wrong in ([], 5, [3.0], [{}], raising([X]), raising([]))
    ],
    "linalg.host_solve": [
        (lambda comm, _, f: m.linalg.host_solve(f, jnp.ones(2), comm=comm), lambda b: b, wrong)
        for wrong in (lambda b: b[:1], lambda b: 1 / 0)
    ],
}  # fmt: skip


# What the error names, if this is not the function.
WORDS = {"checkpoints.AsyncCheckpointer": "save", "iragged_alltoall": "ragged_alltoall"}


def places():
    """Public names, as the pages have them."""
    found = {name: getattr(m, name) for name in m.__all__}
    for prefix, module in {**found}.items():
        if isinstance(module, types.ModuleType):
            del found[prefix]
            found |= {f"{prefix}.{name}": getattr(module, name) for name in module.__all__}
    return found


# Functions that communicate, and raise errors about arguments of this rank before they do, so that
# they can be called in functions that JAX traces: without operations, which are all of this kind.
BEFORE = {
    *("maxloc", "minloc", "gather_blocks", "scatter_blocks", "neighbor_allgather"),
    *("neighbor_alltoall", "ineighbor_allgather", "ineighbor_alltoall", "recv_with_status"),
    *("sendrecv_with_status", "pvary", "ipvary", "reproducible_sum", "redistribute", "shard_map"),
    *("grids.overlapped", "wait", "waitall", "default_comm"),
    *(f"fft.{name}" for name in ("fftn", "ifftn", "rfftn", "irfftn")),
    *(f"fft.{name}" for name in ("dctn", "dstn", "idctn", "idstn")),
    *(f"linalg.{name}" for name in ("cg", "gmres", "minres", "bicgstab", "lsmr", "norm", "vdot")),
    *(f"linalg.{name}" for name in ("block_jacobi", "multigrid")),
    *(f"sharding.{name}" for name in ("cut", "join", "global_shard_map", "device_put")),
    *(f"sharding.{name}" for name in ("jit", "with_sharding_constraint")),
    "sharding.make_array_from_callback",
    *(f"training.{name}" for name in ("clip_by_global_norm", "global_norm", "unshard")),
}
# Functions that do not communicate.
HERE = {
    *("jit", "flush", "time_limit", "after", "auto_tokenize", "transport_info", "Mesh", "Layout"),
    *("has_cuda_support", "has_hip_support", "has_sycl_support", "MEAN", "Received", "Request"),
    *("TransportInfo", "grids.Block", "grids.balanced", "grids.dirichlet", "grids.neumann"),
    *("grids.regions", "fft.frequencies", "fft.spectral_layout", "linalg.Info", "linalg.Reason"),
    *(f"sharding.{name}" for name in ("Mesh", "NamedSharding", "PartitionSpec", "make_mesh")),
    *(f"training.{name}" for name in ("fsdp_specs", "specs_for")),
}


def test_every_public_function_has_its_place():
    operations = {name for name in places() if name in vars(ops)}
    known = operations | {*CASES} | BEFORE | HERE
    assert {*places()} == known
    assert sum(map(len, (CASES, BEFORE, HERE))) == len({*CASES} | BEFORE | HERE)
    assert not operations & (BEFORE | HERE)


def test_the_page_has_the_functions():
    table = PAGE.read_text().split("| function | raises on all ranks")[1].split("\n\n")[0]
    first = " ".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert {*re.findall(r"`([\w.]+)`", first)} - {"grids.Block"} == {*CASES}


EACH = [
    (name, number, rank)
    for name, cases in CASES.items()
    for number in range(len(cases))
    # Only rank 0 reads the directory.
    for rank in ([0] if name == "checkpoints.latest" else [0, SIZE - 1])
]


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("name", "number", "who"), EACH, ids=lambda part: str(part).replace(".", " ")
)
def test_a_mistake_of_one_rank_is_raised_on_all(name, number, who, tmp_path):
    call, good, wrong = CASES[name][number]
    folder, comm, error = COMM.bcast(tmp_path, root=0), COMM.Dup(), None
    try:
        jax.block_until_ready(call(comm, folder, wrong if who == RANK else good))
    except Exception as e:
        error = e
    # All ranks have raised an error, so they can go on together.
    assert COMM.allgather(error is not None) == [True] * SIZE
    assert WORDS.get(name, name.rpartition(".")[2]) in str(error) or who == RANK, error
    comm.Free()
