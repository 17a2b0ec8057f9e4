"""Fewer bits on the wire: reductions of encoded buckets over any c10d process group."""

from trimtab.collectives.choose import all_reduce, reduction_for
from trimtab.collectives.layout import Layout, Piece, plan_layout
from trimtab.collectives.pipeline import Runner, runner_for
from trimtab.collectives.reduction import MAX_STAGES, Reduction, finish

__all__ = [
    "MAX_STAGES",
    "Layout",
    "Piece",
    "Reduction",
    "Runner",
    "all_reduce",
    "finish",
    "plan_layout",
    "reduction_for",
    "runner_for",
]
