"""Process groups of our own: named by their ranks, with the parent's timeout and backend, and gone when closed."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.collectives.roll_call import roll_call, timeout_of

if TYPE_CHECKING:
    from tests.support.pool import Pool

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def compress_beside_a_subgroup() -> float:
    """Ranks 0 and 1 have made one group more than rank 2."""
    pair = dist.new_group([0, 1])
    ddp = trimtab.compress(Ddp(nn.Linear(128, 128)), Block(bits=8))
    ddp(torch.full((4, 128), 1.0 + dist.get_rank())).sum().backward()
    if dist.get_rank() < 2:
        dist.destroy_process_group(pair)
    assert ddp.module.weight.grad is not None
    return float(ddp.module.weight.grad.mean())


def test_ranks_with_different_subgroups_meet(ranks: Pool) -> None:
    means = ranks(3, compress_beside_a_subgroup, allow_groups=True)
    assert means == [means[0]] * 3
    assert abs(means[0] - 8.0) < 0.01  # 4 × (1 + 2 + 3) / 3


def groups_of_parts() -> tuple[list[int], list[float]]:
    """Two pairs of four ranks at once, each pair naming only its own ranks."""
    rank = dist.get_rank()
    pair = (0, 3) if rank in (0, 3) else (1, 2)
    made = private_groups(world(), CPU, 2, ranks=pair)
    values = []
    for group in made:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        values.append(float(tensor))
    members = dist.get_process_group_ranks(made[0])
    destroy_groups(made)
    destroy_groups(made)  # again is allowed
    return members, values


def test_disjoint_parts_of_a_group(ranks: Pool) -> None:
    outer, inner = ([0, 3], [3.0, 3.0]), ([1, 2], [3.0, 3.0])
    assert ranks(4, groups_of_parts) == [outer, inner, inner, outer]


def inherited_timeout() -> tuple[float, float]:
    parent = dist.new_group(timeout=timedelta(seconds=7))
    assert isinstance(parent, dist.ProcessGroup)
    (own,) = private_groups(parent, CPU, 1)
    timeouts = timeout_of(parent).total_seconds(), timeout_of(own, CPU).total_seconds()
    destroy_groups([own])
    dist.destroy_process_group(parent)
    return timeouts


def test_the_timeout_is_the_parents(ranks: Pool) -> None:
    assert ranks(2, inherited_timeout) == [(7.0, 7.0)] * 2


def reused_name() -> list[list[str]]:
    """A destroyed group's name may come again; what was said under it must not."""
    heard = []
    for text in ("first", "second"):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        names = dist.distributed_c10d._world.pg_names
        own, names[group] = names[group], "the same"  # type: ignore[assignment]
        heard.append(roll_call(group, "test", f"{text} {dist.get_rank()}"))
        names[group] = own
        dist.destroy_process_group(group)
    return heard


def test_a_roll_call_hears_nothing_old(ranks: Pool) -> None:
    assert ranks(2, reused_name) == [[["first 0", "first 1"], ["second 0", "second 1"]]] * 2


def called_by_one_rank() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    message = ""
    if dist.get_rank() == 0:
        try:
            roll_call(group, "compress", "")
        except trimtab.TrimtabError as error:
            message = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    return message


def test_a_rank_that_does_not_come_is_named(ranks: Pool) -> None:
    message = ranks(2, called_by_one_rank)[0]
    assert "ranks [1]" in message
    assert "2 s" in message


def dropped_modules() -> list[dict[str, int]]:
    counts: list[dict[str, int]] = []
    for _ in range(3):
        ddp: Any = trimtab.compress(Ddp(nn.Linear(64, 64)), Block(bits=4))
        ddp(torch.ones(2, 64)).sum().backward()
        del ddp
        gc.collect()
        dist.barrier()
        names = dist.distributed_c10d._world.pg_names
        descriptors, tasks = (len(list(Path("/proc/self", part).iterdir())) for part in ("fd", "task"))
        counts.append(
            {
                "groups": len(names),
                "threads": threading.active_count(),
                "tasks": tasks,
                "descriptors": descriptors,
            }
        )
    return counts


def test_a_dropped_module_leaves_no_group_thread_or_descriptor(ranks: Pool) -> None:
    for counts in ranks(2, dropped_modules):
        assert counts[0]["groups"] == 1
        assert counts == [counts[0]] * 3
