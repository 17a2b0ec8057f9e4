"""What a model asks for: its operators with real edges and shapes, its parameters, buckets and blocks.

A workload is data: it is read and written, re-sized and costed without torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.workload.arithmetic import backward_flops, forward_flops
from trimtab.workload.tensor import STRICT, Tensor

SCHEMA_VERSION = 1

Kind = Literal[
    "linear", "conv", "attention", "matmul", "embedding",
    "norm", "softmax", "loss", "activation", "elementwise", "dropout", "reduce", "pool", "copy", "cast",
    "index", "fill", "other",
]  # fmt: skip
"""The first five are products whose precision may be set; no kind is free of cost (views are no operators)."""

Category = Literal["adjustable", "dependent", "fixed"]

DEPENDENT: frozenset[str] = frozenset(
    {"activation", "elementwise", "dropout", "reduce", "pool", "copy", "index", "fill"}
)
"""Kinds that compute in whatever type their inputs have; mixed inputs promote."""

OUTSIDE = -1
"""In the place of an operator's index: the tensor is no operator's result (the batch, a buffer, a constant)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Saved:
    """A tensor that autograd keeps for an operator's backward pass. Parameters are left out."""

    role: Literal["input", "weight", "output", "other"]
    """`input` and `weight`: the argument itself, or the operator's own copy of it in another type (a weight
    itself costs nothing and is left out). `other`: made for backward alone (statistics, masks)."""

    producer: int
    """The operator that made the memory, or OUTSIDE: two operators that keep the same memory keep it once."""

    storage: int
    """Which piece of memory, among all of the workload."""

    tensor: Tensor
    """The memory as a whole: a view keeps all of what it is a view of."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Operator:
    """One call that runs kernels. Views are followed through and do not appear."""

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
    """For each tensor argument that is no parameter: the operator whose result it is, or OUTSIDE."""

    input_tensors: tuple[Tensor, ...] = ()
    """The same arguments' shapes and types, in the same order."""

    input_storages: tuple[int, ...] = ()
    """And their memory; see `Saved.storage`."""

    outputs: tuple[Tensor, ...] = ()
    output_storages: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    """Names of parameters it uses (the first name of a shared one), in the order of the arguments."""

    parameter_tensors: tuple[Tensor, ...] = ()
    """What the call is given of them: a view may be turned, cut or expanded."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the call is given, by name: numbers, flags, lists; a tensor as ``$i``, the i-th input, or ``%i``,
    the i-th parameter. Of whole modules and attention: only what is neither tensor nor usual."""

    saved: tuple[Saved, ...] = ()
    differentiable: bool = True
    """Whether backward passes through it."""

    gradients: int = 2
    """How many of a product's two operands need a gradient: the first layer's input, for one, does not."""

    views: int = 0
    """Calls that only made views, between the previous operator and this one: the host's work, no kernel's."""

    @property
    def category(self) -> Category:
        if self.setting is not None:
            return "adjustable"
        return "dependent" if self.kind in DEPENDENT else "fixed"

    @property
    def dtype(self) -> str:
        """The type in which values arrive: that of the first floating argument, else of the result."""
        for tensor in (*self.input_tensors, *self.parameter_tensors, *self.outputs):
            if tensor.floating:
                return tensor.dtype
        return self.outputs[0].dtype if self.outputs else "fp32"

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the forward call."""
        return forward_flops(self)

    @cached_property
    def backward_flops(self) -> int:
        """Those of the gradients of inputs and parameters together."""
        return backward_flops(self)

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
        """What it keeps for backward, if no other operator kept any of the same."""
        return sum(s.tensor.nbytes for s in self.saved)

    def grown(self, samples: int) -> Operator:
        """The same operator in a batch with so many more samples."""
        from dataclasses import replace

        return replace(
            self,
            input_tensors=tuple(t.grown(samples) for t in self.input_tensors),
            outputs=tuple(t.grown(samples) for t in self.outputs),
            parameter_tensors=tuple(t.grown(samples) for t in self.parameter_tensors),
            saved=tuple(replace(s, tensor=s.tensor.grown(samples)) for s in self.saved),
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parameter:
    """A parameter, once for each tensor however many names it has."""

    name: str
    tensor: Tensor
    operators: tuple[int, ...]
    """Those that use it, in forward order; its gradient is complete after the first of them ran backward."""

    trainable: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bucket:
    """Parameters whose gradients DDP reduces together, in the order in which they become ready."""

    parameters: tuple[str, ...]
    nbytes: int

    ready: int
    """The operator whose backward completes it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Block:
    """Runs of operators that are alike: the i-th of one run does what the i-th of every other does."""

    starts: tuple[int, ...]
    """Index of each run's first operator."""

    length: int
    modules: tuple[str, ...]
    """The module of each run: ``blocks.0``, ``blocks.1``..."""

    def twins(self, index: int) -> tuple[int, ...]:
        """The operators in the same place as this one in every run; empty if it is in none."""
        for start in self.starts:
            if start <= index < start + self.length:
                return tuple(other + index - start for other in self.starts)
        return ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Workload:
    """One training step of a model on one rank."""

    version: int
    """Schema version; this trimtab reads version 1."""

    model: str
    """What the model's class is called."""

    batch_size: Annotated[int, Field(ge=1)]
    batch: tuple[Tensor, ...]
    """The tensors of the sample batch: inputs and labels."""

    operators: tuple[Operator, ...]
    """In forward order; `operators[i].index == i`."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    """As DDP has them from its second step on."""

    bucket_cap_mb: float | None = None
    """What DDP was told; None for its default, where the first bucket is a small one."""

    blocks: tuple[Block, ...] = ()
    buffer_bytes: int = 0
    autocast: str | None = None
    """The half type under whose autocast it was captured."""

    resizable: bool = True
    """Whether `growth` is known."""

    @model_validator(mode="after")
    def _is_whole(self) -> Workload:
        if self.version != SCHEMA_VERSION:
            raise ValueError(
                f"version {self.version} is not read by this trimtab, which reads version {SCHEMA_VERSION}; "
                "capture the model anew"
            )
        names = {p.name for p in self.parameters}
        for place, operator in enumerate(self.operators):
            here = f"operators[{place}] ({operator.name})"
            if operator.index != place:
                raise ValueError(f"{here}: index is {operator.index}; operators are numbered from 0 in order")
            if not all(OUTSIDE <= i < place for i in operator.inputs):
                raise ValueError(
                    f"{here}: inputs {operator.inputs} must be operators before it, or {OUTSIDE}"
                )
            if unknown := [name for name in operator.parameters if name not in names]:
                raise ValueError(f"{here}: there is no parameter {unknown[0]!r}")
        count = len(self.operators)
        for parameter in self.parameters:
            if not all(0 <= i < count for i in parameter.operators):
                raise ValueError(f"parameter {parameter.name}: operators {parameter.operators} of {count}")
        for bucket in self.buckets:
            if unknown := [name for name in bucket.parameters if name not in names]:
                raise ValueError(f"buckets: there is no parameter {unknown[0]!r}")
            if not OUTSIDE <= bucket.ready < count:
                raise ValueError(f"buckets: ready after operator {bucket.ready} of {count}")
        return self

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def settings(self) -> dict[str, tuple[int, ...]]:
        """Adjustable operators by the name that sets them: one name may set several calls."""
        found: dict[str, tuple[int, ...]] = {}
        for operator in self.operators:
            if operator.setting is not None:
                found[operator.setting] = (*found.get(operator.setting, ()), operator.index)
        return found

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, those that use its results."""
        found: list[list[int]] = [[] for _ in self.operators]
        for operator in self.operators:
            for producer in dict.fromkeys(operator.inputs):
                if producer != OUTSIDE:
                    found[producer].append(operator.index)
        return tuple(map(tuple, found))

    def at_batch(self, samples: int) -> Workload:
        """The same step with another number of samples.

        Raises:
            TrimtabError: where how the shapes grow is not known.
        """
        from dataclasses import replace

        if samples == self.batch_size:
            return self
        if samples < 1:
            raise TrimtabError(f"{self.model}: a batch has at least one sample; got {samples}")
        if not self.resizable:
            raise TrimtabError(
                f"{self.model}: how its operators grow with the batch is not known, because it makes other "
                f"calls with another batch; capture it again with a batch of {samples}"
            )
        more = samples - self.batch_size
        return replace(
            self,
            batch_size=samples,
            batch=tuple(t.grown(more) for t in self.batch),
            operators=tuple(o.grown(more) for o in self.operators),
        )
