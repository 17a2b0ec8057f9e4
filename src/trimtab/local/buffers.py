"""Running statistics, as of batch norm: once a round they become their mean over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from trimtab.collectives.reduction import PlainReduction


class AveragedBuffers:
    """Exchanges how buffers changed since the last time, so that constants stay as they are to the last bit.

    What is not finite on a worker counts as unchanged: one worker's NaN does not reach the others.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """All workers begin with the same values."""
        self._buffers, self._group = buffers, group
        self._dtype = reduce(torch.promote_types, (b.dtype for b in buffers), torch.float32)
        self._agreed = self._read()
        self._flat: torch.Tensor | None = None
        self._future: Any = None

    def _read(self) -> torch.Tensor:
        return torch.cat([b.detach().reshape(-1).to(self._dtype) for b in self._buffers]).cpu()

    @property
    def in_flight(self) -> bool:
        return self._future is not None

    def send(self, runner: Any) -> None:
        change = self._read().sub_(self._agreed)
        # Also where both are infinite, as in masks.
        self._flat = change.masked_fill_(~change.isfinite(), 0.0)
        plain = PlainReduction([self._group])
        self._future = runner.submit(
            plain.steps(self._flat, step=0, scale=1 / self._group.size()), self._flat
        )

    @torch.no_grad()
    def take(self) -> None:
        assert self._flat is not None
        self._future.wait()
        self._future = None
        self._agreed.add_(self._flat)
        means = self._agreed.split([b.numel() for b in self._buffers])
        for b, mean in zip(self._buffers, means, strict=True):
            b.copy_(mean.view_as(b))

    def restart(self) -> None:
        """Begin anew from the present values, which all workers have alike. Nothing may be under way."""
        self._agreed = self._read()

    def state_dict(self) -> torch.Tensor:
        """The mean of the last time, which is the same on every worker. An exchange under way is made again."""
        return self._agreed.clone()

    def load_state_dict(self, state: torch.Tensor) -> None:
        self._agreed.copy_(state)
