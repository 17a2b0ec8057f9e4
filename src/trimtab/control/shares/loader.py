"""A rank's batches: uneven parts of each global batch, weighted losses, and shares that follow measured speeds.

The update is that of one device on the whole batch, not an average of averages. With W ranks, n_r of the
step's N samples on rank r, and the loss there a mean over those n_r, `weigh` multiplies it by W · n_r / N.
DDP adds the gradients of the ranks and divides by W, so the optimizer receives the gradient of
(Σ of all samples' losses) / N. That is linear, so it also holds with accumulation (N counts all batches of the
step), with clipping (which sees the finished average) and with any communication hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from trimtab import environment
from trimtab.control.plans.active_plan import ActivePlan
from trimtab.control.rank_values import (
    collective_device,
    gather_numbers,
    rank_and_world_size,
    require_equal_settings,
)
from trimtab.control.running_local_steps import running_local_steps
from trimtab.control.sharded_waits import leave_out_waits
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.control.shares.sampler import Cut, ShareSampler
from trimtab.control.shares.windows import ShareWindows
from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock, leave_out
from trimtab.planning.plan import Plan
from trimtab.planning.shares.batch import Adjust, share_batch

_END = object()
FOLLOW_SPEEDS = Adjust()
"""By default, shares follow measured speeds."""


class Loader:
    """Iterates over this rank's batches, weighs their losses, and adjusts the batch shares to measured speeds.

    `trimtab.loader` makes one. To use a data loader of your own, give it a `ShareSampler` as its batch
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
        adjust: Adjust | None = FOLLOW_SPEEDS,
        group: dist.ProcessGroup | None = None,
        ahead: int | None = None,
        limits: list[int | None] | None = None,
        active_plan: ActivePlan | None = None,
    ) -> None:
        """Collective.

        Args:
            ahead: batches that `data` may take from the sampler before they are used; known for a DataLoader.
            limits: the most samples of a step that each rank has memory for, as far as known.
            active_plan: the plan whose batch shares to follow.
        """
        self.sampler = sampler
        self._data, self._count, self._group = data, count, group
        self._rank, self._world_size = rank_and_world_size(group, "loader")
        # Disabled on one rank is disabled on all: they measure together.
        disabled = any(value for (value,) in gather_numbers([float(environment.disabled())], group))
        self._adjust = None if disabled or self._world_size == 1 else adjust
        if ahead is None:
            ahead = getattr(data, "num_workers", 0) * (getattr(data, "prefetch_factor", None) or 0)
        # Steps that are prefetched keep their shares: a change must take effect in the same step on all ranks.
        self._delay = -(-int(ahead) // sampler.accumulate)
        self._capacity = BatchCapacity(max_batch)
        self._clock: LocalClock | None = None
        self._windows = ShareWindows(
            adjust or FOLLOW_SPEEDS,
            self._capacity,
            group=group,
            least=min_batch * sampler.accumulate,
            accumulate=sampler.accumulate,
            limits=limits,
        )
        self._active_plan = active_plan
        if active_plan is not None:
            active_plan.loaders.add(self)
        self._planned: Sequence[float] | None = None
        self._weighed = True
        self._cut: Cut | None = None
        self._own = 0
        self._total: Callable[[], Any] = lambda: 1
        settings = {
            "len(dataset)": sampler.length,
            "batch_size": sampler.batch_size,
            "accumulate": sampler.accumulate,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
            "seed": sampler.seed,
            "shares": sampler.shares,
            "min_batch": min_batch,
            "adjust": self._adjust,
            "whether count is given": count is not None,
            "the number of prefetched steps": self._delay,
        }
        require_equal_settings(settings, group)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches to the end of the epoch; a loop that was left early continues where it stopped."""
        self._weighed = True
        if self.sampler.at_end:  # left after the last batch: this is the next epoch
            self.sampler.finish_epoch()
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
        """Scale the loss by its batch's weight; call `backward` on the result. Every loss must pass through here.

        Args:
            reduction: how the loss was reduced over the batch's samples (or over what `count` counts): "mean" or
                "sum". With "sum" a rank whose tokens are all ignored does not divide by their number, 0.
        """
        if self._cut is None:
            raise TrimtabError("weigh: there is no current batch; call it inside the loop over the loader")
        if reduction not in ("mean", "sum"):
            raise TrimtabError(f'weigh: reduction is "mean" or "sum"; got {reduction!r}')
        if not isinstance(loss, torch.Tensor):
            raise TrimtabError(
                f"weigh: the loss is a {type(loss).__name__}; give the tensor that backward is called on"
            )
        if loss.dim() != 0:
            raise TrimtabError(f"weigh: the loss has shape {tuple(loss.shape)}; reduce it to a scalar first")
        if self.sampler.accumulate > 1:
            _refuse_second_accumulation(self.sampler.accumulate)
        self._weighed = True
        if self._active_plan is not None:
            self._active_plan.record_batch_of(self)
        count = self._own if reduction == "mean" else min(self._cut.own, 1)
        ranks, total = self._world_size, self._total()
        if (local := running_local_steps()) is not None:
            # Only these ranks average their gradients; in what workers agree on, samples count later.
            team, _ = local.team
            ranks, local.timer = len(team), self
            if self._count is None:
                total = max(1, sum(self._cut.shares[rank] for rank in team))
        weighted: torch.Tensor = loss * _quotient(ranks * count, total, loss.dtype)
        if self._adjust is not None:
            if self._clock is None:
                self._clock = LocalClock(loss.device)
            self._clock.follow(weighted)
        return weighted

    def sync(self, model: Any) -> AbstractContextManager[Any]:
        """For accumulation, around forward and backward: DDP averages gradients only at a step's last batch."""
        context: AbstractContextManager[Any] = nullcontext() if self.last else model.no_sync()
        return context

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what is not part of this rank's work in a step: collectives of your own, an evaluation."""
        clocks = set() if self._active_plan is None else set(self._active_plan.clocks)
        with ExitStack() as stack:
            for clock in clocks if self._clock is None else {self._clock, *clocks}:
                stack.enter_context(clock.waiting())
            yield

    def watch(
        self, model: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.SyncBatchNorm,)
    ) -> None:
        """Do not time modules in which ranks wait for each other (FSDP2's too): all would seem equally slow."""
        leave_out_waits(model, lambda: self._clock)
        for module in model.modules():
            if isinstance(module, kinds):
                leave_out(module, lambda: self._clock)

    @property
    def follows_speeds(self) -> bool:
        """Whether shares will follow measured speeds."""
        return self._adjust is not None

    @property
    def last(self) -> bool:
        """Whether the current batch is the step's last: average the gradients, step the optimizer."""
        return self._cut is None or self._cut.last

    @property
    def round_ends(self) -> bool:
        """Whether the ranks may meet after this step; with ``uneven="steps"`` only after the last of a round."""
        return self.last

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a step for each rank; with ``uneven="steps"`` steps of a round."""
        return self.sampler.shares

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration starts or continues."""
        return self.sampler.epoch

    def take_shares(self, plan: Plan) -> None:
        """Use the batch shares of this plan from the next step that is not prefetched. All ranks must call it."""
        self._planned = plan.shares

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint made between two steps; the same on every rank."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, on the same or another number of ranks.

        The next step begins at the sample after the last finished one. Shares for another number of ranks are dropped.
        """
        self.sampler.load_state_dict(state)
        before = state["shares"]
        if self._rank == 0 and len(before) != self._world_size:
            environment.logger().info(
                "batch shares %s of %d ranks are dropped: starting from %s",
                *(environment.listed_by_rank(before), len(before), environment.listed_by_rank(self.shares)),
            )
        self._reset()

    def _step(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of one step; with `count` all of them are read first, because the weights need their sum."""
        if self._count is None:
            for batch in batches:
                yield self._present(batch, self.sampler.issued.popleft(), None)
            return
        pairs = [(batch, self.sampler.issued.popleft()) for batch in batches]
        counts = [int(self._count(batch)) if cut.own else 0 for batch, cut in pairs]
        self._total = self._start_sum(sum(counts))
        for (batch, cut), own in zip(pairs, counts, strict=True):
            yield self._present(batch, cut, own)

    def _present(self, batch: Any, cut: Cut, counted: int | None) -> Any:
        self._require_weighed()
        self._cut, self._weighed = cut, False
        self._own = cut.own if counted is None else counted
        if counted is None:
            self._total = lambda: cut.total
        self._capacity.record(max(cut.own, 1))
        if cut.last:
            self.sampler.consumed = cut.start + cut.total
        return batch

    def _start_sum(self, own: int) -> Callable[[], Any]:
        """Start an all-reduce of the ranks' counts; its result is needed only after the forward pass."""
        group, local = self._group, running_local_steps()
        if local is not None:
            group = local.team[1]
        if self._world_size == 1 or (local is not None and group is None):
            return lambda: own
        total = torch.tensor([own], dtype=torch.float64, device=collective_device(group))
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None

        def result() -> Any:
            with self.waiting():
                work.wait()
            # On a GPU the number stays there: reading it would block the host until the forward pass is done.
            return total[0] if total.is_cuda else total.item()

        return result

    def _require_weighed(self) -> None:
        if not self._weighed and torch.is_grad_enabled():
            raise TrimtabError(
                "loader: the loss of the previous batch was not weighed, so ranks with few samples would count as "
                "much as those with many; call loader.weigh(loss).backward()"
            )

    def _between_steps(self) -> None:
        """Record the finished step; after a window of steps compare the ranks and perhaps change their shares."""
        self._require_weighed()
        self._take_planned()
        cut, self._cut = self._cut, None
        if self._adjust is None or cut is None or self._clock is None:
            return
        # Steps with other shares than the current ones, and incomplete steps, say nothing about these.
        usable = cut.shares == self.sampler.shares
        new = self._windows.end_step(self._clock, self.shares, usable=usable)
        if new is not None:
            self._change_shares(new)

    def _take_planned(self) -> None:
        """Switch to the shares of a new plan, once the previous change has taken effect."""
        if self._planned is None or self.sampler.changing:
            return
        speeds, self._planned = self._planned, None
        new = share_batch(
            self.sampler.batch_size,
            [1 / speed for speed in speeds],
            most=self._windows.limits,
            least=self._windows.least,
        )
        if new != self.shares:
            self._change_shares(new)

    def _change_shares(self, new: tuple[int, ...]) -> None:
        self.sampler.change(new, after_steps=self._delay)
        self._reset()

    def _reset(self) -> None:
        self._windows.forget(self._clock)


def _refuse_second_accumulation(accumulate: int) -> None:
    """Accelerate divides every loss by its own number of accumulated batches; the weights do so already."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    steps = state().num_steps if state is not None and state._shared_state else 1
    if steps > 1:
        raise TrimtabError(
            f"weigh: Accelerate divides the loss by gradient_accumulation_steps={steps}, and loader(accumulate="
            f"{accumulate}) has weighed it over the accumulated batches already; make the Accelerator with "
            "gradient_accumulation_steps=1, or the loader with accumulate=1"
        )


def _quotient(part: int, total: Any, dtype: torch.dtype) -> Any:
    """NaN if nothing counts at all, as the mean of nothing is on one device."""
    if isinstance(total, torch.Tensor):
        return (part / total).to(dtype)
    return part / total if total else float("nan")
