"""`trimtab bench recorder`: what the run folder costs a job, as CPU time of the process and all its threads.

Wall time cannot show half a per cent. Two ranks train the same small steps recorded and unrecorded, in blocks that take
turns: the difference is what recording adds to a step, however long the step is. The share is that of a step with a
realistic batch. The writer's thread also wakes up where there is nothing to write; that is measured apart and added.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result, Timing, interleave
from trimtab.bench.ranks import run_on_cluster, two_hosts
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block
from trimtab.control.step_recorder import observe_backward
from trimtab.environment import RUN_DIR
from trimtab.models import tasks
from trimtab.report import events
from trimtab.report.live import LiveRun, frame_lines

PLAIN, RECORDED = "unrecorded", "recorded"
BLOCK = 50
"""Steps before the other case has its turn."""

SETTLE_S = 3 * events.EVERY_S
"""Seconds in which the writer's thread finishes with a block."""

IDLE_S = 4.0
"""Seconds in which the idle writer is measured."""

FRAMES = 50
"""Frames of the live view that are drawn."""

SMALL, REALISTIC = (64, 1, 16), (256, 8, 128)
"""Width, samples and tokens of each: of the steps that are compared, and of a realistic one."""

MOST = 0.005
"""Share of a step's CPU time that recording may take, and of a core's that the live view may take."""


def recorder(steps: int, refresh_s: float, progress: Progress) -> Result:
    """Recorded and unrecorded steps of two ranks, and frames of the live view, of which there is one in `refresh_s`."""
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        measured: dict[str, Any] = run_on_cluster(
            two_hosts(), on_rank, {"rounds": max(2, steps // BLOCK), "folder": folder}, progress
        )
        frame_s = _frame_seconds(Path(folder))
    rows = [
        {"method": method, "cpu_us_per_step": each["us"], "spread": each["spread"]}
        for method, each in measured["cases"].items()
    ]
    step_us = measured["realistic_us"]
    noise = abs(measured["aa_us"]) / step_us
    share = max(0.0, measured["added_us"]) / step_us + measured["idle_us_per_s"] / 1e6
    summary: dict[str, Any] = {
        "recorder_us_per_step": measured["added_us"],
        "aa_us_per_step": measured["aa_us"],
        "writer_idle_us_per_s": measured["idle_us_per_s"],
        "realistic_step_us": step_us,
        "share_of_step": share,
        "live_view_us_per_frame": frame_s * 1e6,
        "live_view_share_of_core": frame_s / refresh_s,
        "within_half_a_percent": max(share + noise, frame_s / refresh_s) <= MOST,
    }
    return Result(bench="recorder", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """CPU time of a step by case, of the rank whose recording costs most."""
    observe_backward()
    os.environ[RUN_DIR] = spec["folder"]
    trainers = {RECORDED: _trainer(SMALL)}
    del os.environ[RUN_DIR]
    trainers |= {name: _trainer(SMALL) for name in (PLAIN, PLAIN + AA)}
    cases = {name: partial(_cpu_seconds, trainer, BLOCK) for name, trainer in trainers.items()}
    timings = interleave(cases, warmup=1, repeats=spec["rounds"], progress=report)
    writer = events.writer()
    assert writer is not None
    idle = writer.cpu_seconds
    time.sleep(IDLE_S)
    idle = (writer.cpu_seconds - idle) / IDLE_S
    realistic = _trainer(REALISTIC)
    _cpu_seconds(realistic, 3)
    own = {
        "cases": {
            name: {"us": each.median_ms * 1e3, "spread": each.spread} for name, each in timings.items()
        },
        "added_us": _difference_us(timings[RECORDED], timings[PLAIN]),
        "aa_us": _difference_us(timings[PLAIN + AA], timings[PLAIN]),
        "idle_us_per_s": idle * 1e6,
        "realistic_us": _cpu_seconds(realistic, 10) * 1e6,
    }
    events.close(0)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return max(everybody, key=lambda rank: float(rank["added_us"]))


def _frame_seconds(folder: Path) -> float:
    """CPU time in which the live view reads what is new and draws a frame."""
    live = LiveRun(folder)
    live.poll()
    start = time.process_time()
    for _ in range(FRAMES):
        frame_lines(live.poll(), 120, color=True)
    return (time.process_time() - start) / FRAMES


def _trainer(size: tuple[int, int, int]) -> Trainer:
    width, samples, context = size
    task = tasks.gpt(width=width, layers=4, heads=8, context=context, samples=samples)
    ddp = DistributedDataParallel(task.model)
    trimtab.compress(ddp, Block(bits=4))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    return Trainer(ddp, optimizer, lambda step: task.batch(step=step))


def _cpu_seconds(trainer: Trainer, steps: int) -> float:
    """CPU time of a step, with what other threads do about it."""
    batches = [trainer.batch(step) for step in range(steps)]
    dist.barrier()
    start = time.process_time()
    for batch in batches:
        trainer.train(batch)
    time.sleep(SETTLE_S)
    return (time.process_time() - start) / steps


def _difference_us(one: Timing, other: Timing) -> float:
    """Median of the round-by-round differences."""
    pairs = zip(one.samples, other.samples, strict=True)
    return Timing(samples=tuple(a - b for a, b in pairs)).median_ms * 1e3
