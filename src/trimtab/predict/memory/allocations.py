"""Allocations of forward and backward, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trimtab.predict.operators import low_precision as backend
from trimtab.predict.operators.costs import plain_precision
from trimtab.predict.operators.low_precision import DeviceKind
from trimtab.predict.operators.precision_graph import PrecisionGraph, Results, own_results, promoted
from trimtab.workload import Operator, Saved, Tensor, Workload
from trimtab.workload.operator import OUTSIDE
from trimtab.workload.tensor import BYTES

PASSES_ON = frozenset({"aten.add.Tensor", "aten.add_.Tensor", "aten.clone.default", "aten.sub.Tensor"})
"""Operators whose backward passes the gradient on without allocating a tensor."""


class _Gradient:
    """A gradient in flight; several operators' results may share it."""

    __slots__ = ("holders", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.holders = nbytes, 1


class StepMemory:
    """Simulates the allocations of one step; call `run` once, then read the results."""

    def __init__(
        self,
        workload: Workload,
        precisions: Mapping[str, str],
        kind: DeviceKind,
        rounding: int,
        results: Results | None = None,
    ) -> None:
        self.workload, self.kind, self.rounding = workload, kind, rounding
        # Autocast has every result in its own type, lowered or not.
        results = results or own_results(workload)
        self.graph = PrecisionGraph(workload, results=results, kind=kind)
        for name, precision in precisions.items():
            self.graph.set(name, precision)
        self.precision: list[str | None] = [
            None if self.graph.is_plain(o.index) else self.graph.precision[o.index]
            for o in workload.operators
        ]
        self._trainable = {p.name for p in workload.parameters if p.trainable}
        self.saved = [self._kept(operator) for operator in workload.operators]
        self.own = [self._own(operator) for operator in workload.operators]
        self.live = 0
        self.forward_peak = self.backward_peak = self.activations = 0
        self.forward_at = self.backward_at = ""

    def run(self, accumulated: bool = False) -> None:
        """`accumulated`: every parameter has its gradient already, to which the new one is added."""
        first_saver: dict[int, int] = {}
        for index, kept in enumerate(self.saved):
            for saved in kept:
                first_saver.setdefault(saved.storage, index)
        sizes = self._forward(first_saver)
        self.activations = self.live
        self._backward(first_saver, sizes, accumulated)

    def kept_codes(self) -> tuple[int, int]:
        """Bytes of the weights' codes that micro-batches share, and those of them that are not saved anyway."""
        kept = [
            backend.kept_bytes(operator, precision, self.kind)
            for operator, precision in zip(self.workload.operators, self.precision, strict=True)
            if precision is not None
        ]
        return sum(every for every, _ in kept), sum(besides for _, besides in kept)

    # Forward

    def _forward(self, first_saver: dict[int, int]) -> dict[int, int]:
        """Returns the size of every storage that outlives the forward pass."""
        last_use: dict[int, int] = {}
        for operator in self.workload.operators:
            for storage in (*operator.output_storages, *operator.input_storages):
                last_use[storage] = operator.index
        ending: dict[int, list[int]] = {}
        for storage, index in last_use.items():
            ending.setdefault(index, []).append(storage)
        sizes: dict[int, int] = {}
        for operator in self.workload.operators:
            index = operator.index
            for storage, tensor in zip(operator.output_storages, operator.outputs, strict=True):
                if storage not in sizes:
                    first = tensor is operator.outputs[0]
                    sizes[storage] = self._result_bytes(index) if first else self._rounded(tensor.nbytes)
                    self.live += sizes[storage]
            for saved in self.saved[index]:
                if saved.producer == index and saved.storage not in sizes:
                    sizes[saved.storage] = self._rounded(saved.tensor.nbytes)
                    self.live += sizes[saved.storage]
            self.live += self.own[index]
            self._see_forward(self.live + self._workspace(operator, "forward"), operator)
            for storage in ending.get(index, ()):
                if storage in sizes and storage not in first_saver:
                    self.live -= sizes.pop(storage)
        return sizes

    def _see_forward(self, now: int, operator: Operator) -> None:
        if now > self.forward_peak:
            self.forward_peak, self.forward_at = now, operator.name

    # Backward

    def _backward(self, first_saver: dict[int, int], sizes: dict[int, int], accumulated: bool) -> None:
        ending: dict[int, list[int]] = {}
        for storage, index in first_saver.items():
            ending.setdefault(index, []).append(storage)
        arrived: dict[int, _Gradient] = {}
        trainable = {p.name: p.tensor for p in self.workload.parameters if p.trainable}
        trained: set[str] = set(trainable) if accumulated else set()
        for operator in reversed(self.workload.operators):
            index = operator.index
            gradient = arrived.pop(index, None)
            if operator.differentiable:
                passing = self._parameter_gradients(operator, trainable, trained)
                passing += self._input_gradients(operator, gradient, arrived)
                passing += self._workspace(operator, "backward")
                self._see_backward(self.live + passing, operator)
            if gradient is not None:
                self._release(gradient)
            self.live -= self.own[index]
            for storage in ending.get(index, ()):
                self.live -= sizes.pop(storage, 0)
            self._after_backward(operator)

    def _see_backward(self, now: int, operator: Operator) -> None:
        if now > self.backward_peak:
            self.backward_peak, self.backward_at = now, operator.name

    def _after_backward(self, operator: Operator) -> None:
        """For those who hand gradients on."""

    def _parameter_gradients(
        self, operator: Operator, trainable: Mapping[str, object], trained: set[str]
    ) -> int:
        """Adds gradients that stay allocated; returns the bytes of temporary ones."""
        passing = 0
        for name, tensor in zip(operator.parameters, operator.parameter_tensors, strict=True):
            if name not in trainable:
                continue
            size = self._rounded(tensor.nbytes)
            if name in trained:
                passing += size
            else:
                trained.add(name)
                self.live += size
            if self.precision[operator.index] is None and len(tensor.shape) > 1:
                half = plain_precision(operator)
                if operator.kind in ("linear", "conv", "matmul") and half != tensor.dtype:
                    passing += self._rounded(tensor.numel * BYTES[half])  # before it is cast
        return passing

    def _input_gradients(
        self, operator: Operator, gradient: _Gradient | None, arrived: dict[int, _Gradient]
    ) -> int:
        """Adds gradients for the producers of the inputs; returns the bytes of temporary ones."""
        passing = 0
        operators = self.workload.operators
        parts: dict[int, list[int]] = {}
        lifted = self._lifted(operator) if self.precision[operator.index] is None else set()
        for producer, tensor, storage in zip(
            operator.inputs, operator.input_tensors, operator.input_storages, strict=True
        ):
            if producer != OUTSIDE and operators[producer].differentiable and tensor.floating:
                nbytes = self._rounded(int(tensor.nbytes * self._part(producer, tensor)))
                parts.setdefault(producer, []).append(nbytes)
                if storage in lifted:
                    passing += self._rounded(tensor.nbytes) - nbytes  # before it is cast
        for producer, pieces in parts.items():
            whole = self._result_bytes(producer)
            old = arrived.get(producer)
            if gradient is not None and operator.target in PASSES_ON and pieces[0] == gradient.nbytes:
                if old is None:
                    gradient.holders += 1
                    arrived[producer] = gradient
                    continue
                pieces = []
            # Views of one result produce pieces, which are then assembled in another tensor.
            passing += sum(pieces) if len(pieces) > 1 or (pieces and pieces[0] < whole) else 0
            if old is None:
                arrived[producer] = _Gradient(whole)
                self.live += whole
            elif old.holders == 1:
                passing += whole if pieces else 0  # added in place
            else:
                passing += whole if pieces else 0
                self._release(old)
                arrived[producer] = _Gradient(whole)
                self.live += whole
        return passing

    def _release(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self.live -= gradient.nbytes

    # Operators in a precision that was set

    def _kept(self, operator: Operator) -> tuple[Saved, ...]:
        """The saved tensors of an operator, except operands in low precision."""
        precision = self.precision[operator.index]
        if precision is None:
            lifted = self._lifted(operator)
            return tuple(saved for saved in operator.saved if saved.storage not in lifted)
        if operator.kind == "embedding":
            return operator.saved
        if operator.kind in ("attention", "matmul"):
            copied = self._copied(operator, precision)
            return tuple(saved for saved in operator.saved if saved.storage not in copied)
        copy = _copy_of_input(operator)
        # What a convolution keeps of the input beside a padded copy is what padding it keeps.
        padded = copy is not None and operator.kind == "conv"
        gone = ("weight",) if padded or self._shares(operator, precision) else ("weight", "input", "output")
        return tuple(saved for saved in operator.saved if saved.role not in gone and saved is not copy)

    def _own(self, operator: Operator) -> int:
        precision = self.precision[operator.index]
        if precision is None:
            lifted = self._lifted(operator)
            total = sum(self._rounded(s.tensor.nbytes) for s in operator.saved if s.storage in lifted)
            if operator.kind == "conv" and self._trains_weight(operator):
                # Its input may be listed with the operator before, which keeps it in the type that arrives.
                known = {saved.storage for saved in operator.saved}
                if _copy_of_input(operator) is None and operator.input_storages[0] in lifted - known:
                    total += self._rounded(operator.input_tensors[0].nbytes)
            return total
        if operator.kind in ("attention", "matmul"):
            return sum(map(self._rounded, self._copied(operator, precision).values()))
        arriving, copy = self._arriving(operator), _copy_of_input(operator)
        x = None if copy is None else copy.tensor
        if not self._trains_weight(operator) or (
            self._shares(operator, precision) and (x is None or self._keeps_result(operator))
        ):
            arriving, x = backend.memory_type(backend.passes(precision)[2]), None
        return self._rounded(backend.saved_bytes(operator, precision, arriving, self.kind, x))

    def _copied(self, operator: Operator, precision: str) -> dict[int, int]:
        """Of a product of activations: what it keeps a copy of because it has another type, and the copy's bytes."""
        name = backend.memory_type(backend.passes(precision)[1])
        floating = [
            (storage, tensor)
            for storage, tensor in zip(operator.input_storages, operator.input_tensors, strict=True)
            if tensor.floating
        ]
        copied = {
            storage: tensor.numel * BYTES[name]
            for (storage, tensor), arriving in zip(floating, self.graph.arriving[operator.index], strict=True)
            if arriving != name
        }
        if operator.kind == "attention" and self.graph.leaving[operator.index] != name:
            copied[operator.output_storages[0]] = operator.outputs[0].numel * BYTES[name]
        return copied

    def _arriving(self, operator: Operator) -> str:
        """The type in which values arrive."""
        return promoted(list(self.graph.arriving[operator.index])) or operator.dtype

    def _shares(self, operator: Operator, precision: str) -> bool:
        """Whether backward keeps the input itself: it has the right type, or the operator before keeps it anyway."""
        arriving = self._arriving(operator)
        return backend.shares_input(operator, precision, arriving) or (
            operator.kind in ("linear", "conv") and arriving != "fp32" and self._keeps_result(operator)
        )

    def _keeps_result(self, operator: Operator) -> bool:
        """Whether the operator before keeps what it hands on, as a ReLU does (and a norm keeps its statistics only)."""
        copy = _copy_of_input(operator)
        if operator.inputs[:1] in ((), (OUTSIDE,)) or (copy is not None and operator.kind == "conv"):
            return False
        before = self.workload.operators[operator.inputs[0]]
        return any(
            saved.producer == before.index and saved.storage == operator.input_storages[0]
            for saved in before.saved
        )

    def _trains_weight(self, operator: Operator) -> bool:
        return operator.differentiable and any(
            name in self._trainable and len(tensor.shape) > 1
            for name, tensor in zip(operator.parameters, operator.parameter_tensors, strict=True)
        )

    def _lifted(self, operator: Operator) -> set[int]:
        """The inputs that an operator which was not lowered casts to its own type first; it keeps the copy."""
        if self.graph.follows(operator):
            return set()
        floating = [
            (tensor, storage)
            for tensor, storage in zip(operator.input_tensors, operator.input_storages, strict=True)
            if tensor.floating
        ]
        return {
            storage
            for (tensor, storage), arriving in zip(floating, self.graph.arriving[operator.index], strict=True)
            if arriving != tensor.dtype
        }

    def _part(self, producer: int, tensor: Tensor) -> float:
        """Size of a result of an operator in relation to what was captured."""
        if tensor.dtype != self.graph.captured[producer]:
            return 1.0
        return BYTES[self.graph.leaving[producer]] / BYTES[tensor.dtype]

    def _result_bytes(self, index: int) -> int:
        result = self.workload.operators[index].outputs[0]
        return self._rounded(int(result.nbytes * self._part(index, result)))

    def _workspace(self, operator: Operator, phase: Literal["forward", "backward"]) -> int:
        precision = self.precision[operator.index]
        if precision is None:
            temporaries = self._temporaries(operator) if phase == "backward" else 0
            passing = temporaries * self._result_bytes(operator.index)
            return backend.plain_workspace(operator, self.kind) + passing
        if phase == "forward":
            return backend.forward_workspace(operator, precision, self._arriving(operator), self.kind)
        types = self._arriving(operator), self.graph.leaving[operator.index]
        return backend.backward_workspace(operator, precision, *types, self.kind)

    def _temporaries(self, operator: Operator) -> int:
        """How many tensors like its result the backward of an operator allocates beside the gradients."""
        if operator.target in ("aten.pow.Tensor_Scalar", "aten.reciprocal.default"):
            return 2  # xⁿ⁻¹ and n·xⁿ⁻¹; y² and -g
        divisor = self._computed(operator, "other") if operator.target == "aten.div.Tensor" else None
        if divisor is not None:
            # -g·(x/y)/y: both quotients, -g and their product, which is the gradient of y if that is as large, all of
            # them before the gradient of x.
            own = divisor.outputs[0].numel == operator.outputs[0].numel
            return 4 - own - (self._computed(operator, "self") is not None)
        return 0

    def _computed(self, operator: Operator, name: str) -> Operator | None:
        """The operator that computed this argument, if that has a gradient."""
        argument = operator.arguments.get(name)
        if not isinstance(argument, str) or not argument.startswith("$"):
            return None
        index = operator.inputs[int(argument[1:])]
        producer = None if index == OUTSIDE else self.workload.operators[index]
        return producer if producer is not None and producer.differentiable else None

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.rounding) * self.rounding


def _copy_of_input(operator: Operator) -> Saved | None:
    """The copy of its input that an operator makes and saves: padded by other values than zeros, or contiguous."""
    if operator.kind not in ("linear", "conv") or not operator.input_tensors:
        return None
    x, weight = operator.input_tensors[0], backend.weight_of(operator)
    if weight is None or (operator.kind == "linear" and any(s.role == "input" for s in operator.saved)):
        return None
    before_kernel = len(x.shape) - (len(weight.shape) - 2)
    for saved in operator.saved:
        shape = saved.tensor.shape
        if saved.role != "other" or saved.producer != operator.index or len(shape) != len(x.shape):
            continue
        if operator.kind == "linear":
            same = shape[-1] == weight.shape[-1] and saved.tensor.numel == x.numel
        else:
            same = shape[:before_kernel] == x.shape[:before_kernel] and saved.tensor.numel >= x.numel
        if same:
            return saved
    return None
