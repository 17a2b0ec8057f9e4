"""`trimtab.loader`: every rank gets the part of each batch that it can do in the same time.

The update is that of one device on the whole batch, not an average of averages. With W ranks, n_r of the
step's N samples on rank r, and the loss there a mean over those n_r, `weigh` multiplies it by W · n_r / N.
DDP adds the gradients of the ranks and divides by W, so what reaches the optimizer is the gradient of
(Σ of all samples' losses) / N. That is linear, so it holds with accumulation (N counts all batches of the
step), with clipping (which sees the finished average) and with any communication hook.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from trimtab import environment
from trimtab.control.plans.active_plan import in_force_for
from trimtab.control.rank_values import device_of, gather, place, refuse_differences
from trimtab.control.shares.capacity import Room
from trimtab.control.shares.sampler import Cut, ShareSampler
from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock, leave_out
from trimtab.planning.shares.batch import Adjust, rebalance, share_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from torch.utils.data import Dataset

    from trimtab.control.plans.active_plan import InForce
    from trimtab.planning.plan import Plan

_OWN_OPTIONS = ("sampler", "batch_sampler", "generator")
_END = object()
FOLLOW = Adjust()
"""Unless something else is asked for, shares follow measured speeds."""


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    accumulate: int = 1,
    count: Callable[[Any], int | torch.Tensor] | None = None,
    shares: Sequence[float] | None = None,
    plan: Plan | str | PathLike[str] | torch.nn.Module | None = None,
    max_batch: int | None = None,
    min_batch: int = 1,
    adjust: Adjust | None = FOLLOW,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Loader:
    """Batches for this rank, as large as its speed and memory allow; every rank calls it alike.

    ::

        data = trimtab.loader(dataset, batch_size=256)
        for inputs, targets in data:
            data.weigh(F.cross_entropy(ddp(inputs), targets)).backward()
            optimizer.step(); optimizer.zero_grad()

    Args:
        batch_size: of a step: all ranks together, and all accumulated batches. It does not change, so
            neither does the training; only who computes what does.
        accumulate: batches of each rank for a step. Average at the last: ``with data.sync(ddp):``.
        count: what a batch counts for in the loss's denominator, where that is not samples: for a mean over
            tokens ``lambda batch: (batch["labels"] != -100).sum()``. Costs one number a step to add up.
        shares: speeds to start from, one for each rank; equal when absent.
        plan: whose shares to start from: a plan, its file, or a model that runs under one (`trimtab.apply`) and
            whose later plans count too. Under `trimtab run --plan` that plan counts, unless `shares` are given.
        max_batch: the most samples this rank has memory for at once; a GPU's is also measured.
        min_batch: the fewest samples a rank shall have at once (BatchNorm on vectors needs 2).
        adjust: when to follow measured speeds; None keeps the shares as they are, and so does a plan that was
            made for equal ones, unless an `Adjust` is given.
        shuffle: in an order that depends on `seed` and the epoch alone.
        drop_last: leave out the samples that do not fill a step.
        group: the ranks that train together; all when absent.
        options: for torch's DataLoader: ``num_workers``, ``collate_fn``, ``pin_memory``, ...
    """
    if isinstance(dataset, IterableDataset):
        raise TrimtabError(
            "loader: an IterableDataset gives its samples in its own order, so they cannot be shared out; "
            "use a dataset with __len__ and __getitem__"
        )
    for name in _OWN_OPTIONS:
        if name in options:
            raise TrimtabError(f"loader: {name} is trimtab's to choose; use shuffle and seed")
    rank, world = place(group)
    if batch_size < world * accumulate * min_batch or accumulate < 1 or min_batch < 1:
        raise TrimtabError(
            f"loader: a step of {batch_size} samples cannot give each of {world} ranks {accumulate} batches of "
            f"at least {min_batch}; batch_size counts all ranks and accumulated batches: raise it to "
            f"{max(1, world * accumulate * min_batch)} or more"
        )
    in_force = _plan(plan, shares, group, world)
    if in_force is not None:
        shares = in_force.plan.shares
        if in_force.plan.batch == "fixed" and adjust is FOLLOW:
            adjust = None
    speeds = [1.0] * world if shares is None else [float(share) for share in shares]
    if len(speeds) != world or min(speeds) <= 0:
        raise TrimtabError(f"loader: shares={list(speeds)}: give each of {world} ranks a speed above 0")
    limits = gather([-1.0 if max_batch is None else float(max_batch)], group)
    most = [None if limit < 0 else int(limit) * accumulate for (limit,) in limits]
    sampler = ShareSampler(
        len(dataset),  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset on purpose
        batch_size=batch_size,
        rank=rank,
        shares=share_batch(
            batch_size, [1 / speed for speed in speeds], most=most, least=min_batch * accumulate
        ),
        accumulate=accumulate,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )
    data: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **options)
    made = Loader(
        data, sampler, count=count, max_batch=max_batch, min_batch=min_batch, adjust=adjust, group=group
    )
    made._most = most
    if in_force is not None:
        made._in_force = in_force
        in_force.loaders.add(made)
        if rank == 0 and in_force.plan.batch_size != batch_size:
            environment.logger().info(
                "the plan shares %d samples out as %s; a step of %d takes %s",
                in_force.plan.batch_size,
                "/".join(map(str, in_force.plan.shares)),
                batch_size,
                "/".join(map(str, made.shares)),
            )
    return made


def _plan(
    plan: Plan | str | PathLike[str] | torch.nn.Module | None,
    shares: Sequence[float] | None,
    group: dist.ProcessGroup | None,
    world: int,
) -> InForce | None:
    """The plan whose shares count, if there is one; the script's own shares come before those of `trimtab run`."""
    if plan is not None and shares is not None:
        raise TrimtabError("loader: shares and plan both say who takes how much; give one of them")
    if shares is not None or environment.disabled():
        return None
    return in_force_for(plan, group, world)


