"""Tensor parallelism by units: any split over any ranks, exact, and movable while the job runs.

`trimtab.tensor_parallel(model, mesh)` converts a model; the functions below take a converted model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.sharding.clip import clip_grad_norm_
from trimtab.sharding.clock import Clock, LocalTimes
from trimtab.sharding.lease import end_leases, lease, leased
from trimtab.sharding.migration import Moved, assignment, assignment_for, move
from trimtab.sharding.unit_kinds import Attention, Mlp

if TYPE_CHECKING:
    from trimtab.sharding.checkpoint import Checkpoint

__all__ = [
    "Attention",
    "Checkpoint",
    "Clock",
    "LocalTimes",
    "Mlp",
    "Moved",
    "assignment",
    "assignment_for",
    "clip_grad_norm_",
    "end_leases",
    "lease",
    "leased",
    "move",
]


def __getattr__(name: str) -> Any:
    if name == "Checkpoint":  # lazily: torch.distributed.checkpoint takes half a second to import
        from trimtab.sharding.checkpoint import Checkpoint

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
