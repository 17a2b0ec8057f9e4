"""Local steps of a module while it trains: counts steps and samples, and chooses settings from measurements."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.control.compression.ddp import compress_ddp
from trimtab.control.compression.explanation import record_explanation
from trimtab.control.local_choice import measured_chooser
from trimtab.control.local_rounds import is_better, is_checked, shortened
from trimtab.control.local_workers import WhoWorks, ranks_of_workers
from trimtab.control.rank_values import LaterNumbers, gather_numbers
from trimtab.control.training_steps import TrainingSteps, observe_skipped_steps
from trimtab.control.unify import unify
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.local.worker import LocalWorker
from trimtab.local.workers import HOST, Workers, start_alike
from trimtab.local_settings import LocalSettings
from trimtab.model_state import JobBound, JobHook, find_state
from trimtab.planning.local_steps import LocalChoice, expected_loss, local_settings, of_one_step
from trimtab.report import events

WARM_UP, TIMED = 2, 4
"""Steps before the settings are chosen: some that are not timed, and some that are."""


class StepTimer(Protocol):
    """Times this rank's own work in a step: a loader that shares batches out by speed."""

    @property
    def follows_speeds(self) -> bool:
        """Whether batches will be such that all ranks take the same time."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around what is not part of it."""


class LocalSteps(JobBound):
    """The local steps of one module; a `StepListener`."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        every: int | None,
        max_penalty: float,
        seed: int,
        changes: dict[str, Any],
        who: WhoWorks = "auto",
    ) -> None:
        """Collective. `every` None chooses by measurements after a few steps; `changes` are settings that are given."""
        ddp = isinstance(model, DistributedDataParallel)
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.group, self.seed, self._changes = group, seed, changes
        self._max_penalty = max_penalty
        self._model = weakref.ref(model)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise TrimtabError("local_steps: the model has no parameter that is trained")
        self.device = next(iter(trained.values())).device
        self._parameters = len(trained)
        self._numel = sum(p.numel() for p in trained.values())
        self._largest = max(p.numel() for p in trained.values())
        self._members = ranks_of_workers(model, group, self.device, who)
        self.worker: LocalWorker | None = None
        self.choice: LocalChoice | None = None
        self._chooser: Callable[..., LocalChoice] | None = None
        """Where settings are chosen by measurements: chooses again, from agreement too."""
        self.timer: StepTimer | None = None
        """Must not count the time in which this worker waits for others as its own."""
        self._numbers: weakref.WeakKeyDictionary[object, LaterNumbers] = weakref.WeakKeyDictionary()
        self._number_groups: list[dist.ProcessGroup] = []
        self._start: dict[str, torch.Tensor] | None = None
        self._samples = self._batch = self._seen = self._skipped = 0
        self._ended = False
        self._began = 0.0
        self._times: list[float] = []
        self._off = False
        if isinstance(model, DistributedDataParallel):
            # As inside `no_sync()`, for good: gradients and buffers stay with their worker.
            model.require_backward_grad_sync = model.require_forward_param_sync = False
        if every is not None:
            settings = local_settings(every, 4, self._count_workers(), self._parameters)
            self._agree(replace(settings, **changes))
            self._say(self.explain().removeprefix("local steps: "))
        else:
            start_alike(list(trained.values()), group, self.device)
            self._start = {name: p.detach().float().clone() for name, p in trained.items()}
        self._steps = TrainingSteps(model, {id(p) for p in trained.values()}, self, skipped=True)
        count = JobHook(torch.compiler.disable(self._count))
        model.register_forward_pre_hook(count, with_kwargs=True)
        if ddp and every is None:  # only then is it asked for
            skip = observe_skipped_steps(_weakly(self))
            weakref.finalize(model, skip).atexit = False
        weakref.finalize(model, _close, weakref.ref(self)).atexit = False
        _active.add(self)

    def _count_workers(self) -> int:
        return self.group.size() if self._members is None else len(self._members)

    def _agree(
        self,
        settings: LocalSettings,
        start: dict[str, torch.Tensor] | None = None,
        workers: Workers | None = None,
    ) -> None:
        workers = workers or Workers(self.group, self.device, self._members)
        self.worker = LocalWorker(
            self.module, self.group, settings, workers=workers, seed=self.seed, start=start
        )
        self.worker.restored = self._forget_lost
        model = self._model()
        if workers.gradients is not None and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._average_on_host)
            model.require_backward_grad_sync = True

    def _forget_lost(self) -> None:
        """What the optimizers kept of gradients that were not finite would spoil the next weights too."""
        for optimizer in self._steps.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.nan_to_num_(0.0, 0.0, 0.0)

    def _average_on_host(self, _state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses string annotations
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        group = self.group if self._off else self.team[1]
        assert group is not None
        return allreduce_hook(group, bucket)

    @property
    def team(self) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
        """The ranks that average this rank's gradients in every step, as the group counts them, and their group."""
        if self.worker is None:
            return (self.group.rank(),), None
        return self.worker.workers.own, self.worker.workers.gradients

    def begin_round(self, length: int) -> None:
        """Take so many steps in the round that begins; other workers may take other numbers."""
        self.finish_step()
        if len(self.team[0]) > 1:
            raise TrimtabError(
                "local_steps: ranks of a host take the same number of steps; for uneven=\"steps\" use workers='ranks'"
            )
        self.keep_rounds()  # the loader has cut them
        if self.worker is not None:
            self.worker.begin_round(length)

    def numbers_of(self, owner: object) -> LaterNumbers:
        """What exchanges an owner's numbers between steps while nobody waits. The first call is collective."""
        if owner not in self._numbers:
            self._number_groups += private_groups(self.group, HOST, 1)
            self._numbers[owner] = LaterNumbers(self._number_groups[-1])
        return self._numbers[owner]

    def _count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the samples of a forward pass: the first axis of its first tensor."""
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim())
            self._samples += next((x.shape[0] for x in tensors), 1)

    def between(self, model: nn.Module) -> None:
        self.finish_step()
        worker = self.worker
        # Not in `finish_step`: one rank may call that for itself, to evaluate or to save.
        if worker is not None and self._chooser is not None and is_checked(worker):
            self._reconsider(worker, self._chooser)

    def begins(self) -> None:
        self._began = time.perf_counter()

    def ends(self) -> None:
        self._ended = True

    def skips(self) -> None:
        """A GradScaler has skipped a step."""
        self._skipped += 1

    def finish_step(self) -> None:
        """What follows a step, if one has ended: before the next forward pass, or before the state is looked at."""
        if not self._ended or self._off:
            return
        self._ended = False
        self._batch = samples = self._samples
        self._samples = 0
        with nullcontext() if self.timer is None else self.timer.waiting():
            if self.worker is None:
                self._seen += samples
                self._times.append(time.perf_counter() - self._began)
                if len(self._times) >= WARM_UP + TIMED:
                    self._choose()
            else:
                self.worker.step(samples)

    def _choose(self) -> None:
        """Choose settings from the measured step and link. Collective."""
        self._chooser = measured_chooser(
            self.group,
            self.device,
            self._numel,
            largest=self._largest,
            step_s=median(self._times[WARM_UP:]),
            balanced=self.timer is not None and self.timer.follows_speeds,
            workers=self._count_workers(),
            layers=self._parameters,
            max_penalty=self._max_penalty,
        )
        self.choice = self._chooser()
        settings = self.choice.settings
        if settings is None and self._exchange_every_step():
            return
        if settings is None:  # nothing exchanges gradients every step here: the shortest rounds
            settings = local_settings(2, None, self._count_workers(), self._parameters)
            self.keep_rounds()
        start, self._start = self._start, None
        self._agree(replace(settings, **self._changes), start, self._join_hosts())
        assert self.worker is not None
        self.worker.missed(len(self._times), self._seen)
        expected = {"step_s": self.choice.step_s, "penalty": self.choice.penalty}
        self._say(self.explain().removeprefix("local steps: "), **expected)

    def keep_rounds(self) -> None:
        """Rounds stay as they were chosen, whatever the agreement; for comparisons."""
        self._chooser = None

    def _reconsider(self, worker: LocalWorker, chooser: Callable[..., LocalChoice]) -> None:
        """Shorten rounds, or exchange every step, where the changes of workers agree too little. Collective."""
        # The first rank's counts: with `patience` workers may count exchanges in different order.
        own = worker.agreement.value
        (measured,) = gather_numbers([-1.0 if own is None else own], self.group)[0]
        if measured < 0:
            return
        choice = chooser(agreement=of_one_step(measured, worker.settings.every))
        if not is_better(choice, worker.settings.every):
            return
        worker.finish()
        self.choice = choice
        if choice.settings is not None:
            self.worker = shortened(worker, self.module, replace(choice.settings, **self._changes), self.seed)
            self.worker.restored = self._forget_lost
            self._say(self.explain().removeprefix("local steps: "), penalty=choice.penalty)
            return
        self._seen = self._batch
        if self._exchange_every_step():
            worker.close()
            self.worker = None
            self._say(f"off: {choice.reason}")
        else:
            self.keep_rounds()
            self._say(f"{choice.reason}; rounds stay, as nothing here can exchange every step")

    def _join_hosts(self) -> Workers:
        """Ranks of a host went their own ways while steps were timed: from here on they are one worker. Collective."""
        workers = Workers(self.group, self.device, self._members)
        if workers.gradients is not None and not self._unify(workers.gradients):
            workers.close()
            self._members = None
            self._say("the ranks of a host cannot continue as one, so every rank is a worker")
            return Workers(self.group, self.device)
        return workers

    def _unify(self, team: dist.ProcessGroup) -> bool:
        return unify(
            self.module,
            self._steps.optimizers,
            team,
            self.group,
            samples=self._seen,
            skipped=self._skipped,
        )

    def _exchange_every_step(self) -> bool:
        """Go back to DDP with compressed gradients; False where that is not possible. Collective."""
        model = self._model()
        if not isinstance(model, DistributedDataParallel) or self._changes or not self._unify(self.group):
            return False
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        self._off = True
        _active.discard(self)
        self._start = None
        try:
            decision = compress_ddp(model)
        except TrimtabError as error:
            decision = f"gradients are sent as by DDP alone: {error}"
        assert self.choice is not None
        record_explanation(model, f"local steps are off: {self.choice.reason}; {decision}")
        return True

    def _say(self, text: str, **expected: float) -> None:
        if self.group.rank() == 0:
            logger().info("local steps: %s", text)
            events.emit("decision", what="local_steps", decided=text, why=None, expected=expected)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from a checkpoint; returns whether it was of use. Every rank calls it.

        Where the settings are still to be chosen, those of the checkpoint are taken.
        """
        self.finish_step()
        if self._off:
            return False
        if self.worker is None:
            saved = state["settings"]
            settings = local_settings(saved["every"], saved["bits"], self._count_workers(), self._parameters)
            if state["workers"] == self._count_workers():
                settings = LocalSettings(**saved)
            self._start = None
            self._agree(replace(settings, **self._changes))
        assert self.worker is not None
        self.worker.load_state_dict(state)
        return True

    def explain(self) -> str:
        if self._off:
            return ""
        if self.worker is None:
            return "local steps: the settings are chosen after a few steps"
        own, workers = self.worker.settings, self.worker.workers
        who = (
            "workers"
            if workers.inside is None
            else f"hosts, whose ranks average in every step ({workers.ranks}),"
        )
        text = (
            f"local steps: {workers.count} {who} agree every {own.every} steps, in "
            f"{own.bits or 32} bits and {len(self.worker.fragments)} fragments"
        )
        if self.worker.late:
            text += f"; {self.worker.late} fragments came late and were taken later"
        reason = None if self.choice is None else self.choice.reason
        measured = self.worker.agreement.value
        if reason is None or measured is not None:
            common = None if measured is None else of_one_step(measured, own.every)
            expected = expected_loss(workers.count, own.every, own.bits, common)
            reason = expected if reason is None else f"{reason}; measured by now: {expected}"
        return f"{text}; {reason}"

    def close(self) -> None:
        self._off = True
        _active.discard(self)
        destroy_groups(self._number_groups)
        if self.worker is not None:
            self.worker.close()


_active: weakref.WeakSet[LocalSteps] = weakref.WeakSet()
"""The local steps that run in this process."""


def running_local_steps() -> LocalSteps | None:
    """The local steps of this process; of several, those of any one: all have the same ranks."""
    return next(iter(_active), None)


def averaging_ranks() -> tuple[int, ...] | None:
    """The ranks that average their gradients with this one in every step; None where all do."""
    local = running_local_steps()
    return None if local is None else local.team[0]


def local_steps_of(model: nn.Module) -> LocalSteps | None:
    """The local steps of a model, if it has any."""
    steps: LocalSteps | None = find_state(model, "local_steps")
    return steps


def _weakly(steps: LocalSteps) -> Callable[[Any], None]:
    alive = weakref.ref(steps)

    def skips(_optimizer: Any) -> None:
        if (own := alive()) is not None:
            own.skips()

    return skips


def _close(steps: Callable[[], LocalSteps | None]) -> None:
    own = steps()
    if own is not None:
        own.close()
