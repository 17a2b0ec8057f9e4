"""Numbers and choices that ranks exchange between steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.errors import TrimtabError

T = TypeVar("T")


def rank_and_world_size(group: dist.ProcessGroup | None, verb: str) -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) for a process that was not launched with others."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrimtabError(
            f"{verb}: torchrun started several ranks, but there is no process group yet; call "
            f"torch.distributed.init_process_group() before trimtab.{verb}"
        )
    return 0, 1


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for the group's collectives."""
    nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def gather_numbers(values: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The numbers of all ranks, by rank. Collective."""
    world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if world_size == 1:
        return [values]
    device = collective_device(group)
    # On a stream of its own: the GPU goes on with the training while the ranks communicate.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with stream:
        own = torch.tensor(values, dtype=torch.float64, device=device)
        everyone = torch.empty(world_size * len(values), dtype=torch.float64, device=device)
        members = group or dist.group.WORLD
        assert members is not None
        all_gather_single(everyone, own, members)
        return [list(row) for row in everyone.view(world_size, -1).tolist()]


class LaterNumbers:
    """Numbers of all ranks for which nobody waits: each call returns those of the call before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group` is used for nothing else: what is under way on it may wait for a rank that is late."""
        self.group = group
        self._device = collective_device(group)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._pending: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def exchange(self, values: list[float]) -> list[list[float]] | None:
        """Send these numbers; returns those that the ranks sent in the last call, by rank, or None at first.

        Collective, but waits only for ranks that have not made the last call yet.
        """
        size, rows = self.group.size(), None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._pending is not None:
                work, everyone, _ = self._pending
                work.wait()
                rows = [list(row) for row in everyone.view(size, -1).tolist()]
            own = torch.tensor(values, dtype=torch.float64, device=self._device)
            everyone = torch.empty(size * len(values), dtype=torch.float64, device=self._device)
            started = all_gather_single(everyone, own, self.group, async_op=True)
            assert started is not None
            self._pending = started, everyone, own
        return rows


class NumbersOfOwners:
    """Exchanges numbers between steps while nobody waits, for several who use them at unlike times."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self._parent, self._device = parent, device
        self._numbers: weakref.WeakKeyDictionary[object, LaterNumbers] = weakref.WeakKeyDictionary()
        self._groups: list[dist.ProcessGroup] = []

    def of(self, owner: object) -> LaterNumbers:
        """Those of one owner. Its first call is collective."""
        if owner not in self._numbers:
            self._groups += private_groups(self._parent, self._device, 1)
            self._numbers[owner] = LaterNumbers(self._groups[-1])
        return self._numbers[owner]

    def close(self) -> None:
        destroy_groups(self._groups)


def require_equal_settings(settings: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise if a setting differs between ranks: a step would hang or skip samples. Collective."""
    hashes = [float(crc32(repr(value).encode())) for value in settings.values()]
    by_rank = gather_numbers(hashes, group)
    for index, (name, value) in enumerate(settings.items()):
        differing = [rank for rank, row in enumerate(by_rank) if row[index] != hashes[index]]
        if differing:
            raise TrimtabError(
                f"loader: {name} is {value} here and something else on ranks {differing}; call it with the same "
                "dataset and settings on every rank"
            )


def gather_choices(choice: T, group: dist.ProcessGroup | None) -> list[T]:
    """The choices of every rank of the group, by rank; only this one's without a group."""
    if group is None:
        return [choice]
    choices: list[Any] = [None] * group.size()
    dist.all_gather_object(choices, choice, group=group)
    return choices
