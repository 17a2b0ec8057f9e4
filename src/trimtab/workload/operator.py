"""One operator of a model: its tensors, what autograd saves for it, and its floating-point operations."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import isqrt, prod
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from trimtab.strict_files import STRICT
from trimtab.workload.tensor import Tensor

PRODUCTS = ("linear", "conv", "attention", "matmul")

_PER_ELEMENT = {
    "norm": 8, "softmax": 5, "loss": 5, "activation": 8, "elementwise": 1, "dropout": 2, "reduce": 1, "pool": 1,
}  # fmt: skip
"""For memory-bound kinds, where a rough count suffices; kinds that are missing compute nothing."""

Kind = Literal[
    "linear", "conv", "attention", "matmul", "embedding",
    "norm", "softmax", "loss", "activation", "elementwise", "dropout", "reduce", "pool", "copy", "cast",
    "index", "fill", "other",
]  # fmt: skip
"""The first five are products whose precision can be set. Every kind runs kernels: views are not operators."""

Category = Literal["adjustable", "dependent", "fixed"]

DEPENDENT: frozenset[str] = frozenset(
    {"activation", "elementwise", "dropout", "reduce", "pool", "copy", "index", "fill"}
)
"""Kinds that compute in the type of their inputs; mixed types are promoted."""

OUTSIDE = -1
"""In place of an operator's index: the tensor is not an operator's result (the batch, a buffer, a constant)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Saved:
    """A tensor that autograd saves for an operator's backward pass. Parameters are left out."""

    role: Literal["input", "weight", "output", "other"]
    """`input` and `weight`: the argument itself, or the operator's own copy of it in another type (a weight
    itself costs nothing and is left out). `other`: made for backward alone (statistics, masks)."""

    producer: int
    """The operator that allocated the memory, or OUTSIDE. Memory that two operators save is counted once."""

    storage: int
    """Identifies the memory within the workload."""

    tensor: Tensor
    """The whole allocation: a view keeps all of its base."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Operator:
    """One call that runs kernels. Views are resolved and do not appear."""

    index: int
    name: str
    """Unique; the module, and what it calls: ``blocks.0.qkv``, ``blocks.0/gelu``, ``blocks.0/add.1``."""

    kind: Kind
    module: str
    """Qualified name of the innermost module whose forward makes the call; empty for the model's own."""

    target: str
    """What is called: ``linear``, ``conv``, ``embedding`` for whole modules, else torch's operator:
    ``aten.gelu.default``."""

    setting: str | None = None
    """The name by which `trimtab.set_precision` sets this operator; None where it cannot."""

    inputs: tuple[int, ...] = ()
    """For each tensor argument that is not a parameter: the operator that produced it, or OUTSIDE."""

    input_tensors: tuple[Tensor, ...] = ()
    """Shapes and types of the same arguments, in the same order."""

    input_storages: tuple[int, ...] = ()
    """Memory of the same arguments; see `Saved.storage`."""

    outputs: tuple[Tensor, ...] = ()
    output_storages: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    """Names of its parameters (the first name of a shared one), in the order of the arguments."""

    parameter_tensors: tuple[Tensor, ...] = ()
    """The parameters as the call receives them, possibly as views."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the call by name: numbers, flags, lists; a tensor as ``$i``, the i-th input, or ``%i``,
    the i-th parameter. For whole modules and attention: only those that are neither tensors nor defaults."""

    saved: tuple[Saved, ...] = ()
    differentiable: bool = True
    """Whether backward passes through it."""

    gradients: int = 2
    """How many of a product's two operands need a gradient: the first layer's input, for one, does not."""

    views: int = 0
    """Calls between the previous operator and this one that only made views: work of the host without kernels."""

    @property
    def category(self) -> Category:
        if self.setting is not None:
            return "adjustable"
        return "dependent" if self.kind in DEPENDENT else "fixed"

    @property
    def dtype(self) -> str:
        """The type in which values arrive: that of the first floating-point argument, else of the result."""
        for tensor in (*self.input_tensors, *self.parameter_tensors, *self.outputs):
            if tensor.floating:
                return tensor.dtype
        return self.outputs[0].dtype if self.outputs else "fp32"

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the forward call; a multiply and its add count as two."""
        if self.kind in PRODUCTS:
            return _product(self)
        largest = max((t.numel for t in (*self.input_tensors, *self.outputs)), default=0)
        return _PER_ELEMENT.get(self.kind, 0) * largest

    @cached_property
    def backward_flops(self) -> int:
        """Floating-point operations of the gradients of inputs and parameters together."""
        if not self.differentiable:
            return 0
        if self.kind == "attention":
            # Scores are computed again in addition to the four gradient products.
            return self.flops * 5 // 2
        if self.kind == "embedding":
            return self.outputs[0].numel
        return self.flops * (self.gradients if self.kind in PRODUCTS else 1)

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of all arguments, each read once."""
        if self.kind == "embedding":  # only the rows that are looked up
            return sum(t.nbytes for t in (*self.input_tensors, *self.outputs))
        return sum(t.nbytes for t in (*self.input_tensors, *self.parameter_tensors))

    @cached_property
    def bytes_written(self) -> int:
        return sum(t.nbytes for t in self.outputs)

    @property
    def saved_bytes(self) -> int:
        """What it saves for backward, if no other operator saved any of the same."""
        return sum(s.tensor.nbytes for s in self.saved)

    def grown(self, samples: int) -> Operator:
        """The same operator in a batch with so many more samples."""
        return replace(
            self,
            input_tensors=tuple(t.grown(samples) for t in self.input_tensors),
            outputs=tuple(t.grown(samples) for t in self.outputs),
            parameter_tensors=tuple(t.grown(samples) for t in self.parameter_tensors),
            saved=tuple(replace(s, tensor=s.tensor.grown(samples)) for s in self.saved),
        )


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
        return 2 * out.numel * weight.numel // max(1, out.shape[-1])
    # k follows from the sizes b·m·k and b·k·n of the operands and b·m·n of the result, whatever their order.
    operands = sorted(t.numel for t in (*operator.input_tensors, *operator.parameter_tensors))[-2:]
    batch = prod(out.shape[:-2]) if len(out.shape) > 2 else 1
    return 2 * out.numel * isqrt(prod(operands) // max(1, out.numel * batch))
