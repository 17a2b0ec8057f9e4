"""Rates of links, measured or nominal: the time of a message and of a byte.

How many messages and bytes an exchange takes is in `collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.errors import TrimtabError
from trimtab.predict.collectives import COLLECTIVES, Collective
from trimtab.predict.linear_fit import two_rates

EFFICIENCY = 0.93
"""Fraction of a link's nominal rate that is available for data, when nothing was measured."""

LATENCY_S = 50e-6
"""Time of a message on a link of unknown latency: switched Ethernet and two network stacks."""


NEARLY = 0.85
"""A fit that gives less than this part of the largest transfer's time is no line."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = per_message · messages + per_byte · bytes, for one collective on one link."""

    per_message_s: float
    per_byte_s: float
    drag: float = 0.0
    """Fraction of a rank's device that the transfer uses."""

    busy_message_s: float = 0.0
    """As `per_message_s`, while the ranks compute; less than that counts as that."""

    awaited_message_s: float = 0.0
    awaited_byte_s: float = 0.0
    """The same for single transfers that ranks start when they have just computed, and wait for; both 0 if unknown."""

    per_bucket_s: float = 0.0
    """Of the all-gather: what each compressed bucket takes beyond its messages, bytes and codec."""

    estimated: bool = False
    """Whether it comes from a link's nominal rate instead of a measurement."""

    @property
    def awaited(self) -> Fit:
        """The rates of transfers that ranks wait for when they have just computed."""
        if not self.awaited_message_s and not self.awaited_byte_s:
            return self
        return replace(self, per_message_s=self.awaited_message_s, per_byte_s=self.awaited_byte_s)


SHARED_MEMORY = Fit(per_message_s=20e-6, per_byte_s=1 / 4e9, estimated=True)
"""Between ranks of one host, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class JobLinks:
    """What is known of the links of a job."""

    between: Mapping[Collective, tuple[Fit, ...]]
    """For each class of hosts of the job's `Placement`, or between the ranks of a single host. What was not
    measured is missing."""

    inside: Mapping[Collective, Fit]
    """Between ranks of one host, before and after the exchange between hosts."""

    drag: Mapping[Collective, tuple[float, ...]]
    """For each role, the fraction of its device that a transfer uses."""

    trees: bool = False
    """Whether the backend also all-reduces along trees."""

    spared: tuple[bool, ...] = ()
    """For each role, whether the route spares all of its ranks (`Route.spared`); empty if it spares none."""

    @classmethod
    def uniform(cls, between: Fit, inside: Fit = SHARED_MEMORY, *, classes: int = 1) -> JobLinks:
        """The same rates for every collective and every class of hosts."""
        return cls(
            between=dict.fromkeys(COLLECTIVES, (between,) * classes),
            inside=dict.fromkeys(COLLECTIVES, inside),
            drag=dict.fromkeys(COLLECTIVES, ()),
        )

    def fits(self, collective: Collective) -> tuple[Fit, ...]:
        """Raises TrimtabError for a collective that was not measured."""
        if collective not in self.between:
            raise TrimtabError(
                f"links: {collective} was not measured on this link; run `trimtab probe` under torchrun on the hosts "
                "it joins, or give the link class a rate in the cluster file"
            )
        return self.between[collective]


def nominal(gbit_per_s: float, latency_us: float | None) -> Fit:
    """The fit of a link that was not measured."""
    per_message = LATENCY_S if latency_us is None else latency_us * 1e-6
    return Fit(per_message_s=per_message, per_byte_s=8 / (gbit_per_s * 1e9 * EFFICIENCY), estimated=True)


def fit(points: Sequence[tuple[float, float, float]], *, drag: float = 0.0) -> Fit:
    """Least squares in relative error over (messages, bytes, seconds); neither rate is negative.

    Where large transfers are slower per byte than small ones (queues and allowances fill up), the large ones count.
    """
    if len(points) < 2:
        raise TrimtabError(
            f"links: {len(points)} measurement(s) cannot separate latency from bandwidth; take two sizes"
        )
    message, byte = two_rates(points)
    count, sent, seconds = max(points, key=lambda point: point[1])
    convex = message < 0 or message * count + byte * sent < NEARLY * seconds
    if not convex and byte >= 0:
        return Fit(per_message_s=message, per_byte_s=byte, drag=drag)
    # No line: large transfers are slower per byte than small ones, or small ones were disturbed.
    if convex and sent > 0:
        return Fit(per_message_s=0.0, per_byte_s=seconds / sent, drag=drag)
    return Fit(per_message_s=seconds / count if count else 0.0, per_byte_s=0.0, drag=drag)
