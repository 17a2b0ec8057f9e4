"""Where an operator rounds in each precision, by how much, and how the gradient responds.

This follows `trimtab.precision` product by product: a tensor that is rounded once and used twice is one source of
noise, a tensor that is rounded twice is two.

Sources are named after the rounded tensor: ``x`` the input, ``w`` the weight, ``b`` the bias, ``y`` the result,
and with a ``g`` in front the gradient of each (``gy``, or ``gy for x`` and ``gy for w`` where it is rounded
separately for each product). Products of activations have ``x0``, ``x1``... instead of x and w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.errors import TrimtabError
from trimtab.measure.damage import rounding
from trimtab.measure.damage.recorder import OperatorCall
from trimtab.precision_names import OperatorKind


@dataclass
class CallMatrices:
    """The tensors of one call by name; those of linear layers and convolutions as matrices that share scales.

    In a linear layer x is tokens × inputs, w outputs × inputs, y tokens × outputs. In a convolution x is
    samples × all other axes, w outputs × the kernel's inputs, y positions × outputs.
    """

    name: str
    kind: OperatorKind
    tensors: dict[str, torch.Tensor]
    groups: int
    recorded: OperatorCall
    wanted: frozenset[str]
    """Gradients that training needs."""


def as_matrices(recorded: OperatorCall, scale: float = 1.0) -> CallMatrices:
    """The matrices of a recorded call, with its weight's gradient, all in fp32.

    Args:
        scale: a power of two that gradients are multiplied by, so that squares stay in range.
    """
    assert recorded.result_grad is not None
    tensors = {"y": recorded.result, "gy": recorded.result_grad}
    wanted = {"gy"}
    names = [f"x{i}" for i in range(len(recorded.operands))] if recorded.kind == "attention" else ["x"]
    if recorded.kind != "embedding":
        for name, operand, grad, needed in zip(
            names, recorded.operands, recorded.operand_grads, recorded.wanted, strict=True
        ):
            tensors[name] = operand
            tensors["g" + name] = torch.zeros_like(operand) if grad is None else grad
            wanted |= {"g" + name} if needed else set()
    if recorded.kind in ("linear", "conv"):
        assert recorded.weight is not None
        tensors["w"] = recorded.weight
        tensors["gw"] = _weight_grad(recorded)
        wanted.add("gw")
        tensors = {name: _matrix(recorded, name[-1], tensor) for name, tensor in tensors.items()}
        if recorded.bias is not None:
            tensors["b"], tensors["gb"] = recorded.bias, tensors["gy"].sum(0)
    tensors = {n: t.float() * scale if n[0] == "g" else t.float() for n, t in tensors.items()}
    groups = getattr(recorded.module, "groups", 1)
    return CallMatrices(recorded.name, recorded.kind, tensors, groups, recorded, frozenset(wanted))


def errors(call: CallMatrices, precision: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """For each noise source: its name, the rounded tensor's name, and the elements' expected squared errors."""
    if precision in rounding.HALF:
        for name in call.tensors:
            if _rounded_in_half(call, name):
                yield name, name, rounding.half(call.tensors[name], precision, scaled=name[0] == "g")
    elif precision == "int8":
        yield from _int8_errors(call)
    elif precision == "tf32":
        for name in ("x", "w", "gy"):
            yield name, name, rounding.tf32(call.tensors[name])
    else:
        assert precision == "fp8", precision
        for name, dtype in (
            ("x", torch.float8_e4m3fn),
            ("w", torch.float8_e4m3fn),
            ("gy", torch.float8_e5m2),
        ):
            yield name, name, rounding.fp8(call.tensors[name], dtype, stochastic=name == "gy")


def responses(before: CallMatrices, after: CallMatrices, length: float) -> dict[str, torch.Tensor]:
    """How the model's gradient, along the direction of a step, responds to a unit of error in each element.

    Mixed second derivatives of the loss are symmetric. So the effect of an error in a value on the gradient along a
    direction equals the effect of a step in that direction on the value's own gradient; and the effect of an error
    in a value's gradient equals the change of that value.

    Args:
        before: the call at the current parameters.
        after: the call after a step of `length` along the direction.
    """
    moved = {}
    for name, tensor in before.tensors.items():
        other = after.tensors[name]
        if before.name != after.name or other.shape != tensor.shape:
            raise TrimtabError(
                f"damage: shapes in {before.name} change when the weights move a little ({tuple(tensor.shape)} and "
                f"{tuple(other.shape)}): the model's control flow depends on values. Use indicator='measured'"
            )
        moved[name] = (other - tensor) / length
    response = {name: moved[name[1:] if name[0] == "g" else "g" + name] for name in moved}
    if before.kind in ("linear", "conv"):
        product = moved["y"] - moved.get("b", torch.zeros((), device=moved["y"].device))
        own = _matrix(
            before.recorded,
            "y",
            _product(before.recorded, (_weight(after.recorded) - _weight(before.recorded)) / length),
        )
        response |= {"gy": product, "gy for w": own, "gy for x": product - own}
    return response


def _rounded_in_half(call: CallMatrices, name: str) -> bool:
    if call.kind == "embedding":
        return name == "y"
    if name == "gb":  # summed from the gradient before it is rounded
        return False
    if name == "gw" and call.kind == "linear" and call.tensors["w"].device.type == "cuda":
        return False  # it stays in the accumulator's precision
    return name[0] != "g" or name in call.wanted


def _int8_errors(call: CallMatrices) -> Iterator[tuple[str, str, torch.Tensor]]:
    x, w, g = (call.tensors[name] for name in ("x", "w", "gy"))
    yield "x", "x", rounding.int8(x, "rows")
    yield "w", "w", rounding.int8(w, "rows")
    # The scales of the other operand are folded into the gradient before it is rounded.
    w_steps = rounding.int8_scales(w, "rows").flatten()
    by_group = g.reshape(len(g), call.groups, -1)
    factor = w_steps.reshape(1, call.groups, -1).expand_as(by_group)
    if "gx" in call.wanted:
        error = rounding.int8(by_group.flatten(0, 1), "rows", factor.flatten(0, 1))
        yield "gy for x", "gy", error.reshape(g.shape)
    x_steps = rounding.int8_scales(x, "rows")
    yield (
        "gy for w",
        "gy",
        rounding.int8(g, "columns", x_steps.repeat_interleave(len(g) // max(1, len(x)), 0)),
    )


def _matrix(recorded: OperatorCall, letter: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the role of x, w or y of a linear layer or convolution, as a matrix."""
    if recorded.kind == "linear":
        if letter == "w":
            return tensor.t() if _transposed(recorded) else tensor
        return tensor.reshape(-1, tensor.shape[-1])
    if letter == "w":
        return tensor.flatten(1)
    axes = _weight(recorded).dim()
    tensor = tensor if tensor.dim() == axes else tensor.unsqueeze(0)
    return tensor.flatten(1) if letter == "x" else tensor.movedim(1, -1).flatten(0, -2)


def _product(recorded: OperatorCall, weight: torch.Tensor) -> torch.Tensor:
    """The operator's result with another weight, without bias."""
    module: Any = recorded.module
    (x,) = recorded.operands
    if recorded.kind == "conv":
        result: torch.Tensor = module._conv_forward(x.float(), weight, None)
        return result
    return F.linear(x.float(), weight.t() if _transposed(recorded) else weight)


def _weight_grad(recorded: OperatorCall) -> torch.Tensor:
    """Through this call alone."""
    assert recorded.result_grad is not None
    weight = _weight(recorded)
    if recorded.kind == "linear":
        x, g = (_matrix(recorded, "y", t.float()) for t in (recorded.operands[0], recorded.result_grad))
        return x.t() @ g if _transposed(recorded) else g.t() @ x
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(_product(recorded, leaf), leaf, recorded.result_grad.float())[0]


def _weight(recorded: OperatorCall) -> torch.Tensor:
    assert recorded.weight is not None
    return recorded.weight.float()


def _transposed(recorded: OperatorCall) -> bool:
    return not isinstance(recorded.module, torch.nn.Linear)
