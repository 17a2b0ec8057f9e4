"""What adaptive compression knows of every layer: running averages of its reduced gradient, and error tables.

Memory is bounded: of a layer with more than `MOST_VALUES` values, whole codec blocks spread evenly over it
are looked at, and no more than `MOST_IN_ALL` values of a model. Everything here is one rank's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment, name_hash
from trimtab.codec.random import stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trimtab.collectives import Piece

MOST_VALUES = 1 << 14
"""Values kept of one layer: 64 KiB of fp32."""

MOST_IN_ALL = 1 << 21
"""Values kept of a whole model, 8 MiB of fp32: with very many layers each gets fewer."""

MEMORY = 0.1
"""Weight of the newest of many gradients in the running average; the first few weigh alike."""

ALL_BITS = tuple(range(1, 9))
_MEASURED = 0x7AB1E
"""Stands for the step in the random streams of error tables, which no gradient's encoding uses."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Which values of a layer are looked at: `blocks` whole blocks, one in every `gap` values."""

    numel: int
    block: int
    blocks: int
    gap: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks, min(self.block, self.numel)

    @property
    def share(self) -> float:
        """Values looked at over values there are."""
        return math.prod(self.shape) / self.numel

    def of(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """The values, a view of (blocks, block), of a layer that starts at `offset` of a flat buffer."""
        return flat.as_strided(self.shape, (self.gap, 1), flat.storage_offset() + offset)


def sample_of(numel: int, block: int, most: int = MOST_VALUES) -> Sample:
    """At most `most` values, or one block if that is longer; a last block that is not whole is left out."""
    whole = max(numel // block, 1)
    blocks = min(whole, max(most // block, 1))
    return Sample(numel=numel, block=block, blocks=blocks, gap=whole // blocks * block)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer as it is at one moment, on the host."""

    name: str
    sample: Sample
    average: torch.Tensor
    """Running average of the sampled values, 1-D fp32."""

    norm: float
    """Of the whole layer in a typical step: the root of the running mean of squared norms."""

    latest: float
    """Norm of the whole layer when last looked at; NaN or Inf if it was."""


class Statistics:
    """Running averages by layer name, on the gradients' own device."""

    def __init__(self, layers: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """`layers` gives the numel and codec block of each layer to look at."""
        most = min(MOST_VALUES, MOST_IN_ALL // max(len(layers), 1))
        self.samples = {name: sample_of(numel, block, most) for name, (numel, block) in layers.items()}
        self.averages = {
            name: torch.zeros(s.shape, dtype=torch.float32, device=device) for name, s in self.samples.items()
        }
        self._squares = {name: torch.zeros((), device=device) for name in layers}
        self._latest = {name: torch.zeros((), device=device) for name in layers}
        self.counts = dict.fromkeys(layers, 0)

    def add(self, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Take a reduced bucket into the averages. Layers that are not finite there are not taken in."""
        mine = [piece for piece in pieces if piece.name in self.samples]
        if not mine:
            return
        views = [self.samples[piece.name].of(flat, piece.offset).float() for piece in mine]
        for piece, values, norm in zip(mine, views, torch._foreach_norm(views), strict=True):
            name = piece.name
            weight = max(1 / (self.counts[name] + 1), MEMORY)
            self.counts[name] += 1
            scaled = norm / math.sqrt(self.samples[name].share)
            self._latest[name].copy_(scaled)
            if flat.device.type == "cpu":
                if math.isfinite(float(norm)):
                    self.averages[name].lerp_(values, weight)
                    self._squares[name].lerp_(scaled.square(), weight)
            else:  # asking would make the host wait for the device
                finite = torch.isfinite(norm)
                taken = torch.where(finite, values, self.averages[name])
                self.averages[name].lerp_(taken, weight)
                self._squares[name].lerp_(torch.where(finite, scaled.square(), self._squares[name]), weight)

    def snapshot(self) -> Snapshot:
        """The averages as they are now, on their way to the host."""
        return Snapshot(self)

    def state_dict(self) -> dict[str, Any]:
        return {
            "averages": {name: value.cpu().clone() for name, value in self.averages.items()},
            "squares": {name: value.cpu().clone() for name, value in self._squares.items()},
            "latest": {name: value.cpu().clone() for name, value in self._latest.items()},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, count in state["counts"].items():
            self.averages[name].copy_(state["averages"][name])
            self._squares[name].copy_(state["squares"][name])
            self._latest[name].copy_(state["latest"][name])
            self.counts[name] = count


class Snapshot:
    """A copy of the averages that the training no longer touches."""

    def __init__(self, statistics: Statistics) -> None:
        names = [name for name, count in statistics.counts.items() if count]
        self._samples = {name: statistics.samples[name] for name in names}
        every = [statistics.averages[name].view(-1) for name in names]
        numbers = [table[name] for table in (statistics._squares, statistics._latest) for name in names]
        self._ready: torch.cuda.Event | None = None
        device = numbers[0].device if numbers else torch.device("cpu")
        joined = torch.cat([*every, torch.stack(numbers)]) if numbers else torch.zeros(0)
        if device.type == "cuda":
            self._values = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            self._values.copy_(joined, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))
            self._keep = joined  # until the copy has been made
        else:
            self._values = joined

    def layers(self) -> list[Layer]:
        """Waits for the copy where it comes from a device."""
        if self._ready is not None:
            self._ready.synchronize()
        sizes = [math.prod(sample.shape) for sample in self._samples.values()]
        parts = self._values.split([*sizes, len(sizes), len(sizes)]) if sizes else ()
        if not parts:
            return []
        squares, latest = parts[-2].tolist(), parts[-1].tolist()
        return [
            Layer(name=name, sample=sample, average=average, norm=math.sqrt(square), latest=last)
            for (name, sample), average, square, last in zip(
                self._samples.items(), parts[:-2], squares, latest, strict=True
            )
        ]


def relative_errors(layer: Layer, bits: Iterable[int], *, stochastic: bool, seed: int) -> dict[int, float]:
    """‖decoded - value‖ / ‖value‖ of the layer's average at each number of bits, made with the real codec.

    Of averages, never of one step's reduced gradient: that has been through the codec already, and
    encoding it once more at the same bits would find almost nothing to lose.
    """
    values = layer.average
    norm = float(values.norm())
    if not norm or not math.isfinite(norm):
        return dict.fromkeys(bits, 0.0)
    kernels = kernels_for(values.device)
    key = stream(seed, _MEASURED, 0, 0)
    block = layer.sample.block
    found = {}
    for b in bits:
        segment = Segment(
            offset=0, numel=values.numel(), bits=b, block=block, name_hash=name_hash(layer.name)
        )
        packing = Packing(segments=(segment,), dtype=values.dtype)
        payload = torch.empty(packing.nbytes, dtype=torch.uint8)
        kernels.encode(values, packing, payload, stream=key, stochastic=stochastic)
        # One pass for the difference: what was decoded is added onto the negated values.
        difference = values.neg()
        kernels.decode(payload, packing, difference, add=True)
        found[b] = float(difference.norm()) / norm
    return found
