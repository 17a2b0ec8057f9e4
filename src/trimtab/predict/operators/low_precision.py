"""How `trimtab.precision` runs an operator in a precision: what it casts, saves and temporarily allocates.

Facts about the implementation, as plain arithmetic on shapes; tests compare them with the implementation.

- Results have autocast's type if that is on. Without it operators in bf16, int8 and fp8 hand on bf16 (see
  `precision_graph`), except when compiled; others hand on the type of their inputs.
- The operands of x and w are made inside: int8 and fp8 by a fused quantize, half types by a cast; the
  product of codes is scaled back in its epilogue, that of half types is cast back.
- Backward converts the gradient to operands (int8 once for each of its two products), makes the weight's
  operand again unless it was saved, and returns the weight's gradient in fp32.
- x is saved in the low precision, or shared where the operator before keeps it in bf16. The weight's operand is saved
  by 8-bit linear layers on a GPU only.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from trimtab.precision_names import HALVES
from trimtab.workload import Operator, Tensor
from trimtab.workload.tensor import BYTES

DeviceKind = Literal["cpu", "cuda"]

CODES = ("int8", "fp8")
PAD = 16
"""A GPU's 8-bit operands are padded to multiples of this."""


class Cast(NamedTuple):
    """A conversion of elements from one type to another."""

    source: str
    target: str
    elements: int


def passes(precision: str) -> tuple[str, str, str]:
    """The precisions of forward, input gradient and weight gradient: ``int8`` or ``int8/int8/bf16``."""
    parts = precision.split("/")
    if len(parts) == 1:
        return precision, precision, precision
    forward, grad_input, grad_weight = parts
    return forward, grad_input, grad_weight


def memory_type(precision: str) -> str:
    """The type of a precision's operands: tf32 is fp32 in memory."""
    return "fp32" if precision == "tf32" else precision


def values_of(operator: Operator) -> tuple[Tensor, ...]:
    """The floating-point inputs of a product."""
    return tuple(t for t in operator.input_tensors if t.floating)


def weight_of(operator: Operator) -> Tensor | None:
    """The weight of a linear layer or a convolution."""
    if operator.kind not in ("linear", "conv"):
        return None
    matrices = [t for t in operator.parameter_tensors if len(t.shape) >= 2]
    # Of an operator on a parameter (a table of positions) that is the first.
    return None if not matrices else matrices[0] if operator.input_tensors else matrices[-1]


def input_of(operator: Operator) -> Tensor:
    """What a linear layer or a convolution is applied to: values, or a parameter."""
    return next(iter((*operator.input_tensors, *operator.parameter_tensors)))


def saves_weight_operand(operator: Operator, precision: str, device: DeviceKind) -> bool:
    return operator.kind == "linear" and device == "cuda" and passes(precision)[1] in CODES


def forward_casts(operator: Operator, precision: str, arriving: str, leaving: str) -> Iterator[Cast]:
    """The casts of the forward pass in a given precision."""
    name, _, for_weight = map(memory_type, passes(precision))
    out = operator.outputs[0].numel
    if operator.kind == "embedding":
        if name != leaving:
            yield Cast(leaving, name, out)
            yield Cast(name, leaving, out)
        return
    elements = sum(t.numel for t in values_of(operator))
    if arriving != name:
        yield Cast(arriving, name, elements)
    weight = weight_of(operator)
    if weight is not None:
        if weight.dtype != name:
            yield Cast(weight.dtype, name, weight.numel)
        if for_weight != name and arriving != for_weight:
            yield Cast(arriving, for_weight, elements)  # what the weight's gradient will need of x
    if name not in CODES and name != leaving:
        yield Cast(name, leaving, out)


def backward_casts(
    operator: Operator, precision: str, arriving: str, leaving: str, device: DeviceKind
) -> Iterator[Cast]:
    """The casts of the backward pass; the gradient has the type of the results."""
    if operator.kind == "embedding" or not operator.differentiable:
        return
    _, for_input, for_weight = map(memory_type, passes(precision))
    out = operator.outputs[0].numel
    weight = weight_of(operator)
    wanted = [for_input] if weight is None else [for_input, for_weight]
    if len(set(wanted)) == 1 and for_input != "int8" and operator.kind != "conv":
        wanted = wanted[:1]  # int8 folds another scale into each; a convolution's two products are two calls
    for name in wanted:
        if leaving != name:
            yield Cast(leaving, name, out)
    if (
        weight is not None
        and weight.dtype != for_input
        and not saves_weight_operand(operator, precision, device)
    ):
        yield Cast(weight.dtype, for_input, weight.numel)
    if for_input not in CODES and for_input != arriving:
        yield Cast(for_input, arriving, sum(t.numel for t in values_of(operator)))
    # On a GPU a linear layer's product leaves the accumulator in fp32.
    straight = operator.kind == "linear" and device == "cuda"
    if weight is not None and for_weight in HALVES and not straight and weight.dtype != for_weight:
        yield Cast(for_weight, weight.dtype, weight.numel)


def saved_bytes(
    operator: Operator, precision: str, arriving: str, device: DeviceKind, x: Tensor | None = None
) -> int:
    """What an operator in a given precision saves in memory of its own, not shared with others.

    Args:
        x: what it computes with, if that is a copy of its input (padded, say).
    """
    _, for_input, for_weight = map(memory_type, passes(precision))
    if operator.kind == "embedding":
        return 0
    if operator.kind in ("attention", "matmul"):
        if for_input == arriving:
            return 0
        kept = sum(t.numel for t in values_of(operator))
        if operator.kind == "attention":
            kept += operator.outputs[0].numel
        return kept * BYTES[for_input]
    total = 0
    weight = weight_of(operator)
    assert weight is not None
    if for_weight != arriving or x is not None:
        total += _operand_bytes(x or input_of(operator), operator, for_weight, device)
    if saves_weight_operand(operator, precision, device):
        rows, columns = weight.shape[0], weight.numel // weight.shape[0]
        total += _padded(rows, device) * _padded(columns, device) + 4 * (rows if for_input == "int8" else 1)
    return total