class Loader:
    """Iterates over this rank's batches, weighs their losses, and moves work to where it is done soonest.

    `trimtab.loader` makes one. With a data loader of your own, give it a `ShareSampler` as its batch
    sampler and wrap it: ``Loader(data, sampler)``; it must deliver batches in the sampler's order.
    """

    def __init__(
        self,
        data: Iterable[Any],
        sampler: ShareSampler,
        *,
        count: Callable[[Any], int | torch.Tensor] | None = None,
        max_batch: int | None = None,
        min_batch: int = 1,
        adjust: Adjust | None = FOLLOW,
        group: dist.ProcessGroup | None = None,
        ahead: int | None = None,
    ) -> None:
        """`ahead`: batches that `data` may take from the sampler before they are used; known for a DataLoader."""
        self.sampler = sampler
        self._data, self._count, self._group = data, count, group
        self._rank, self._world = place(group)
        self._least = min_batch * sampler.accumulate
        self._adjust = None if environment.disabled() or self._world == 1 else adjust
        if ahead is None:
            ahead = getattr(data, "num_workers", 0) * (getattr(data, "prefetch_factor", None) or 0)
        # What was cut already keeps its shares: a change must reach all ranks in the same step.
        self._delay = -(-int(ahead) // sampler.accumulate)
        self._room = Room(max_batch)
        self._clock: LocalClock | None = None
        self._windows: list[list[float]] = []
        self._in_force: InForce | None = None
        self._planned: Sequence[float] | None = None
        self._most: list[int | None] | None = None
        self._counted = 0
        self._weighed = True
        self._cut: Cut | None = None
        self._own = 0
        self._total: Callable[[], Any] = lambda: 1
        alike = {
            "len(dataset)": sampler.length,
            "batch_size": sampler.batch_size,
            "accumulate": sampler.accumulate,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
            "seed": sampler.seed,
            "shares": sampler.shares,
            "min_batch": min_batch,
            "adjust": self._adjust,
            "whether there is a count": count is not None,
            "the number of prefetched steps": self._delay,
        }
        refuse_differences(alike, group)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches to the end of the epoch; a loop that was left early goes on where it was."""
        self._weighed = True
        source = iter(self._data)
        while True:
            self._between_steps()
            step = islice(source, self.sampler.accumulate)
            first = next(step, _END)
            if first is _END:
                break
            yield from self._step(chain([first], step))
        self.sampler.finish_epoch()

    def weigh(self, loss: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
        """The loss with its batch's weight, to call `backward` on; every loss must pass through here.

        Args:
            reduction: what the loss is of the batch's samples (or of what `count` counts): "mean" or "sum".
                With "sum" a rank whose tokens are all ignored never divides by their number, 0.
        """
        if self._cut is None:
            raise TrimtabError(
                "weigh: there is no batch to weigh by; call it inside the loop over the loader"
            )
        if reduction not in ("mean", "sum"):
            raise TrimtabError(
                f'weigh: reduction={reduction!r}; the loss of a batch is its "mean" or its "sum"'
            )
        if loss.dim() != 0:
            raise TrimtabError(
                f"weigh: the loss has shape {tuple(loss.shape)}; reduce it to one number first"
            )
        self._weighed = True
        if self._in_force is not None:
            self._in_force.trained_on(self)
        counts = self._own if reduction == "mean" else min(self._cut.own, 1)
        weighted: torch.Tensor = loss * _quotient(self._world * counts, self._total(), loss.dtype)
        if self._adjust is not None:
            if self._clock is None:
                self._clock = LocalClock(loss.device)
            self._clock.follow(weighted)
        return weighted

    def sync(self, model: Any) -> AbstractContextManager[Any]:
        """For accumulation: around forward and backward, lets DDP average only at a step's last batch."""
        quiet: AbstractContextManager[Any] = nullcontext() if self.last else model.no_sync()
        return quiet

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what is no part of this rank's work in a step: collectives of your own, an evaluation."""
        clocks = set() if self._in_force is None else set(self._in_force.clocks)
        with ExitStack() as paused:
            for clock in clocks if self._clock is None else {self._clock, *clocks}:
                paused.enter_context(clock.waiting())
            yield

    def watch(
        self, model: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.SyncBatchNorm,)
    ) -> None:
        """Do not count the modules of `model` in which ranks wait for each other; else all seem equally slow."""
        for module in model.modules():
            if isinstance(module, kinds):
                leave_out(module, lambda: self._clock)

    @property
    def last(self) -> bool:
        """Whether the present batch is the step's last: average the gradients, step the optimizer."""
        return self._cut is None or self._cut.last

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a step for each rank."""
        return self.sampler.shares

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration begins or goes on with."""
        return self.sampler.epoch

    def take_shares(self, plan: Plan) -> None:
        """Deal out as this plan says, from the next step that is not dealt out yet; the same call on every rank."""
        self._planned = plan.shares

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands, for a checkpoint made between two steps; the same on every rank."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on the same or another number of ranks."""
        self.sampler.load_state_dict(state)
        self._reset()

    def _step(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of one step; with `count` all of them first, since the first weight needs their sum."""
        if self._count is None:
            for batch in batches:
                yield self._present(batch, self.sampler.issued.popleft(), None)
            return
        held = [(batch, self.sampler.issued.popleft()) for batch in batches]
        counts = [int(self._count(batch)) if cut.own else 0 for batch, cut in held]
        self._total = self._added_up(sum(counts))
        for (batch, cut), own in zip(held, counts, strict=True):
            yield self._present(batch, cut, own)

    def _present(self, batch: Any, cut: Cut, counted: int | None) -> Any:
        self._refuse_unweighed()
        self._cut, self._weighed = cut, False
        self._own = cut.own if counted is None else counted
        if counted is None:
            self._total = lambda: cut.total
        self._room.batch(max(cut.own, 1))
        if cut.last:
            self.sampler.consumed = cut.start + cut.total
        return batch

    def _added_up(self, own: int) -> Callable[[], Any]:
        """Start adding the ranks' counts; the result is asked for after the forward pass."""
        if self._world == 1:
            return lambda: own
        total = torch.tensor([own], dtype=torch.float64, device=device_of(self._group))
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None

        def result() -> Any:
            with self.waiting():
                work.wait()
            # On a GPU the number stays there: reading it would stop the host until the forward pass is done.
            return total[0] if total.is_cuda else total.item()

        return result

    def _refuse_unweighed(self) -> None:
        if not self._weighed and torch.is_grad_enabled():
            raise TrimtabError(
                "loader: the loss of the batch before was not weighed, so ranks with few samples would count as "
                "much as those with many; call loader.weigh(loss).backward()"
            )

    def _between_steps(self) -> None:
        """Count the step that ended; after a window of them compare the ranks and perhaps move samples."""
        self._refuse_unweighed()
        self._take_planned()
        cut, self._cut = self._cut, None
        if self._adjust is None or cut is None or self._clock is None:
            return
        # Steps of other shares than the present ones, or not full, say nothing about these.
        usable = cut.shares == self.sampler.shares
        self._clock.end_step(keep=usable)
        self._counted += usable
        if not usable or self._counted < self._adjust.window:
            return
        self._counted = 0
        with self._clock.waiting():
            every = gather([self._clock.read(), self._room.samples()], self._group)
        seconds = [own for own, _ in every]
        if not all(own > 0 for own in seconds):
            return
        self._windows.append(seconds)
        self._most = [None if room < 0 else int(room) * self.sampler.accumulate for _, room in every]
        new = rebalance(self.shares, self._windows, self._adjust, most=self._most, least=self._least)
        if new is not None:
            self._move(new, seconds)

    def _take_planned(self) -> None:
        """Shares of a new plan, once a change before them has taken effect."""
        if self._planned is None or self.sampler.changing:
            return
        speeds, self._planned = self._planned, None
        new = share_batch(
            self.sampler.batch_size, [1 / speed for speed in speeds], most=self._most, least=self._least
        )
        if new != self.shares:
            self.sampler.change(new, after_steps=self._delay)
            self._reset()

    def _move(self, new: tuple[int, ...], seconds: Sequence[float]) -> None:
        if self._rank == 0:
            before, after = ("/".join(map(str, shares)) for shares in (self.shares, new))
            times = "/".join(f"{own * 1e3:.0f}" for own in seconds)
            environment.logger().info("batch shares %s take the ranks %s ms; now %s", before, times, after)
        self.sampler.change(new, after_steps=self._delay)
        self._reset()

    def _reset(self) -> None:
        self._windows, self._counted = [], 0
        if self._clock is not None:
            self._clock.forget()


def _quotient(part: int, total: Any, dtype: torch.dtype) -> Any:
    """Not a number where nothing counts at all, as the mean of nothing is on one device."""
    if isinstance(total, torch.Tensor):
        return (part / total).to(dtype)
    return part / total if total else float("nan")
