"""Measures what the settings of local steps are chosen from: the job's own link, and the computing time it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, harmonic_mean
from typing import Literal

import torch
import torch.distributed as dist

from trimtab.codec import Block, ErrorFeedback
from trimtab.collectives import Piece, runner_for
from trimtab.collectives.groups import destroy_groups
from trimtab.control.rank_values import gather_numbers
from trimtab.doors.ddp import stage_groups
from trimtab.local.agreement import outer_step
from trimtab.local.device import host_reduction, in_stream, streams_for
from trimtab.local.worker import STREAMS
from trimtab.local.workers import HOST
from trimtab.measure.exchange import LARGEST, measure_exchanges
from trimtab.measure.timing import call_seconds, slowest_seconds, synchronize
from trimtab.planning.local_steps import (
    MOST_FRAGMENTS,
    TRIED_BITS,
    TURNS,
    LocalChoice,
    choose_local_steps,
    every_step_seconds,
)
from trimtab.predict.exchange import Exchange

SMALL = 1 << 12
"""Values of the exchange that shows what one costs whatever its size."""

STREAM = 6
"""Exchanges that are timed one after another, as fragments travel."""


def measured_chooser(
    group: dist.ProcessGroup,
    device: torch.device,
    numel: int,
    *,
    largest: int,
    step_s: float,
    balanced: bool,
    workers: int,
    layers: int,
    max_penalty: float,
    bits: int | Literal["auto"] | None = "auto",
) -> partial[LocalChoice]:
    """Time exchanges on the job's own link. Returns what chooses from it. Collective.

    Args:
        numel: values of all trained parameters.
        largest: values of the largest of them.
        step_s: of this rank's own steps.
        balanced: batches will be shared out by speeds, so that all ranks take the same time.
        bits: where they are given, rounds are chosen for them.
    """
    on_gpu = device.type == "cuda"
    groups = stage_groups(group, device)
    gradients, work_s, trial = _exchanges(groups, device, numel)
    if on_gpu:
        destroy_groups(groups)
        groups, trial = stage_groups(group, HOST), min(numel, LARGEST)
    exchange_s = {}
    for bits in TRIED_BITS:
        several_s = _stream_s(bits, groups, device, trial, STREAM) * numel / trial
        alone_s = gradients[bits].compressed_s
        if on_gpu:  # gradients take another way
            alone_s = _stream_s(bits, groups, device, trial, 1) * numel / trial
        exchange_s[bits] = stream_s(alone_s, several_s, on_gpu)
    destroy_groups(groups)
    own = [step_s, work_s + _arithmetic_s(numel, device)]
    steps_s, works_s = zip(*gather_numbers(own, group), strict=True)
    step_s, work_s = harmonic_mean(steps_s) if balanced else max(steps_s), max(works_s)
    # `trimtab.compress` sends 3 bits or so.
    compressed_s = fmean(exchange.compressed_s for exchange in gradients.values())
    return partial(
        choose_local_steps,
        step_s=step_s,
        exchange_s=exchange_s if bits == "auto" else of_given_bits(exchange_s, bits),
        every_step_s=min(
            every_step_seconds(step_s, gradients[4].plain_s, 0.0, largest / numel),
            every_step_seconds(step_s, compressed_s, work_s, largest / numel),
        ),
        workers=workers,
        layers=layers,
        max_penalty=max_penalty,
        work_s=work_s,
    )


def _exchanges(
    groups: Sequence[dist.ProcessGroup], device: torch.device, numel: int
) -> tuple[dict[int, Exchange], float, int]:
    """What one exchange of so many values takes, by bits; the CPU time of one in 4 bits; and the values of the trial.

    Collective.
    """
    codecs = {str(bits): (_codec(bits), True) for bits in TRIED_BITS}
    measured = measure_exchanges(codecs, groups, device, numel)
    small = measure_exchanges({"4": codecs["4"]}, groups, device, min(numel, SMALL))["4"]
    whole = {int(bits): exchange.of(numel * 4) for bits, exchange in measured.items()}
    return whole, codec_work_s(measured["4"], small, numel), measured["4"].nbytes // 4


def of_given_bits(exchange_s: Mapping[int, float], bits: int | None) -> dict[int, float]:
    """What is measured in the nearest bits below, at their size: with the ranges of blocks they are a quarter more."""
    below = max((each for each in exchange_s if bits is None or each <= bits), default=min(exchange_s))
    return {below: exchange_s[below] * ((bits or 32) + 0.25) / (below + 0.25)}


def _codec(bits: int) -> Block:
    return Block(bits=bits, block=128, stochastic=False)


def stream_s(alone_s: float, several_s: float, on_gpu: bool = False) -> float:
    """Seconds by which each of many exchanges delays the next, from one alone and `STREAM` that follow each other.

    While one is on the wire the next is encoded. But each must arrive in the time of `TURNS` turns; of a model on a GPU
    earlier, as the host is up to a step ahead of the device, which is half of the shortest turn.
    """
    turns = TURNS - 0.5 if on_gpu else TURNS
    return max((several_s - alone_s) / (STREAM - 1), alone_s / turns)


def _stream_s(
    bits: int, groups: Sequence[dist.ProcessGroup], device: torch.device, numel: int, count: int
) -> float:
    """Seconds of several exchanges of so many values that follow each other, as fragments do. Collective."""
    piece = Piece(name="", offset=0, numel=numel, bits=bits, block=128)
    generator = torch.Generator().manual_seed(0)
    flats = torch.randn(count, numel, dtype=torch.float32, generator=generator).to(device)
    streams = streams_for(device, STREAMS)
    reductions = [
        host_reduction([(piece, flat.shape)], device, groups, _codec(bits), seed=0, feedback=ErrorFeedback())
        for flat in flats
    ]
    scale, runner = 1 / groups[0].size(), runner_for(HOST)

    def exchange_all() -> None:
        futures = []
        for index, (reduction, flat) in enumerate(zip(reductions, flats, strict=True)):
            steps, stream = reduction.steps(flat, step=0, scale=scale), streams[index % STREAMS]
            if stream is not None:
                steps = in_stream(steps, stream)
            futures.append(runner.submit(steps, flat))
        for future in futures:
            future.wait()

    if device.type == "cuda":
        exchange_all()  # compiles the kernels, and allocates
        synchronize(device)
    seconds = slowest_seconds(exchange_all, HOST, groups[0])
    synchronize(device)
    runner.close()
    return seconds


def codec_work_s(measured: Exchange, small: Exchange, numel: int) -> float:
    """CPU time in which all values are encoded and decoded, fragment by fragment.

    The trial on a slow link is small, so what an exchange costs whatever its size must not be counted once for each
    trial that fits the model.
    """
    if measured.nbytes <= small.nbytes:
        return measured.of(numel * 4).work_s
    per_byte = max(0.0, measured.work_s - small.work_s) / (measured.nbytes - small.nbytes)
    return MOST_FRAGMENTS * small.work_s + per_byte * numel * 4


def _arithmetic_s(numel: int, device: torch.device) -> float:
    """Computing time of the outer gradients and steps of all weights."""
    agreed, momentum, change = torch.zeros(
        3, min(numel, 1 << 20 if device.type == "cpu" else LARGEST), dtype=torch.float32, device=device
    )

    def step() -> None:
        outer_step(agreed, momentum, change, 1.0, 0.5)

    if device.type == "cuda":
        step()  # loads the kernels
    once = call_seconds(step, device, gpu_calls=5)
    # The copies and differences before and after it are about as many passes over the weights. On a GPU the codec is
    # part of it, and it was measured to cost the training more than its passes do by themselves (rounds of 7 steps,
    # which a factor of 6.6 chooses for ViT-B on four parts of an H200, were at 0.947 of ideal).
    return float((2 if device.type == "cpu" else 8) * once * numel / agreed.numel())
