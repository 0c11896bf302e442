"""Batches of unequal numbers, which end together on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, overload

import jax
import numpy as np
from mpi4py import MPI

from ..ops import allgather
from .arrays import T
from .base import as_comm

#: What a rank sends in place of the number of rows of its next batch.
_ENDED, _NO_BATCH, _UNEVEN_ROWS, _FAILED = -1, -2, -3, -4


@overload
def batches(
    iterable: Iterable[T], comm: MPI.Intracomm | None = None, *, pad: Literal[False] = False
) -> Iterator[tuple[T, float]]: ...


@overload
def batches(
    iterable: Iterable[T], comm: MPI.Intracomm | None = None, *, pad: Literal[True]
) -> Iterator[tuple[T, np.ndarray[Any, Any]]]: ...


def batches(
    iterable: Iterable[T], comm: MPI.Intracomm | None = None, *, pad: bool = False
) -> Iterator[tuple[T, Any]]:
    """Iterate over batches until the iterators of all ranks are exhausted. Collective.

    A rank whose batches are exhausted gets its last batch again, with weight zero, so that all
    ranks take part in the same number of steps.

    A function in a :func:`mpi4jax.shard_map` needs blocks with the same number of rows on all
    ranks. Pass ``pad=True`` if the batches of a step may have different numbers of rows, as the
    last batch often does.

    Args:
        iterable: this rank's batches, pytrees of arrays with a row per sample. Every rank must have
            at least one.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.
        pad: whether to repeat the last row of a batch until it has as many rows as the largest
            batch of any rank in this step or an earlier one. Equal shapes in all steps also mean
            that a step is compiled once.

    Yields:
        The batch and its weight. The mean over ranks of ``weight * loss`` is the mean over samples,
        if ``loss`` is the mean over the samples of the batch. With ``pad=True``, the weight is a
        NumPy array of float32 with one entry per row, zero for repeated rows: the mean over ranks
        of ``jnp.mean(weights * losses)`` is the mean over samples.

    Raises:
        ValueError: on all ranks, if a rank has no batch. With ``pad=True`` also if the first batch
            of a rank has no row, or if the arrays of a batch have different numbers of rows.
        RuntimeError: if ``iterable`` has raised an exception on another rank. The rank itself
            raises its exception.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> mine = [jnp.full(2, 3.0)] * (1 + mpi4jax.default_comm().rank)
        >>> for x, weight in mpi4jax.training.batches(mine):
        ...     mean = mpi4jax.allreduce(weight * x.mean(), op=mpi4jax.MEAN)
        >>> float(mean)
        3.0
    """
    comm = as_comm("batches", comm).mpi
    iterator: Iterator[T] | None = None
    batch, length, padded = None, 0, 0
    failed: Exception | None = None
    while True:
        new = None
        try:
            iterator = iter(iterable) if iterator is None else iterator
            new = next(iterator, None)
            rows = _ENDED if new is None else _rows(new, pad)
        except Exception as error:
            failed, rows = error, _FAILED
        if rows > 0 or (rows == 0 and not pad):
            batch, length = new, rows
        elif batch is None and rows > _UNEVEN_ROWS:
            rows = _NO_BATCH
        of_all = np.asarray(allgather(np.int32(rows), comm=comm))
        if failed is not None:
            raise failed
        if (of_all < _ENDED).any():
            _raise_for_rows(of_all)
        total = of_all.clip(0).sum()
        if total == 0:
            if (of_all == _ENDED).all():
                return
            continue
        assert batch is not None
        if not pad:
            yield batch, float(max(rows, 0) * len(of_all) / total)
            continue
        padded = max(padded, int(of_all.max()))
        weights = np.zeros(padded, np.float32)
        weights[: max(rows, 0)] = padded * len(of_all) / total
        yield _repeat_last_row(batch, length, padded), weights


def _rows(batch: Any, pad: bool) -> int:
    """Return the number of rows of a batch. If batches are padded, all arrays must have this
    number."""
    leaves = jax.tree.leaves(batch)
    if not leaves or (np.ndim(leaves[0]) == 0 and not pad):
        raise TypeError(
            "batches: argument 'iterable' must yield pytrees of arrays with one row per sample, "
            f"got {batch!r}"
        )
    if pad and (np.ndim(leaves[0]) == 0 or len({np.shape(leaf)[:1] for leaf in leaves}) > 1):
        return _UNEVEN_ROWS
    return len(leaves[0])


def _raise_for_rows(of_all: np.ndarray[Any, Any]) -> None:
    rank = int(of_all.argmin())
    if of_all[rank] == _FAILED:
        raise RuntimeError(
            f"batches: argument 'iterable' has raised an exception on rank {rank}, which raises it"
        )
    if of_all[rank] == _UNEVEN_ROWS:
        raise ValueError(
            f"batches: argument 'iterable' must yield arrays with one row per sample, got arrays "
            f"with different numbers of rows in one batch of rank {rank}"
        )
    raise ValueError(
        f"batches: rank {rank} has no batch, or a first one without a row; expected at least one "
        "row on each rank"
    )


def _repeat_last_row(batch: Any, rows: int, padded: int) -> Any:
    """Repeat the last row instead of adding zeros, because some functions have no derivative at
    zero."""
    if rows == padded:
        return batch
    index = np.minimum(np.arange(padded), rows - 1)
    return jax.tree.map(lambda leaf: leaf[index], batch)
