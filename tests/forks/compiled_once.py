"""Ranks that compile the same program share it: one compiles, the others wait for it and load it.

Processes in which ranks of tests begin import this. What they compile is in JAX's persistent cache,
in the directory MPI4JAX_TEST_COMPILED; without it each rank compiles for itself. JAX alone
would let ranks that compile at the same time do so, and read files that others are writing.

Programs of one thread share an MLIR context, too. JAX up to 0.11 makes one for each program, and
loads all dialects into it: a fifth of the time of these tests.
"""

import fcntl
import os
import threading

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

FOLDER = os.environ.get("MPI4JAX_TEST_COMPILED")
OWN = threading.local()  # the lock of the program that a thread compiles; its MLIR context
PROGRAMS = 50  # that share a context, which forgets nothing


def find_or_lock(read, name, key, *rest):
    """The program in the cache. If it is not there, others wait until this thread has compiled."""
    lock = os.open(f"{FOLDER}/{key}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found = read(name, key, *rest)
    if found[0] is None:
        OWN.lock = lock
    else:
        os.close(lock)
    return found


def compile_and_unlock(compile_and_write, *arguments):
    try:
        return compile_and_write(*arguments)
    finally:
        os.close(OWN.lock)


def is_lowering():
    """Whether this thread lowers a program. A module of its context would become a part of it."""
    try:
        return ir.InsertionPoint.current is not None
    except ValueError:
        return False


def shared_context(make):
    if is_lowering():  # a rule of lineax computes something at once
        return make()
    if not getattr(OWN, "programs", 0):
        OWN.context, OWN.programs = make(), PROGRAMS
    OWN.programs -= 1
    return OWN.context


def around(module, name, function):
    original = getattr(module, name)
    setattr(module, name, lambda *arguments: function(original, *arguments))


# Of JAX 0.7 to 0.12. Without them, each rank for itself.
if FOLDER and hasattr(compiler, "_cache_read") and hasattr(compiler, "_compile_and_write_cache"):
    jax.config.update("jax_compilation_cache_dir", FOLDER)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    around(compiler, "_cache_read", find_or_lock)
    around(compiler, "_compile_and_write_cache", compile_and_unlock)
    around(mlir, "make_ir_context", shared_context)
