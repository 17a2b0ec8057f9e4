"""Samples of the steps of one rank, made on the event writer's thread from the timestamps of `StepRecorder`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.report import events
from trimtab.wire_format import encoded_bytes

EVERY_STEP_UNTIL, MOST_BETWEEN = 64, 32
"""Steps that are all sampled, and the most steps between two samples."""

MOST_SPANS = 2000
"""Spans of a traced step that are written."""


def is_sampled(step: int) -> bool:
    """Whether a sample ends with this step, counted from 1: the same on all ranks."""
    if step < EVERY_STEP_UNTIL:
        return True
    return step % min(1 << (step // EVERY_STEP_UNTIL).bit_length(), MOST_BETWEEN) == 0


def is_traced(step: int) -> bool:
    """Whether the spans of this step are written: 5, 10, 20, 50, 100, 200, 500, ..."""
    leading = step
    while leading >= 10 and leading % 10 == 0:
        leading //= 10
    return step == 5 or (step >= 10 and leading in (1, 2, 5))


@dataclass(kw_only=True)
class StepTimes:
    """Timestamps of one step: values of `perf_counter`, or CUDA events; None where nothing was seen."""

    step: int = 0
    last_end: Any = None
    begin: Any = None
    forward_end: Any = None
    ready: Any = None
    """This rank's last gradient."""
    exchanged: Any = None
    """DDP has the averages."""
    end: Any = None
    samples: int = 0
    losses: list[Any] = field(default_factory=list)
    loss_by_script: bool = False
    stages: list[tuple[int, int, Any, Any]] = field(default_factory=list)
    """Bucket, stage, start and end of each part of a reduction that this rank computes; in sampled steps."""
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Name, start and end of collectives that a sharded model waits for inside its passes; in sampled steps."""


class StepSamples:
    """Adds up steps to samples. All calls are made on the writer's thread."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._device = device
        self.pieces: dict[str, tuple[int, int, int]] | None = None
        """Numel, bits and block of what is compressed, as it is now; None if nothing is."""
        world_size = (
            dist.get_world_size(getattr(model, "process_group", None)) if dist.is_initialized() else 1
        )
        self._factor = 2 * (world_size - 1) / world_size
        """Bytes that a rank sends in an all-reduce, over those that are reduced."""
        self._plain = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._anchor: tuple[Any, float] | None = None
        self._sums: dict[str, float] = {}
        self._losses: list[float] = []
        self._waited: float | None = None
        """Seconds of the last sampled step in which a sharded model waited inside its passes; None for others."""
        self._last: events.Event = {}

    def add(self, times: StepTimes, writer: events.EventWriter) -> list[events.Event]:
        """Add a step; returns what is to be written."""
        at = self._resolved(times)
        if at["end"] is None or at["begin"] is None:  # a captured CUDA graph has no timestamps
            return []
        stages = [
            (bucket, stage, self._time(start), self._time(end)) for bucket, stage, start, end in times.stages
        ]
        waits = [
            (name, self._time(start), self._time(end))
            for name, start, end in times.waits
            if None not in (start, end)
        ]
        event = self._measure(times, at, stages, [(start, end) for _, start, end in waits])
        for name in ("seconds", *_PARTS):
            self._sums[name] = self._sums.get(name, 0.0) + event[name]
        self._sums["steps"] = self._sums.get("steps", 0.0) + 1
        self._losses += [float(loss) for loss in times.losses]
        self._last = event
        if writer.wants_live:
            writer.live = {**event, "loss": self._losses[-1] if self._losses else None, **self._state()}
        written = []
        if is_traced(times.step):
            written.append(_trace(times.step, at, stages, waits))
        if is_sampled(times.step):
            written += self.finish()
        return written

    def finish(self) -> list[events.Event]:
        """The sample so far, if it has steps."""
        steps = self._sums.pop("steps", 0.0)
        if not steps:
            return []
        means = {name: round(total / steps, 6) for name, total in self._sums.items()}
        exposed = means["codec"] + means["wire"]
        means["codec"] = min(self._last["codec"], exposed)  # other steps' stages are not observed
        means["wire"] = round(exposed - means["codec"], 6)
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._sums, self._losses = {}, []
        return [{**self._last, "steps": int(steps), **means, "loss": loss, **self._state()}]

    def _measure(
        self,
        times: StepTimes,
        at: dict[str, float | None],
        stages: Sequence[tuple[int, int, float, float]],
        waits: list[tuple[float, float]],
    ) -> events.Event:
        begin, end = float(at["begin"] or 0), float(at["end"] or 0)
        ready, exchanged = at["ready"], at["exchanged"]
        if ready is None or exchanged is None:  # no gradient was seen: all of it counts as compute
            ready = exchanged = end
        last_end = begin if at["last_end"] is None else at["last_end"]
        codec = _covered([(start, stop) for _, _, start, stop in stages], ready, exchanged)
        exchange = exchanged - min(start for _, _, start, _ in stages) if stages else None
        if waits:
            self._waited = _covered(waits, begin, ready)
        waited = min(self._waited or 0.0, ready - begin)  # other steps' waits are not observed
        return {
            "time": round(end, 6),
            "kind": "step",
            "step": times.step,
            "steps": 1,
            "seconds": round(end - last_end, 6),
            "data": round(begin - last_end, 6),
            "compute": round(ready - begin - waited, 6),
            "codec": round(codec, 6),
            "wire": round(exchanged - ready - codec + waited, 6),
            "optimizer": round(end - exchanged, 6),
            "exchange": None if exchange is None else round(exchange, 6),
            "began": round(begin, 6),
            # A sharded model has no such moment: its ranks meet in every layer.
            "ready": None if at["ready"] is None or self._waited is not None else round(ready, 6),
            "exchanged": None if at["exchanged"] is None else round(exchanged, 6),
            "samples": times.samples or None,
        }

    def _state(self) -> dict[str, Any]:
        """Memory and bytes on the wire, as they are now."""
        plain = round(self._plain * self._factor)
        state: dict[str, Any] = {
            "memory": _memory(self._device),
            "sent": plain,
            "sent_plain": plain,
            "bits": None,
        }
        if self.pieces is not None:
            payload, values = payload_of(self.pieces)
            state |= {"sent": round(payload * self._factor), "bits": round(8 * payload / max(values, 1), 3)}
        if self._waited is not None:  # what a sharded model sends, weights included, is not counted
            state |= {"sent": None, "sent_plain": None}
        return state

    def _resolved(self, times: StepTimes) -> dict[str, float | None]:
        names = ("last_end", "begin", "forward_end", "ready", "exchanged", "end")
        stamps = {name: getattr(times, name) for name in names}
        if self._device.type == "cuda" and times.end is not None:
            self._wait_for(times.end)
        return {name: None if stamp is None else self._time(stamp) for name, stamp in stamps.items()}

    def _wait_for(self, event: Any) -> None:
        """Wait for the end of a step, and learn what time that is on the host's clock.

        Where the event is still to come, the host's clock is read right after it. Otherwise its distance to the last
        such event counts, from step to step, since CUDA's distances are in single precision.
        """
        pending = not event.query()
        event.synchronize()
        if pending or self._anchor is None:
            self._anchor = event, events.now()
        else:
            self._anchor = event, min(self._time(event), events.now())

    def _time(self, stamp: Any) -> float:
        if isinstance(stamp, float):
            return events.wall_time(stamp)
        assert self._anchor is not None
        stamp.synchronize()
        event, then = self._anchor
        return then + float(event.elapsed_time(stamp)) / 1e3


