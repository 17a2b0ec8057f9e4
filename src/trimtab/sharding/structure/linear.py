"""Linear maps: `nn.Linear`, and the `Conv1D` of transformers, whose weight is transposed."""

from __future__ import annotations

from torch import nn


def is_linear(module: object) -> bool:
    """Whether it is an `nn.Linear`, or a `Conv1D` of transformers, with a weight that is not computed (weight norm)."""
    known = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return known and isinstance(getattr(module, "weight", None), nn.Parameter)


def further_parameters(module: nn.Module) -> list[str]:
    """Names of a linear map's parameters beside weight and bias (an adapter in a subclass), which units would lack."""
    return [name for name, _ in module.named_parameters() if name not in ("weight", "bias")]


def hooked(module: nn.Module) -> bool:
    """Whether somebody has registered hooks on it or on its parameters, which a projection in its place would lack."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip
    return any(hooks) or hooked_parameters(module)


def hooked_parameters(module: nn.Module) -> bool:
    """Whether somebody has registered hooks on a module's own parameters."""
    own = list(module.parameters(recurse=False))
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in own)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight's first axis is the input."""
    return not isinstance(module, nn.Linear)


def features(module: nn.Module) -> tuple[int, int]:
    """Number of inputs and of outputs."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)