def kept_bytes(operator: Operator, precision: str, device: DeviceKind) -> tuple[int, int]:
    """What micro-batches of a step share: all of a weight's codes, and the part of them that is not saved anyway."""
    forward, for_input, _ = passes(precision)
    weight = weight_of(operator)
    if operator.kind != "linear" or weight is None or forward not in CODES:
        return 0, 0
    rows, columns = weight.shape[0], weight.numel // weight.shape[0]
    codes = _padded(rows, device) * _padded(columns, device)
    orders = 2 if forward == "fp8" and for_input == "fp8" else 1
    saved = codes if saves_weight_operand(operator, precision, device) and forward == for_input else 0
    return orders * codes, orders * codes - saved


def shares_input(operator: Operator, precision: str, arriving: str) -> bool:
    """Whether backward saves the input tensor itself."""
    return memory_type(passes(precision)[2]) == arriving


def forward_workspace(operator: Operator, precision: str, arriving: str, device: DeviceKind) -> int:
    """Temporary bytes of the forward pass in a given precision."""
    name = memory_type(passes(precision)[0])
    weight = weight_of(operator)
    out = operator.outputs[0].numel
    if operator.kind == "embedding":
        return out * BYTES[name]
    total = 0
    if weight is not None and weight.dtype != name:
        # fp8 makes each operand in both orders, of which one is saved.
        saved = saves_weight_operand(operator, precision, device) and name != "fp8"
        total += 0 if saved else weight.numel * BYTES[name]
    if name in CODES:
        total += input_of(operator).numel if name == "fp8" else 0
        total += (
            out * 4 if name == "int8" and device == "cpu" else 0
        )  # sums of codes, before they are scaled back
        return total + _gathered(operator)
    if name != arriving:
        total += out * BYTES[name]
    return total + plain_workspace(operator, device) * BYTES[name] // 4


def backward_workspace(
    operator: Operator, precision: str, arriving: str, leaving: str, device: DeviceKind
) -> int:
    """Temporary bytes of the backward pass in a given precision, without its results."""
    name = memory_type(passes(precision)[1])
    if operator.kind == "embedding":
        return 0
    out = operator.outputs[0].numel
    weight = weight_of(operator)
    values = sum(t.numel for t in values_of(operator))
    weights = 0 if weight is None else weight.numel
    if name in CODES and operator.kind == "conv":
        return _unfolded_backward(operator, arriving)
    if name == "fp8":
        return 2 * out
    if name == "int8" and device == "cpu":
        # Codes of g and w, and sums: of the input's gradient while the weight's does not exist yet, then its own.
        return out + weights + 4 * max(values - weights, weights)
    if name == "int8":
        return out + values  # codes of g, and x's codes turned, for the gradient of the weight
    total = plain_workspace(operator, device) * BYTES[name] // 4
    if name != leaving:
        total += (out + values) * BYTES[name]
    if weight is not None and weight.dtype != name:
        total += weights * BYTES[name]
    return total


def _unfolded_backward(operator: Operator, arriving: str) -> int:
    """Temporary bytes of the backward pass of a convolution of codes, which has two moments that may be the peak."""
    out, gathered = operator.outputs[0].numel, _gathered(operator)
    weight = weight_of(operator)
    assert weight is not None
    # The weight's gradient: codes of what lies under the kernel, g in fp32 and in codes, sums.
    for_weight = gathered + 5 * out + 4 * weight.numel
    if operator.gradients < 2:
        return for_weight
    # Before it the input's: gradients of what lies under the kernel are added up, both in fp32. Neither the weight's
    # gradient nor the input's in the input's own type exists yet.
    values = sum(t.numel for t in values_of(operator))
    results = values * BYTES[arriving] + 4 * weight.numel
    return max(for_weight, 4 * (gathered + values) + weight.numel - results)


def _gathered(operator: Operator) -> int:
    """Elements of the unfolded input of all groups, with which a convolution of codes is a matrix product."""
    weight = weight_of(operator)
    if operator.kind != "conv" or weight is None:
        return 0
    outputs, _, *kernel = weight.shape
    under_kernel = input_of(operator).shape[1] * prod(kernel)
    return operator.outputs[0].numel // outputs * under_kernel


def plain_workspace(operator: Operator, device: DeviceKind) -> int:
    """Temporary bytes of either pass of an operator in its own precision."""
    if operator.kind != "conv" or device != "cpu":
        return 0
    # oneDNN computes in its own layout, so inputs and outputs are copied.
    return sum(t.nbytes for t in values_of(operator)) + operator.outputs[0].nbytes


def _operand_bytes(x: Tensor, operator: Operator, name: str, device: DeviceKind) -> int:
    if name not in CODES:
        return x.numel * BYTES[name]
    if operator.kind == "conv":
        return x.numel + 4 * x.shape[0]
    columns = x.shape[-1]
    rows = x.numel // max(1, columns)  # a tensor-parallel rank may have no unit of a block
    if name == "fp8":
        return _padded(rows, device) * _padded(columns, device) + 4
    return _padded(rows, device) * _padded(columns, device) + 4 * rows


def _padded(size: int, device: DeviceKind) -> int:
    return -(-size // PAD) * PAD if device == "cuda" else size
