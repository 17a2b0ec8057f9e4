"""Statistics of every layer for adaptive compression: running averages of its reduced gradient, and errors.

Memory is bounded: of a layer with more than `MOST_VALUES` values, whole codec blocks spread evenly over it
are sampled, and at most `MOST_IN_ALL` values of a model. These are kept three times, for the averages, for the newest
gradient and for one step's own, and twice more while a look is pending. Everything here is local to a rank and stays
on the gradients' device: the host gets numbers, not values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.codec import ErrorFeedback
from trimtab.collectives import Piece
from trimtab.control.compression.sampled_layers import Layer, SampledLayers

MOST_VALUES = 1 << 14
"""Values kept of one layer: 64 KiB of fp32."""

MOST_IN_ALL = 1 << 21
"""Values kept of a whole model, 8 MiB of fp32: with very many layers each gets fewer."""

MEMORY = 0.1
"""Weight of the newest gradient in the running average; the first few have equal weights."""


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


class Statistics:
    """Running averages by layer name.

    On CUDA the calls of a step are ordered by streams: `add` and `keep` may run on any of the job's, `fold` and
    `snapshot` before anything of the next step.
    """

    def __init__(self, layers: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """`layers` has the numel and codec block size of each layer."""
        most = min(MOST_VALUES, MOST_IN_ALL // max(len(layers), 1))
        self.samples = {name: sample_of(numel, block, most) for name, (numel, block) in layers.items()}
        self._sizes = [math.prod(sample.shape) for sample in self.samples.values()]
        self._average, self._newest, self._own = (
            torch.zeros(sum(self._sizes), dtype=torch.float32, device=device) for _ in range(3)
        )
        self.averages, self._newest_of, self._own_of = map(
            self._by_name, (self._average, self._newest, self._own)
        )
        self.counts = dict.fromkeys(layers, 0)
        self._pending: set[str] = set()
        """Layers of which the newest gradient is not in the averages yet."""
        self._kept: set[str] = set()
        """Layers of which this rank's own gradient is kept."""
        self._names = {name: place for place, name in enumerate(layers)}
        self._known: dict[tuple[str, ...], torch.Tensor] = {}
        self._squares, self._latest = torch.zeros(2, len(layers), dtype=torch.float32, device=device).unbind()
        shares = torch.tensor([sample.share for sample in self.samples.values()], dtype=torch.float32)
        self._scale = shares.rsqrt().to(device)
        self._layer_of: torch.Tensor | None = None
        if device.type == "cuda":
            sizes = torch.tensor(self._sizes)
            self._layer_of = torch.arange(len(layers)).repeat_interleave(sizes).to(device)

    def add(self, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Take a reduced bucket; `fold` adds it to the averages."""
        if any(piece.name in self._pending for piece in pieces):
            self.fold()
        self._copy(pieces, flat, self._newest_of, self._pending)

    def keep(self, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Keep this rank's own values of a bucket until the next snapshot."""
        self._copy(pieces, flat, self._own_of, self._kept)

    def fold(self) -> None:
        """Add what `add` took to the averages. Layers with non-finite values are skipped."""
        if not self._pending:
            return
        names = [name for name in self.samples if name in self._pending]
        self._pending.clear()
        places = self._places(names)
        for name in names:
            self.counts[name] += 1
        weights = [max(1 / self.counts[name], MEMORY) for name in names]
        # On a device one number needs no copy: layers nearly always come together.
        alike = weights.count(weights[0]) == len(weights)
        weight = torch.full_like(places, weights[0], dtype=torch.float32)
        if not alike:
            weight.copy_(torch.tensor(weights))
        norms = (
            torch.stack(torch._foreach_norm([self._newest_of[name] for name in names])) * self._scale[places]
        )
        finite = torch.isfinite(norms)
        before = self._squares[places]
        self._squares[places] = torch.where(finite, before.lerp(norms.square(), weight), before)
        self._latest[places] = norms
        if self._layer_of is None:
            for name, own, good in zip(names, weights, finite.tolist(), strict=True):
                if good:
                    self.averages[name].lerp_(self._newest_of[name], own)
            return
        # A branch would make the host wait for the device.
        by_layer = torch.zeros_like(self._squares)
        by_layer[places] = torch.where(finite, weight, 0.0)
        by_value = by_layer.index_select(0, self._layer_of)
        sound = torch.where(by_value > 0, self._newest, self._average)
        self._average.lerp_(sound, by_value)

    def snapshot(
        self, memory: ErrorFeedback | None = None, current: Mapping[str, int] | None = None
    ) -> Snapshot:
        """A copy of everything, with norms of the error feedback; own values are handed over.

        `current` has the bits of layers at which the errors of own values will be asked for.
        """
        self.fold()
        names = [name for name, count in self.counts.items() if count]
        places = self._places(names)
        owed = torch.zeros_like(self._latest[places])
        residuals = [None if memory is None else memory.residual(name) for name in names]
        if names and all(residual is not None for residual in residuals):
            held = [self.samples[n].of(r, 0) for n, r in zip(names, residuals, strict=True) if r is not None]
            owed = torch.stack(torch._foreach_norm(held)) * self._scale[places]
        kept, self._kept = self._kept, set()
        numbers = torch.stack([self._squares[places], self._latest[places], owed])
        values = SampledLayers(
            {name: self.samples[name].shape for name in names},
            average=self._joined(self._average, names),
            own=self._joined(self._own, [name for name in names if name in kept]),
            kept=kept,
            current=current or {},
        )
        return Snapshot({name: self.samples[name].numel for name in names}, numbers, values)

    def state_dict(self) -> dict[str, Any]:
        self.fold()
        own = {name: self._own_of[name].reshape(-1) for name in self.samples if name in self._kept}
        return {
            "averages": {name: value.cpu().clone() for name, value in self.averages.items()},
            "squares": self._squares.cpu().clone(),
            "latest": self._latest.cpu().clone(),
            "own": {name: value.cpu().clone() for name, value in own.items()},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if any(state["averages"][name].shape != average.shape for name, average in self.averages.items()):
            return  # shards of another number of ranks: start anew
        for name, average in self.averages.items():
            average.copy_(state["averages"][name])
        self._squares.copy_(state["squares"])
        self._latest.copy_(state["latest"])
        self._pending.clear()
        self._kept = set(state["own"])
        for name, value in state["own"].items():
            self._own_of[name].copy_(value.view(self.samples[name].shape))
        self.counts.update(state["counts"])

    def _by_name(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = values.split(self._sizes)
        return {
            name: part.view(sample.shape)
            for (name, sample), part in zip(self.samples.items(), parts, strict=True)
        }

    def _copy(
        self, pieces: Sequence[Piece], flat: torch.Tensor, into: Mapping[str, torch.Tensor], names: set[str]
    ) -> None:
        """The sampled values of a bucket's layers, whose names are added to `names`."""
        mine = [piece for piece in pieces if piece.name in self.samples]
        if mine:
            values = [self.samples[piece.name].of(flat, piece.offset) for piece in mine]
            torch._foreach_copy_([into[piece.name] for piece in mine], values)
            names.update(piece.name for piece in mine)

    def _joined(self, values: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """A copy of the values of these layers."""
        if len(names) == len(self.samples):
            return values.clone()
        parts = dict(zip(self.samples, values.split(self._sizes), strict=True))
        return torch.cat([parts[name] for name in names]) if names else values.new_empty(0)

    def _places(self, names: Sequence[str]) -> torch.Tensor:
        """The indices of these layers, on the device."""
        key = tuple(names)
        if key not in self._known:
            places = torch.tensor([self._names[name] for name in names], dtype=torch.int64)
            self._known[key] = places.to(self._latest.device)
        return self._known[key]


class Snapshot:
    """A copy of the statistics that the training no longer changes."""

    def __init__(self, numels: Mapping[str, int], numbers: torch.Tensor, values: SampledLayers) -> None:
        self._numels, self._numbers, self._values = numels, numbers, values

    def on_host(self, numbers: torch.Tensor) -> list[Any]:
        """Numbers that were there before this copy, from the device; sleeps until they have arrived."""
        return list(self._values.on_host(numbers).tolist())

    def layers(self) -> list[Layer]:
        """The statistics of all layers; waits for the numbers from a device."""
        squares, latest, owed = self.on_host(self._numbers)
        return [
            Layer(
                name=name,
                numel=numel,
                norm=math.sqrt(squares[i]),
                latest=latest[i],
                owed=owed[i],
                values=self._values,
            )
            for i, (name, numel) in enumerate(self._numels.items())
        ]
