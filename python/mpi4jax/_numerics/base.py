"""What the numerics need of the core besides its public names.

The modules here, and the public ones above, import nothing else that is private to the core.
`tests/unit/test_layers.py` has the reason for each of these names.
"""

from __future__ import annotations

from .._grid import cart as cart
from .._job.abort import fail_at_exit as fail_at_exit
from .._op.arguments import rank_of as rank_of
from .._op.comm import (
    Uncopied as Uncopied,
    as_comm as as_comm,
    static_int as static_int,
    waits_in as waits_in,
)
from .._op.packing import as_arrays as as_arrays
from .._spmd.mesh import current as current
from .._spmd.whole import of_whole_arrays as of_whole_arrays
