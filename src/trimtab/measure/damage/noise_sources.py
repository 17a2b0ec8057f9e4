"""Where an operator rounds in each precision, how far, and how the gradient responds.

Following `trimtab.precision` product by product: what is rounded once and used twice is one source, what is
rounded twice is two.

Sources have the names of what is rounded: ``x`` the input, ``w`` the weight, ``b`` the bias, ``y`` the result,
with a ``g`` before it the gradient of each (``gy``, and where it is rounded for each product by itself
``gy for x`` and ``gy for w``). Products of activations have ``x0``, ``x1``... in the place of x and w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trimtab.errors import TrimtabError
from trimtab.measure.damage import rounding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.measure.damage.recorder import Seen
    from trimtab.precision_names import OperatorKind


@dataclass
class Shaped:
    """One call's tensors by name, those of linear layers and convolutions as the matrices that share scales.

    Of a linear layer x is tokens × inputs, w outputs × inputs, y tokens × outputs. Of a convolution x is
    samples × all of it, w outputs × all under the kernel, y places × outputs.
    """

    name: str
    kind: OperatorKind
    tensors: dict[str, torch.Tensor]
    groups: int
    seen: Seen
    wanted: frozenset[str]
    """Gradients that training asks for."""


def shaped(seen: Seen, scale: float = 1.0) -> Shaped:
    """A call that was seen, its weight's gradient made beside it, all in fp32.

    Args:
        scale: a power of two by which gradients are multiplied, so that squares stay in range.
    """
    assert seen.result_grad is not None
    tensors = {"y": seen.result, "gy": seen.result_grad}
    wanted = {"gy"}
    names = [f"x{i}" for i in range(len(seen.operands))] if seen.kind == "attention" else ["x"]
    if seen.kind != "embedding":
        for name, operand, grad, asked in zip(
            names, seen.operands, seen.operand_grads, seen.wanted, strict=True
        ):
            tensors[name] = operand
            tensors["g" + name] = torch.zeros_like(operand) if grad is None else grad
            wanted |= {"g" + name} if asked else set()
    if seen.kind in ("linear", "conv"):
        assert seen.weight is not None
        tensors["w"] = seen.weight
        tensors["gw"] = _weight_grad(seen)
        wanted.add("gw")
        tensors = {name: _matrix(seen, name[-1], tensor) for name, tensor in tensors.items()}
        if seen.bias is not None:
            tensors["b"], tensors["gb"] = seen.bias, tensors["gy"].sum(0)
    tensors = {n: t.float() * scale if n[0] == "g" else t.float() for n, t in tensors.items()}
    groups = getattr(seen.module, "groups", 1)
    return Shaped(seen.name, seen.kind, tensors, groups, seen, frozenset(wanted))


def errors(call: Shaped, precision: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Of every source of a call: its name, that of the rounded tensor, and each element's expected squared error."""
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


def responses(before: Shaped, after: Shaped, length: float) -> dict[str, torch.Tensor]:
    """How the model's gradient, seen along the way the parameters moved, responds to a unit of error in each element.

    The loss's mixed second derivatives are the same in either order. So what an error in a value does to the
    gradient along a direction is what a step along that direction does to the value's own gradient; and what an
    error in a value's gradient does, is how that value moves.

    Args:
        before: where the parameters are.
        after: where they are after a step of `length` along the direction.
    """
    moved = {}
    for name, tensor in before.tensors.items():
        other = after.tensors[name]
        if before.name != after.name or other.shape != tensor.shape:
            raise TrimtabError(
                f"damage: {before.name} is given other shapes when the weights move a little ({tuple(tensor.shape)} "
                f"and {tuple(other.shape)}): the model chooses its way by the values. Use indicator='measured'"
            )
        moved[name] = (other - tensor) / length
    found = {name: moved[name[1:] if name[0] == "g" else "g" + name] for name in moved}
    if before.kind in ("linear", "conv"):
        product = moved["y"] - moved.get("b", torch.zeros((), device=moved["y"].device))
        own = _matrix(
            before.seen, "y", _product(before.seen, (_weight(after.seen) - _weight(before.seen)) / length)
        )
        found |= {"gy": product, "gy for w": own, "gy for x": product - own}
    return found


def _rounded_in_half(call: Shaped, name: str) -> bool:
    if call.kind == "embedding":
        return name == "y"
    if name == "gb":  # summed from the gradient before it is rounded
        return False
    if name == "gw" and call.kind == "linear" and call.tensors["w"].device.type == "cuda":
        return False  # it leaves the accumulator as it is
    return name[0] != "g" or name in call.wanted


def _int8_errors(call: Shaped) -> Iterator[tuple[str, str, torch.Tensor]]:
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


def _matrix(seen: Seen, letter: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the place of x, w or y in a linear layer or convolution, as a matrix."""
    if seen.kind == "linear":
        if letter == "w":
            return tensor.t() if _turned(seen) else tensor
        return tensor.reshape(-1, tensor.shape[-1])
    if letter == "w":
        return tensor.flatten(1)
    axes = _weight(seen).dim()
    tensor = tensor if tensor.dim() == axes else tensor.unsqueeze(0)
    return tensor.flatten(1) if letter == "x" else tensor.movedim(1, -1).flatten(0, -2)


def _product(seen: Seen, weight: torch.Tensor) -> torch.Tensor:
    """The operator's result for another weight, without its bias."""
    module: Any = seen.module
    (x,) = seen.operands
    if seen.kind == "conv":
        result: torch.Tensor = module._conv_forward(x.float(), weight, None)
        return result
    return F.linear(x.float(), weight.t() if _turned(seen) else weight)


def _weight_grad(seen: Seen) -> torch.Tensor:
    """Through this call alone."""
    assert seen.result_grad is not None
    weight = _weight(seen)
    if seen.kind == "linear":
        x, g = (_matrix(seen, "y", t.float()) for t in (seen.operands[0], seen.result_grad))
        return x.t() @ g if _turned(seen) else g.t() @ x
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(_product(seen, leaf), leaf, seen.result_grad.float())[0]


def _weight(seen: Seen) -> torch.Tensor:
    assert seen.weight is not None
    return seen.weight.float()


def _turned(seen: Seen) -> bool:
    return not isinstance(seen.module, torch.nn.Linear)
