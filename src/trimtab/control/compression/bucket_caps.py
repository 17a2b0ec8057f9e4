"""Short last buckets: of a DDP module that `trimtab run` constructs for a script, or that a script has constructed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab._compat import rebuild_reducer, takes_bucket_list

TOLERANCE = 0.97
"""A bucket ends at this part of its size. Gradients become ready in another order than that of the parameters: if a
small one went into the bucket before, this one would take another large one, and the last would have nothing left."""


def bucket_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for DDP's constructor that end a backward pass with short buckets.

    None where the script has sizes of its own, or torch (before 2.13) takes one size for all buckets.

    Args:
        given: the arguments of the script, by name.
    """
    module = given.get("module")
    own = given.keys() & {"bucket_cap_mb", "bucket_cap_mb_list"}
    if (
        not takes_bucket_list()
        or not isinstance(module, nn.Module)
        or any(given[name] is not None for name in own)
    ):
        return {}
    trained = [p for p in module.parameters() if p.requires_grad]
    if len({(p.dtype, p.device) for p in trained}) != 1:
        return {}  # each has buckets of its own
    from trimtab.planning.compression.bucket_caps import short_last_buckets  # brings pydantic

    sizes = short_last_buckets([p.nbytes for p in trained])
    if len(sizes) < 2:
        return {}
    if given.get("find_unused_parameters", False) and not given.get("static_graph", False):
        # DDP keeps its first buckets, for which it takes the parameters in their own order, from the other end.
        return {"bucket_cap_mb_list": list(reversed(sizes))}
    *caps, last = sizes  # the last takes what is left
    return {"bucket_cap_mb_list": [*(TOLERANCE * cap for cap in caps), last / TOLERANCE]}


def shorten_last_buckets(ddp: DistributedDataParallel) -> bool:
    """Rebuild the buckets of a module on CPUs that has not been trained yet; returns whether that was done.

    Every rank does the same, because sizes depend on the model alone. What the script has chosen stays. On GPUs too:
    there what is exposed of an exchange is 2.6 ms of 78 (four parts of an H200).
    """
    tied = ddp._use_python_reducer or ddp._delay_all_reduce_params or ddp.mixed_precision is not None
    ignored = ddp.parameters_to_ignore or not ddp.bucket_bytes_cap_default
    begun = ddp._has_rebuilt_buckets or any(p.grad is not None for p in ddp.parameters())
    if tied or ignored or begun or any(p.device.type != "cpu" for p in ddp.parameters()):
        return False
    given = {
        "module": ddp.module,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
    }
    options = bucket_options(given)
    if options:
        rebuild_reducer(ddp, options["bucket_cap_mb_list"])
    return bool(options)


def bucket_caps_mb(ddp: DistributedDataParallel) -> tuple[float, ...] | None:
    """The caps of a module's buckets in the order in which a backward pass fills them; None without a list of them."""
    caps = getattr(ddp, "bucket_bytes_cap_list", None)
    if not caps:
        return None
    kept = ddp.find_unused_parameters and not ddp.static_graph
    return tuple(cap / (1 << 20) for cap in (reversed(caps) if kept else caps))
