"""Local steps of a module while it trains: counts steps and samples, and chooses settings from measurements."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trimtab.codec import Block
from trimtab.collectives.groups import destroy_groups
from trimtab.control.rank_values import gather_numbers
from trimtab.control.training_steps import TrainingSteps
from trimtab.doors.ddp import stage_groups
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.local.worker import LocalWorker
from trimtab.local_settings import LocalSettings
from trimtab.measure.exchange import measure_exchanges
from trimtab.model_state import JobBound, JobHook, find_state
from trimtab.planning.local_steps import TRIED_BITS, LocalChoice, choose_local_steps, local_settings

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
    ) -> None:
        """Collective. `every` None chooses by measurements after a few steps; `changes` are settings that are given."""
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.group, self.seed, self._changes = group, seed, changes
        self._max_penalty = max_penalty
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise TrimtabError("local_steps: the model has no parameter that is trained")
        self.device = next(iter(trained.values())).device
        self._parameters = len(trained)
        self._numel = sum(p.numel() for p in trained.values())
        self.worker: LocalWorker | None = None
        self.choice: LocalChoice | None = None
        self._start: dict[str, torch.Tensor] | None = None
        self._samples = 0
        self._ended = False
        self._began = 0.0
        self._times: list[float] = []
        if every is not None:
            settings = local_settings(every, 4, group.size(), self._parameters)
            self._agree(replace(settings, **changes), None)
            if group.rank() == 0:
                logger().info("%s", self.explain())
        else:
            _broadcast(trained, group)
            self._start = {name: p.detach().float().clone() for name, p in trained.items()}
        if isinstance(model, DistributedDataParallel):
            # As inside `no_sync()`, for good: gradients and buffers stay with their worker.
            model.require_backward_grad_sync = model.require_forward_param_sync = False
        self._steps = TrainingSteps(model, {id(p) for p in trained.values()}, self, skipped=True)
        model.register_forward_pre_hook(JobHook(torch.compiler.disable(self._count)), with_kwargs=True)
        weakref.finalize(model, _close, weakref.ref(self)).atexit = False

    def _agree(self, settings: LocalSettings, start: dict[str, torch.Tensor] | None) -> None:
        self.worker = LocalWorker(self.module, self.group, settings, seed=self.seed, start=start)

    def _count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the samples of a forward pass: the first axis of its first tensor."""
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim())
            self._samples += next((x.shape[0] for x in tensors), 1)

    def between(self, model: nn.Module) -> None:
        self.finish_step()

    def begins(self) -> None:
        self._began = time.perf_counter()

    def ends(self) -> None:
        self._ended = True

    def finish_step(self) -> None:
        """What follows a step, if one has ended: before the next forward pass, or before the state is looked at."""
        if not self._ended:
            return
        self._ended = False
        samples, self._samples = self._samples, 0
        if self.worker is None:
            self._times.append(time.perf_counter() - self._began)
            if len(self._times) >= WARM_UP + TIMED:
                self._choose()
        if self.worker is not None:
            self.worker.step(samples)

    def _choose(self) -> None:
        """Choose settings from the measured step and link. Collective."""
        own = median(self._times[WARM_UP:])
        step_s = max(row[0] for row in gather_numbers([own], self.group))
        groups = stage_groups(self.group, self.device)
        codecs = {str(bits): (Block(bits=bits, block=128, stochastic=False), True) for bits in TRIED_BITS}
        measured = measure_exchanges(codecs, groups, self.device, self._numel)
        destroy_groups(groups)
        whole = {int(b): e.compressed_s * self._numel * 4 / e.nbytes for b, e in measured.items()}
        plain = next(iter(measured.values()))
        plain_s = plain.plain_s * self._numel * 4 / plain.nbytes
        self.choice = choose_local_steps(
            step_s=step_s,
            exchange_s=whole,
            every_step_s=step_s + min(plain_s, *whole.values()),
            workers=self.group.size(),
            layers=self._parameters,
            max_penalty=self._max_penalty,
        )
        settings = self.choice.settings
        if settings is None:  # nothing exchanges gradients every step here: the shortest rounds
            settings = local_settings(2, None, self.group.size(), self._parameters)
        if self.group.rank() == 0:
            logger().info("local steps: %s", self.choice.reason)
        start, self._start = self._start, None
        self._agree(replace(settings, **self._changes), start)
        assert self.worker is not None
        self.worker.missed(len(self._times) - 1)

    def explain(self) -> str:
        if self.worker is None:
            return "local steps: the settings are chosen after a few steps"
        own = self.worker.settings
        text = (
            f"local steps: {self.group.size()} workers agree every {own.every} steps, in "
            f"{own.bits or 32} bits and {len(self.worker.fragments)} fragments"
        )
        return text if self.choice is None else f"{text}; {self.choice.reason}"

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


def local_steps_of(model: nn.Module) -> LocalSteps | None:
    """The local steps of a model, if it has any."""
    steps: LocalSteps | None = find_state(model, "local_steps")
    return steps


def _broadcast(trained: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    for p in trained.values():
        dist.broadcast(p.detach(), dist.get_global_rank(group, 0), group=group)


def _close(steps: Callable[[], LocalSteps | None]) -> None:
    own = steps()
    if own is not None:
        own.close()
