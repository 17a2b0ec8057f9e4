"""Scheduled contention: a host loses part of its speed for some steps of the training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:  # every rank reads its schedule, and starts without pydantic
    from trimtab.cluster import Cluster

_FORM = "HOST=SPEED@FROM:TO, for example b=0.5@20:60 (host b at half its speed from step 20 to 60)"
_PATTERN = re.compile(r"(?P<host>[^=@:\s]+)=(?P<speed>[0-9.eE+-]+)@(?P<start>[0-9]+):(?P<end>[0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Contention:
    """A host keeps only `speed` of its own speed after `from_step` optimizer steps, until `to_step`."""

    host: str
    speed: float
    """The fraction of its normal speed that the host keeps: above 0, at most 1."""

    from_step: int
    to_step: int | None = None
    """First step at which the host is back at full speed; None for never."""

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1:
            raise TrimtabError(
                f"schedule: {self.host}: speed {self.speed:g} is not above 0 and at most 1; "
                "it is the fraction of its speed that the host keeps"
            )
        if self.from_step < 0 or (self.to_step is not None and self.to_step <= self.from_step):
            raise TrimtabError(
                f"schedule: {self.host}: steps {self.from_step} to {self.to_step} are empty; "
                "FROM must be at least 0 and TO larger"
            )

    def covers(self, step: int) -> bool:
        """Whether it applies to the step after `step` finished ones."""
        return self.from_step <= step and (self.to_step is None or step < self.to_step)


def parse_contention(text: str) -> Contention:
    """Parse ``HOST=SPEED@FROM:TO``; without ``TO`` it lasts to the end."""
    match = _PATTERN.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        speed = float(match["speed"])
    except ValueError:
        raise TrimtabError(f"schedule: {text!r} is not of the form {_FORM}") from None
    end = match["end"]
    return Contention(
        host=match["host"], speed=speed, from_step=int(match["start"]), to_step=int(end) if end else None
    )


def check_schedule(schedule: Sequence[Contention], cluster: Cluster) -> None:
    """Raise for unknown hosts, and for overlapping contentions of one host."""
    hosts = [name for name, _ in cluster.machines()]
    for contention in schedule:
        if contention.host not in hosts:
            raise TrimtabError(
                f"schedule: no host {contention.host!r} in this cluster; its hosts are {', '.join(hosts)}"
            )
    ordered = sorted(schedule, key=lambda c: (c.host, c.from_step))
    for first, second in pairwise(ordered):
        if first.host == second.host and first.covers(second.from_step):
            raise TrimtabError(
                f"schedule: {first.host} has two speeds at step {second.from_step}; let one end before the other"
            )


def speed_left(schedule: Sequence[Contention], step: int) -> float:
    """The fraction of its speed that a host keeps in the step after `step` finished ones."""
    return next((c.speed for c in schedule if c.covers(step)), 1.0)
