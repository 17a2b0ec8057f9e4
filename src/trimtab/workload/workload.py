"""What a model needs: its operators with their real edges and shapes, its parameters, buckets and blocks.

A workload is data: it is loaded, saved, resized and costed without torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.strict_files import STRICT
from trimtab.workload.operator import OUTSIDE, Operator
from trimtab.workload.tensor import Tensor

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parameter:
    """A parameter; listed once even if the model has several names for it."""

    name: str
    tensor: Tensor
    operators: tuple[int, ...]
    """The operators that use it, in forward order; its gradient is complete after backward of the first one."""

    trainable: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bucket:
    """Parameters whose gradients DDP reduces together, in the order they become ready."""

    parameters: tuple[str, ...]
    nbytes: int

    ready: int
    """The operator whose backward completes the bucket."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RepeatedBlock:
    """Identical runs of operators: the i-th of one run does the same as the i-th of every other."""

    starts: tuple[int, ...]
    """Index of each run's first operator."""

    length: int
    modules: tuple[str, ...]
    """The module of each run: ``blocks.0``, ``blocks.1``..."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UnitSpan:
    """A block whose units tensor parallelism can divide: the hidden units of an MLP, the heads of an attention."""

    name: str
    """As `trimtab.tensor_parallel` calls it."""

    units: Annotated[int, Field(ge=1)]
    into: tuple[int, ...]
    """The operators that project the block's input to its units."""

    inside: tuple[int, ...]
    """The operators between the projections."""

    out: int
    """The operator that projects back; its results are summed over the ranks."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Workload:
    """One training step of a model on one rank."""

    version: int
    """Version of the file format."""

    model: str
    """Name of the model's class."""

    batch_size: Annotated[int, Field(ge=1)]
    batch: tuple[Tensor, ...]
    """The tensors of the sample batch: inputs and labels."""

    operators: tuple[Operator, ...]
    """In forward order; `operators[i].index == i`."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    """As DDP arranges them from its second step on."""

    bucket_cap_mb: float | None = None
    """DDP's `bucket_cap_mb`; None for its default, where the first bucket is small."""

    blocks: tuple[RepeatedBlock, ...] = ()
    units: tuple[UnitSpan, ...] = ()
    """What tensor parallelism can divide, in forward order; empty if the model has nothing that it knows."""

    buffer_bytes: int = 0
    autocast: str | None = None
    """The half type of autocast during capture, if it was on."""

    resizable: bool = True
    """Whether it is known how shapes grow with the batch."""

    caveat: str | None = None
    """In words, if the captured batch sizes had different operators, so that others are interpolated."""

    @model_validator(mode="after")
    def _is_whole(self) -> Workload:
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
        for span in self.units:
            if not all(0 <= i < count for i in (*span.into, *span.inside, span.out)) or not span.into:
                raise ValueError(f"units: {span.name} has operators that do not exist")
        return self

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def settings(self) -> dict[str, tuple[int, ...]]:
        """Adjustable operators by the name that sets them; one name may set several calls."""
        by_setting: dict[str, tuple[int, ...]] = {}
        for operator in self.operators:
            if operator.setting is not None:
                by_setting[operator.setting] = (*by_setting.get(operator.setting, ()), operator.index)
        return by_setting

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that use its results."""
        consumers: list[list[int]] = [[] for _ in self.operators]
        for operator in self.operators:
            for producer in dict.fromkeys(operator.inputs):
                if producer != OUTSIDE:
                    consumers[producer].append(operator.index)
        return tuple(map(tuple, consumers))

    def leaves_parameters_out(self) -> bool:
        """Whether the loss, which is computed last, does not depend on some of the trained parameters."""
        reached: set[int] = set()
        waiting = [len(self.operators) - 1]
        while waiting:
            index = waiting.pop()
            if index != OUTSIDE and index not in reached:
                reached.add(index)
                waiting += self.operators[index].inputs
        return any(p.trainable and reached.isdisjoint(p.operators) for p in self.parameters)

    def at_batch(self, samples: int) -> Workload:
        """The same step with another number of samples.

        Raises:
            TrimtabError: it is not known how the shapes grow.
        """
        if samples == self.batch_size:
            return self
        if samples < 1:
            raise TrimtabError(f"{self.model}: a batch has at least one sample; got {samples}")
        if not self.resizable:
            raise TrimtabError(
                f"{self.model}: it is not known how its operators grow with the batch, because it makes other "
                f"calls with another batch; capture it again with a batch of {samples}"
            )
        more = samples - self.batch_size
        return replace(
            self,
            batch_size=samples,
            batch=tuple(t.grown(more) for t in self.batch),
            operators=tuple(o.grown(more) for o in self.operators),
        )
