"""The units of a sharded model: what FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.predict.collectives import BLOCK, Placement
from trimtab.wire_format import MIN_NUMEL, encoded_bytes
from trimtab.workload import Parameter, Workload


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is sharded, besides the settings of any data-parallel job."""

    hybrid: bool = False
    """Shard inside each host and reduce between hosts (HSDP); False shards over all ranks."""

    keep: bool = False
    """Keep gathered weights from forward to backward (`reshard_after_forward=False`)."""

    weight_bits: int | None = None
    """Bits of gathered weights; None gathers them exactly."""

    def ways(self, placement: Placement) -> int:
        """Ranks that share one copy of the model.

        Raises:
            TrimtabError: HSDP on hosts of one rank, or of different numbers of ranks.
        """
        if self.hybrid and not (placement.two_levels and placement.equal):
            raise TrimtabError(
                "HSDP shards inside each host and needs the same number of ranks, at least two, on every host; shard "
                "over all ranks instead"
            )
        return placement.most if self.hybrid else placement.world


ALL_RANKS = Sharding()
"""FSDP2's default: one copy, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together."""

    name: str
    """Module; empty for the root."""

    parameters: tuple[Parameter, ...]
    first: int
    last: int
    """Its operators, from first to last, without those of other units in between (the root's)."""

    @property
    def trainable(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trainable)


def shard_numel(parameter: Parameter, ways: int) -> int:
    """Values of a parameter on each of so many ranks: FSDP2 divides the first axis, and pads it."""
    shape = parameter.tensor.shape
    rows = shape[0] if shape else 1
    return -(-rows // ways) * (parameter.tensor.numel // rows if rows else 0)


def fsdp_units(workload: Workload) -> tuple[FsdpUnit, ...]:
    """The root, then the repeated blocks in forward order."""
    runs = sorted(
        (start, start + block.length - 1, module)
        for block in workload.blocks
        for start, module in zip(block.starts, block.modules, strict=True)
    )
    of: dict[str, list[Parameter]] = {}
    modules = [module for _, _, module in runs]
    for parameter in workload.parameters:
        owner = next((m for m in modules if parameter.name.startswith(f"{m}.")), "")
        of.setdefault(owner, []).append(parameter)
    root = FsdpUnit(name="", parameters=tuple(of.get("", ())), first=0, last=len(workload.operators) - 1)
    return (
        root,
        *(
            FsdpUnit(name=module, parameters=tuple(of[module]), first=first, last=last)
            for first, last, module in runs
            if module in of
        ),
    )


def shard_bytes(parameters: Sequence[Parameter], ways: int, bits: int | None, block: int = BLOCK) -> int:
    """A shard of these parameters on the wire; small parameters and vectors travel exactly."""
    total = 0
    for p in parameters:
        numel, itemsize = shard_numel(p, ways), p.tensor.nbytes // max(1, p.tensor.numel)
        if bits is None:
            total += numel * itemsize
        else:
            coded = len(p.tensor.shape) > 1 and p.tensor.numel >= MIN_NUMEL
            total += encoded_bytes(numel, bits if coded else 0, block, itemsize=itemsize)
    return total
