"""Whether an earlier run of the same job compressed: in a close case, a run decides as the previous one did."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from trimtab.collectives.roll_call import roll_call
from trimtab.environment import cache_folder, logger

_MOST = 200
"""Jobs that are kept."""


class PastDecision:
    """The last decision of a job, identified by its gradient bytes, world size and device; rank 0 keeps it in a file.

    A file that cannot be read or written is ignored.
    """

    def __init__(self, gradient_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._key = f"{gradient_bytes} bytes, {group.size()} ranks, {device.type}"
        self._group = group
        self._path = cache_folder() / "decisions.json"

    def recall(self) -> bool | None:
        """The last decision; None if there is none. Every rank of the group calls it."""
        before = self._read().get(self._key) if self._group.rank() == 0 else None
        (first, *_) = roll_call(self._group, "past decision", json.dumps(before))
        known = json.loads(first)
        return known if isinstance(known, bool) else None

    def remember(self, compress: bool) -> None:
        """Store the decision for the next run; rank 0 writes."""
        if self._group.rank() != 0:
            return
        jobs = self._read()
        jobs.pop(self._key, None)
        jobs[self._key] = compress
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(dict(list(jobs.items())[-_MOST:])), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            logger().debug("%s: the decision is not remembered: %s", self._path, error)

    def _read(self) -> dict[str, Any]:
        try:
            jobs = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return jobs if isinstance(jobs, dict) else {}
