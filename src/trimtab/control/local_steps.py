"""Local steps of a module while it trains: counts steps and samples, and chooses settings from measurements."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trimtab.control.local_choice import measured_chooser
from trimtab.control.local_ddp import DdpOfWorker
from trimtab.control.local_rounds import in_words, is_better, is_checked, shortened
from trimtab.control.local_watch import HandUpdates, LoadedWeights, shards_states
from trimtab.control.local_workers import WhoWorks, ranks_of_workers
from trimtab.control.rank_values import NumbersOfOwners, gather_numbers
from trimtab.control.running_local_steps import StepTimer, active
from trimtab.control.training_steps import TrainingSteps, in_training_mode, observe_skipped_steps
from trimtab.control.unify import forget_lost, unify
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.local.worker import LocalWorker
from trimtab.local.workers import HOST, Workers, are_alike, start_alike
from trimtab.local_settings import LocalSettings
from trimtab.model_state import JobBound, JobHook
from trimtab.planning.local_steps import LocalChoice, local_settings, of_one_step
from trimtab.report import events

WARM_UP, TIMED = 2, 4
"""Steps before the settings are chosen: some that are not timed, and some that are."""


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
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.group, self.seed, self._changes = group, seed, changes
        self._max_penalty = max_penalty
        self._model = weakref.ref(model)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise TrimtabError("local_steps: the model has no parameter that is trained")
        if odd := next((name for name, p in trained.items() if p.is_complex()), None):
            raise TrimtabError(
                f"local_steps: {odd} is complex, and changes of weights are exchanged as real numbers"
            )
        self._trained = trained
        self.device = next(iter(trained.values())).device
        self._members = ranks_of_workers(model, group, self.device, who)
        self.worker: LocalWorker | None = None
        self.choice: LocalChoice | None = None
        self._chooser: Callable[..., LocalChoice] | None = None
        """Where settings are chosen by measurements: chooses again, from agreement too."""
        self.timer: StepTimer | None = None
        """Must not count the time in which this worker waits for others as its own."""
        self.numbers = NumbersOfOwners(group, HOST)
        self._start: dict[str, torch.Tensor] | None = None
        self._samples = self._batch = self._seen = self._skipped = 0
        self._ended = False
        self._length: int | None = None
        """Steps of the present round, where workers take unequal numbers of them."""
        self._began = 0.0
        self._times: list[float] = []
        self._off = self._opened = self._begun = self._resumed = False
        """Whether a forward pass of training was seen, a step was taken, and a checkpoint of local steps was loaded
        that no step has followed."""
        self._loaded = LoadedWeights(self.module, list(trained.values()))
        self._by_hand = HandUpdates(list(trained.values()))
        # Before what follows a step is done: the script may have changed weights since.
        before = JobHook(torch.compiler.disable(self._before_forward))
        model.register_forward_pre_hook(before, with_kwargs=True)
        self._steps = TrainingSteps(model, {id(p) for p in trained.values()}, self, skipped=True)
        self._ddp = DdpOfWorker(model) if isinstance(model, DistributedDataParallel) else None
        if every is not None:
            settings = local_settings(every, 4, self._count_workers(), len(self._trained))
            self._agree(replace(settings, **changes))
            self._say(self.explain().removeprefix("local steps: "))
        else:
            start_alike(list(trained.values()), group, self.device)
            self._start = self._present()
        if self._ddp is not None and every is None:  # only then is it asked for
            alive = weakref.WeakMethod(self.skips)
            skip = observe_skipped_steps(lambda _: own() if (own := alive()) else None)
            weakref.finalize(model, skip).atexit = False
        weakref.finalize(model, _close, weakref.ref(self)).atexit = False
        active[self] = None

    def _present(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().float().clone() for name, p in self._trained.items()}

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
        self.worker.restored = lambda: forget_lost(self._steps.optimizers)
        if workers.gradients is not None:
            assert self._ddp is not None
            self._ddp.average_in(workers.gradients)

    @property
    def team(self) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
        """The ranks that average this rank's gradients in every step, as the group counts them, and their group."""
        if self.worker is None:
            return (self.group.rank(),), None
        return self.worker.workers.own, self.worker.workers.gradients

    def begin_round(self, length: int, *, earlier: bool = False) -> None:
        """Take so many steps in the round that begins; other workers may take other numbers.

        Args:
            earlier: another model may be the one that is trained now; nothing changes in the middle of a round.
        """
        self.finish_step()
        if earlier and self.worker is not None and not self.worker.between_rounds:
            return
        if len(self.team[0]) > 1:
            raise TrimtabError(
                "local_steps: ranks of a host take the same number of steps; for uneven=\"steps\" use workers='ranks'"
            )
        self.keep_rounds()  # the loader has cut them
        self._length = length
        if self.worker is not None:
            self.worker.begin_round(length)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at what the script did since the last one; and count samples: the first axis of the first tensor."""
        repeated = torch._C._current_graph_task_id() != -1
        if self._off or repeated or not in_training_mode(module) or not torch.is_grad_enabled():
            return
        if not self._begun and self._is_refused():
            return
        if self._loaded.pending and (self._opened or self._resumed):
            self._take_loaded()
        self.finish_step()
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim())
        self._samples += next((x.shape[0] for x in tensors), 1)

    def _is_refused(self) -> bool:
        """Before the first step: go back to DDP where rounds cannot be."""
        if self._ddp is not None and self._ddp.joins:
            reason = "torch's Join lets ranks take different numbers of steps, and rounds have as many on all"
            self._leave(reason, alike=True, compressed=False)
        elif self._by_hand.look():
            self._leave("the weights change without a step of a torch optimizer, so steps cannot be counted")
        return self._off

    def _agree_on_present(self) -> None:
        """All workers have the present weights alike: rounds begin anew from them."""
        if self.worker is None:
            self._start = self._present()
        elif self.worker.differs():
            self.worker.restart()

    def _take_loaded(self) -> None:
        """The script has loaded weights in the middle of the training: all begin anew from them. Collective.

        Where each worker has loaded something of its own, that is a part of its change.
        """
        weights = list(self._trained.values())
        if self._resumed:
            self._loaded.drop()
        elif self._loaded.settle(self._finish) and are_alike(weights, self.group, self.device):
            self._agree_on_present()

    def _finish(self) -> None:
        self.finish_step()
        if self.worker is not None:
            self.worker.finish()

    def between(self, model: nn.Module) -> None:
        self.finish_step()
        self._resumed = False
        if self._off:
            return
        # Not in `finish_step`: one rank may call that for itself, to evaluate.
        worker = self.worker
        if self._ddp is not None and any(map(shards_states, self._steps.optimizers)):
            self._leave("ZeroRedundancyOptimizer updates every parameter on one rank only", alike=True)
        elif worker is None and len(self._times) >= WARM_UP + TIMED:
            with self._not_own_time():
                self._choose()
        elif worker is not None and self._chooser is not None and is_checked(worker):
            self._reconsider(worker, self._chooser)

    def _not_own_time(self) -> AbstractContextManager[None]:
        return nullcontext() if self.timer is None else self.timer.waiting()

    def begins(self) -> None:
        if not self._opened:  # scripts load their weights, and wrap a model before that or after it
            self._opened = True
            self._loaded.drop()
            if not self._resumed:
                self._agree_on_present()
        self._began = time.perf_counter()

    def ends(self) -> None:
        self._ended = self._begun = True

    def skips(self) -> None:
        """A GradScaler has skipped a step."""
        self._skipped += 1

    def finish_step(self, *, alone: bool = False) -> None:
        """What follows a step, if one has ended: before the next forward pass, or before weights are looked at.

        `alone`: other workers may be waiting for this one, and send nothing before their next forward pass. What would
        be sent now is then left for that. Without a delay it cannot be: the step ends with the exchange.
        """
        if not self._ended or self._off or self._loaded.pending:
            return
        worker = self.worker
        if alone and worker is not None and worker.settings.delay and worker.sends_next:
            return
        self._ended = False
        self._batch = samples = self._samples
        self._samples = 0
        with self._not_own_time():
            if self.worker is None:
                self._seen += samples
                self._times.append(time.perf_counter() - self._began)
            else:
                self.worker.step(samples)

    def _choose(self) -> None:
        """Choose settings from the measured step and link. Collective."""
        sizes = [p.numel() for p in self._trained.values()]
        self._chooser = measured_chooser(
            self.group,
            self.device,
            sum(sizes),
            largest=max(sizes),
            step_s=median(self._times[WARM_UP:]),
            balanced=self.timer is not None and self.timer.follows_speeds,
            workers=self._count_workers(),
            layers=len(self._trained),
            max_penalty=self._max_penalty,
            bits=self._changes.get("bits", "auto"),
        )
        self.choice = self._chooser()
        settings = self.choice.settings
        if settings is None and self._exchange_every_step(self.choice.reason):
            return
        if settings is None:  # nothing exchanges gradients every step here: the shortest rounds
            settings = local_settings(2, None, self._count_workers(), len(self._trained))
            self.keep_rounds()
        start, self._start = self._start, None
        self._agree(replace(settings, **self._changes), start, self._join_hosts())
        assert self.worker is not None
        self.worker.missed(len(self._times), self._seen)
        if self._length is not None:  # the loader has cut the present round, without knowing of these
            self.worker.begin_round(self._length)
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
            self.worker.restored = lambda: forget_lost(self._steps.optimizers)
            self._say(self.explain().removeprefix("local steps: "), penalty=choice.penalty)
            return
        self._seen = self._batch
        if self._exchange_every_step(choice.reason):
            worker.close()
            self.worker = None
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

    def _exchange_every_step(self, reason: str) -> bool:
        """Go back to DDP; False where that is not possible. Collective."""
        if self._changes or self._ddp is None or not self._ddp.can_go_back or not self._unify(self.group):
            return False
        self._back_to_ddp(reason)
        return True

    def _back_to_ddp(self, reason: str, *, compressed: bool = True) -> None:
        assert self._ddp is not None
        self._turn_off()
        self._ddp.take_back(f"local steps are off: {reason}", compressed=compressed)
        if self.group.rank() == 0:
            events.emit("decision", what="local_steps", decided="off", why=reason, expected={})

    def defer(self, state: object, hook: Callable[[Any, Any], Any]) -> bool:
        """Keep the script's communication hook until DDP exchanges every step again; False where it does so now."""
        if self._ddp is None or self._off:
            return False
        self._ddp.defer(state, hook)
        return True

    def _leave(self, reason: str, *, alike: bool = False, compressed: bool = True) -> None:
        """Back to DDP, whatever the settings; `alike`: ranks have the same weights already. Collective.

        Not if `alike` and not `compressed`: ranks without data never come here.
        """
        self._seen = max(1, self._seen + self._samples)
        if self._ddp is None or not self._ddp.can_go_back or not (alike or self._unify(self.group)):
            raise TrimtabError(f"local_steps: {reason}; train without local steps")
        self._finish()
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self._back_to_ddp(reason, compressed=compressed)

    def _say(self, text: str, **expected: float) -> None:
        if self.group.rank() == 0:
            logger().info("local steps: %s", text)
            events.emit("decision", what="local_steps", decided=text, why=None, expected=expected)

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed job needs, if settings are chosen; one rank may ask for itself.

        A step that has ended is not finished here, but when training goes on, in the resumed job too: it may send what
        other workers send before their next forward pass, and the state cannot be known before that has arrived.
        """
        if self.worker is None:
            return None
        return {**self.worker.state_dict(), "unfinished": self._samples if self._ended else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from a checkpoint; returns whether it was of use. Every rank calls it.

        Where the settings are still to be chosen, those of the checkpoint are taken.
        """
        self._loaded.drop()
        self.finish_step()
        if self._off:
            return False
        self._resumed = True
        if self.worker is None:
            saved = state["settings"]
            settings = local_settings(
                saved["every"], saved["bits"], self._count_workers(), len(self._trained)
            )
            if state["workers"] == self._count_workers():
                settings = LocalSettings(**saved)
            self._start = None
            self._agree(replace(settings, **self._changes))
        assert self.worker is not None
        continued = self.worker.load_state_dict(state)
        unfinished = state.get("unfinished") if continued else None
        self._ended, self._samples = unfinished is not None, unfinished or 0
        return True

    def explain(self) -> str:
        if self._off:
            return ""
        if self.worker is None:
            return "local steps: the settings are chosen after a few steps"
        return in_words(self.worker, self.choice)

    def _turn_off(self) -> None:
        self._off, self._start = True, None
        active.pop(self, None)
        self._loaded.end()

    def close(self) -> None:
        self._turn_off()
        self.numbers.close()
        if self.worker is not None:
            self.worker.close()


def _close(steps: Callable[[], LocalSteps | None]) -> None:
    own = steps()
    if own is not None:
        own.close()
