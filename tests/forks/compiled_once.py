"""Ranks that compile the same program share it: one compiles, the others wait for it and load it.

Processes in which ranks of tests begin import this. What they compile is in JAX's persistent cache,
in the folder MPI4JAX_TEST_COMPILED; without that variable each rank compiles for itself. JAX alone
would let ranks that compile at the same time do so, and read files that others are writing.
"""

import fcntl
import os
import threading

import jax
from jax._src import compiler

FOLDER = os.environ.get("MPI4JAX_TEST_COMPILED")
HELD = threading.local()  # the lock of the program that this thread compiles


def find_or_lock(read, name, key, *rest):
    """The program in the cache. If it is not there, others wait until this thread has compiled."""
    lock = os.open(f"{FOLDER}/{key}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found = read(name, key, *rest)
    if found[0] is None:
        HELD.lock = lock
    else:
        os.close(lock)
    return found


def compile_and_unlock(compile_and_write, *arguments):
    try:
        return compile_and_write(*arguments)
    finally:
        os.close(HELD.lock)


def around(name, function):
    original = getattr(compiler, name)
    setattr(compiler, name, lambda *arguments: function(original, *arguments))


# Of JAX 0.7 to 0.12. Without them, each rank for itself.
if FOLDER and hasattr(compiler, "_cache_read") and hasattr(compiler, "_compile_and_write_cache"):
    jax.config.update("jax_compilation_cache_dir", FOLDER)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    around("_cache_read", find_or_lock)
    around("_compile_and_write_cache", compile_and_unlock)
