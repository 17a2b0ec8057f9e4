"""A workload as a cluster file holds it: operators of repeated layers are written twice at most."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from trimtab.strict_files import STRICT
from trimtab.workload.buckets import ddp_buckets
from trimtab.workload.operator import Operator
from trimtab.workload.tensor import Tensor
from trimtab.workload.workload import SCHEMA_VERSION, Parameter, RepeatedBlock, UnitSpan, Workload


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StoredWorkload:
    """What `Workload` holds, without what follows from the rest: buckets, and runs of a block after the second."""

    model: str
    batch_size: Annotated[int, Field(ge=1)]
    batch: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    """Those that are written, by their index."""

    parameters: tuple[Parameter, ...]
    bucket_cap_mb: float | None = None
    blocks: tuple[RepeatedBlock, ...] = ()
    storage_shifts: tuple[tuple[int | None, ...], ...] = ()
    """For each block and each of its runs after the second: how much larger its storage numbers are than those of
    the second run; None if the run is written."""

    units: tuple[UnitSpan, ...] = ()
    buffer_bytes: int = 0
    autocast: str | None = None
    resizable: bool = True
    caveat: str | None = None

    @classmethod
    def of(cls, workload: Workload) -> StoredWorkload:
        """The form from which `workload` restores an equal one."""
        written = {operator.index: operator for operator in workload.operators}
        shifts = []
        for block in workload.blocks:
            own: list[int | None] = []
            for run in range(2, len(block.starts)):
                shift = _storage(workload.operators, block, run) - _storage(workload.operators, block, 1)
                repeated = _repeated(written, block, run, shift)
                alike = all(workload.operators[operator.index] == operator for operator in repeated)
                own.append(shift if alike else None)
                if alike:
                    for operator in repeated:
                        del written[operator.index]
            shifts.append(tuple(own))
        same = {f.name: getattr(workload, f.name) for f in fields(cls) if hasattr(workload, f.name)}
        return cls(**same | {"operators": tuple(written.values()), "storage_shifts": tuple(shifts)})

    @model_validator(mode="after")
    def _can_be_restored(self) -> StoredWorkload:
        for operator in self.operators:
            inputs = {len(operator.inputs), len(operator.input_tensors), len(operator.input_storages)}
            if len(inputs) > 1 or len(operator.outputs) != len(operator.output_storages):
                raise ValueError(
                    f"operators: {operator.name} must list as many storages as inputs and outputs, and a tensor each"
                )
        try:
            _ = self.workload
        except ValidationError as error:
            raise ValueError(str(error.errors()[0]["ctx"]["error"])) from None
        return self

    @cached_property
    def workload(self) -> Workload:
        """The whole workload.

        Raises:
            ValueError: an operator is missing, or refers to what does not exist.
        """
        operators = {operator.index: operator for operator in self.operators}
        for block, shifts in zip(self.blocks, self.storage_shifts, strict=True):
            if len(shifts) != max(0, len(block.starts) - 2) or len(block.modules) != len(block.starts):
                raise ValueError(
                    f"block of {block.modules[:1]}: modules and storage_shifts must fit its starts"
                )
            for run, shift in enumerate(shifts, start=2):
                if shift is not None:
                    operators |= {o.index: o for o in _repeated(operators, block, run, shift)}
        listed = tuple(operators[index] for index in sorted(operators))
        same = {f.name: getattr(self, f.name) for f in fields(Workload) if hasattr(self, f.name)}
        whole = Workload(**same | {"version": SCHEMA_VERSION, "operators": listed, "buckets": ()})
        return replace(whole, buckets=ddp_buckets(self.parameters, listed, self.bucket_cap_mb))


def _storage(operators: tuple[Operator, ...], block: RepeatedBlock, run: int) -> int:
    """The smallest storage that a run's operators allocate."""
    start = block.starts[run]
    return min((n for o in operators[start : start + block.length] for n in o.output_storages), default=0)


def _repeated(operators: dict[int, Operator], block: RepeatedBlock, run: int, shift: int) -> list[Operator]:
    """The second run of a block as if it were another one.

    What the second run takes from the first one or from itself, the other takes from the run before it or from
    itself; what comes from before the block is the same for all.
    """
    first, second, by = block.starts[0], block.starts[1], block.starts[run] - block.starts[1]
    try:
        oldest = min(
            (n for i in range(first, first + block.length) for n in operators[i].output_storages), default=0
        )
        pattern = [operators[index] for index in range(second, second + block.length)]
    except KeyError as error:
        raise ValueError(
            f"operators: {error.args[0]} is missing; the first two runs of a block are written"
        ) from None
    old, new = block.modules[1], block.modules[run]

    def named(text: str) -> str:
        inside = text == old or text.startswith((f"{old}.", f"{old}/"))
        return new + text[len(old) :] if inside else text

    def index(number: int) -> int:
        return number + by if number >= first else number

    def storage(number: int) -> int:
        return number + shift if number >= oldest else number

    return [
        replace(
            operator,
            index=operator.index + by,
            name=named(operator.name),
            module=named(operator.module),
            setting=None if operator.setting is None else named(operator.setting),
            inputs=tuple(map(index, operator.inputs)),
            input_storages=tuple(map(storage, operator.input_storages)),
            output_storages=tuple(map(storage, operator.output_storages)),
            parameters=tuple(map(named, operator.parameters)),
            saved=tuple(
                replace(s, producer=index(s.producer), storage=storage(s.storage)) for s in operator.saved
            ),
        )
        for operator in pattern
    ]
