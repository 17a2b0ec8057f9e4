"""The result of a replay: spans on every lane, which waited for which, and where the step's time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "codec", "wire"]
PHASES = ("forward", "backward", "codec", "wire", "optimizer")
"""The phases that the time of a step is divided into."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that ran from `start` to `end`, in seconds since the step began."""

    role: int | None
    """Index of the role on whose device it ran; None for a transfer, which belongs to all."""

    lane: Lane
    phase: str
    name: str
    start: float
    end: float
    stage: int = 0
    cause: int | None = None
    """Index of the span whose end let this one start; None at the beginning of the step."""

    ticks: tuple[tuple[float, float], ...] = ()
    """(time, work left) wherever its speed changed, because it shared a device or the wire."""


@dataclass(frozen=True, kw_only=True)
class RoleTime:
    """The step as one rank of a role sees it."""

    name: str
    ranks: int
    compute_s: float
    """Forward, backward and optimizer, slowed down by what runs at the same time."""

    own_s: float
    """The same with the device to itself."""

    wait_s: float
    """From its last gradient to the last reduced bucket, and for buckets that it needs before that."""

    end_s: float

    @property
    def utilization(self) -> float:
        """Fraction of the step in which the device works on the model."""
        return self.own_s / self.end_s if self.end_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One replayed step."""

    step_s: float
    roles: tuple[RoleTime, ...]
    spans: tuple[Span, ...]

    def critical_path(self) -> tuple[Span, ...]:
        """The spans from the beginning of the step to its end, each of which waited for the one before."""
        if not self.spans:
            return ()
        index: int | None = max(range(len(self.spans)), key=lambda i: self.spans[i].end)
        path: list[Span] = []
        while index is not None:
            path.append(self.spans[index])
            index = path[-1].cause
        return tuple(reversed(path))

    def breakdown(self) -> dict[str, float]:
        """Seconds of the critical path by phase; they add up to the step."""
        parts = dict.fromkeys(PHASES, 0.0)
        for span in self.critical_path():
            parts[span.phase] += span.end - span.start
        return parts

    def critical_role(self) -> int:
        """Index of the role that computes longest on the critical path."""
        seconds = [0.0] * len(self.roles)
        for span in self.critical_path():
            if span.role is not None:
                seconds[span.role] += span.end - span.start
        return max(range(len(seconds)), key=seconds.__getitem__)


def bottleneck(timeline: Timeline, *, advice: bool = True) -> str:
    """The bottleneck of the step, in words, if wanted with where to find what helps."""
    parts = timeline.breakdown()
    total = timeline.step_s
    role = timeline.critical_role()
    name = timeline.roles[role].name
    if total <= 0:
        return "the step takes no time: it has no work"
    link = parts["wire"] / total
    codec = parts["codec"] / total
    compute = 1 - link - codec
    waits = [r.wait_s / total for r in timeline.roles]
    if link >= 0.4:
        return f"the link: {link:.0%} of the step is exposed communication"
    if codec >= 0.3:
        return f"encoding, decoding and reducing inside hosts: {codec:.0%} of the step"
    spread = max(waits) - min(waits)
    if len(timeline.roles) > 1 and spread > 0.1:
        remedy = (
            "; `trimtab plan` says whether smaller shares or a lower precision would help" if advice else ""
        )
        return f"the devices of {name}: the others wait for them up to {spread:.0%} of the step{remedy}"
    exposed = f", {link:.0%} exposed communication" if link >= 0.02 else ""
    return f"computing: {compute:.0%} of the step{exposed}; the ranks are even to within {spread:.0%} of it"
