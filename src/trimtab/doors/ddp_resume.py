"""Reduces the first step of a resumed job in the buckets of the job that was saved.

DDP learns the order of gradients in the first backward pass of a process and only then builds its final buckets.
With three or more ranks, a bucket determines which rank adds up which values, and so their rounding: a resumed job
whose first step used DDP's provisional buckets would diverge from one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

Reduce = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]


class SavedBuckets:
    """Collects the buckets of one step, then reduces their gradients in the saved ones."""

    def __init__(self, buckets: Sequence[Sequence[str]], names: Mapping[int, str]) -> None:
        """`names` gives the name of a parameter by its id."""
        self._buckets, self._names = buckets, names
        self._held: list[tuple[GradBucket, Any]] = []

    def take(self, bucket: GradBucket, reduce: Reduce) -> Any:
        """A future of the bucket's average; all of them complete when the last bucket has arrived."""
        device = bucket.buffer().device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._held.append((bucket, future))
        if bucket.is_last():
            self._reduce(reduce)
            for held, waiting in self._held:
                waiting.set_result(held.buffer())
        return future

    def _reduce(self, reduce: Reduce) -> None:
        by_name = {
            self._names[id(parameter)]: (parameter, gradient)
            for bucket, _ in self._held
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        if sorted(by_name) != sorted(name for names in self._buckets for name in names):
            # The trained parameters differ from those of the saved job: its buckets do not apply.
            for bucket, _ in self._held:
                reduce(bucket.parameters(), bucket.gradients(), bucket.buffer())
            return
        for names in self._buckets:
            parameters = [by_name[name][0] for name in names]
            gradients = [by_name[name][1] for name in names]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            parts = [
                part.view_as(gradient)
                for part, gradient in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
            ]
            reduce(parameters, parts, flat)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part)
