"""Detects which ranks share a host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single

_TEXT = 512
"""Bytes of a rank's text; longer texts are cut off."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The ranks of a process group, by host. Hosts are in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks as the group counts them, ascending on each host."""

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """Into how many shards a bucket is cut: each needs an owner on every host, so the smallest host counts."""
        return min(len(members) for members in self.ranks)

    def seat(self, rank: int) -> tuple[int, int]:
        """The index of the rank's host, and the rank's index on it."""
        for host, members in enumerate(self.ranks):
            if rank in members:
                return host, members.index(rank)
        raise ValueError(f"rank {rank} is on none of the hosts {self.ranks}")

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same index on every host, this one included; ascending, as c10d sorts a group's.

        None for a rank beyond the number of shards: it owns none.
        """
        _, index = self.seat(rank)
        return tuple(sorted(members[index] for members in self.ranks)) if index < self.shards else ()

    def flat_reason(self) -> str | None:
        """Why these ranks form no hierarchy; None if they do."""
        if max(len(members) for members in self.ranks) == 1:
            return "every host has one rank: there is nothing to reduce inside a host"
        return None


def hosts_of(names: Sequence[str]) -> Hosts:
    """The hosts, given the name of each rank's host."""
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_of.setdefault(name, []).append(rank)
    return Hosts(ranks=tuple(tuple(members) for members in ranks_of.values()))


def find_hosts(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    """The hosts of a group's ranks. Collective: every rank calls it at the same point."""
    return hosts_of(gather_texts(own_host(), group, device))


def own_host() -> str:
    """A name that all ranks of one host, and no others, have in common.

    Under torchrun the index of its agent, because emulated hosts share a machine's name. Otherwise the machine's
    name and boot id, because machines made from one image often have the same name.
    """
    agent = os.environ.get("GROUP_RANK")
    if agent is not None:
        return f"agent {agent} of {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def gather_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every rank's text, by rank. Collective."""
    data = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyone = torch.empty(dist.get_world_size(group) * _TEXT, dtype=torch.uint8, device=device)
    all_gather_single(everyone, mine, group)
    rows = everyone.cpu().view(-1, _TEXT)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
