"""Peak memory of a step under FSDP2 or HSDP, simulated allocation by allocation.

Each rank keeps a shard of parameters, gradients and optimizer states. Beside these and the activations of its own
samples, as torch allocates them (W of a unit: its weights or gradients, whole):

| while                   | weights and buffers                                                                        |
|-------------------------|--------------------------------------------------------------------------------------------|
| always, until the end   | W of the root                                                                              |
| forward                 | W of the unit that computes, and the buffer in which the last one was gathered (W again)   |
| backward of a unit      | its W and gradients, the buffer of the unit before it (prefetched), and the gradients of   |
|                         | the unit after it, which may still be sent                                                 |
| after backward of it    | its gradients, their copy to send (Gloo: two), and the prefetched buffer                   |
| kept after forward      | W of every unit, from its forward to its backward                                          |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trimtab.predict.fsdp_units import FsdpUnit, fsdp_units, shard_bytes, shard_numel
from trimtab.predict.memory.allocations import StepMemory
from trimtab.predict.memory.step_peak import CUBLAS_WORKSPACE, STATES, Memory, OptimizerName
from trimtab.predict.operators.low_precision import DeviceKind
from trimtab.predict.operators.precision_graph import Results
from trimtab.wire_format import WEIGHT_BLOCK, encoded_bytes
from trimtab.workload import Operator, Parameter, Workload
from trimtab.workload.tensor import BYTES


def sharded_memory(
    workload: Workload,
    precisions: Mapping[str, str] | None = None,
    *,
    ways: int,
    kind: DeviceKind = "cpu",
    optimizer: OptimizerName = "adam",
    keep: bool = False,
    bits: int | None = None,
    weight_bits: int | None = None,
    workspace: int | None = None,
    results: Results | None = None,
) -> Memory:
    """Peak memory of a step and its parts, on a rank of a model sharded over so many ranks; see `step_memory`.

    Args:
        keep: gathered weights stay from forward to backward.
        bits: of compressed gradients.
        weight_bits: of compressed weights.
    """
    step = _ShardedStep(workload, precisions or {}, kind, results, ways=ways, keep=keep)
    step.run()
    if workspace is None:
        workspace = 2 * CUBLAS_WORKSPACE[True] if kind == "cuda" else 0
    parameters = sum(step.shard(p) for p in workload.parameters)
    shards = [step.shard(p) for p in workload.parameters if p.trainable]
    state = STATES[optimizer] * sum(shards)
    codec = 0
    if bits is not None:
        payloads = [
            sum(encoded_bytes(shard_numel(p, ways), bits) for p in unit.trainable) for unit in step.units
        ]
        codec = 2 * (ways - 1) * max(payloads)
    if weight_bits is not None:
        # A unit's own shard and those of all ranks, encoded; the root's, which is first, are gone by then.
        gathered = [
            shard_bytes(unit.parameters, ways, weight_bits, WEIGHT_BLOCK)
            for unit in step.units[1:] or step.units
        ]
        codec += (ways + 1) * max(gathered)
    temporary = {"adam": sum(shards) if kind == "cuda" else 2 * max(shards, default=0)}.get(optimizer, 0)
    batch = sum(step.round(t.numel * BYTES[t.dtype]) for t in workload.batch)
    moments: list[tuple[int, Literal["forward", "backward", "optimizer"], str]] = [
        (step.forward_peak, "forward", step.forward_at),
        (step.backward_peak, "backward", step.backward_at),
        (sum(shards) + temporary, "optimizer", optimizer),
    ]
    peak, phase, operator = max(moments, key=lambda moment: moment[0])
    return Memory(
        parameters=parameters,
        buffers=workload.buffer_bytes,
        gradients=sum(shards),
        optimizer=state,
        buckets=step.most,
        codec=codec,
        workspace=workspace,
        activations=step.activations,
        peak=parameters + workload.buffer_bytes + batch + state + codec + workspace + peak,
        phase=phase,
        operator=operator,
    )


class _ShardedStep(StepMemory):
    """A step that gathers weights before a unit computes, and hands its gradients on after backward."""

    def __init__(
        self,
        workload: Workload,
        precisions: Mapping[str, str],
        kind: DeviceKind,
        results: Results | None,
        *,
        ways: int,
        keep: bool,
    ) -> None:
        super().__init__(workload, precisions, kind, 512 if kind == "cuda" else 64, results)
        self.units, self._ways = fsdp_units(workload), ways
        self._whole = [sum(self.round(p.tensor.nbytes) for p in unit.parameters) for unit in self.units]
        self._of = [0] * len(workload.operators)
        for index, unit in enumerate(self.units[1:], start=1):
            for operator in range(unit.first, unit.last + 1):
                self._of[operator] = index
        self._keep, self._gathered = keep, 0
        self._copies = 1 if kind == "cuda" else 2
        self.most = 0

    def round(self, nbytes: int) -> int:
        return self._rounded(nbytes)

    def shard(self, parameter: Parameter) -> int:
        """Bytes of a parameter's shard."""
        itemsize = parameter.tensor.nbytes // max(1, parameter.tensor.numel)
        return self.round(shard_numel(parameter, self._ways) * itemsize)

    def _see_forward(self, now: int, operator: Operator) -> None:
        unit = self._of[operator.index]
        before = self._of[operator.index - 1] if operator.index else 0
        self._gathered = max(self._gathered, unit)
        held = self._whole[0] + max(self._whole[self._gathered], self._whole[before])
        if self._keep:
            held += sum(self._whole[1 : self._gathered + 1])
        elif unit:
            held += self._whole[unit]
        self.most = max(self.most, held)
        super()._see_forward(now + held, operator)

    def _see_backward(self, now: int, operator: Operator) -> None:
        unit = self._of[operator.index]
        held = self._whole[0] + self._prefetched(unit) + self._sent(unit)
        if unit and not self._keep:
            held += self._whole[unit]
        self.most = max(self.most, held)
        super()._see_backward(now + held, operator)

    def _prefetched(self, unit: int) -> int:
        """Weights of earlier units that are there while a unit (0: the root) goes backward."""
        if self._keep:
            return sum(self._whole[1 : unit + 1 if unit else None])
        return (
            self._whole[unit - 1]
            if unit > 1
            else (self._whole[-1] if not unit and len(self.units) > 1 else 0)
        )

    def _sent(self, unit: int) -> int:
        """Gradients of the unit after it that may still be sent."""
        return self._whole[unit + 1] if 0 < unit < len(self.units) - 1 else 0

    def _after_backward(self, operator: Operator) -> None:
        unit = self._of[operator.index]
        if unit and self.units[unit].first == operator.index:
            self._hand_on(self.units[unit], operator, self._whole[0] + self._prefetched(unit))
        if operator.index == 0:
            self._hand_on(self.units[0], operator, 0)

    def _hand_on(self, unit: FsdpUnit, operator: Operator, held: int) -> None:
        """Send a unit's gradients: copied, reduced, then only this rank's shard is kept."""
        whole = sum(self.round(p.tensor.nbytes) for p in unit.trainable)
        kept = sum(self.shard(p) for p in unit.trainable)
        super()._see_backward(self.live + held + self._copies * whole + kept, operator)
        self.live += kept - whole
