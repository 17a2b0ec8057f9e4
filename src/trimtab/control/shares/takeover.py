"""Uneven batches in a script that does not know of them: `trimtab run` takes over its DataLoader and backward pass.

1. A new iterator of a DataLoader that divides samples among all ranks gets a batch sampler that cuts each global batch
   by shares (`cutting.py`). What is known of a batch waits until its backward pass begins.
2. `torch.autograd.backward` starts from the batch's weight W · n / N instead of 1. The loss that the script sees is its
   own batch's. A later place would be wrong: `no_sync` adds up the batches of a step before the communication hook
   runs, and SyncBatchNorm exchanges gradients inside the backward pass. Every average after it (DDP's, that of a
   communication hook or of the backend, FSDP2's reduce-scatter) gets weighted gradients.
3. At first batches are equal. Three of them show whether the script can be cut: one backward pass for each, a loss that
   is a mean or a sum, no BatchNorm. If not on all ranks, they stay equal, and one line says why.
4. Then shares follow measured speeds, as those of `trimtab.loader` do, or are those that the user gave. A plan of the
   autopilot gives them a starting point.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trimtab.control.local_steps import averaging_ranks, running_local_steps
from trimtab.control.rank_values import gather_numbers
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.control.shares.cutting import CutBatch, CutEpoch, CutLoader, LeftAlone, cut_loader
from trimtab.control.shares.loss_form import LossForm, compares_samples, grows_with_samples, loss_form
from trimtab.control.shares.model_form import problem_of_model
from trimtab.control.shares.sampler import ShareSampler
from trimtab.control.shares.trainer_loss import watch_trainer
from trimtab.control.shares.windows import ShareWindows, emit_shares
from trimtab.control.training_steps import TrainingSteps, in_training_mode
from trimtab.environment import listed_by_rank, logger
from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock, leave_out
from trimtab.model_state import JobHook
from trimtab.planning.shares.batch import Adjust, share_batch
from trimtab.run_settings import OwnSteps

OBSERVED = 3
"""Batches with equal shares that show whether a script can be cut."""

_UNEQUAL_TARGETS = "some targets are ignored, so the loss is a mean over tokens and not over samples"


class Takeover:
    """Cuts the training batches of this process, and weighs their gradients."""

    current: ClassVar[Takeover | None] = None
    """That of this process, as long as its batches are taken over."""

    def __init__(self, sizes: Sequence[int] | None = None, rule: Adjust | None = None) -> None:
        """`sizes` are the batches that the user wants, by rank; by default shares follow speeds by `rule`."""
        self.sizes = None if sizes is None else tuple(sizes)
        self.follows_speeds = sizes is None
        self.scope: str | None = None
        """What a framework has divided the loss by, if not by its own batch: "all ranks" or "this rank"."""
        self.texts: set[str] = set()
        """What was logged."""
        self._rule = rule or Adjust()
        self._model: weakref.ref[nn.Module] | None = None
        self._inside: set[int] = set()
        """Ids of the model and of its modules, of which FSDP2 shards some by themselves."""
        self._sources: weakref.WeakKeyDictionary[Any, CutLoader | LeftAlone] = weakref.WeakKeyDictionary()
        self._latest: CutLoader | LeftAlone | None = None
        self._source: CutLoader | None = None
        self._observed = 0
        self._decided = False
        self._first: LossForm | None = None
        self._equal: LossForm | None = None
        """The form of the last loss of as many samples as in the plain job."""
        self._summed: bool | None = None
        """Whether the loss is a sum over samples; known with the first batch of another size."""
        self._others = 0
        """Batches of other loaders that the script had got when the last batch was observed."""
        self._rows: int | None = None
        self._rows_are_samples = False
        """Whether the first axis of what the model is called with, `_rows`, was the samples of all equal batches."""
        self._current: CutBatch | None = None
        self._problem: str | None = None
        self._step: list[CutBatch] = []
        self._ignored: list[torch.Tensor] = []
        """For recent losses, whether they ignored more or fewer targets of some samples than of others."""
        self._targets: int | None = None
        """Targets of a sample that count, on all ranks: a causal language model has none for the last token."""
        self._clock: LocalClock | None = None
        self._steps: TrainingSteps | None = None
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
        """Continue from the shares of a plan; every rank calls it between the same two steps.

        Args:
            replace: also where shares have followed measured speeds already.
        """
        if self.sizes is None:
            self._planned = tuple(shares), replace

    def watch(self, model: nn.Module) -> None:
        """The batches of this DDP or FSDP2 module may be cut: it averages gradients over ranks."""
        hook = JobHook(torch.compiler.disable(self._before_forward))
        model.register_forward_pre_hook(hook, with_kwargs=True)

    def source_of(self, loader: Any) -> CutLoader | LeftAlone | None:
        """How a loader is cut; None if there is only one rank, and for `trimtab.loader`, which cuts by itself."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if isinstance(loader.batch_sampler, ShareSampler):
            return None
        watch_trainer(self)
        if loader not in self._sources:
            self._sources[loader] = cut_loader(loader, self._in_training)
        return self._sources[loader]

    def delivered(self, source: CutLoader | LeftAlone, epoch: object) -> None:
        """The script gets the next batch of an epoch."""
        if isinstance(epoch, CutEpoch):
            batch = epoch.issued.popleft()
            if not epoch.training or not torch.is_grad_enabled():
                return
            epoch.source.waiting.append(batch)
        if torch.is_grad_enabled():
            self._latest = source

    def weight(self, losses: Sequence[torch.Tensor]) -> float:
        """What a backward pass that begins counts for."""
        if self._model is None or OwnSteps.running or torch._C._current_graph_task_id() != -1:
            return 1.0  # nothing is averaged, or activation checkpointing calls it inside another one
        source = self._training_source()
        if source is None:
            if self._current is None:
                return 1.0
            self._note("a batch has several backward passes")
            return self._weight_of(self._current, loss_form(losses[0]))
        form = (
            loss_form(losses[0]) if len(losses) == 1 else LossForm(problem="there are several losses at once")
        )
        batch = self._current = self._take(source, form)
        self._step.append(batch)
        self._capacity.record(batch.own)
        if not self._decided:
            self._observe(source, batch, form, losses[0])
        elif self._clock is not None:
            self._check_targets(form, batch)
            self._clock.follow(losses[0])
        return self._weight_of(batch, form)

    def between(self, _model: nn.Module) -> None:
        """A step has ended: record it, and perhaps change the shares."""
        step, self._step = self._step, []
        source, clock = self._source, self._clock
        if source is None or clock is None or not step:
            return
        if self._planned is not None:
            self._take_planned(source)
        if len(self._ignored) >= self._rule.window:
            self._note_ignored()
        usable = all(batch.shares == source.shares for batch in step)
        new = self._windows.end_step(clock, source.shares, usable=usable, alarm=self._problem is not None)
        if self._windows.alarm:
            self._stay_equal(self._agreed_problem() or "")
        elif new is not None:
            self._change(new)

    def waiting(self) -> AbstractContextManager[None]:
        """Around what is not part of this rank's work in a step."""
        return nullcontext() if self._clock is None else self._clock.waiting()

    def begins(self) -> None:
        """A step begins."""

    def ends(self) -> None:
        """A step ends: the optimizer has used the averages."""
        if self._clock is not None:
            self._clock.update_ends()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        repeated = torch._C._current_graph_task_id() != -1
        if repeated or OwnSteps.running or not in_training_mode(module) or not torch.is_grad_enabled():
            return
        gone = self._model is None or self._model() is None  # its ids may be those of a new model
        if gone or id(module) not in self._inside:
            self._model = weakref.ref(module)
            self._inside = {id(inner) for inner in module.modules()}
        if self._model is not None and self._model() is module:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim())
            self._rows = next(map(len, tensors), None)

    def _in_training(self) -> bool:
        model = None if self._model is None else self._model()
        return model is None or in_training_mode(model)

    def _training_source(self) -> CutLoader | None:
        """The loader that the batch of a backward pass comes from; None if that batch had one already."""
        if self._source is not None and self._source.waiting:
            return self._source
        latest = self._latest
        if isinstance(latest, LeftAlone):
            if self._source is None and not self._decided:
                self._decided = True
                self._say(f"batches stay as they are: {latest.reason}")
            return None
        if latest is None or not latest.waiting:
            return None
        if latest is not self._source:  # a script may make a new loader for every epoch
            if self._source is not None and len(set(self._source.shares)) > 1 and self._planned is None:
                self.start_from(self._source.shares, replace=True)
            self._source, self._observed, self._decided = latest, 0, False
            self._rows_are_samples = False
            self._first = self._problem = self._targets = self._summed = None
            self._require_sizes(latest)
            if not latest.ahead:
                latest.skip_to_newest()
        return latest

    def _take(self, source: CutLoader, form: LossForm) -> CutBatch:
        """The oldest waiting batch that the loss can be of; those before it were skipped."""
        per_sample = self._per_sample

        def matches(batch: CutBatch) -> bool:
            if self._rows_are_samples and self._rows != batch.own:
                return False
            counts = {mean / batch.own for mean in form.means}
            return counts == per_sample if per_sample and counts else all(c == int(c) for c in counts)

        batch, found = source.take(matches)
        if not found:
            self._note("the loss is not a mean over the samples of its batch")
        return batch

    @property
    def _per_sample(self) -> set[float]:
        """Values of each sample in the means of the loss, if that does not change from batch to batch."""
        if self._first is None or self._source is None:
            return set()
        return {mean / self._source.batch_size for mean in self._first.means}

    def _weight_of(self, batch: CutBatch, form: LossForm) -> float:
        if self._source is not None and batch.own == self._source.batch_size:
            self._equal = form
        elif self._summed is None and self._equal is not None and batch.shares is not None:
            assert self._source is not None
            self._summed = grows_with_samples(form, self._equal, batch.own / self._source.batch_size)
            if self._summed is None and self.scope is None:
                self._note(
                    "the loss is a sum over the batch that is divided by something else than its samples"
                )
        summed = bool(form.divisors) if self._summed is None else self._summed
        return batch.weigh(summed=self.scope == "all ranks" or summed, team=averaging_ranks())

    def _observe(self, source: CutLoader, batch: CutBatch, form: LossForm, loss: torch.Tensor) -> None:
        """One more batch with equal shares; after some the ranks decide together."""
        others = sum(
            len(other.waiting)
            for other in self._sources.values()
            if isinstance(other, CutLoader) and other is not source
        )
        if self._observed == 0:
            model = None if self._model is None else self._model()
            assert model is not None
            self._note(compares_samples(loss) or problem_of_model(model, follows_speeds=self.sizes is None))
        elif others > self._others:
            self._note("a step takes batches from several loaders")
        self._others = others
        if self.scope == "this rank":
            self._note("average_tokens_across_devices=False: the loss is divided by the tokens of each rank")
        elif self.scope == "all ranks":
            if form.means:
                self._note("the loss is a mean although the Trainer divides by the tokens of all ranks")
        elif form.problem is not None:
            self._note(form.problem)
        elif batch.shares is not None:
            if any(mean % batch.own for mean in form.means):
                self._note(f"the loss is a mean over {form.means[0]} values of {batch.own} samples")
            if self._first is None:
                self._first = form
            elif form.divisors != self._first.divisors:
                self._note(
                    "the loss is a sum over the batch, divided by a number that varies, as means over tokens are"
                )
            elif form.means != self._first.means:
                self._first = LossForm()  # lengths vary
            self._check_targets(form, batch)
        self._rows_are_samples = self._rows == batch.own and (self._rows_are_samples or self._observed == 0)
        self._observed += 1
        if self._observed < OBSERVED:
            return
        self._decided = True
        problem = self._agreed_problem()
        if problem is not None:
            self._stay_equal(problem)
            return
        model = None if self._model is None else self._model()
        assert model is not None
        self._clock = LocalClock(loss.device)
        if (local := running_local_steps()) is not None:
            local.timer = self
        if self._steps is None:
            self._steps = TrainingSteps(model, {id(p) for p in model.parameters()}, self, skipped=True)
            for module in model.modules():
                if isinstance(module, nn.SyncBatchNorm):
                    leave_out(module, lambda: self._clock)
        if self.sizes is not None:
            self._change(self.sizes)
            self._say(f"batches of {listed_by_rank(self.sizes)} samples on the ranks, as requested")
        elif self._planned is not None:
            self._take_planned(source)

    def _check_targets(self, form: LossForm, batch: CutBatch) -> None:
        """Note ignored targets: a mean over the others weighs samples alike only if each has as many of them."""
        for counted, count in form.counted:
            if self._targets is None:
                self._targets = int(counted) // batch.own
            self._ignored.append((counted != count) & (counted != self._targets * batch.own))
        if not self._decided or any(each.device.type == "cpu" for each in self._ignored):
            self._note_ignored()

    def _note_ignored(self) -> None:
        """On a GPU this waits for the last step."""
        ignored, self._ignored = self._ignored, []
        if any(map(bool, ignored)):
            self._note(_UNEQUAL_TARGETS)

    def _change(self, shares: Sequence[int] | None) -> None:
        """From the first batch on that no rank has drawn. Collective."""
        assert self._source is not None
        at = max(int(drawn) for (drawn,) in gather_numbers([self._source.drawn], None))
        self._source.change(shares, at=at)
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
            self._change(new)
            emit_shares(before, new, noticed=None, why="they start from there and follow measured speeds")
        self._windows.forget(self._clock, other_speeds=True)
        self._say(f"batch shares start from {listed} and follow measured speeds")

    def _require_sizes(self, source: CutLoader) -> None:
        if self.sizes is None:
            return
        whole = source.batch_size * source.world_size
        if len(self.sizes) != source.world_size or sum(self.sizes) != whole:
            problem = (
                f"run: --batch-sizes {','.join(map(str, self.sizes))}: the script trains on {whole} samples in a step, "
                f"{source.batch_size} on each of {source.world_size} ranks, and these are {sum(self.sizes)} on "
                f"{len(self.sizes)}, so the training would change; give {source.world_size} numbers that add up to "
                f"{whole}"
            )
            self.texts.add(problem)
            raise TrimtabError(problem)

    def _agreed_problem(self) -> str | None:
        """The problem of the first rank that has one. Collective."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self._problem, self._targets))
        if len({targets for _, targets in ranks}) > 1:
            return _UNEQUAL_TARGETS
        return next((problem for problem, _ in ranks if problem is not None), None)

    def _stay_equal(self, problem: str) -> None:
        self._clock, self._problem = None, None
        if self._source is not None and len(set(self._source.shares)) > 1:
            self._change(None)
        self._say(f"batches stay equal on all ranks: {problem}")

    def _note(self, problem: str | None) -> None:
        if self._problem is None:
            self._problem = problem

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0 and text not in self.texts:
            logger().info(text)
        self.texts.add(text)
