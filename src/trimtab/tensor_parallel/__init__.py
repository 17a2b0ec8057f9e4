"""Tensor parallelism by units: any split over any ranks, exact, movable while the job runs.

The package itself is the verb: ``trimtab.tensor_parallel(model, mesh)`` converts a model, as
`trimtab.runtime.tensor_parallel` says; the names below take converted models.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trimtab.tensor_parallel.clip import clip_grad_norm_
from trimtab.tensor_parallel.clock import Clock, Segments
from trimtab.tensor_parallel.kinds import Attention, Mlp
from trimtab.tensor_parallel.lease import end_leases, lease, leased
from trimtab.tensor_parallel.migration import Moved, assignment, assignment_for, move

if TYPE_CHECKING:
    from trimtab.tensor_parallel.checkpoint import Checkpoint

__all__ = [
    "Attention",
    "Checkpoint",
    "Clock",
    "Mlp",
    "Moved",
    "Segments",
    "assignment",
    "assignment_for",
    "clip_grad_norm_",
    "end_leases",
    "lease",
    "leased",
    "move",
]


def __getattr__(name: str) -> Any:
    if name == "Checkpoint":  # when first used: torch's distributed checkpoints take half a second to import
        from trimtab.tensor_parallel.checkpoint import Checkpoint

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Verb(ModuleType):
    """Importing a package binds its name in its parent, where the verb of the same name would be."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from trimtab.runtime.tensor_parallel import tensor_parallel

        return tensor_parallel(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
