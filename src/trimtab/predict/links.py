"""How long a collective takes on a link: messages and bytes, at measured or nominal rates.

A collective is described by what the busiest host sends: a number of sequential messages and a volume of bytes.
Both follow from the collective, the number of ranks and their placement on hosts; the time of a message and of a
byte is a property of the link. So a measurement between two ranks also applies to more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.errors import TrimtabError
from trimtab.predict.linear_fit import two_rates

if TYPE_CHECKING:
    from collections.abc import Sequence

Collective = Literal["all_reduce", "all_gather", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "all_to_all")

EFFICIENCY = 0.93
"""Fraction of a link's nominal rate that is available for data, when nothing was measured."""

LATENCY_S = 50e-6
"""Time of a message on a link of unknown latency: switched Ethernet and two network stacks."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = per_message · messages + per_byte · volume, for one collective on one link."""

    per_message_s: float
    per_byte_s: float
    drag: float = 0.0
    """Fraction of a rank's device that the transfer uses."""

    estimated: bool = False
    """Whether it comes from a link's nominal rate instead of a measurement."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the ranks of a job are placed on hosts."""

    per_host: tuple[int, ...]
    """Ranks on each host, in rank order."""

    @property
    def world(self) -> int:
        return sum(self.per_host)

    @property
    def hosts(self) -> int:
        return len(self.per_host)


def volume(collective: Collective, nbytes: int, placement: Placement) -> tuple[int, float]:
    """(sequential messages, bytes that the busiest host sends) of a collective.

    Args:
        nbytes: for `all_reduce` of the whole vector; for `all_gather` what one rank contributes; for
            `all_to_all` what one rank sends to all others together.
    """
    world = placement.world
    if world == 1:
        return 0, 0.0
    if collective == "all_reduce":  # a ring crosses each host's link once in each direction
        return 2 * (world - 1), 2 * (world - 1) / world * nbytes
    if collective == "all_gather":
        return world - 1, float((world - 1) * nbytes)
    if placement.hosts == 1:
        return world - 1, float(nbytes)
    most = max(placement.per_host)
    return world - 1, most * nbytes * (world - most) / (world - 1)


def nominal(gbit_per_s: float, latency_us: float | None) -> Fit:
    """The fit of a link that was not measured."""
    per_message = LATENCY_S if latency_us is None else latency_us * 1e-6
    return Fit(per_message_s=per_message, per_byte_s=8 / (gbit_per_s * 1e9 * EFFICIENCY), estimated=True)


def fit(points: Sequence[tuple[int, float, float]], *, drag: float = 0.0) -> Fit:
    """Least squares in relative error over (messages, volume, seconds); neither rate is negative."""
    if len(points) < 2:
        raise TrimtabError(
            f"links: {len(points)} measurement(s) cannot separate latency from bandwidth; take two sizes"
        )
    message, byte = two_rates(points)
    if message >= 0 and byte >= 0:
        return Fit(per_message_s=message, per_byte_s=byte, drag=drag)
    # One of the two is negative: large transfers are slower per byte than small ones (queues fill up), or small
    # ones were disturbed. Large transfers are the ones that matter.
    count, sent, seconds = max(points, key=lambda point: point[1])
    if message < 0 and sent > 0:
        return Fit(per_message_s=0.0, per_byte_s=seconds / sent, drag=drag)
    return Fit(per_message_s=seconds / count if count else 0.0, per_byte_s=0.0, drag=drag)
