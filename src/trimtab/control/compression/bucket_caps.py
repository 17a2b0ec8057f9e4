"""The buckets of a DDP module that `trimtab run` constructs for a script."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.planning.compression.bucket_caps import short_last_buckets


def bucket_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for DDP's constructor that end a backward pass with short buckets.

    None where the script has sizes of its own, or torch (before 2.13) takes one size for all buckets.

    Args:
        given: the arguments of the script, by name.
    """
    takes_list = "bucket_cap_mb_list" in signature(DistributedDataParallel.__init__).parameters
    module = given.get("module")
    own = given.keys() & {"bucket_cap_mb", "bucket_cap_mb_list"}
    if not takes_list or not isinstance(module, nn.Module) or any(given[name] is not None for name in own):
        return {}
    trained = [p for p in module.parameters() if p.requires_grad]
    if len({(p.dtype, p.device) for p in trained}) != 1:
        return {}  # each has buckets of its own
    caps = short_last_buckets([p.nbytes for p in trained])
    if len(caps) < 2:
        return {}
    # Where it looks for unused parameters DDP keeps its first buckets, for which it counts sizes from the other end.
    kept = given.get("find_unused_parameters", False) and not given.get("static_graph", False)
    return {"bucket_cap_mb_list": list(reversed(caps) if kept else caps)}


def bucket_caps_mb(ddp: DistributedDataParallel) -> tuple[float, ...] | None:
    """The caps of a module's buckets in the order in which a backward pass fills them; None without a list of them."""
    caps = getattr(ddp, "bucket_bytes_cap_list", None)
    if not caps:
        return None
    kept = ddp.find_unused_parameters and not ddp.static_graph
    return tuple(cap / (1 << 20) for cap in (reversed(caps) if kept else caps))