_PARTS = ("data", "compute", "codec", "wire", "optimizer")


def payload_of(pieces: dict[str, tuple[int, int, int]]) -> tuple[int, int]:
    """Encoded bytes of all parameters, and how many values they have."""
    values = sum(numel for numel, _, _ in pieces.values())
    return sum(encoded_bytes(numel, bits, block) for numel, bits, block in pieces.values()), values


def _covered(intervals: list[tuple[float, float]], start: float, end: float) -> float:
    """How much of the time from `start` to `end` the intervals cover together."""
    total, reached = 0.0, start
    for low, high in sorted(intervals):
        low, high = max(low, reached), min(high, end)
        if high > low:
            total += high - low
            reached = high
    return total


def _trace(
    step: int,
    at: dict[str, float | None],
    stages: Sequence[tuple[int, int, float, float]],
    waits: Sequence[tuple[str, float, float]],
) -> events.Event:
    begin, end = float(at["begin"] or 0), float(at["end"] or 0)
    spans: list[list[Any]] = []

    def add(lane: str, name: str, start: float | None, stop: float | None) -> None:
        if start is not None and stop is not None and stop > start and len(spans) < MOST_SPANS:
            spans.append([lane, name, round(start - begin, 6), round(stop - begin, 6)])

    add("data", "data", at["last_end"], begin)
    add("compute", "forward", begin, at["forward_end"])
    add("compute", "backward", at["forward_end"], at["ready"])
    add("wait", "wait for averages", at["ready"], at["exchanged"])
    add("optimizer", "optimizer", at["exchanged"], end)
    for name, start, stop in waits:
        add("wire", name, start, stop)
    by_bucket: dict[int, list[tuple[int, float, float]]] = {}
    for bucket, stage, start, stop in stages:
        by_bucket.setdefault(bucket, []).append((stage, start, stop))
    first = min(by_bucket, default=0)
    for bucket, parts in by_bucket.items():
        parts.sort()
        for place, (stage, start, stop) in enumerate(parts):
            add("codec", f"bucket {bucket - first}, stage {stage}", start, stop)
            if place + 1 < len(parts):
                add("wire", f"bucket {bucket - first}, stage {stage}", stop, parts[place + 1][1])
    return {"time": round(end, 6), "kind": "trace", "step": step, "began": round(begin, 6), "spans": spans}


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except (OSError, ValueError):
        return None
