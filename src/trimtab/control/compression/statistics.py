"""Statistics of every layer for adaptive compression: running averages of its reduced gradient, and errors.

Memory is bounded: of a layer with more than `MOST_VALUES` values, whole codec blocks spread evenly over it
are sampled, and at most `MOST_IN_ALL` values of a model. These are kept twice, for the averages and
for one step's own gradient, and once more while a look is pending. Everything here is local to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from trimtab.codec import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.collectives import Piece
from trimtab.random_bits import name_hash, stream

MOST_VALUES = 1 << 14
"""Values kept of one layer: 64 KiB of fp32."""

MOST_IN_ALL = 1 << 21
"""Values kept of a whole model, 8 MiB of fp32: with very many layers each gets fewer."""

MEMORY = 0.1
"""Weight of the newest gradient in the running average; the first few have equal weights."""

_MOST_STRAIN = 8.0
_MEASURED = 0x7AB1E
"""Replaces the step in the random streams of measured errors; no gradient's encoding uses it."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Which values of a layer are sampled: `blocks` whole blocks, one in every `gap` values."""

    numel: int
    block: int
    blocks: int
    gap: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks, min(self.block, self.numel)

    @property
    def share(self) -> float:
        """Sampled values over all values."""
        return math.prod(self.shape) / self.numel

    def of(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """The sampled values, as a view of (blocks, block), of a layer that starts at `offset` of a flat buffer."""
        return flat.as_strided(self.shape, (self.gap, 1), flat.storage_offset() + offset)


def sample_of(numel: int, block: int, most: int = MOST_VALUES) -> Sample:
    """A sample of at most `most` values, or one block if that is longer; an incomplete last block is skipped."""
    whole = max(numel // block, 1)
    blocks = min(whole, max(most // block, 1))
    return Sample(numel=numel, block=block, blocks=blocks, gap=whole // blocks * block)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The statistics of a layer at one moment, on the host."""

    name: str
    sample: Sample
    average: torch.Tensor
    """Running average of the sampled values, 1-D fp32."""

    norm: float
    """Norm of the whole layer in a typical step: the root of the running mean of squared norms."""

    latest: float
    """Norm of the whole layer at the last sample, possibly NaN or Inf."""

    own: torch.Tensor
    """The sampled values of this rank's own gradient in the step before the look, 1-D fp32; may be empty."""

    owed: float = 0.0
    """Norm of this rank's error feedback for the whole layer."""

    @property
    def numel(self) -> int:
        """Values of the whole layer."""
        return self.sample.numel

    def relative_errors(
        self,
        bits: Iterable[int],
        *,
        stochastic: bool,
        seed: int,
        block: int | None = None,
        own: bool = False,
    ) -> dict[int, float]:
        """‖decoded - value‖ / ‖value‖ of the layer's average at each number of bits, measured with the real codec.

        With `own` it is the error of this rank's own gradient in one step: what compression really does there.
        It is never that of one step's *reduced* gradient: that was already encoded, and encoding it
        again with the same bits would lose almost nothing.
        """
        values = self.own if own else self.average
        norm = float(values.norm())
        if not norm or not math.isfinite(norm):
            return dict.fromkeys(bits, 0.0)
        kernels = kernels_for(values.device)
        key = stream(seed, _MEASURED, 0, 0)
        block = block or self.sample.block
        errors = {}
        for b in bits:
            segment = Segment(
                offset=0, numel=values.numel(), bits=b, block=block, name_hash=name_hash(self.name)
            )
            packing = Packing(segments=(segment,), dtype=values.dtype)
            payload = torch.empty(packing.nbytes, dtype=torch.uint8)
            kernels.encode(values, packing, payload, stream=key, stochastic=stochastic)
            # The difference in one pass: the decoded values are added to the negated ones.
            difference = values.neg()
            kernels.decode(payload, packing, difference, add=True)
            errors[b] = float(difference.norm()) / norm
        return errors

    def strain(self, block: int | None = None) -> float:
        """Bits that the layer needs, beyond those for a normal distribution, to represent its typical values as well.

        A block's range follows its largest values. If most values are far smaller (the rows of an embedding, the
        parts of a fused projection), they are lost in rounding although the error is small relative to the norm, and
        an optimizer that scales every value by its own size, as Adam does, turns that into noise. Half of the
        blocks that are not constant have at least this strain.
        """
        blocks = self.average.view(self.sample.shape)
        if block is not None and blocks.shape[1] % block == 0:  # shorter blocks lie inside the sampled ones
            blocks = blocks.view(-1, block)
        span = blocks.amax(1) - blocks.amin(1)
        typical = blocks.abs().median(1).values
        normal = NormalDist()
        expected = 2 * normal.inv_cdf(1 - 1 / (blocks.shape[1] + 1)) / normal.inv_cdf(0.75)
        uneven = span > 0
        if not bool(uneven.any()) or not bool(torch.isfinite(span).all()):
            return 0.0
        beyond = (span[uneven] / (expected * typical[uneven])).log2().clamp(0.0, _MOST_STRAIN)
        return float(beyond.median())


class Statistics:
    """Running averages by layer name, on the gradients' own device."""

    def __init__(self, layers: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """`layers` has the numel and codec block size of each layer."""
        most = min(MOST_VALUES, MOST_IN_ALL // max(len(layers), 1))
        self.samples = {name: sample_of(numel, block, most) for name, (numel, block) in layers.items()}
        self.averages = {
            name: torch.zeros(s.shape, dtype=torch.float32, device=device) for name, s in self.samples.items()
        }
        self._own: dict[str, torch.Tensor] = {}
        self.counts = dict.fromkeys(layers, 0)
        self._names = {name: place for place, name in enumerate(layers)}
        self._known: dict[tuple[str, ...], torch.Tensor] = {}
        self._squares, self._latest = torch.zeros(2, len(layers), device=device).unbind()
        shares = torch.tensor([sample.share for sample in self.samples.values()])
        self._scale = shares.rsqrt().to(device)

    def add(self, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Add a reduced bucket to the averages. Layers with non-finite values are skipped."""
        mine = [piece for piece in pieces if piece.name in self.samples]
        if not mine:
            return
        values = [self.samples[piece.name].of(flat, piece.offset).float() for piece in mine]
        places = self._places([piece.name for piece in mine])
        weight = max(1 / (self.counts[mine[0].name] + 1), MEMORY)  # layers of a bucket always come together
        norms = torch.stack(torch._foreach_norm(values)) * self._scale[places]
        finite = torch.isfinite(norms)
        before = self._squares[places]
        self._squares[places] = torch.where(finite, before.lerp(norms.square(), weight), before)
        self._latest[places] = norms
        on_host = flat.device.type == "cpu"
        sound = finite.tolist() if on_host else finite.unbind()
        for piece, new, good in zip(mine, values, sound, strict=True):
            self.counts[piece.name] += 1
            average = self.averages[piece.name]
            if not on_host:  # a branch would make the host wait for the device
                average.lerp_(torch.where(good, new, average), weight)
            elif good:
                average.lerp_(new, weight)

    def keep(self, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Keep this rank's own values of a bucket until the next snapshot."""
        for piece in pieces:
            if piece.name in self.samples:
                values = self.samples[piece.name].of(flat, piece.offset)
                self._own[piece.name] = values.to(torch.float32, copy=True).view(-1)

    def snapshot(self, memory: ErrorFeedback | None = None) -> Snapshot:
        """Start copying everything to the host, with norms of the error feedback; own values are handed over."""
        names = [name for name, count in self.counts.items() if count]
        places = self._places(names)
        owed = torch.zeros(len(names), device=self._latest.device)
        residuals = [None if memory is None else memory.residual(name) for name in names]
        if names and all(residual is not None for residual in residuals):
            held = [self.samples[n].of(r, 0) for n, r in zip(names, residuals, strict=True) if r is not None]
            owed = torch.stack(torch._foreach_norm(held)) * self._scale[places]
        averages = [self.averages[name].view(-1) for name in names]
        own, self._own = self._own, {}
        kept = {name: self.samples[name] for name in names}
        numbers = [self._squares[places], self._latest[places], owed]
        joined = torch.cat([*averages, *numbers, *(own[name] for name in names if name in own)])
        return Snapshot(kept, [name in own for name in names], joined)

    def _places(self, names: Sequence[str]) -> torch.Tensor:
        """The indices of these layers, on the device."""
        key = tuple(names)
        if key not in self._known:
            places = torch.tensor([self._names[name] for name in names], dtype=torch.int64)
            self._known[key] = places.to(self._latest.device)
        return self._known[key]

    def state_dict(self) -> dict[str, Any]:
        return {
            "averages": {name: value.cpu().clone() for name, value in self.averages.items()},
            "squares": self._squares.cpu().clone(),
            "latest": self._latest.cpu().clone(),
            "own": {name: value.cpu().clone() for name, value in self._own.items()},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if any(state["averages"][name].shape != average.shape for name, average in self.averages.items()):
            return  # shards of another number of ranks: start anew
        for name, average in self.averages.items():
            average.copy_(state["averages"][name])
        self._squares.copy_(state["squares"])
        self._latest.copy_(state["latest"])
        self._own = {name: value.to(self._latest.device) for name, value in state["own"].items()}
        self.counts.update(state["counts"])


class Snapshot:
    """A copy of the statistics that the training no longer changes."""

    def __init__(self, samples: dict[str, Sample], own: list[bool], values: torch.Tensor) -> None:
        self._samples, self._own, self._values = samples, own, values
        self._ready: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._source = values  # must outlive the copy
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event(blocking=True)  # a thread that spins would take a core
            self._ready.record(torch.cuda.current_stream(values.device))

    def layers(self) -> list[Layer]:
        """The statistics of all layers; waits for the copy from a device."""
        if self._ready is not None:
            self._ready.synchronize()
        count = len(self._samples)
        sizes = [math.prod(sample.shape) for sample in self._samples.values()]
        own_sizes = [size if there else 0 for size, there in zip(sizes, self._own, strict=True)]
        parts = self._values.split([*sizes, 3 * count, *own_sizes])
        squares, latest, owed = parts[count].view(3, count).tolist()
        return [
            Layer(
                name=name,
                sample=sample,
                average=parts[i],
                norm=math.sqrt(squares[i]),
                latest=latest[i],
                own=parts[count + 1 + i],
                owed=owed[i],
            )
            for i, (name, sample) in enumerate(self._samples.items())
        ]
