"""Sampled gradients of all layers at one moment: what the codec would do to them, for all layers at once.

Everything is computed where the values are, in a few operations for all layers together, on a thread that has time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MOST_STRAIN = 8.0
_CONSTANT, _BROKEN = -1.0, -2.0
"""Instead of the strain of a block: all its values are equal; one is not finite."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The statistics of a layer at one moment, on the host."""

    name: str
    numel: int
    """Values of the whole layer."""

    norm: float
    """Norm of the whole layer in a typical step: the root of the running mean of squared norms."""

    latest: float
    """Norm of the whole layer at the last sample, possibly NaN or Inf."""

    values: SampledLayers
    owed: float = 0.0
    """Norm of this rank's error feedback for the whole layer."""

    @property
    def average(self) -> torch.Tensor:
        """Running average of the sampled values, 1-D fp32."""
        return self.values.averages[self.name]

    @property
    def own(self) -> torch.Tensor | None:
        """The sampled values of this rank's own gradient in the step before the look, 1-D fp32."""
        return self.values.owns.get(self.name)

    def relative_errors(
        self, bits: Iterable[int], *, stochastic: bool, block: int | None = None, own: bool = False
    ) -> dict[int, float]:
        """‖decoded - value‖ / ‖value‖ of the layer's average at each number of bits: what the codec does on average.

        With `own` it is the error of this rank's own gradient in one step: what compression really does there.
        It is never that of one step's *reduced* gradient: that was already encoded, and encoding it
        again with the same bits would lose almost nothing.
        """
        bits = tuple(bits)
        table = self.values.errors(bits, stochastic=stochastic, block=block, own=own)
        return table.get(self.name) or dict.fromkeys(bits, 0.0)

    def strain(self, block: int | None = None) -> float:
        """Bits that the layer needs, beyond those for a normal distribution, to represent its typical values as well.

        A block's range follows its largest values. If most values are far smaller (the rows of an embedding, the
        parts of a fused projection), they are lost in rounding although the error is small relative to the norm, and
        an optimizer that scales every value by its own size, as Adam does, turns that into noise. Half of the
        blocks that are not constant have at least this strain.
        """
        return self.values.strains(block)[self.name]


