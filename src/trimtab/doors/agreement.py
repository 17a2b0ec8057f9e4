"""Refusing to go on when ranks would send or expect different bytes: a hang, or worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab._compat import all_gather_single
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    import torch.distributed as dist


def require_agreement(
    fingerprint: int, device: torch.device, group: dist.ProcessGroup, *, what: str, remedy: str
) -> None:
    """Raise, on every rank, unless all ranks of the group give the same number. Collective."""
    mine = torch.tensor([fingerprint], device=device)
    everyone = torch.empty(group.size(), dtype=mine.dtype, device=device)
    all_gather_single(everyone, mine, group)
    differing = (everyone != mine).nonzero().view(-1).tolist()
    if differing:
        raise TrimtabError(
            f"ranks {differing} of the group compress {what} with other settings than rank {group.rank()}; {remedy}"
        )
