"""Where a script meets the take-over of its batches: its DataLoaders, gradients and collectives."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import dataloader as torch_dataloader

from trimtab.control.shares.cutting import CutLoader
from trimtab.control.shares.script_collectives import is_of_script, watch_collectives
from trimtab.control.shares.takeover import Takeover
from trimtab.planning.shares.batch import Adjust


def take_over(
    sizes: Sequence[int] | None = None, rule: Adjust | None = None
) -> tuple[Takeover, Callable[[], None]]:
    """From here on the batches of this process are cut; returns what does it, and what ends it."""
    takeover = Takeover.current = Takeover(sizes, rule)
    iterator: Any = torch_dataloader._BaseDataLoaderIter
    begin, advance = iterator.__init__, iterator.__next__
    backward, differentiate = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(begin)
    def begin_epoch(self: Any, loader: Any) -> None:
        begin(self, loader)
        self._trimtab = source = takeover.source_of(loader)
        if isinstance(source, CutLoader):
            self._index_sampler, self._sampler_iter = source, iter(source)

    @functools.wraps(advance)
    def next_batch(self: Any) -> Any:
        try:
            data = advance(self)
        except StopIteration:
            if isinstance(self._trimtab, CutLoader):
                self._sampler_iter.ended = True
                self._trimtab.ended |= self._sampler_iter.training
            raise
        if self._trimtab is not None:
            takeover.delivered(self._trimtab, self._sampler_iter)
        return data

    @functools.wraps(backward)
    def weighted_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        weight = takeover.weight(roots)
        if weight != 1.0:
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
            starts = [None] * len(roots) if given is None else list(given)
            grad_tensors = [_weighted(*pair, weight) for pair in zip(roots, starts, strict=True)]
            tensors = roots
        backward(tensors, grad_tensors, *args, **kwargs)

    @functools.wraps(differentiate)
    def watched_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if is_of_script(sys._getframe(1).f_globals.get("__name__", "")):
            takeover.differentiated([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
        return differentiate(outputs, *args, **kwargs)

    iterator.__init__, iterator.__next__ = begin_epoch, next_batch
    torch.autograd.backward = torch.compiler.disable(weighted_backward)  # a compiled step must not trace it
    torch.autograd.grad = watched_grad
    give_collectives_back = watch_collectives(takeover.exchanged)

    def give_back() -> None:
        iterator.__init__, iterator.__next__ = begin, advance
        torch.autograd.backward, torch.autograd.grad = backward, differentiate
        give_collectives_back()
        Takeover.current = None

    return takeover, give_back


def _weighted(root: torch.Tensor, start: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    if start is not None:
        return start * weight
    return torch.full_like(root, weight) if root.numel() == 1 else None  # torch rejects the latter
