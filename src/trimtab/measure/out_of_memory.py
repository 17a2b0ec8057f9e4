"""Running out of memory, noticed on time and by all ranks together."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "could not create a memory",
)

_KEPT_FREE = 0.05
"""Fraction of the available memory that a rank leaves alone: page tables, other programs."""


class OutOfMemoryOnRanksError(Exception):
    """Some ranks have no memory for their batch; raised on all ranks together.

    Args:
        samples: by rank, the number of samples that did not fit.
    """

    def __init__(self, samples: dict[int, int]) -> None:
        super().__init__(samples)
        self.samples = samples


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is torch's, Python's or a library's way to say that an allocation failed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
    )


class MemoryAgreement:
    """Lets ranks attempt something together: if one of them runs out of memory, it fails on all of them.

    Collective, like all of its methods. What it sends is allocated here, while there is memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
        self.check()

    @contextmanager
    def attempt(self, samples: int) -> Iterator[None]:
        """Run the block with a batch of so many samples, then `check`."""
        failed = 0
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = samples
        self.check(failed)

    def check(self, failed: int = 0) -> None:
        """Raise `OutOfMemoryOnRanksError` if a rank, here or elsewhere, had no memory for its number of samples."""
        self._samples.zero_()
        self._samples[dist.get_rank()] = failed
        if len(self._samples) > 1:
            dist.all_reduce(self._samples, op=dist.ReduceOp.MAX)
        by_rank = {rank: samples for rank, samples in enumerate(self._samples.tolist()) if samples}
        if by_rank:
            raise OutOfMemoryOnRanksError(by_rank)


@contextmanager
def allocations_fail_on_time(device: torch.device) -> Iterator[None]:
    """Inside, a CPU rank cannot allocate more than its share of the available memory.

    Without this limit Linux hands out more memory than there is, and kills the process that uses it.
    """
    if device.type != "cpu":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    share = available_bytes() * (1 - _KEPT_FREE) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = _own_data_bytes() + int(share)
    lowest = min([limit, *(bound for bound in before if bound != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def available_bytes() -> int:
    """Memory that this process can still use: what the machine has free, or what its control group allows."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = [int(fields["MemAvailable"].split()[0]) * 1024]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            root, limit, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            root, limit, used = "/sys/fs/cgroup", "memory.max", "memory.current"
        else:
            continue
        # In a container the group's own directory is the mount itself.
        for folder in (Path(root + group), Path(root)):
            with suppress(OSError, ValueError):  # no such file, or no limit ("max")
                available.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(0, min(available))


def _own_data_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()
