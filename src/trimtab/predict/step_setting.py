"""What all ranks of a data-parallel job do alike in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.predict.collectives import BLOCK, Route
from trimtab.predict.fsdp_units import Sharding
from trimtab.wire_format import MIN_NUMEL
from trimtab.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """How a step is divided, and how its gradients are exchanged."""

    bits: int | None = None
    """Bits of compressed gradients; None for the backend's own all-reduce."""

    layer_bits: Mapping[str, int | None] = field(default_factory=dict)
    """By parameter, where other bits are used; None sends it uncompressed. Without `bits` nothing is compressed."""

    block: int = BLOCK
    """Values of a quantization block."""

    error_feedback: bool = False
    """Whether what one step leaves out is added to the next."""

    route: Route | None = None
    """How compressed gradients are reduced; None for the default: flat, by the size of each bucket."""

    bucket_cap_mb: float | None = None
    """DDP's `bucket_cap_mb`; None for the workload's own buckets."""

    accumulate: int = 1
    """Micro-batches of a step; gradients are exchanged after the last."""

    sharding: Sharding | None = None
    """How FSDP2 shards the model; None for DDP, with a copy on every rank."""

    def bits_of(self, workload: Workload) -> dict[str, int]:
        """Bits of every trainable parameter; 0 for uncompressed, as small ones always are."""
        return {
            p.name: self.layer_bits.get(p.name, self.bits) or 0
            if self.bits and len(p.tensor.shape) > 1 and p.tensor.numel >= MIN_NUMEL
            else 0
            for p in workload.parameters
            if p.trainable
        }
