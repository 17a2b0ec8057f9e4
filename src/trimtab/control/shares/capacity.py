"""How many samples a rank's memory holds at once."""

from __future__ import annotations

import torch

_USABLE = 0.9
"""Part of the free memory to plan with: the allocator leaves gaps, and other work comes and goes."""


class Room:
    """Learns from the batches that ran; what has run once is known to fit."""

    def __init__(self, most: int | None) -> None:
        """`most` is the user's own limit, if there is one."""
        self._most = most
        self._largest = 0

    def batch(self, samples: int) -> None:
        """A batch of so many samples is about to run."""
        self._largest = max(self._largest, samples)

    def samples(self) -> int:
        """The most samples of one batch; -1 where nothing limits them."""
        measured = self._measured() if torch.cuda.is_initialized() and self._largest else None
        if measured is None:
            return -1 if self._most is None else self._most
        return measured if self._most is None else min(measured, self._most)

    def _measured(self) -> int:
        """Between steps: what stays is fixed; what the largest batch took on top of it grows with samples."""
        stays, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        free, whole = torch.cuda.mem_get_info()
        mine = torch.cuda.memory_reserved()
        allowed = torch.cuda.get_per_process_memory_fraction() * whole
        usable = min(free + mine, allowed) * _USABLE
        each = max(1.0, (peak - stays) / self._largest)
        return max(self._largest, int((usable - stays) / each))
