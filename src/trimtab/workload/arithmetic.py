"""Floating-point operations of an operator, from its kind and shapes. A multiply and its add count as two."""

from __future__ import annotations

from math import isqrt, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.workload.workload import Operator

PRODUCTS = ("linear", "conv", "attention", "matmul")

_PER_ELEMENT = {
    "norm": 8, "softmax": 5, "loss": 5, "activation": 8, "elementwise": 1, "dropout": 2, "reduce": 1, "pool": 1,
}  # fmt: skip
"""For kinds that are bound by memory, so that a rough count serves; those not listed compute nothing."""


def forward_flops(operator: Operator) -> int:
    if operator.kind in PRODUCTS:
        return _product(operator)
    largest = max((t.numel for t in (*operator.input_tensors, *operator.outputs)), default=0)
    return _PER_ELEMENT.get(operator.kind, 0) * largest


def backward_flops(operator: Operator) -> int:
    if not operator.differentiable:
        return 0
    if operator.kind == "attention":
        # Scores are made anew beside the four gradient products.
        return _product(operator) * 5 // 2
    if operator.kind in PRODUCTS:
        return _product(operator) * operator.gradients
    if operator.kind == "embedding":
        return operator.outputs[0].numel
    return forward_flops(operator)


def _product(operator: Operator) -> int:
    out = operator.outputs[0]
    if operator.kind == "attention":
        query, key, value = (t.shape for t in operator.input_tensors[:3])
        pairs = prod(query[:-1]) * key[-2]
        return 2 * pairs * (query[-1] + value[-1])
    if operator.kind == "conv":
        weight = next(t for t in operator.parameter_tensors if len(t.shape) == len(out.shape))
        return 2 * out.numel * prod(weight.shape[1:])
    if operator.kind == "linear":
        weight = next(t for t in operator.parameter_tensors if len(t.shape) == 2)
        return 2 * out.numel * weight.numel // out.shape[-1]
    # Of the operands, b·m·k and b·k·n elements, and the result's b·m·n, follow k, whatever their order.
    operands = sorted(t.numel for t in (*operator.input_tensors, *operator.parameter_tensors))[-2:]
    batch = prod(out.shape[:-2]) if len(out.shape) > 2 else 1
    return 2 * out.numel * isqrt(prod(operands) // max(1, out.numel * batch))
