"""What the tests of several ranks on one GPU share: NCCL ranks on slices of the card, and plain helpers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.bench.ranks import run_on_ranks, slices
from trimtab.collectives import finish
from trimtab.emulate import Emulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


def on_slices(count: int, function: Callable[..., Any], **spec: Any) -> Any:
    """Rank 0's result of `function(spec, report)` on `count` NCCL ranks, each with a slice of the GPU."""
    with Emulation(slices(count)) as emulation:
        return run_on_ranks(emulation, function, {"device": "cuda", **spec})


class WaitingRunner:
    """Finishes each reduction before the next begins, on the current stream: no overlap, so no race."""

    observe: Any = None

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        torch.cuda.synchronize()
        finish(steps)
        torch.cuda.synchronize()
        future: Any = torch.futures.Future(devices=[result.device] if result.is_cuda else [])
        future.set_result(result)
        return future

    def close(self, timeout: float | None = None) -> None:
        pass


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def agree(tensor: torch.Tensor) -> bool:
    """Whether this rank has rank 0's bits."""
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    return torch.equal(first, tensor)


def summed(*counts: int) -> list[int]:
    """Counts added over the ranks."""
    totals = torch.tensor(counts, device="cuda")
    dist.all_reduce(totals)
    return [int(total) for total in totals]
