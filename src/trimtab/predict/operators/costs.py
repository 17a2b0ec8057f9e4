"""What operators and casts take on a device class, as measured.

An operator's time is that of the whole call as `trimtab.precision` runs it in a step whose operators all have that
precision: casts of its input, its weight and its gradients are inside. `cost_mapper` separates them again where an
operator meets other types than it was measured with. A missing time is an error, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.cluster.profile import Line, OperatorTime
    from trimtab.workload import Operator, Tensor, Workload


@dataclass(frozen=True)
class OperatorKey:
    """Identifies a measurement. Operators with equal keys take equal time on a device."""

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
            raise TrimtabError(f"{text!r} is not an operator key: kind|shape|dtype|precision")
        return cls(*parts)


def key_of(operator: Operator, precision: str | None = None, dtype: str | None = None) -> OperatorKey:
    """The key of an operator in a precision (its plain one when absent), of values in `dtype` (its own).

    Shapes: linear ``rows x inputs x outputs``; conv ``input, weight, stride, padding, dilation, groups``;
    attention and matmul the operands'; the others torch's name, the shapes of arguments and the rest of them.
    """
    known = operator.__dict__.setdefault("_keys", {})  # an operator does not change, and is asked for often
    if (precision, dtype) not in known:
        known[precision, dtype] = _key_of(operator, precision, dtype)
    key: OperatorKey = known[precision, dtype]
    return key


def _key_of(operator: Operator, precision: str | None, dtype: str | None) -> OperatorKey:
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
    """The precision of an operator that was not set: the type of its result."""
    if operator.outputs and operator.outputs[0].floating and dtype is None:
        return operator.outputs[0].dtype
    return dtype or operator.dtype


def _shape(operator: Operator) -> str:
    parts: list[str] = []
    if operator.kind == "linear" and operator.parameter_tensors:
        # The input may be a parameter itself: a table of positions.
        x, weight, *biases = (*operator.input_tensors[:1], *operator.parameter_tensors)
        rows, outputs = x.numel // max(1, x.shape[-1]), operator.outputs[0].shape[-1]
        parts.append(f"{rows}x{x.shape[-1]}x{outputs}")
        parts += _weight_type(weight)
        parts += ["bias"] if biases else []
    else:
        if "." in operator.target:
            parts.append(operator.target)
        parts += [_sizes(t, operator.dtype) for t in operator.input_tensors]
        parts += [f"w{_sizes(t, operator.dtype)}" for t in operator.parameter_tensors]
    for name, value in sorted(operator.arguments.items()):
        if not _holds_tensors(value):
            parts.append(f"{name}={_value(value)}")
    if not operator.input_tensors and operator.kind != "linear":
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


def workload_key(workload: Workload) -> str:
    """What a profile calls a model: its class, and a hash of its operators at one sample.

    The class alone would be the same for unlike models of one script or wrapper.
    """
    if "_key" not in workload.__dict__:  # a workload does not change, and is asked for often
        least = workload.at_batch(1) if workload.resizable else workload
        text = ";".join(str(key_of(operator)) for operator in least.operators)
        workload.__dict__["_key"] = f"{workload.model}-{blake2b(text.encode(), digest_size=4).hexdigest()}"
    key: str = workload.__dict__["_key"]
    return key


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """What operators and casts take on one device class."""

    device: str
    """The device class, for errors."""

    operators: Mapping[str, OperatorTime]
    """By `str(OperatorKey)`."""

    casts: Mapping[str, Line]
    """By direction: ``fp32>bf16`` reads fp32 and writes bf16; ``fp32>int8`` quantizes, scales included."""

    def times(self, key: OperatorKey, operator: str) -> OperatorTime:
        """The time of an operator; `operator` is what the error calls it."""
        found = self.operators.get(str(key))
        if found is None:
            raise TrimtabError(
                f"{operator}: {key.kind} ({key.shape}) in {key.precision} with values in {key.dtype} was not measured "
                f"on device class {self.device!r}; run `trimtab probe` there with this model and batch size"
            )
        return found

    def cast(self, source: str, target: str) -> Line:
        """The time of converting one type to another; fp32 stands for a bf16 that was not measured."""
        wider = f"{source}>{target}".replace("bf16", "fp32")
        found = self.casts.get(f"{source}>{target}", self.casts.get(wider))
        if found is None:
            raise TrimtabError(
                f"the cast {source} to {target} was not measured on device class {self.device!r}; "
                "run `trimtab probe` there"
            )
        return found
