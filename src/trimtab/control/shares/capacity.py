"""How many samples fit into a rank's memory at once."""

from __future__ import annotations

import torch

_USABLE = 0.9
"""Fraction of the free memory to plan with: the allocator leaves gaps, and other work comes and goes."""


class BatchCapacity:
    """The largest batch of this rank, estimated from the batches that ran; a size that ran once fits."""

    def __init__(self, max_batch: int | None) -> None:
        """`max_batch` is the user's own limit, if any."""
        self._max_batch = max_batch
        self._largest = 0

    def record(self, samples: int) -> None:
        """A batch of this many samples is about to run."""
        self._largest = max(self._largest, samples)

    def samples(self) -> int:
        """The most samples in one batch; -1 if there is no limit."""
        limits = [] if self._max_batch is None else [self._max_batch]
        if torch.cuda.is_initialized() and self._largest:
            limits.append(self._estimate())
        return min(limits, default=-1)

    def _estimate(self) -> int:
        """Call between steps: what is allocated then is fixed; the largest batch's peak above it grows per sample."""
        fixed, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        allowed = torch.cuda.get_per_process_memory_fraction() * total
        usable = min(free + torch.cuda.memory_reserved(), allowed) * _USABLE
        per_sample = max(1.0, (peak - fixed) / self._largest)
        return max(self._largest, int((usable - fixed) / per_sample))
