"""How long a gradient exchange takes on a job's own link, plain and compressed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One gradient exchange of the same values, measured both ways on the job's own link."""

    nbytes: int
    """Size of the values, uncompressed."""

    plain_s: float
    """Time of the backend's all-reduce."""

    compressed_s: float
    """Time to encode, send and decode."""

    bits: int
    work_s: float = 0.0
    """CPU time of a rank in the compressed exchange; 0 where the values are on a GPU."""

    @property
    def gbit_per_s(self) -> float:
        """Rate at which the plain all-reduce processes the values."""
        return self.nbytes * 8 / self.plain_s / 1e9

    @property
    def cost_s(self) -> float:
        """What codecs are compared by: computing may hide the exchange, but not the work of a CPU in it."""
        return self.compressed_s + self.work_s

    def of(self, nbytes: int) -> Exchange:
        """The same exchange of so many bytes; both ways take time in proportion."""
        times = nbytes / self.nbytes
        return replace(
            self,
            nbytes=nbytes,
            plain_s=self.plain_s * times,
            compressed_s=self.compressed_s * times,
            work_s=self.work_s * times,
        )


def wire_seconds(nbytes: int, gbit_per_s: float) -> float:
    """Time of so many bytes on a link that processes values at this rate (`Exchange.gbit_per_s`)."""
    return nbytes * 8 / (gbit_per_s * 1e9)
