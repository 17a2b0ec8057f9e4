"""The ways to send gradients and weights that `bit_verdicts` judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.studies.simulated_wire import (
    AdaptiveBlocks,
    Blocks,
    Exact,
    Largest,
    LowRank,
    Shapes,
    WarmedUp,
    Wire,
    uniform4,
)

from trimtab.planning.compression.family import (
    ADAMW,
    BITS,
    BITS_FEEDBACK,
    BITS_SCALED,
    BITS_WIDE,
    FAMILIES,
    SGD,
)
from trimtab.wire_format import WEIGHT_BLOCK, encoded_bytes

WORKERS = 4
WARM_UP = 0.1
"""Of the steps: those without compression in methods that are warmed up."""

NUDGED = 3
"""Runs of fp32 from nudged weights, for each seed."""

CANARY, WEIGHT_CANARY = "1 bit, nearest (canary)", "FSDP2: gradients 4, weights 2 (canary)"
OTHER_DATA = "fp32, other data"
WORK = {
    Exact: "none",
    Blocks: "one pass",
    AdaptiveBlocks: "one pass",
    LowRank: "matrix products",
    Largest: "selection",
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the gradients, and with `weight_bits` the weights, of some runs travel."""

    make: Callable[[Shapes, Sequence[int], torch.device], Wire]
    weight_bits: int | None = None
    fsdp: bool = False
    nudge: int = 0
    """Which nudge of the initial weights; 0 is none."""

    other_data: bool = False


def methods(optimizer: str, steps: int) -> dict[str, Method]:
    """By name; fp32 first, then its noise."""

    def blocks(bits: int, **options: Any) -> Callable[[Shapes, Sequence[int], torch.device], Blocks]:
        return lambda shapes, seeds, device: Blocks(
            shapes=shapes, seeds=seeds, workers=WORKERS, bits=bits, **options
        )

    def exact(shapes: Shapes, seeds: Sequence[int], device: torch.device) -> Wire:
        return Exact(shapes)

    def adaptive(name: str) -> Callable[[Shapes, Sequence[int], torch.device], Wire]:
        family = FAMILIES[name]
        start = blocks(4, block=family.block, stochastic=family.stochastic, feedback=family.error_feedback)
        return lambda shapes, seeds, device: AdaptiveBlocks(
            start(shapes, seeds, device),
            name,
            optimizer,
            device,
        )

    def low_rank(rank: int, *, warm: bool = False) -> Callable[[Shapes, Sequence[int], torch.device], Wire]:
        exact_steps = int(WARM_UP * steps) if warm else 0
        return lambda shapes, seeds, device: WarmedUp(LowRank(shapes, seeds, WORKERS, rank), exact_steps)

    def largest(density: float) -> Callable[[Shapes, Sequence[int], torch.device], Wire]:
        return lambda shapes, seeds, device: Largest(shapes, WORKERS, density)

    owing: dict[str, Any] = {"stochastic": False, "feedback": True}
    averaged = {**owing, "averaged": True}
    chosen = {SGD: (BITS, BITS_FEEDBACK), ADAMW: (BITS_WIDE, BITS_SCALED)}[optimizer]
    return {
        "fp32": Method(make=exact),
        **{f"fp32, nudged {i}": Method(make=exact, nudge=i) for i in range(1, NUDGED + 1)},
        OTHER_DATA: Method(make=exact, other_data=True),
        "4 bits": Method(make=blocks(4)),
        "3 bits": Method(make=blocks(3)),
        "3 bits, blocks of 128": Method(make=blocks(3, block=128)),
        "3 bits, feedback": Method(make=blocks(3, **owing)),
        "2 bits, feedback": Method(make=blocks(2, **owing)),
        "2 bits, blocks of 128, feedback": Method(make=blocks(2, block=128, **owing)),
        **{f"adaptive, {name}": Method(make=adaptive(name)) for name in chosen},
        "3 bits, blocks of 128, 16-bit ranges": Method(make=blocks(3, block=128, short_ranges=True)),
        "2 bits, blocks of 128, 16-bit ranges, feedback": Method(
            make=blocks(2, block=128, short_ranges=True, **owing)
        ),
        "3 bits, averaged error in 8": Method(make=blocks(3, **averaged)),
        "2 bits, blocks of 128, averaged error in 8": Method(make=blocks(2, block=128, **averaged)),
        **{f"PowerSGD {rank}": Method(make=low_rank(rank)) for rank in (4, 8, 16, 32)},
        **{f"PowerSGD {rank}, warmed up": Method(make=low_rank(rank, warm=True)) for rank in (4, 16)},
        **{f"top-k {density:.0%}": Method(make=largest(density)) for density in (0.01, 0.05, 0.2)},
        CANARY: Method(make=blocks(1, stochastic=False)),
        "FSDP2: weights 8": Method(make=exact, weight_bits=8, fsdp=True),
        "FSDP2: gradients 4": Method(make=blocks(4, twice=False), fsdp=True),
        "FSDP2: gradients 4, weights 8": Method(make=blocks(4, twice=False), weight_bits=8, fsdp=True),
        "FSDP2: gradients 4, weights 4": Method(make=blocks(4, twice=False), weight_bits=4, fsdp=True),
        WEIGHT_CANARY: Method(make=blocks(4, twice=False), weight_bits=2, fsdp=True),
        "FSDP2: gradients 4, weights 1": Method(make=blocks(4, twice=False), weight_bits=1, fsdp=True),
    }


def sent_bytes(method: Method, wire: Wire, shapes: Shapes) -> float:
    """Of a rank's step; with FSDP2 also the weights, which are gathered twice."""
    if not method.fsdp:
        return wire.bytes_over_uniform4()
    bits = method.weight_bits or 0
    weights = sum(encoded_bytes(shape.numel(), bits, WEIGHT_BLOCK) for shape in shapes.values())
    gradients = wire.bytes_over_uniform4() * (0.5 if isinstance(wire, Exact) else 1.0)
    return gradients + weights / uniform4(shapes)


def work(wire: Wire) -> str:
    """What its codec does, in words."""
    inner = wire.wire if isinstance(wire, WarmedUp) else wire
    feedback = isinstance(inner, Blocks) and inner.feedback
    feedback = feedback or (isinstance(inner, AdaptiveBlocks) and inner.blocks.feedback)
    return WORK[type(inner)] + (", feedback" if feedback or isinstance(inner, LowRank | Largest) else "")
