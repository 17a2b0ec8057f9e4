"""What operators and casts were measured to take, by device class.

An operator's time is that of the whole call as `trimtab.precision` runs it, alone, on inputs of the type in
its key: casts of its input, its weight and its gradients are inside. `mapper` takes them apart again where an
operator meets other types than it was measured with. A time that is missing is an error, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from trimtab.cluster.profile import Line  # noqa: TC001 - pydantic reads the annotations
from trimtab.errors import TrimtabError
from trimtab.workload.tensor import STRICT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.workload import Operator, Tensor

COSTS_VERSION = 1

Seconds = Annotated[float, Field(ge=0)]


@plain_dataclass(frozen=True)
class OperatorKey:
    """What a measurement is known by. Operators with equal keys take equal time on a device."""

    kind: str
    shape: str
    """Sizes and arguments that the time depends on; see `key_of`."""

    dtype: str
    """The type in which values arrive, and after ``>`` the one in which they leave where it is another."""

    precision: str
    """As `str(trimtab.precision.Precision)`: ``int8``, or product by product ``int8/int8/bf16``. For what
    cannot be set: the type it computes in."""

    def __str__(self) -> str:
        return "|".join((self.kind, self.shape, self.dtype, self.precision))

    @classmethod
    def parse(cls, text: str) -> OperatorKey:
        """The key that `str` wrote."""
        parts = text.split("|")
        if len(parts) != 4:
            raise TrimtabError(f"{text!r} is no operator key: kind|shape|dtype|precision")
        return cls(*parts)


def key_of(operator: Operator, precision: str | None = None, dtype: str | None = None) -> OperatorKey:
    """The key of an operator in a precision (its plain one when absent), of values in `dtype` (its own).

    Shapes: linear ``rows x inputs x outputs``; conv ``input, weight, stride, padding, dilation, groups``;
    attention and matmul the operands'; the others torch's name, the shapes of arguments and the rest of them.
    """
    arriving = dtype or operator.dtype
    leaving = operator.outputs[0].dtype if operator.outputs and operator.outputs[0].floating else arriving
    if dtype is not None and operator.setting is None:
        leaving = dtype if leaving == operator.dtype else leaving
    return OperatorKey(
        kind=operator.kind,
        shape=_shape(operator),
        dtype=arriving if leaving == arriving else f"{arriving}>{leaving}",
        precision=precision or plain_precision(operator, dtype),
    )


def plain_precision(operator: Operator, dtype: str | None = None) -> str:
    """What an operator computes in when nobody set it: the type its result leaves in."""
    if operator.outputs and operator.outputs[0].floating and dtype is None:
        return operator.outputs[0].dtype
    return dtype or operator.dtype


def _shape(operator: Operator) -> str:
    parts: list[str] = []
    if operator.kind == "linear" and operator.parameter_tensors:
        x, weight = operator.input_tensors[0], operator.parameter_tensors[0]
        rows, outputs = x.numel // max(1, x.shape[-1]), operator.outputs[0].shape[-1]
        parts.append(f"{rows}x{x.shape[-1]}x{outputs}")
        parts += _weight_type(weight)
        parts += ["bias"] if len(operator.parameter_tensors) > 1 else []
    else:
        if "." in operator.target:
            parts.append(operator.target)
        parts += [_sizes(t, operator.dtype) for t in operator.input_tensors]
        parts += [f"w{_sizes(t, operator.dtype)}" for t in operator.parameter_tensors]
    for name, value in sorted(operator.arguments.items()):
        if not _holds_tensors(value):
            parts.append(f"{name}={_value(value)}")
    if not operator.input_tensors:
        parts += [_sizes(t, operator.dtype) for t in operator.outputs]
    return ",".join(parts)


def _sizes(tensor: Tensor, usual: str) -> str:
    text = "x".join(map(str, tensor.shape)) or "1"
    return text if tensor.dtype == usual else f"{text}:{tensor.dtype}"


def _weight_type(weight: Tensor) -> list[str]:
    return [] if weight.dtype == "fp32" else [f"w:{weight.dtype}"]


def _holds_tensors(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, str) and value[:1] in ("$", "%")


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "(" + " ".join(_value(v) for v in value) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Times:
    """Of one call. Backward makes the gradients of the inputs and of the parameters."""

    forward_s: Seconds
    backward_s: Seconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceCosts:
    """What was measured on one device class."""

    operators: dict[str, Times] = Field(default_factory=dict)
    """By `str(OperatorKey)`."""

    casts: dict[str, Line] = Field(default_factory=dict)
    """By direction: ``fp32>bf16`` reads fp32 and writes bf16; ``fp32>int8`` quantises, scales included."""

    estimated: bool = False
    """Whether it was derived from a datasheet instead of measured."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CostTable:
    """Measured costs of every device class at hand."""

    version: int
    devices: dict[str, DeviceCosts]

    @model_validator(mode="after")
    def _is_of_this_version(self) -> CostTable:
        if self.version != COSTS_VERSION:
            raise ValueError(
                f"version {self.version} of measured costs is not read by this trimtab, which reads version "
                f"{COSTS_VERSION}; measure anew with `trimtab probe`"
            )
        return self

    def device(self, name: str) -> DeviceCosts:
        if name not in self.devices:
            raise TrimtabError(
                f"no costs were measured for device class {name!r}; there are {', '.join(self.devices) or 'none'}. "
                "Run `trimtab probe` on such a device and merge its profile"
            )
        return self.devices[name]

    def times(self, device: str, key: OperatorKey, operator: str) -> Times:
        """The time of an operator; `operator` is what the error calls it."""
        found = self.device(device).operators.get(str(key))
        if found is None:
            raise TrimtabError(
                f"{operator}: {key.kind} ({key.shape}) in {key.precision} with values in {key.dtype} was not measured "
                f"on device class {device!r}; run `trimtab probe` there with this model and batch size"
            )
        return found

    def cast(self, device: str, source: str, target: str) -> Line:
        """What turning one type into another takes."""
        found = self.device(device).casts.get(f"{source}>{target}")
        if found is None:
            raise TrimtabError(
                f"the cast {source} to {target} was not measured on device class {device!r}; "
                "run `trimtab probe` there"
            )
        return found

    def merged(self, other: CostTable) -> CostTable:
        """Both tables' entries; where both have one, the other's, except that an estimate replaces nothing."""
        devices = dict(self.devices)
        for name, theirs in other.devices.items():
            ours = devices.get(name)
            if ours is None or (ours.estimated and not theirs.estimated):
                devices[name] = theirs
            elif ours.estimated == theirs.estimated:
                devices[name] = DeviceCosts(
                    operators={**ours.operators, **theirs.operators},
                    casts={**ours.casts, **theirs.casts},
                    estimated=ours.estimated,
                )
        return CostTable(version=COSTS_VERSION, devices=devices)


_ADAPTER: TypeAdapter[CostTable] = TypeAdapter(CostTable)


def load_costs(path: str | Path) -> CostTable:
    """Read what `save_costs` wrote, refusing anything else by name."""
    path = Path(path)
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}; run `trimtab probe`") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise TrimtabError(f"{path}: {place}: {first['msg']}; measure anew with `trimtab probe`") from None


def save_costs(table: CostTable, path: str | Path) -> None:
    """Write a table that `load_costs` reads back as an equal one."""
    Path(path).write_bytes(_ADAPTER.dump_json(table, indent=1))


def missing(table: CostTable, device: str, keys: Iterable[OperatorKey]) -> list[OperatorKey]:
    """Those of the keys that were not measured on a device class, each once: what a probe has to do."""
    have = table.devices[device].operators if device in table.devices else {}
    return [key for key in dict.fromkeys(keys) if str(key) not in have]
