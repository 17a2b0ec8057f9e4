"""Ranks that fail together: out of memory, noticed on time, or for any other reason."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "could not create a memory",
)

_FAILED = 2**31 - 1
"""Instead of a number of samples: a rank failed, and not for lack of memory."""

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


class FailedOnRanksError(TrimtabError):
    """Some ranks failed in what all ranks attempted together; raised on the others."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """`reasons`: by rank, in words."""
        super().__init__("; ".join(f"rank {rank}: {reason}" for rank, reason in list(reasons.items())[:4]))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is torch's, Python's or a library's way to say that an allocation failed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
    )


class Agreement:
    """Lets ranks attempt something together: if one of them fails, it fails on all of them, and none waits for it.

    Collective, like all of its methods. What it sends is allocated here, while there is memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
        self._disconnected = False
        self.check()

    @contextmanager
    def attempt(self, samples: int = 0) -> Iterator[None]:
        """Run the block, perhaps with a batch of so many samples, then `check`. This rank's own error is raised here.

        Inside, ranks meet in `check` alone, or before anything can fail on some of them.
        """
        failed, failure = 0, None
        try:
            yield
        except (OutOfMemoryOnRanksError, FailedOnRanksError):
            raise
        except Exception as error:
            if self._disconnected:
                raise
            if samples and is_out_of_memory(error):
                failed = samples  # the error is dropped, and the tensors of the failed step with it
            else:
                failed, failure = _FAILED, error
        try:
            self.check(failed, "" if failure is None else f"{type(failure).__name__}: {failure}")
        except FailedOnRanksError:
            if failure is not None:
                raise failure from None
            raise

    def check(self, failed: int = 0, reason: str = "") -> None:
        """Raise on every rank if one, here or elsewhere, has failed.

        Raises:
            OutOfMemoryOnRanksError: it had no memory for its number of samples.
            FailedOnRanksError: it failed otherwise.
        """
        self._samples.zero_()
        self._samples[dist.get_rank()] = failed
        if len(self._samples) > 1:
            self._disconnected = True  # unless the others answer
            dist.all_reduce(self._samples, op=dist.ReduceOp.MAX)
        by_rank = {rank: samples for rank, samples in enumerate(self._samples.tolist()) if samples}
        self._disconnected = False
        if _FAILED in by_rank.values():
            reasons: list[str] = [""] * len(self._samples)
            dist.all_gather_object(reasons, reason)
            raise FailedOnRanksError({rank: reasons[rank] for rank, n in by_rank.items() if n == _FAILED})
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
