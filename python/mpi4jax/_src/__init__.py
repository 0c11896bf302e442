"""Names that programs import from the private module of earlier packages of this name."""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class _Missing(importlib.abc.MetaPathFinder):
    """Names the public functions where a program imports another private module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.startswith(f"{__name__}."):
            raise ModuleNotFoundError(
                f"there is no {fullname} in this package, which shares its interface, not its "
                "private modules, with mpi4jax 0.9 and older. Use the functions of mpi4jax or "
                "mpi4jax.notoken, such as mpi4jax.default_comm() and mpi4jax.flush()",
                name=fullname,
            )


# The last: it is asked only for what is not in this folder.
sys.meta_path.append(_Missing())
