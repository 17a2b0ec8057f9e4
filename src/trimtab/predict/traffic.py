"""What one collective takes from the links, and what a rank computes between collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from trimtab.cluster.profile import CodecTime

if TYPE_CHECKING:
    from trimtab.predict.links import Fit

Collective = Literal["all_reduce", "all_gather", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

Way = Literal["both", "out", "in"]

POSTED = 0.1
"""Cost of a message that is sent together with others, over that of one that is waited for."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one collective takes from the links."""

    collective: Collective
    """The one whose measured rates apply."""

    waits: int
    """Messages that each wait for the one before."""

    nbytes: tuple[float, ...]
    """Through the interface of a host of each class."""

    beside: int = 0
    """Messages that a rank sends together with these."""

    ways: tuple[Way, ...] = ()
    """For each class, what its hosts do: send, receive, or both as by default."""

    @property
    def messages(self) -> float:
        """In units of messages that are waited for."""
        return self.waits + POSTED * self.beside

    def latency_s(self, fits: Sequence[Fit]) -> float:
        """Time before and between the bytes; `fits` are those of the host classes' links."""
        return max((self.messages * fit.per_message_s for fit in fits), default=0.0)

    def busy_latency_s(self, fits: Sequence[Fit]) -> float:
        """The same while the ranks compute."""
        return max((self.messages * max(fit.per_message_s, fit.busy_message_s) for fit in fits), default=0.0)

    def flow_s(self, fits: Sequence[Fit]) -> float:
        """Time of the bytes, through the interface that needs most of it."""
        return max((sent * fit.per_byte_s for sent, fit in zip(self.nbytes, fits, strict=True)), default=0.0)

    def seconds(self, fits: Sequence[Fit]) -> float:
        return self.latency_s(fits) + self.flow_s(fits)

    def way(self, fits: Sequence[Fit]) -> Way:
        """What the interface does that needs most time."""
        times = [sent * fit.per_byte_s for sent, fit in zip(self.nbytes, fits, strict=True)]
        return self.ways[times.index(max(times))] if self.ways else "both"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Calls of the codec on one rank, and the values that pass through them."""

    encoded: float = 0.0
    decoded: float = 0.0
    added: float = 0.0
    """Decoded and added to a sum."""

    encodes: int = 0
    decodes: int = 0
    adds: int = 0

    def seconds(self, codec: CodecTime, *, feedback: bool = False) -> float:
        """With error feedback every encoded value is also decoded again: only then it is known what was sent."""
        owed = codec.feedback.a + codec.decode.a if feedback else 0.0
        return (
            owed * self.encoded
            + codec.encode.a * self.encoded
            + codec.encode.c * self.encodes
            + codec.decode.a * self.decoded
            + codec.decode.c * self.decodes
            + codec.add.a * self.added
            + codec.add.c * self.adds
        )
