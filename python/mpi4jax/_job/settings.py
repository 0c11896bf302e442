"""The environment variables of mpi4jax, and the values that they accept.

Empty is unset. All are checked at import: a wrong value would otherwise show where it is first
used, on some ranks, or not at all.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable

FALSE, TRUE = ("0", "false", "off", "no"), ("1", "true", "on", "yes")

# Returns what is expected if a value is invalid, and None otherwise.
Rule = Callable[[str], str | None]


def _one_of(*choices: str) -> Rule:
    words = f"one of {', '.join(choices)}"
    return lambda value: None if value.lower() in choices else words


def _seconds(zero: str) -> Rule:
    def rule(value: str) -> str | None:
        try:
            is_right = 0 <= float(value) < math.inf
        except ValueError:
            is_right = False
        return None if is_right else f"a number of seconds, {zero}"

    return rule


def _anything(value: str) -> None:
    """Accept any value: the core checks it, with a better message."""


def _is_writable(directory: str) -> bool:
    return os.path.isdir(directory) and os.access(directory, os.W_OK)


def _directory(value: str) -> str | None:
    return None if _is_writable(value) else "a directory that exists and can be written"


def _file(value: str) -> str | None:
    parent = os.path.dirname(os.path.abspath(value))
    return None if _is_writable(parent) else "a file in a directory that exists and can be written"


_SWITCH = _one_of(*FALSE, *TRUE)

RULES: dict[str, Rule] = {
    "MPI4JAX_ABORT": _SWITCH,
    "MPI4JAX_CHECK": _one_of("samples", *FALSE, *TRUE),
    "MPI4JAX_DEADLOCK_AFTER": _seconds("0 to never abort"),
    "MPI4JAX_DEBUG": _SWITCH,
    "MPI4JAX_DUMP_DIR": _directory,
    "MPI4JAX_JAX_DISTRIBUTED": _SWITCH,
    "MPI4JAX_LIBCUDA": _anything,
    "MPI4JAX_LIBHIP": _anything,
    "MPI4JAX_LIBNCCL": _anything,
    "MPI4JAX_LIBUCP": _anything,
    "MPI4JAX_LOG": _anything,
    "MPI4JAX_LOG_FORMAT": _anything,
    "MPI4JAX_NCCL_MESSAGES": _anything,
    "MPI4JAX_NOTOKEN": _SWITCH,
    "MPI4JAX_ON_TIMEOUT": _one_of("abort", "continue"),
    "MPI4JAX_PROGRESS": _anything,
    "MPI4JAX_REPORT_AFTER": _seconds("0 for no lines"),
    "MPI4JAX_STAGING_MIB": _anything,
    "MPI4JAX_TIMEOUT": _seconds("0 for no timeout"),
    "MPI4JAX_TRACE": _file,
    "MPI4JAX_TRANSPORT": _anything,
    "MPI4JAX_USE_CUDA_MPI": _anything,
    "MPI4JAX_USE_HIP_MPI": _one_of("0", "1"),
    "MPI4JAX_WAIT": _anything,
}
# Variables of the build, of this repository's tests, and of other versions of mpi4jax.
_OTHERS = (
    "MPI4JAX_BUILD_HEADERS", "MPI4JAX_BUILD_MPI", "MPI4JAX_TEST_",
    "MPI4JAX_NO_WARN_JAX_VERSION", "MPI4JAX_USE_SYCL_MPI",
)  # fmt: skip


def get(name: str) -> str:
    """Return the value of a variable, or ``""`` if it is unset or empty."""
    return os.environ.get(name, "").strip()


def check(name: str) -> str:
    """Return the value of a variable."""
    value = get(name)
    if value and (expected := RULES[name](value)):
        raise ValueError(f"mpi4jax: environment variable {name} must be {expected}, got {value!r}")
    return value


def switch(name: str) -> bool:
    """Return whether a variable is set to 1 or a word for it."""
    return check(name).lower() in TRUE


def check_all() -> list[str]:
    """Check all variables, and return warnings about unknown ones.

    Raises:
        ValueError: if a variable has a wrong value.
    """
    for name in RULES:
        check(name)
    unknown = []
    for name in sorted(os.environ):
        if name.startswith("MPI4JAX_") and name not in RULES and not name.startswith(_OTHERS):
            near = difflib.get_close_matches(name, RULES, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            unknown.append(f"environment variable {name} means nothing to mpi4jax{hint}")
    return unknown
