"""Reductions of encoded buckets over any c10d process group."""

from trimtab.collectives.choose import Method, all_reduce, reduction_for
from trimtab.collectives.hierarchy import Hierarchy
from trimtab.collectives.layout import Layout, Piece, plan_layout
from trimtab.collectives.pipeline import Runner, runner_for
from trimtab.collectives.reduction import STAGE_GROUPS, Reduction, finish
from trimtab.collectives.shared_memory import SharedMemory
from trimtab.collectives.topology import Hosts, find_hosts

__all__ = [
    "STAGE_GROUPS",
    "Hierarchy",
    "Hosts",
    "Layout",
    "Method",
    "Piece",
    "Reduction",
    "Runner",
    "SharedMemory",
    "all_reduce",
    "find_hosts",
    "finish",
    "plan_layout",
    "reduction_for",
    "runner_for",
]
