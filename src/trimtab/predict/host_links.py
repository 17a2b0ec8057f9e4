"""What was measured of the links inside and between hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """One kind of link, as measured: a message takes `latency_s`, then its bytes at the rate."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, messages: float, nbytes: float) -> float:
        return messages * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """What was measured of a job's links."""

    between: LinkSpeed
    """Between hosts; the rate is that of one host's interface, which its ranks share."""

    inside: LinkSpeed
    """Between ranks of one host, exact values; the rate at which one rank gives and takes them."""

    codec_bytes_per_s: float
    """Uncompressed bytes that a rank encodes, or decodes and adds, in a second."""
