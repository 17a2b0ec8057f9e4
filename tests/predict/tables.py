"""Tables of made-up costs for every operator of a workload in every precision."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from tests.measure.capture.models import MODELS, batch_for

from trimtab.cluster.profile import Line, OperatorTime
from trimtab.measure.capture.capture import capture_workload
from trimtab.predict.operators.costs import DeviceCosts, key_of
from trimtab.predict.precision_patterns import settable

if TYPE_CHECKING:
    from trimtab.workload import Workload

DEVICE = "here"
TYPES = ("fp32", "bf16", "fp16", "int8", "fp8")


@cache
def workload_of(name: str, autocast: str | None = None) -> Workload:
    with torch.device("meta"):
        model = MODELS[name]()
    return capture_workload(model, batch_for(name, 2), autocast=autocast)


@cache
def costs_of(name: str, autocast: str | None = None) -> DeviceCosts:
    """Every key its own time, so that a wrong one is seen; casts small beside them."""
    operators: dict[str, OperatorTime] = {}
    for operator in workload_of(name, autocast).operators:
        keys = [key_of(operator), *(key_of(operator, dtype=d) for d in ("fp32", "bf16", "fp16"))]
        if operator.setting is not None:
            keys += [key_of(operator, precision) for precision in settable(operator.kind)]
            keys.append(key_of(operator, "int8/int8/bf16"))
        for key in keys:
            operators.setdefault(
                str(key),
                OperatorTime(
                    forward_s=1e-3 * (1 + len(operators) % 97), backward_s=2e-3 * (1 + len(operators) % 89)
                ),
            )
    casts = {
        f"{a}>{b}": Line(a=1e-12 * (i + 1), c=1e-7 * (i + 1))
        for i, (a, b) in enumerate(permutations(TYPES, 2))
    }
    return DeviceCosts(device=DEVICE, operators=operators, casts=casts)
