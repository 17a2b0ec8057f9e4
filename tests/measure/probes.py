"""What the tests of probing share: a small model, and a group of one rank."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.measure.device import Task, alone
from trimtab.models.gpt import Gpt
from trimtab.models.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


CPU = torch.device("cpu")


def tiny() -> tuple[Gpt, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Gpt(width=32, layers=2, heads=2, context=16), (torch.zeros(2, 17, dtype=torch.int64),)


@contextmanager
def group_of_one() -> Iterator[None]:
    made = alone()
    try:
        yield
    finally:
        if made:
            dist.destroy_process_group()


def task(model: nn.Module, batch: tuple[torch.Tensor, ...], **changes: Any) -> Task:
    spec = ModelSpec(name="tiny", model=model, batch=batch)
    asked: dict[str, Any] = {"batches": (2, 3), "precisions": (), "bits": (4,), **changes}
    return Task(spec=spec, **asked)
