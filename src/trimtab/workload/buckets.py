"""The gradients that DDP reduces together, as it arranges them after its first step."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.workload.operator import OUTSIDE, Operator
from trimtab.workload.workload import Bucket, Parameter

MIB = 1 << 20
FIRST_MB = 1.0
"""DDP's first bucket is small, so that communication starts early."""

DEFAULT_MB = 25.0


def ddp_buckets(
    parameters: Sequence[Parameter],
    operators: Sequence[Operator],
    cap_mb: float | Sequence[float] | None = None,
) -> tuple[Bucket, ...]:
    """Trainable parameters in the order in which backward completes their gradients, divided at the caps.

    The parameter that fills a bucket closes it; each dtype has its own buckets.

    Args:
        parameters: in the order in which the model lists them.
        cap_mb: DDP's `bucket_cap_mb`; if given, it applies to the first bucket, too. Or one for each bucket, the last
            of which applies to all that follow.
    """
    if cap_mb is None:
        cap_mb = (FIRST_MB, DEFAULT_MB)
    caps = (cap_mb,) if isinstance(cap_mb, (int, float)) else cap_mb
    limits = [int(cap * MIB) for cap in caps]
    trainable = [p for p in parameters if p.trainable]
    # Backward runs from the last operator to the first; unused parameters are reduced last.
    order = sorted(trainable, key=lambda p: _arrival(p, operators))
    done: list[list[Parameter]] = []
    open_: dict[str, list[Parameter]] = {}
    closed: dict[str, int] = {}
    for parameter in order:
        dtype = parameter.tensor.dtype
        mine = open_.setdefault(dtype, [])
        if not mine:
            done.append(mine)
        mine.append(parameter)
        limit = limits[min(closed.get(dtype, 0), len(limits) - 1)]
        if sum(p.tensor.nbytes for p in mine) >= limit:
            closed[dtype] = closed.get(dtype, 0) + 1
            open_[dtype] = []
    return tuple(
        Bucket(
            parameters=tuple(p.name for p in bucket),
            nbytes=sum(p.tensor.nbytes for p in bucket),
            ready=min(min(p.operators, default=OUTSIDE) for p in bucket),
        )
        for bucket in done
    )


def _arrival(parameter: Parameter, operators: Sequence[Operator]) -> tuple[int, int]:
    """When in backward a gradient is complete: the operator, and the position among its parameters."""
    if not parameter.operators:
        return -OUTSIDE, 0
    last = operators[min(parameter.operators)]
    place = last.parameters.index(parameter.name)
    # Gradients are produced in the order of the arguments, except that a linear layer's bias precedes its weight.
    return -last.index, -place if last.target == "linear" else place
