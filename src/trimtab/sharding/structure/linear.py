"""Linear maps: `nn.Linear`, and the `Conv1D` of transformers, whose weight is transposed."""

from __future__ import annotations

from torch import nn


def is_linear(module: object) -> bool:
    """Whether it is an `nn.Linear`, or a `Conv1D` of transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight's first axis is the input."""
    return not isinstance(module, nn.Linear)


def features(module: nn.Module) -> tuple[int, int]:
    """Number of inputs and of outputs."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)
