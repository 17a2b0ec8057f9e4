"""How large DDP's buckets are where the link is slow: the last ones of a backward pass are short."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.workload.buckets import DEFAULT_MB, MIB

LAST_MB = (3.0, 4.8, 7.7, 12.3, 19.7)
"""The least size of the last buckets, the very last first; those before have DDP's default.

Nothing hides what is still on the wire when the backward pass ends. Shrinking sizes end with a short exchange, and the
wire keeps up if it takes at most 1 / 1.6 of the time in which a bucket is computed. With halves it falls behind where
it takes more than half: for 100 MB in 4 bits at 1 Gbit/s beside a backward pass of 170 ms, 20 ms are exposed instead
of 8. Short buckets all the way would cost more CPU time than they save.
"""


def short_last_buckets(nbytes: Sequence[int]) -> tuple[float, ...]:
    """The caps in MiB of DDP's buckets, in the order in which a backward pass fills them.

    Args:
        nbytes: sizes of the trained parameters in the order of the forward pass, so that the first is needed last.
    """
    sizes: list[int] = []
    open_ = 0
    for size in nbytes:
        open_ += size
        least = LAST_MB[len(sizes)] if len(sizes) < len(LAST_MB) else DEFAULT_MB
        if open_ >= least * MIB:
            sizes.append(open_)
            open_ = 0
    if open_:
        sizes.append(open_)
    return tuple(size / MIB for size in reversed(sizes))
