"""`trimtab.loader`: every rank gets the part of each global batch that it can process in the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from os import PathLike
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trimtab import environment
from trimtab.control.plans.active_plan import active_plan_for
from trimtab.control.plans.tensor_layout import group_share
from trimtab.control.rank_values import gather_numbers, rank_and_world_size
from trimtab.control.shares.loader import FOLLOW_SPEEDS, Loader
from trimtab.control.shares.rounds import RoundLoader, RoundSampler, round_length
from trimtab.control.shares.sampler import ShareSampler
from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan
from trimtab.planning.shares.batch import Adjust, share_batch

_OWN_OPTIONS = ("sampler", "batch_sampler", "generator")

_NO_ROUNDS = (
    'loader: uneven={uneven!r}: use "batches", or "steps" with a batch_size that is a multiple of the {world_size} '
    "ranks, and without accumulate, batch_sizes and plan"
)


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    accumulate: int | None = None,
    count: Callable[[Any], int | torch.Tensor] | None = None,
    shares: Sequence[float] | None = None,
    batch_sizes: Sequence[int] | None = None,
    plan: Plan | str | PathLike[str] | torch.nn.Module | None = None,
    max_batch: int | None = None,
    min_batch: int = 1,
    adjust: Adjust | None = FOLLOW_SPEEDS,
    uneven: Literal["batches", "steps"] = "batches",
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Loader:
    """Batches for this rank, as large as its speed and memory allow. Every rank calls it with the same arguments.

    ::

        data = trimtab.loader(dataset, batch_size=256)
        for inputs, targets in data:
            data.weigh(F.cross_entropy(ddp(inputs), targets)).backward()
            optimizer.step(); optimizer.zero_grad()

    Args:
        batch_size: the global batch: samples of a step, over all ranks and accumulated batches. It does not
            change, so neither does the training; only the ranks' shares of it do.
        accumulate: micro-batches of each rank in a step; by default those of the plan, or one. Gradients are
            averaged at the last one: ``with data.sync(ddp):``.
        count: what a batch counts for in the loss's denominator, if that is not samples: for a mean over
            tokens ``lambda batch: (batch["labels"] != -100).sum()``. Costs one small all-reduce per step.
        shares: speeds to start from, one per rank; by default equal.
        batch_sizes: samples of a step for each rank, which then do not change: [24, 11, 11] for a batch of 46.
        plan: the plan whose shares to start from: a plan, its file, or a model that a plan was applied to
            (`trimtab.apply`), whose later plans are followed too. Under `trimtab run --plan` the default is that
            plan, unless `shares` are given.
        max_batch: the most samples that this rank has memory for at once; on a GPU it is also measured.
        min_batch: the fewest samples of a rank at once (BatchNorm on vectors needs 2).
        adjust: when shares follow measured speeds; None keeps the shares fixed. With a plan for equal shares
            or for FSDP2 they are fixed too, unless an `Adjust` is given.
        uneven: with `trimtab.local_steps`, "steps" gives every rank batches of the same size, batch_size / ranks, and a
            faster rank more of them in a round. The ranks then meet only where ``data.round_ends``: save, evaluate and
            step learning-rate schedules there.
        shuffle: in an order that depends on `seed` and the epoch alone.
        drop_last: drop the last samples of an epoch if they do not fill a step.
        group: the ranks that train together; by default all. In a tensor-parallel job the data-parallel ones,
            ``mesh.get_group("dp")``, with ``adjust=None``: ranks of a tensor group then get the same samples.
        options: passed to torch's DataLoader: ``num_workers``, ``collate_fn``, ``pin_memory``, ...
    """
    size = _checked_size(dataset, batch_size, adjust, options)
    if plan is not None and shares is not None:
        raise TrimtabError("loader: give shares or plan, not both")
    if batch_sizes is not None:
        shares, adjust = _fixed_sizes(batch_sizes, batch_size, shares, plan), None
    active_plan = None
    if shares is None and not environment.disabled():
        if group is None and isinstance(plan, DistributedDataParallel):
            group = plan.process_group
        active_plan = active_plan_for(plan, group)
    rank, world_size = rank_and_world_size(group, "loader")
    tensor_groups = () if active_plan is None else active_plan.plan.tensor_groups
    if tensor_groups:
        rank, world_size = group_share(tensor_groups, group)
    planned = 1 if active_plan is None else active_plan.plan.accumulate
    if accumulate is None:
        accumulate = planned
    elif accumulate % planned:
        raise TrimtabError(
            f"loader: the plan divides a step into {planned} micro-batches because memory holds no more at once; with "
            f"accumulate={accumulate} they would be larger: leave it out, or give a multiple of {planned}"
        )
    smallest = world_size * accumulate * min_batch
    if batch_size < smallest or accumulate < 1 or min_batch < 1:
        raise TrimtabError(
            f"loader: a step of {batch_size} samples cannot give each of {world_size} ranks {accumulate} batches of "
            f"at least {min_batch}; batch_size counts all ranks and accumulated batches: raise it to "
            f"{max(1, smallest)} or more"
        )
    if active_plan is not None:
        shares = active_plan.plan.shares
        if adjust is FOLLOW_SPEEDS and (
            active_plan.plan.batch == "fixed" or active_plan.plan.wrapper == "fsdp" or tensor_groups
        ):
            # FSDP2 waits for other ranks in every unit, and a tensor group in every block: a rank's own time is not
            # known.
            adjust = None
    speeds = [1.0] * world_size if shares is None else [float(share) for share in shares]
    if len(speeds) != world_size or min(speeds) <= 0:
        name = "shares" if batch_sizes is None else "batch_sizes"
        raise TrimtabError(f"loader: {name}={list(speeds)}: give each of {world_size} ranks a number above 0")
    if uneven != "batches":
        if accumulate != 1 or batch_sizes is not None or active_plan is not None:
            raise TrimtabError(_NO_ROUNDS.format(uneven=uneven, world_size=world_size))
        return _round_loader(
            dataset,
            size,
            batch_size,
            rank,
            speeds,
            uneven=uneven,
            count=count,
            adjust=adjust,
            shuffle=shuffle,
            seed=seed,
            group=group,
            options=options,
        )
    own_limit = float("inf") if max_batch is None else float(max_batch)
    by_rank = [limit for (limit,) in gather_numbers([own_limit], None if tensor_groups else group)]
    if tensor_groups:
        by_rank = [min(by_rank[member] for member in members) for members in tensor_groups]
    limits = [None if limit == float("inf") else int(limit) * accumulate for limit in by_rank]
    sampler = ShareSampler(
        size,
        batch_size=batch_size,
        rank=rank,
        shares=batch_sizes
        or share_batch(
            batch_size, [1 / speed for speed in speeds], most=limits, least=min_batch * accumulate
        ),
        accumulate=accumulate,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )
    if active_plan is not None and rank == 0 and active_plan.plan.batch_size != batch_size:
        environment.logger().info(
            "the plan divides %d samples as %s; a step of %d is divided as %s",
            active_plan.plan.batch_size,
            environment.listed_by_rank(active_plan.plan.shares),
            batch_size,
            environment.listed_by_rank(sampler.shares),
        )
    return Loader(
        DataLoader(dataset, batch_sampler=sampler, **options),
        sampler,
        count=count,
        max_batch=max_batch,
        min_batch=min_batch,
        adjust=adjust,
        group=group,
        limits=limits,
        active_plan=active_plan,
    )


def _checked_size(dataset: object, batch_size: object, adjust: object, options: Mapping[str, object]) -> int:
    """The samples of the dataset; what cannot be a dataset, a batch size, an adjustment or an option is refused."""
    if isinstance(dataset, DataLoader):
        raise TrimtabError(
            "loader: pass the dataset, not a DataLoader: trimtab.loader(data.dataset, batch_size)"
        )
    if isinstance(dataset, IterableDataset):
        raise TrimtabError(
            "loader: an IterableDataset has its own order of samples, so they cannot be divided among ranks; "
            "use a dataset with __len__ and __getitem__"
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        missing = "__getitem__" if isinstance(dataset, Sized) else "__len__"
        raise TrimtabError(
            f"loader: {type(dataset).__name__} has no {missing}, so it cannot be divided among ranks"
        )
    if not hasattr(batch_size, "__index__"):
        raise TrimtabError(
            f"loader: batch_size={batch_size!r}: give a whole number of samples, over all ranks"
        )
    if not (adjust is None or isinstance(adjust, Adjust)):
        raise TrimtabError(
            f"loader: adjust={adjust!r}: use None for fixed shares, or a trimtab.planning.Adjust"
        )
    for name in _OWN_OPTIONS:
        if name in options:
            raise TrimtabError(f"loader: {name} is chosen by trimtab; use shuffle and seed")
    return len(dataset)


def _round_loader(
    dataset: Dataset[Any],
    size: int,
    batch_size: int,
    rank: int,
    speeds: Sequence[float],
    *,
    uneven: str,
    count: Callable[[Any], int | torch.Tensor] | None,
    adjust: Adjust | None,
    shuffle: bool,
    seed: int,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> RoundLoader:
    """Batches of equal size, of which faster ranks take more in a round of local steps."""
    if uneven != "steps" or batch_size % len(speeds):
        raise TrimtabError(_NO_ROUNDS.format(uneven=uneven, world_size=len(speeds)))
    rounds = RoundSampler(
        size,
        batch_size=batch_size,
        rank=rank,
        speeds=speeds,
        every=round_length,
        shuffle=shuffle,
        seed=seed,
    )
    return RoundLoader(
        DataLoader(dataset, batch_sampler=rounds, **options), rounds, count=count, adjust=adjust, group=group
    )


def _fixed_sizes(
    sizes: Sequence[int], batch_size: int, shares: Sequence[float] | None, plan: object
) -> Sequence[int]:
    """The sizes, if they are complete."""
    if shares is not None or plan is not None:
        raise TrimtabError("loader: give batch_sizes, shares or plan, and only one of them")
    if min(sizes, default=0) < 1 or sum(sizes) != batch_size:
        raise TrimtabError(
            f"loader: batch_sizes={list(sizes)} add up to {sum(sizes)}, and batch_size is {batch_size}; give each rank "
            f"at least 1, and {batch_size} in all"
        )
    return sizes
