"""The settings of local steps."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import TrimtabError


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How often workers agree, how the change travels, and how large an outer step is."""

    every: int
    """Steps from one agreement on a parameter to the next."""

    outer_lr: float
    outer_momentum: float
    bits: int | None = None
    """Bits of the change of each weight; None sends it uncompressed."""

    block: int = 128
    fragments: int = 1
    """Groups of layers that are exchanged one after another, spread over a round."""

    delay: int = 0
    """Steps between sending a fragment and taking its average; so long nobody waits for the network or a worker. Where
    the next fragments are sent meanwhile, one is encoded while another is on the wire."""

    patience: int = 0
    """Steps by which a fragment may be taken later if it has not arrived. Where that happens, which step it is depends
    on the timing: a run with patience is not reproducible."""

    keep: float = 1.0
    """The part of a worker's own change during the delay that it keeps when it takes the average."""

    def __post_init__(self) -> None:
        wrong = {
            f"every={self.every}: use at least 1": self.every < 1,
            f"fragments={self.fragments}: use 1 to every ({self.every})": not 1
            <= self.fragments
            <= self.every,
            f"delay={self.delay}: use 0 to every ({self.every})": not 0 <= self.delay <= self.every,
            f"bits={self.bits}: use 1 to 8, or None": self.bits is not None and not 1 <= self.bits <= 8,
            f"patience={self.patience}: use at least 0": self.patience < 0,
            f"keep={self.keep}: use 0 to 1": not 0 <= self.keep <= 1,
            f"outer_lr={self.outer_lr}: use a number above 0": not 0 < self.outer_lr < float("inf"),
            f"outer_momentum={self.outer_momentum}: use 0 to below 1": not 0 <= self.outer_momentum < 1,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise TrimtabError(f"local_steps: {message}")
