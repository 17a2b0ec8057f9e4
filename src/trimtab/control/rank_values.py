"""Numbers that the ranks of a job tell each other between steps."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Mapping


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and number of ranks; a process that nobody launched in company is alone."""
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise TrimtabError(
                "loader: torchrun started several ranks, and they have not met yet; call "
                "torch.distributed.init_process_group() before trimtab.loader"
            )
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for the group's collectives."""
    nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def gather(values: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Every rank's numbers, by rank."""
    _, world = place(group)
    if world == 1:
        return [values]
    device = device_of(group)
    # Beside the stream of the training: the GPU goes on with what it has while the hosts talk.
    aside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with aside:
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        everyone = torch.empty(world * len(values), dtype=torch.float64, device=device)
        members = group or dist.group.WORLD
        assert members is not None
        all_gather_single(everyone, mine, members)
        return [list(row) for row in everyone.view(world, -1).tolist()]


def refuse_differences(settings: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Settings that must be the same on every rank, or a step would hang or leave samples out."""
    mine = [float(crc32(repr(value).encode())) for value in settings.values()]
    every = gather(mine, group)
    for index, (name, own) in enumerate(settings.items()):
        differing = [rank for rank, row in enumerate(every) if row[index] != mine[index]]
        if differing:
            raise TrimtabError(
                f"loader: {name} is {own} here and something else on ranks {differing}; call it with the same "
                "dataset and settings on every rank"
            )
