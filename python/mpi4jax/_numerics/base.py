"""What the numerics need besides the public names of the package.

The modules here, and the public ones above, import nothing else of what is below them
(`tests/unit/test_layers.py`): to read the operations, nobody need read the numerics, and the other
way round.
"""

from __future__ import annotations

from .._check.whole_arrays import look as look, taken as taken
from .._grid import cart as cart
from .._grid.border import Dirichlet as Dirichlet
from .._jax.compat import (
    array_type as array_type,
    eval_primitive as eval_primitive,
    vary_over as vary_over,
    varying_axes as varying_axes,
    warn as warn,
)
from .._job.abort import fail_at_exit as fail_at_exit
from .._job.flush import flush_before as flush_before
from .._job.watch import compares_before as compares_before
from .._op import manual as manual
from .._op.arguments import from_end as from_end, rank_of as rank_of
from .._op.comm import (
    Uncopied as Uncopied,
    as_comm as as_comm,
    check_not_null as check_not_null,
    given_or_default as given_or_default,
    static_int as static_int,
    waits_in as waits_in,
)
from .._op.operation import T as T
from .._op.packing import as_array as as_array, as_arrays as as_arrays
from .._requests.request import (
    CompositeKind as CompositeKind,
    CompositeRequest as CompositeRequest,
)
from .._spmd.boundary import check_whole as check_whole
from .._spmd.collectives import mentioned as mentioned, names_of as names_of
from .._spmd.mesh import current as current
from ..ops.ragged_alltoall import rows_to_owners as rows_to_owners
