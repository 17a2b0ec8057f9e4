"""Checks before ranks exchange bytes: without them a mismatch is a hang, or a wrong result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.errors import TrimtabError


def require_agreement(
    fingerprint: int, device: torch.device, group: dist.ProcessGroup, *, what: str, remedy: str
) -> None:
    """Raise, on every rank, unless all ranks of the group have the same fingerprint. Collective."""
    mine = torch.tensor([fingerprint], device=device)
    everyone = torch.empty(group.size(), dtype=mine.dtype, device=device)
    all_gather_single(everyone, mine, group)
    differing = (everyone != mine).nonzero().view(-1).tolist()
    if differing:
        raise TrimtabError(
            f"ranks {differing} of the group compress {what} with other settings than rank {group.rank()}; {remedy}"
        )


def check_state_version(what: str, state: Mapping[str, Any], expected: int) -> None:
    """Refuse the state of another version of trimtab."""
    if state.get("version") != expected:
        raise TrimtabError(f"{what}: version mismatch: found {state.get('version')!r}, expected {expected}")
