"""Peak memory of one training step, simulated allocation by allocation.

Forward keeps what autograd saves, in the precision it is saved in; backward frees it operator by operator while
gradients are allocated. The peak is where their sum is largest: often at the loss, not at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.predict.collectives import BLOCK
from trimtab.predict.memory.allocations import StepMemory
from trimtab.predict.operators.low_precision import DeviceKind
from trimtab.predict.operators.precision_graph import Results
from trimtab.predict.replay.build import payloads
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import in_one_gather
from trimtab.workload import Workload
from trimtab.workload.tensor import BYTES

OptimizerName = Literal["sgd", "momentum", "adam", "adam_fused"]

STATES: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adam_fused": 2}
"""State tensors that an optimizer keeps for each parameter."""

MIB = 1 << 20

CUBLAS_WORKSPACE = {True: 32 * MIB, False: 8 * MIB + 128 * 1024}
"""cuBLAS workspace in torch's allocator for each thread that multiplies: since Hopper, and before."""

RESERVED_BEYOND_ALLOCATED = 0.05
"""Overhead of a caching allocator: fragments too small for the next request."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one rank, in bytes."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    buckets: int
    """DDP's own copies of the gradients; under FSDP2 the most that gathered weights and the buffers of its
    collectives take."""

    codec: int
    """Payloads of compressed buckets, sent and received."""

    workspace: int
    """Workspace of the matrix product library."""

    activations: int
    """What autograd holds after forward."""

    peak: int
    """Peak of allocated memory in a step (except the first one, which has less)."""

    phase: Literal["forward", "backward", "optimizer"]
    operator: str
    """Where the peak is."""

    @property
    def reserved(self) -> int:
        """What a caching allocator reserves for that; compare this with the device's memory."""
        return int(self.peak * (1 + RESERVED_BEYOND_ALLOCATED))


def step_memory(
    workload: Workload,
    precisions: Mapping[str, str] | None = None,
    *,
    kind: DeviceKind = "cpu",
    optimizer: OptimizerName = "adam",
    data_parallel: bool = False,
    bits: int | None = None,
    layer_bits: Mapping[str, int | None] | None = None,
    block: int = BLOCK,
    world: int = 1,
    accumulate: int = 1,
    workspace: int | None = None,
    results: Results | None = None,
) -> Memory:
    """Peak memory of a step and its parts.

    Args:
        precisions: of operators, by the name that sets each (not patterns: see `settings.matched`).
        optimizer: "adam" is torch's default implementation, which on a GPU temporarily needs the parameters'
            size once more; "adam_fused" does not.
        data_parallel: under DDP, which holds every gradient a second time in its buckets.
        bits, layer_bits, block: of compressed gradients, among `world` ranks (see `StepSetting`).
        accumulate: micro-batches of a step; the workload is one of them. From the second on gradients are held from
            the beginning, and so are the codes of weights in 8 bits.
        workspace: bytes of the matrix product library; by default cuBLAS's on Hopper.
        results: "input" for a device without bf16, whose lowered operators hand on the type of their inputs.
    """
    rounding = 512 if kind == "cuda" else 64
    held = _Held(workload, rounding)
    if workspace is None:
        # The thread that runs backward has its own workspace.
        workspace = 2 * CUBLAS_WORKSPACE[True] if kind == "cuda" else 0
    state = STATES[optimizer] * held.trainable
    buckets = sum(b.nbytes for b in workload.buckets) if data_parallel else 0
    sent = StepSetting(bits=bits, layer_bits=layer_bits or {}, block=block)
    codec = sum(_codec_buffers(nbytes, world) for nbytes in payloads(workload, sent)) if bits else 0
    base = held.parameters + held.buffers + held.batch + state + buckets + codec + workspace
    step = StepMemory(workload, precisions or {}, kind, rounding, results)
    step.run(accumulate > 1)
    codes, besides = step.kept_codes() if accumulate > 1 else (0, 0)
    before = held.trainable + besides if accumulate > 1 else 0
    temporary = _temporary(optimizer, kind, held)
    moments: list[tuple[int, Literal["forward", "backward", "optimizer"], str]] = [
        (before + step.forward_peak, "forward", step.forward_at),
        (before + step.backward_peak, "backward", step.backward_at),
        (held.trainable + temporary + codes, "optimizer", optimizer),
    ]
    peak, phase, operator = max(moments, key=lambda moment: moment[0])
    return Memory(
        parameters=held.parameters,
        buffers=held.buffers,
        gradients=held.trainable,
        optimizer=state,
        buckets=buckets,
        codec=codec,
        workspace=workspace,
        activations=step.activations,
        peak=base + peak,
        phase=phase,
        operator=operator,
    )


class _Held:
    """What is allocated for the whole step."""

    def __init__(self, workload: Workload, rounding: int) -> None:
        def rounded(nbytes: int) -> int:
            return -(-nbytes // rounding) * rounding

        sizes = [(rounded(p.tensor.nbytes), p.trainable) for p in workload.parameters]
        self.parameters = sum(size for size, _ in sizes)
        self.trainable = sum(size for size, trainable in sizes if trainable)
        self.largest = max((size for size, trainable in sizes if trainable), default=0)
        self.buffers = workload.buffer_bytes
        self.batch = sum(rounded(t.numel * BYTES[t.dtype]) for t in workload.batch)


def _codec_buffers(payload: int, world: int) -> int:
    """Buffers of a reduction for one bucket: what it sends and receives."""
    if in_one_gather(payload, world):
        return (1 + world) * payload
    # All chunks but its own, its own from all others, their sum, and everyone's sums.
    return payload * (3 * world - 1) // world


def _temporary(optimizer: OptimizerName, kind: DeviceKind, held: _Held) -> int:
    """Temporary memory of the optimizer: on a GPU torch's Adam works on all parameters at once."""
    if optimizer == "adam_fused":
        return 0
    if optimizer == "adam":
        return held.trainable if kind == "cuda" else 2 * held.largest
    return 0
