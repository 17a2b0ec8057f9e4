"""Shared memory between real ranks: the bits of a sum in one process, and no harm from peers that fail."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.collectives.simulate import local_sum
from tests.support.pool import RanksError

from trimtab.codec import native
from trimtab.collectives import SharedMemory
from trimtab.collectives.cuda_staging import Staged
from trimtab.collectives.shared_memory import TYPES
from trimtab.collectives.shared_segment import PREFIX, remove_abandoned
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.pool import Pool

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the C++ library")

CPU = torch.device("cpu")
SMALL = 1 << 16
"""Bytes of a segment that needs many rounds."""


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def wide(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes: those that round, those too small for half precision, too large, and NaN."""
    generator = torch.Generator().manual_seed(rank)
    powers = torch.randint(-30, 17, (numel,), generator=generator)
    values = torch.ldexp(torch.randn(numel, generator=generator), powers).to(dtype)
    values[7::1001] = torch.inf
    values[11 + rank :: 1500] = torch.nan
    return values


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def collect(
    numels: list[int], dtype: torch.dtype, scale: float, staged: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each size an all-reduce, and a reduce-scatter of uneven shards followed by their all-gather."""
    shared = SharedMemory(world_group(), CPU, nbytes=SMALL)
    through = Staged(shared._bytes, shared, CPU) if staged else None
    results = []
    for numel in numels:
        first, second = wide(shared.rank, numel, dtype), wide(shared.rank, numel, dtype)
        shared.all_reduce(first, scale=scale)
        cuts = [0, *(numel // 7 for _ in range(shared.world - 1)), numel]
        if through is None:
            shared.reduce_scatter(second, cuts, scale=scale)
            shared.all_gather(second, cuts)
        else:
            through.reduce_scatter(second, cuts, scale)
            through.all_gather(second, cuts)
        results.append((first, second))
    dist.barrier()
    shared.close()
    return results


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_sums_have_the_bits_of_one_process(ranks: Pool, world: int, dtype: torch.dtype, staged: bool) -> None:
    numels = [0, 1, 3, 50_001, 100]
    reduced = ranks(world, collect, numels, dtype, 0.37, staged)
    for index, numel in enumerate(numels):
        values = [wide(rank, numel, dtype) for rank in range(world)]
        expected = local_sum(values, 0.37)
        for rank in range(world):
            for got in reduced[rank][index]:
                assert same_bits(got, expected), (numel, rank)


def two_jobs() -> tuple[torch.Tensor, int]:
    job = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shared = SharedMemory(groups[job], CPU, nbytes=SMALL)
    tensor = torch.full((30_000,), float(dist.get_rank() + 1))
    for _ in range(20):
        shared.all_reduce(tensor, scale=0.5)
    names = os.fstat(shared._segment.fd).st_nlink
    dist.barrier()
    shared.close()
    return tensor, names


def test_two_jobs_on_one_host_do_not_meet_and_leave_no_name(ranks: Pool) -> None:
    results = ranks(4, two_jobs, allow_groups=True)
    assert [float(tensor[0]) for tensor, _ in results] == [1.5, 1.5, 3.5, 3.5]
    assert all(bool((tensor == tensor[0]).all()) for tensor, _ in results)
    assert [names for _, names in results] == [0] * 4, "killed now, the job would leave nothing behind"


def beyond_32_bits() -> torch.Tensor:
    shared = SharedMemory(world_group(), CPU, nbytes=SMALL)
    flat = torch.empty((1 << 31) + 64, dtype=torch.bfloat16)  # pages that nobody touches take no memory
    start = 1 << 31
    flat[start:] = float(dist.get_rank())
    shared.all_gather(flat, [start + 5, start + 10, start + 20])
    dist.barrier()
    shared.close()
    return flat[start : start + 24].clone()


def test_places_beyond_32_bits(ranks: Pool) -> None:
    first, second = ranks(2, beyond_32_bits)
    assert first.tolist() == [0.0] * 10 + [1.0] * 10 + [0.0] * 4
    assert second.tolist() == [1.0] * 5 + [0.0] * 5 + [1.0] * 14


def a_peer_that(does: str) -> str:
    shared = SharedMemory(world_group(), CPU, nbytes=SMALL, timeout_s=0.4 if does == "is late" else 30.0)
    rank = dist.get_rank()
    tensor = torch.ones(1000)
    message = "no error"
    if rank == 1 and does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and does == "leaves":
        shared.close()
    elif rank == 0 or does == "calls another":
        try:
            shared.all_reduce(tensor[: 500 * (rank + 1)] if does == "calls another" else tensor)
        except TrimtabError as error:
            message = str(error)
    if rank == 0 and does == "is killed":
        raise AssertionError(message)
    if does == "is late" and rank == 0:
        with pytest.raises(TrimtabError, match="cannot be used any more"):
            shared.all_reduce(tensor)
    dist.barrier()
    shared.close()
    return message


def test_a_killed_peer_is_noticed_and_named(ranks: Pool) -> None:
    with pytest.raises(RanksError, match="rank 1 of the group has ended"):
        ranks(2, a_peer_that, "is killed")


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("leaves", "rank 1 of the group has ended or closed it"),
        ("is late", "rank 1 of the group is alive but did not take part within 0.4 s"),
        ("calls another", "rank 1 of the group made a different call"),
    ],
)
def test_a_peer_that_does_not_come_is_named(ranks: Pool, does: str, words: str) -> None:
    assert words in ranks(2, a_peer_that, does)[0]


def ask_for(nbytes: int) -> str:
    try:
        SharedMemory(world_group(), CPU, nbytes=nbytes)
    except TrimtabError as error:
        return str(error)
    return "no error"


def test_sizes_that_cannot_be_had_are_refused_on_every_rank(ranks: Pool) -> None:
    for message in ranks(2, ask_for, 100):
        assert "too small for 2 ranks" in message


def too_large() -> str:
    from trimtab.collectives.shared_segment import FOLDER, share

    before = {path.name for path in FOLDER.glob(PREFIX + "*")}
    try:
        share(1 << 50, [0, 1], world_group(), CPU)
    except TrimtabError as error:
        left = {path.name for path in FOLDER.glob(PREFIX + "*")} - before
        return f"{error} {left or 'nothing left'}"
    return "no error"


def test_a_file_system_that_is_too_small_is_named_with_its_room(ranks: Pool) -> None:
    for message in ranks(2, too_large):
        assert "rank 0: /dev/shm has" in message
        assert "--shm-size" in message
        assert "nothing left" in message


def lacking_on_one_rank() -> str:
    from trimtab.collectives.shared_segment import share

    try:
        share(4096, [0, 1], world_group(), CPU, failure="no library" if dist.get_rank() == 1 else "")
    except TrimtabError as error:
        return str(error)
    return "no error"


def test_what_one_rank_lacks_is_an_error_on_all_and_not_a_hang(ranks: Pool) -> None:
    for message in ranks(2, lacking_on_one_rank):
        assert message == "shared memory: rank 1: no library"


def not_a_tensor_for_it() -> list[str]:
    shared = SharedMemory(world_group(), CPU, nbytes=SMALL)
    messages = []
    calls: list[Callable[[], None]] = [
        lambda: shared.all_reduce(torch.zeros(4, dtype=torch.int32)),
        lambda: shared.all_reduce(torch.zeros(4, 4).t()),
        lambda: shared.reduce_scatter(torch.zeros(4), [0, 5]),
        lambda: shared.all_gather(torch.zeros(4), [3, 1]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"shared memory|cuts") as error:
            call()
        messages.append(str(error.value))
    shared.close()
    return messages


def test_what_it_cannot_take_is_refused(ranks: Pool) -> None:
    (messages,) = ranks(1, not_a_tensor_for_it)
    assert "torch.int32" in messages[0]
    assert "2 ascending places in 4 elements" in messages[2]


def test_what_a_killed_job_left_half_made_goes_with_the_next(tmp_path: Path) -> None:
    old, young, held = (tmp_path / f"{PREFIX}{os.getuid()}-{name}" for name in ("old", "young", "held"))
    other = tmp_path / "not-ours"
    for path in (old, young, held, other):
        path.write_bytes(b"x")
    for path in (old, held, other):
        os.utime(path, (time.time() - 60,) * 2)
    with held.open() as file:  # by a job that is still creating it
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_abandoned(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([young, held, other])
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, other])
