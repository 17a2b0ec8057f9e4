"""Where 8 bits pay, by the shape of a weight: rules from measurements, so that every rank and every run decides alike.

8 bits save arithmetic, in proportion to inputs · outputs of a layer, and cost quantizing, in proportion to inputs +
outputs: so what decides is the harmonic mean of both, here called the width. The number of rows hardly matters, because
both are proportional to it.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch import nn

from trimtab.precision_names import OperatorKind, Precision

LEAST_WIDTH: dict[tuple[str, OperatorKind, str], int] = {
    ("cuda", "linear", "int8"): 4608,
    ("cuda", "linear", "fp8"): 4608,
    ("cpu", "linear", "int8"): 128,
    ("cpu", "conv", "int8"): 200,
}
"""By type of device, kind and precision: the least width at which forward and backward together are faster than what a
model would run otherwise, bf16 on a GPU and fp32 on a CPU. What is not here is faster at any width, or was refused."""


def passed_over(
    module: nn.Module, kind: OperatorKind, precision: Precision, device: torch.device
) -> str | None:
    """Why the pattern ``*`` leaves this operator alone: it would be slower in this precision. None if it would not."""
    for name in dict.fromkeys(precision.names):
        least = LEAST_WIDTH.get((device.type, kind, name))
        if least is not None and (own := width(module, kind)) < least:
            return f"{name} is slower on a {device.type} device at a width below {least}, and it has {own}"
    return None


def width(module: Any, kind: OperatorKind) -> int:
    """The harmonic mean of inputs and outputs of the matrix that a linear layer or a group of a convolution is."""
    inputs: int
    outputs: int
    if kind == "conv":
        inputs = module.in_channels // module.groups * prod(module.kernel_size)
        outputs = module.out_channels // module.groups
    elif isinstance(module, nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    elif getattr(module, "weight", None) is not None and module.weight.dim() == 2:
        inputs, outputs = module.weight.shape
    else:  # a projection that is divided among ranks
        return sys.maxsize
    return 2 * inputs * outputs // max(1, inputs + outputs)
