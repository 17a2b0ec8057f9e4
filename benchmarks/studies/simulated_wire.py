"""What workers' gradients become on the wire, for many runs at once and without a network: trimtab's own codec on one
device, in the roundings that a scatter-reduce-allgather makes of every value.

Gradients are (runs, workers, values), already divided by the number of workers. Each `Wire` serves some runs; it
returns what every worker gets, (runs, values).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.codec import PowerSGD, TopK
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.codec.powersgd import matrix_shape, start
from trimtab.collectives.layout import Piece
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.statistics import Statistics
from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings
from trimtab.random_bits import OWN, REDUCED, name_hash, stream
from trimtab.wire_format import encoded_bytes

WHOLE = 1024
"""Chunks of owners begin at multiples of this many values."""

KEPT_OF_ERROR, ERROR_BLOCK = 0.8, 256
"""Of the averaged error of LoCo: what one step keeps of it (DeepSpeed's `err_beta`); it is stored in 8 bits."""

Shapes = Mapping[str, torch.Size]


class Wire(Protocol):
    """How the gradients of some runs travel."""

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        """What arrives of the workers' sum; `losses` are the workers', (runs, workers)."""

    def bytes_over_uniform4(self) -> float:
        """Bytes that a rank sends in a step now, over those of 4 bits in blocks of 1024."""


@dataclass(kw_only=True)
class Blocks:
    """Block quantization of every value: once by its worker, and (DDP) once more as a sum by its owner."""

    shapes: Shapes
    seeds: Sequence[int]
    """Of the runs: what keys their random numbers."""

    workers: int
    bits: int
    block: int = 1024
    stochastic: bool = True
    feedback: bool = False
    averaged: bool = False
    """Keep a running average of the error, in 8 bits, instead of the last error (LoCo)."""

    short_ranges: bool = False
    """A block's range takes 16 bits a number (bf16, rounded outward); simulated, the wire format has none."""

    twice: bool = True
    """False: sums stay with their owners, as in FSDP2's reduce-scatter."""

    def __post_init__(self) -> None:
        self._coded = sum(shape.numel() for shape in self.shapes.values())
        chunk = -(-self._coded // (self.workers * WHOLE)) * WHOLE
        owner = torch.arange(self._coded) // chunk
        self._owned = owner == torch.arange(self.workers)[:, None]
        self.layer_bits = [dict.fromkeys(self.shapes, self.bits) for _ in self.seeds]
        """By run and parameter."""
        self.residual: Tensor | None = None
        self._packings: tuple[Packing, Packing] | None = None

    def set_bits(self, run: int, bits: Mapping[str, int]) -> None:
        self.layer_bits[run].update(bits)
        self._packings = None

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        owned = self._owned = self._owned.to(gradients.device)
        target = gradients if self.residual is None else gradients + self.residual
        arrived = torch.where(owned, target, self._through(target, step, OWN))
        total = arrived.sum(1)
        sent = self._through(total[:, None], step, REDUCED)[:, 0] if self.twice else total
        if self.feedback:
            error = target - arrived + owned * (total - sent)[:, None]
            if self.averaged:
                before = torch.zeros_like(error) if self.residual is None else self.residual
                error = nearest(before.lerp(error, 1 - KEPT_OF_ERROR), 8, ERROR_BLOCK)
            self.residual = error
        return sent

    def bytes_over_uniform4(self) -> float:
        spared = 4 / self.block if self.short_ranges else 0.0
        own = sum(
            encoded_bytes(shape.numel(), bits[name], self.block) - spared * shape.numel()
            for bits in self.layer_bits
            for name, shape in self.shapes.items()
        )
        return own / len(self.layer_bits) / uniform4(self.shapes) * (1.0 if self.twice else 0.5)

    def _through(self, values: Tensor, step: int, stage: int) -> Tensor:
        """What is decoded of (runs, senders, values)."""
        if self.short_ranges:
            noise = torch.Generator(values.device).manual_seed(
                stream(self.seeds[0], step, 0, stage) & 0xFFFFFFFF
            )
            return short_ranges(values, self.bits, self.block, noise if self.stochastic else None)
        if self._packings is None:
            self._packings = self._packing(self.workers), self._packing(1)
        packing = self._packings[stage]
        flat = values.reshape(-1)
        payload = torch.empty(packing.nbytes, dtype=torch.uint8, device=values.device)
        kernels = kernels_for(values.device)
        kernels.encode(flat, packing, payload, stream=stream(0, step, 0, stage), stochastic=self.stochastic)
        decoded = torch.empty_like(flat)
        kernels.decode(payload, packing, decoded)
        return decoded.view_as(values)

    def _packing(self, senders: int) -> Packing:
        segments, offset = [], 0
        for seed, bits in zip(self.seeds, self.layer_bits, strict=True):
            for sender in range(senders):
                for name, shape in self.shapes.items():
                    key = name_hash(f"{name} of {seed} from {sender}")
                    segments.append(
                        Segment(
                            offset=offset,
                            numel=shape.numel(),
                            bits=bits[name],
                            block=self.block,
                            name_hash=key,
                        )
                    )
                    offset += shape.numel()
        return Packing(segments=tuple(segments), dtype=torch.float32)


class AdaptiveBlocks:
    """Bits of every layer chosen while it trains, by trimtab's own statistics and planner, for each run by itself."""

    def __init__(self, blocks: Blocks, family: str, optimizer: str, device: torch.device) -> None:
        self.blocks, self._optimizer, self._config = blocks, optimizer, Adaptive(family=family)
        self._pieces, offset = [], 0
        for name, shape in blocks.shapes.items():
            self._pieces.append(
                Piece(name=name, offset=offset, numel=shape.numel(), bits=blocks.bits, block=blocks.block)
            )
            offset += shape.numel()
        sizes = {name: (shape.numel(), WHOLE) for name, shape in blocks.shapes.items()}
        runs = range(len(blocks.seeds))
        self._statistics = [Statistics(sizes, device) for _ in runs]
        settings = PlannerSettings(name=family, gbit_per_s=0.0)
        self._planners = [BitPlanner(self._config.policy, settings, guard=True) for _ in runs]
        self._pending: tuple[int, list[dict[str, int]]] | None = None
        self._losses: list[Tensor] = []

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        config = self._config
        if self._pending is not None and self._pending[0] == step:
            for run, bits in enumerate(self._pending[1]):
                self.blocks.set_bits(run, bits)
        if step and step % config.look == 0:
            self._pending = step + config.delay, self._look(step)
        self._losses.append(losses[:, 0])
        if (step + 1) % config.look == 0:
            for statistics, own in zip(self._statistics, gradients[:, 0], strict=True):
                statistics.keep(self._pieces, own.contiguous())
        sent = self.blocks.reduce(gradients, step, losses).contiguous()
        if step % (5 if step >= config.warmup else 2) == 0:
            for statistics, reduced in zip(self._statistics, sent, strict=True):
                statistics.add(self._pieces, reduced)
                statistics.fold()
        return sent

    def bytes_over_uniform4(self) -> float:
        return self.blocks.bytes_over_uniform4()

    def _look(self, step: int) -> list[dict[str, int]]:
        losses = torch.stack(self._losses).mean(0).tolist()
        self._losses.clear()
        decisions = []
        for run, (statistics, planner) in enumerate(zip(self._statistics, self._planners, strict=True)):
            current = self.blocks.layer_bits[run]
            snapshot = statistics.snapshot(_Residuals(self, run), current)  # type: ignore[arg-type]
            decisions.append(
                planner.decide(
                    step,
                    snapshot.layers(),
                    current,
                    loss=losses[run],
                    may_plan=step >= self._config.warmup,
                    period=self._config.period,
                    optimizer=self._optimizer,
                )["bits"]
            )
        return decisions


class _Residuals:
    """Worker 0's error feedback of a run, as the statistics ask for it."""

    def __init__(self, wire: AdaptiveBlocks, run: int) -> None:
        self._wire, self._run = wire, run

    def residual(self, name: str) -> Tensor | None:
        held = self._wire.blocks.residual
        if held is None:
            return None
        piece = next(piece for piece in self._wire._pieces if piece.name == name)
        return held[self._run, 0, piece.span].contiguous()


class LowRank:
    """PowerSGD with error feedback, each step starting from the right factors of the one before."""

    def __init__(self, shapes: Shapes, seeds: Sequence[int], workers: int, rank: int) -> None:
        self._shapes, self._seeds, self._workers, self._codec = shapes, seeds, workers, PowerSGD(rank=rank)
        self._rights: dict[str, Tensor] = {}
        self._residual: Tensor | None = None

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        target = gradients if self._residual is None else gradients + self._residual
        sent, offset = torch.empty_like(target[:, 0]), 0
        for name, shape in self._shapes.items():
            span = slice(offset, offset + shape.numel())
            offset += shape.numel()
            rows, columns = matrix_shape(shape)
            rank = self._codec.rank_for(shape)
            if rank * (rows + columns) >= rows * columns:
                sent[:, span] = target[:, :, span].sum(1)
                continue
            # The workers' factors are summed exactly, so those of the sum are the same.
            matrix = target[:, :, span].sum(1).view(-1, rows, columns)
            if name not in self._rights:
                starts = [
                    start(columns, rank, name_hash(f"{name} of {seed}"), matrix.device)
                    for seed in self._seeds
                ]
                self._rights[name] = torch.stack(starts)
            left = orthonormal(matrix @ self._rights[name])
            right = self._rights[name] = matrix.mT @ left
            sent[:, span] = (left @ right.mT).flatten(1)
        self._residual = target - (sent / self._workers)[:, None]
        return sent

    def bytes_over_uniform4(self) -> float:
        own = sum(
            min(self._codec.nbytes(shape, torch.float32), 4 * shape.numel())
            for shape in self._shapes.values()
        )
        return own / uniform4(self._shapes)


class Largest:
    """Top-k with error feedback: every worker's entries reach all others in one all-gather."""

    def __init__(self, shapes: Shapes, workers: int, density: float) -> None:
        self._shapes, self._workers, self._codec = shapes, workers, TopK(density=density)
        self._residual: Tensor | None = None

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        target = gradients if self._residual is None else gradients + self._residual
        sent, offset = torch.zeros_like(target), 0
        for shape in self._shapes.values():
            values = target[..., offset : offset + shape.numel()]
            count = max(1, round(shape.numel() * self._codec.density))
            places = values.abs().topk(count, dim=-1, sorted=False).indices
            sent[..., offset : offset + shape.numel()].scatter_(-1, places, values.gather(-1, places))
            offset += shape.numel()
        self._residual = target - sent
        return sent.sum(1)

    def bytes_over_uniform4(self) -> float:
        own = sum(self._codec.nbytes(shape, torch.float32) for shape in self._shapes.values())
        # All-gathered: (W - 1) times the payload, not twice (W - 1) / W of it.
        return own * self._workers / 2 / uniform4(self._shapes)


class Exact:
    """Sums in fp32."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        return gradients.sum(1)

    def bytes_over_uniform4(self) -> float:
        return 4 * sum(shape.numel() for shape in self._shapes.values()) / uniform4(self._shapes)


@dataclass
class WarmedUp:
    """Exact sums for some steps, then another wire."""

    wire: Wire
    steps: int

    def reduce(self, gradients: Tensor, step: int, losses: Tensor) -> Tensor:
        return gradients.sum(1) if step < self.steps else self.wire.reduce(gradients, step, losses)

    def bytes_over_uniform4(self) -> float:
        return self.wire.bytes_over_uniform4()


def uniform4(shapes: Shapes) -> int:
    """Bytes of 4 bits in blocks of 1024."""
    return sum(encoded_bytes(shape.numel(), 4) for shape in shapes.values())


def nearest(values: Tensor, bits: int, block: int) -> Tensor:
    """Values as they arrive when the codec rounds them to nearest; blocks must not straddle what was not adjacent."""
    flat = values.reshape(-1)
    packing = Packing(
        segments=(Segment(offset=0, numel=flat.numel(), bits=bits, block=block),), dtype=torch.float32
    )
    payload = torch.empty(packing.nbytes, dtype=torch.uint8, device=values.device)
    kernels = kernels_for(values.device)
    kernels.encode(flat, packing, payload, stream=0, stochastic=False)
    decoded = torch.empty_like(flat)
    kernels.decode(payload, packing, decoded)
    return decoded.view_as(values)


def short_ranges(values: Tensor, bits: int, block: int, noise: torch.Generator | None) -> Tensor:
    """Values as they would arrive if (low, unit) took 16 bits each; stochastic with `noise`, else to nearest."""
    rows, levels = values.reshape(-1, block), (1 << bits) - 1
    low = _in_16_bits(rows.amin(1, keepdim=True), -1)
    unit = _in_16_bits((rows.amax(1, keepdim=True) - low) / levels, 1)
    places = (rows - low) / torch.where(unit > 0, unit, 1.0)
    shift = 0.5 if noise is None else torch.rand(places.shape, generator=noise, device=places.device)
    return (low + (places + shift).floor().clamp(0, levels) * unit).view_as(values)


def orthonormal(factors: Tensor) -> Tensor:
    """Orthonormal bases of the columns of many factors at once, by Cholesky: PowerSGD's product needs no other."""
    wide = factors.double()
    gram = wide.mT @ wide
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    jitter = (1e-12 * size + 1e-60)[:, None, None] * torch.eye(
        gram.shape[-1], device=gram.device, dtype=gram.dtype
    )
    triangle = torch.linalg.cholesky_ex(gram + jitter).L
    basis: Tensor = torch.linalg.solve_triangular(triangle.mT, wide, upper=True, left=False)
    return basis.float()


def _in_16_bits(values: Tensor, outward: int) -> Tensor:
    """As bf16, not above (`outward` = -1) or not below (1) the values, so that a range holds all of its block."""
    near = values.bfloat16().float()
    beyond = (near - values) * outward < 0
    # Half a unit in the last place is at most a 256th.
    return torch.where(beyond, (values + outward * values.abs() / 256).bfloat16().float(), near)