class SampledLayers:
    """The sampled values of some layers: running averages and, of some, this rank's own."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        *,
        average: torch.Tensor,
        own: torch.Tensor,
        kept: Collection[str],
        current: Mapping[str, int],
    ) -> None:
        """`average` and `own` hold the layers one after another: all of `shapes`, and those that are `kept`.

        `shapes` has the sampled blocks of each and their length. `current` are the bits at which errors of own
        values are measured together.
        """
        self._current = current
        self._shapes = dict(shapes)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        own_sizes = {name: size for name, size in sizes.items() if name in kept}
        self.averages: dict[str, torch.Tensor] = dict(
            zip(sizes, average.split(list(sizes.values())), strict=True)
        )
        self.owns: dict[str, torch.Tensor] = dict(
            zip(own_sizes, own.split(list(own_sizes.values())), strict=True)
        )
        self._stream: Any = None
        if average.device.type == "cuda":
            # Of its own, after what made the values: decisions must not wait for the training, nor it for them.
            self._stream = torch.cuda.Stream(average.device)
            self._stream.wait_stream(torch.cuda.current_stream(average.device))
        self._tables: dict[Any, Any] = {}

    def errors(
        self, bits: tuple[int, ...], *, stochastic: bool, block: int | None, own: bool
    ) -> dict[str, dict[int, float]]:
        """The codec's expected error over the norm, by layer and bits. Of own values: one number of bits, and the
        layers that have it now."""
        key = bits, stochastic, block, own
        if key not in self._tables:
            values = self.averages
            if own:
                values = {
                    n: part for n, part in self.owns.items() if self._current.get(n, bits[0]) == bits[0]
                }
            self._tables[key] = self._errors(values, bits, stochastic, block)
        table: dict[str, dict[int, float]] = self._tables[key]
        return table

    def strains(self, block: int | None) -> dict[str, float]:
        """The strain of every layer: see `Layer.strain`."""
        key = "strains", block
        if key not in self._tables:
            self._tables[key] = self._strains(block)
        table: dict[str, float] = self._tables[key]
        return table

    def on_host(self, values: torch.Tensor) -> npt.NDArray[Any]:
        """Their numbers; the thread sleeps until a device has them."""
        if self._stream is None:
            return np.asarray(values)
        with torch.cuda.stream(self._stream):
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            pinned.copy_(values, non_blocking=True)
            ready = torch.cuda.Event(blocking=True)  # a thread that spins would take a core
            ready.record()
        ready.synchronize()
        return np.asarray(pinned)

    def _errors(
        self, values: Mapping[str, torch.Tensor], bits: Sequence[int], stochastic: bool, block: int | None
    ) -> dict[str, dict[int, float]]:
        """Between two neighboring codes, at a fraction f from the lower one, rounding to nearest errs by the shorter
        way and stochastic rounding by f (1 - f) on average, squared and in units of their distance."""
        result: dict[str, dict[int, float]] = {}
        for length, names in self._by_length(values, block).items():
            with self._where():
                rows = torch.cat([values[name] for name in names]).view(-1, length)
                low, high = rows.aminmax(dim=1, keepdim=True)
                extent = high - low
                place = (rows - low) / torch.where(extent > 0, extent, 1.0)
                sums = [rows.square().sum(1)]
                for b in bits:
                    top = 2**b - 1
                    fraction = (place * top).frac_()
                    off = 1 - fraction
                    squared = off.mul_(fraction) if stochastic else off.minimum(fraction).square_()
                    sums.append(squared.sum(1) * (extent.view(-1) / top).square())
                by_block = torch.stack(sums)
            first = np.cumsum([0, *(values[name].numel() // length for name in names[:-1])])
            norms, *missed = np.add.reduceat(self.on_host(by_block), first, axis=1, dtype=np.float64)
            for i, name in enumerate(names):
                usable = norms[i] > 0 and math.isfinite(norms[i])
                result[name] = {
                    b: math.sqrt(one[i] / norms[i]) if usable else 0.0
                    for b, one in zip(bits, missed, strict=True)
                }
        return result

    def _strains(self, block: int | None) -> dict[str, float]:
        normal, result = NormalDist(), {}
        for length, names in self._by_length(self.averages, block).items():
            expected = 2 * normal.inv_cdf(1 - 1 / (length + 1)) / normal.inv_cdf(0.75)
            with self._where():
                rows = torch.cat([self.averages[name] for name in names]).view(-1, length)
                low, high = rows.aminmax(dim=1)
                span, typical = high - low, rows.abs().median(1).values
                beyond = (span / (expected * typical)).log2().clamp(0.0, _MOST_STRAIN)
                beyond = torch.where(span > 0, beyond, _CONSTANT)
                beyond = torch.where(torch.isfinite(span), beyond, _BROKEN)
            numbers, start = self.on_host(beyond).tolist(), 0
            for name in names:
                end = start + self.averages[name].numel() // length
                strains = sorted(number for number in numbers[start:end] if number != _CONSTANT)
                broken = not strains or strains[0] == _BROKEN
                result[name] = 0.0 if broken else strains[(len(strains) - 1) // 2]
                start = end
        return result

    def _by_length(self, values: Mapping[str, torch.Tensor], block: int | None) -> dict[int, list[str]]:
        """The layers by the length of their blocks: shorter blocks lie inside the sampled ones."""
        lengths: dict[int, list[str]] = {}
        for name in values:
            sampled = self._shapes[name][1]
            fits = block is not None and sampled % block == 0
            lengths.setdefault(block if fits and block is not None else sampled, []).append(name)
        return lengths

    def _where(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
