"""Uneven batches in a script that does not know of them: `trimtab run` takes over its DataLoader and backward pass.

1. A new iterator of a DataLoader that divides samples among all ranks gets a batch sampler that cuts each global batch
   by shares (`cutting.py`). What is known of a batch waits until its backward pass begins.
2. `torch.autograd.backward` starts from the batch's weight W · n / N instead of 1. The loss that the script sees is its
   own batch's. A later place would be wrong: `no_sync` adds up the batches of a step before the communication hook
   runs, and SyncBatchNorm exchanges gradients inside the backward pass. Every average after it (DDP's, that of a
   communication hook or of the backend, FSDP2's reduce-scatter) gets weighted gradients.
3. At first batches are equal. Three of them show whether the script can be cut (`script_losses.py`). If not on all
   ranks, they stay equal, and one line says why.
4. Then shares follow measured speeds, or are those that the user gave; a plan of the autopilot is a starting point.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from trimtab.control.rank_values import gather_numbers
from trimtab.control.running_local_steps import averaging_ranks, running_local_steps
from trimtab.control.sharded_waits import leave_out_waits
from trimtab.control.shares import cutting
from trimtab.control.shares.agreed_problem import require_one_rate
from trimtab.control.shares.between_samples import problem_of_gradient
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.control.shares.cutting import (
    BY_TURNS,
    CutBatch,
    CutEpoch,
    CutLoader,
    LeftAlone,
    StepLoaders,
    cut_loader,
)
from trimtab.control.shares.loss_form import LossForm, loss_form
from trimtab.control.shares.sampler import ShareSampler
from trimtab.control.shares.script_collectives import SUM, problem_of_exchange, require_equal_rows
from trimtab.control.shares.script_losses import ScriptLosses
from trimtab.control.shares.sizes import RequestedSizes
from trimtab.control.shares.trained_models import TrainedModels
from trimtab.control.shares.trainer_loss import watch_trainer
from trimtab.control.shares.windows import ShareWindows, emit_shares
from trimtab.environment import listed_by_rank, logger
from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock
from trimtab.planning.shares.batch import Adjust, share_batch
from trimtab.run_settings import OwnSteps

_PROOF = 4
"""Uneven steps that are looked at by all ranks together, one by one."""


class Takeover:
    """Cuts the training batches of this process, and weighs their gradients."""

    current: ClassVar[Takeover | None] = None
    """That of this process, as long as its batches are taken over."""

    def __init__(self, sizes: Sequence[int] | None = None, rule: Adjust | None = None) -> None:
        """`sizes` are the batches that the user wants, by rank; by default shares follow speeds by `rule`."""
        self._requested = None if sizes is None else RequestedSizes(sizes)
        self.follows_speeds = sizes is None
        self.texts: set[str] = set()
        """What was logged."""
        self._rule = rule or Adjust()
        self._models = TrainedModels(self, self._decide_again)
        self._sources: weakref.WeakKeyDictionary[Any, CutLoader | LeftAlone] = weakref.WeakKeyDictionary()
        self._latest: CutLoader | LeftAlone | None = None
        self._source: CutLoader | None = None
        self._decided = False
        self.losses = ScriptLosses(self._models)
        """What they show about the script's batches."""
        self._loaders = StepLoaders()
        self._others = 0
        """Batches of other loaders that the script had got when the last batch was observed."""
        self._delivered: CutBatch | None = None
        """The batch that the script got last."""
        self._current: CutBatch | None = None
        self._uncut: CutEpoch | None = None
        """The epoch of the last batch, if it began in evaluation mode, and so has the batches of the plain job."""
        self._proven = 0
        """Uneven steps since the decision that were like the equal ones, as far as they are looked at."""
        self._step: list[CutBatch] = []
        self._clock: LocalClock | None = None
        self._capacity = BatchCapacity(None)
        self._windows = ShareWindows(self._rule if sizes is None else None, self._capacity, group=None)
        self._planned: tuple[tuple[int, ...], bool] | None = None
        """Shares of a plan that are still to be taken, and whether also in place of those that were measured."""

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of a step for each rank; None as long as nothing is cut."""
        return None if self._source is None else self._source.shares

    @property
    def is_cutting(self) -> bool:
        """Whether the script was found to be one whose batches may be uneven."""
        return self._clock is not None

    def start_from(self, shares: Sequence[int], *, replace: bool) -> None:
        """Continue from the shares of a plan, if `replace` also where they follow speeds already. Collective."""
        if self._requested is None:
            self._planned = tuple(shares), replace

    def watch(self, model: nn.Module) -> None:
        """The batches of this DDP or FSDP2 module may be cut: it averages gradients over ranks."""
        self._models.watch(model)

    def source_of(self, loader: Any) -> CutLoader | LeftAlone | None:
        """How a loader is cut; None if there is only one rank, and for `trimtab.loader`, which cuts by itself."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if isinstance(loader.batch_sampler, ShareSampler):
            return None
        watch_trainer(self.losses)
        if loader not in self._sources:
            self._sources[loader] = cut_loader(loader, lambda: self._models.in_training)
        return self._sources[loader]

    def delivered(self, source: CutLoader | LeftAlone, epoch: object) -> None:
        """The script gets the next batch of an epoch."""
        if isinstance(epoch, CutEpoch):
            batch = epoch.issued.popleft()
            trains = torch.is_grad_enabled()
            self._uncut = epoch if trains and not epoch.training else None
            if self._uncut is not None:
                epoch.delivered.append(batch)
            if not trains or not epoch.training:
                return
            epoch.source.waiting.append(batch)
            self._delivered = batch
        if torch.is_grad_enabled():
            self._latest = source
            if isinstance(source, LeftAlone) and self._models.in_training:
                self._loaders.deliver_beside()

    def weight(self, losses: Sequence[torch.Tensor]) -> float:
        """What a backward pass that begins counts for."""
        if self._models.latest is None or OwnSteps.running or torch._C._current_graph_task_id() != -1:
            return 1.0  # nothing is averaged, or activation checkpointing calls it inside another one
        source = self._training_source()
        if source is None and self._uncut is not None and self._models.in_training:
            source = self._begin_late(self._uncut)
            if source is None:
                self._say("an epoch began in evaluation mode: its batches stay equal on all ranks")
                return 1.0
        if source is None:
            if self._current is None:
                return 1.0
            self._note("a batch has several backward passes")
            return self._weight_of(self._current, loss_form(losses[0]))
        form = (
            loss_form(losses[0]) if len(losses) == 1 else LossForm(problem="there are several losses at once")
        )
        self._note(self._loaders.begin_step())
        batch = self._current = self._take(source, form)
        self._step.append(batch)
        self._capacity.record(batch.own)
        if not self._decided:
            if batch.shares is None or len(set(batch.shares)) == 1:
                self._observe(source, batch, form, losses[0])
        elif self._clock is not None:
            self.losses.follow(losses[0], form, batch)
            self._clock.follow(losses[0])
        return self._weight_of(batch, form)

    def exchanged(self, name: str, tensor: torch.Tensor, group: Any) -> None:
        """The script is about to call a collective by itself, with this tensor; collective where batches are uneven."""
        batch = self._delivered
        if batch is None or not tensor.dim() or not self._models.in_training or OwnSteps.running:
            return
        if not self._decided or name == SUM:
            waiting = self._latest.waiting if isinstance(self._latest, CutLoader) else ()
            unused = any(each is batch for each in waiting)
            self._note(problem_of_exchange(name, tensor, batch.own, unused=unused))
        elif self._clock is not None and len(set(batch.shares or ())) > 1:
            require_equal_rows(name, tensor, group)

    def differentiated(self, outputs: Sequence[torch.Tensor]) -> None:
        """The script takes gradients by itself, not those that train."""
        if self._delivered is not None and self._models.in_training and not OwnSteps.running:
            self._note(problem_of_gradient(outputs))

    def between(self, model: nn.Module) -> None:
        """A step has ended: record it, and perhaps change the shares."""
        if model is not self._models.followed:
            return
        step, self._step = self._step, []
        source, clock = self._source, self._clock
        if source is None or clock is None or not step:
            return
        if self._planned is not None:
            self._take_planned(source)
        self.losses.look_at_targets(at_least=self._rule.window)
        usable = all(batch.shares == source.shares for batch in step)
        if usable and self._is_refuted(source):
            self._stay_equal(self.losses.agreed_problem() or "")
            return
        new = self._windows.end_step(
            clock, source.shares, usable=usable, alarm=self.losses.problem is not None
        )
        if self._windows.alarm:
            self._stay_equal(self.losses.agreed_problem() or "")
        elif new is not None:
            self._change(source, new)

    def _is_refuted(self, source: CutLoader) -> bool:
        """Whether an uneven step has shown on some rank that batches must be equal. Collective after the first ones.

        Later ones are asked for window by window.

        Raises:
            TrimtabError: the ranks have different learning rates now.
        """
        if self._proven >= _PROOF or len(set(source.shares)) == 1 or running_local_steps() is not None:
            return False
        self._proven += 1
        if self._proven == 1:
            self.losses.look_at_targets()
        with self.waiting():
            by_rank = gather_numbers(
                [float(self.losses.problem is not None), self._models.learning_rates()], None
            )
        refuted, rates = zip(*by_rank, strict=True)
        require_one_rate(rates)
        return any(refuted)

    def waiting(self) -> AbstractContextManager[None]:
        """Around what is not part of this rank's work in a step."""
        return nullcontext() if self._clock is None else self._clock.waiting()

    def begins(self) -> None:
        """A step begins."""

    def ends(self) -> None:
        """A step ends: the optimizer has used the averages."""
        if self._clock is not None:
            self._clock.update_ends()

    def _decide_again(self) -> None:
        """A model comes that was not there when it was decided; batches are equal until it is known. Collective."""
        if not self._decided:
            return
        source, self._source = self._source, None
        if source is not None and len(set(source.shares)) > 1:
            if self._planned is None:
                self.start_from(source.shares, replace=True)
            self._change(source, None)
        self._decided, self._clock = False, None
        self._models.forget()
        self._windows.forget(None, other_speeds=True)

    def _begin_late(self, epoch: CutEpoch) -> CutLoader | None:
        """The loader of an epoch that began in evaluation mode, if it is the one that trains. Collective if it is cut.

        Transformers' Trainer is back in training mode only when it has the first batch after an evaluation.
        """
        source = epoch.source
        if self._source is not None and source is not self._source:
            return None
        shares, self._uncut, self._latest = source.shares, None, source
        source.begin_late(epoch)
        if len(set(shares)) > 1:
            self._change(source, shares)
        return self._training_source()

    def _training_source(self) -> CutLoader | None:
        """The loader that the batch of a backward pass comes from; None if that batch had one already."""
        if self._source is not None and self._source.ready:
            return self._source
        latest = self._latest
        if isinstance(latest, LeftAlone):
            if self._source is None and not self._decided:
                self._decided = True
                self._say(f"batches stay as they are: {latest.reason}")
            return None
        if latest is None or not latest.ready:
            return None
        if latest is not self._source:  # a script may make a new loader for every epoch
            before = self._source
            if before is not None and len(set(before.shares)) > 1 and self._planned is None:
                self.start_from(before.shares, replace=True)
            if before is not None and before.batch_size != latest.batch_size:
                self._windows.forget(None, other_speeds=True)
            by_turns = before is not None and self._loaders.go_to_another(known=self.losses.are_known)
            self._source, self._decided, self._clock = latest, by_turns, None
            self._models.observing = not by_turns
            if by_turns:
                self._say(f"batches stay equal on all ranks: {BY_TURNS}")
            self.losses.restart(latest.batch_size)
            if len(set(latest.shares)) > 1:
                self._change(latest, None)
            self._require_sizes(latest)
            if not latest.ahead:
                latest.skip_to_newest()
        return latest

    def _take(self, source: CutLoader, form: LossForm) -> CutBatch:
        """The oldest waiting batch that the loss can be of; those before it were skipped."""
        batch, found = source.take(self.losses.matcher(form))
        if not found and batch.own > 1:  # torch leaves no trace of how one value was reduced
            self._note("the loss is not a mean over the samples of its batch")
        return batch

    def _weight_of(self, batch: CutBatch, form: LossForm) -> float:
        summed = self.losses.weighs_alike(form, batch, cut=self._source is not None)
        return batch.weigh(summed=summed, team=averaging_ranks())

    def _observe(self, source: CutLoader, batch: CutBatch, form: LossForm, loss: torch.Tensor) -> None:
        """One more batch with equal shares; after some the ranks decide together."""
        others = sum(len(other.waiting) for other in cutting.waiting_beside(source, self._sources.values()))
        several = self.losses.observed > 0 and others > self._others
        beside = cutting.several_loaders(source, self._sources.values()) if several else None
        self._others = others
        self.losses.observe(loss, form, batch, beside)
        if self.losses.are_known:
            self._decide(source, loss.device)

    def _decide(self, source: CutLoader, device: torch.device) -> None:
        """All ranks agree whether batches may be uneven, and begin with them. Collective."""
        self._decided, self._models.observing = True, False
        problem = self.losses.agreed_problem()
        if problem is not None:
            self._stay_equal(problem)
            return
        self._clock, self._proven = LocalClock(device), 0
        if (local := running_local_steps()) is not None:
            local.timer = self
        self._models.follow(lambda: self._clock)
        if self._models.followed is not None:
            leave_out_waits(self._models.followed, weakref.ref(self._clock))
        if self._requested is not None:
            self._change(source, self._requested.sizes)
            self._say(
                f"batches of {listed_by_rank(self._requested.sizes)} samples on the ranks, as requested"
            )
        elif self._planned is not None:
            self._take_planned(source)

    def _change(self, source: CutLoader, shares: Sequence[int] | None) -> None:
        """From the first batch on that no rank has drawn. Collective."""
        at = max(int(drawn) for (drawn,) in gather_numbers([source.drawn], None))
        source.change(shares, at=at)
        self._windows.forget(self._clock)

    def _take_planned(self, source: CutLoader) -> None:
        """Start from the shares of a plan, which may be for another global batch. Collective."""
        assert self._planned is not None
        (planned, replace), self._planned = self._planned, None
        before, limits = source.shares, self._windows.limits
        new = share_batch(sum(before), [1 / share for share in planned], most=limits)
        listed = listed_by_rank(new)
        if len(set(before)) > 1 and not replace:
            self._say(f"batch shares follow measured speeds already; the plan has {listed}")
            return
        if new != before:
            self._change(source, new)
            emit_shares(before, new, noticed=None, why="they start from there and follow measured speeds")
        self._windows.forget(self._clock, other_speeds=True)
        self._say(f"batch shares start from {listed} and follow measured speeds")

    def _require_sizes(self, source: CutLoader) -> None:
        """Refuse sizes that do not add up, or keep batches equal where only some of the script's loaders fit them."""
        if self._requested is None:
            return
        several = any(cutting.waiting_beside(source, self._sources.values()))
        beside = cutting.several_loaders(source, self._sources.values()) if several else None
        try:
            self._note(self._requested.problem(source.batch_size, source.world_size, beside))
        except TrimtabError as error:
            self.texts.add(str(error))
            raise

    def _stay_equal(self, problem: str) -> None:
        self._clock, self.losses.problem = None, None
        if self._source is not None and len(set(self._source.shares)) > 1:
            self._change(self._source, None)
        self._say(f"batches stay equal on all ranks: {problem}")

    def _note(self, problem: str | None) -> None:
        self.losses.note(problem)

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0 and text not in self.texts:
            logger().info(text)
        self.texts.add(text)
