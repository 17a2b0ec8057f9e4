"""Which of a script's DDP and FSDP2 modules train, and where their steps end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trimtab.control.sharded_waits import sharded_parameters
from trimtab.control.shares.between_samples import has_standardized_columns, is_standardized
from trimtab.control.training_steps import StepListener, TrainingSteps, in_training_mode
from trimtab.measure.local_clock import LocalClock, leave_out
from trimtab.model_state import JobHook
from trimtab.run_settings import OwnSteps


class TrainedModels:
    """Follows the modules that average gradients over ranks; a script may train one after another, or several."""

    def __init__(self, listener: StepListener, unknown: Callable[[], None]) -> None:
        """
        Args:
            listener: hears of the steps of the modules that are followed.
            unknown: called on every rank where a module is made, or trains for the first time.
        """
        self._listener, self._unknown = listener, unknown
        self._latest: weakref.ref[nn.Module] | None = None
        self._inside: set[int] = set()
        """Ids of the latest module and of the modules in it, of which FSDP2 shards some by themselves."""
        self._trained: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[nn.Module, TrainingSteps] = weakref.WeakKeyDictionary()
        self._followed: weakref.ref[nn.Module] | None = None
        self.rows: int | None = None
        """The first axis of what the latest module was called with."""
        self.observing = True
        """Whether what the modules are called with is looked at."""
        self._standardized = False

    @property
    def latest(self) -> nn.Module | None:
        """The module that ran last in training."""
        return None if self._latest is None else self._latest()

    @property
    def followed(self) -> nn.Module | None:
        """The module whose steps count."""
        return None if self._followed is None else self._followed()

    @property
    def in_training(self) -> bool:
        """False as long as the latest module is in evaluation mode."""
        latest = self.latest
        return latest is None or in_training_mode(latest)

    def watch(self, model: nn.Module) -> None:
        """Take notice of a module that averages gradients, unless it is one that trimtab tries something with."""
        if OwnSteps.running:
            return
        hook = JobHook(torch.compiler.disable(self.before_forward))
        model.register_forward_pre_hook(hook, with_kwargs=True)
        if _averages_over_all(model):
            self._unknown()

    def forget(self) -> None:
        """No module is known to have trained."""
        self._trained.clear()
        self._standardized, self.observing = False, True

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        repeated = torch._C._current_graph_task_id() != -1
        if repeated or OwnSteps.running or not in_training_mode(module) or not torch.is_grad_enabled():
            return
        latest = self.latest
        if (
            latest is None or id(module) not in self._inside
        ):  # ids of one that is gone may be those of a new one
            if module not in self._trained and self._trained and _averages_over_all(module):
                self._unknown()
            self._trained[module] = None
            self._latest = weakref.ref(module)
            self._inside = {id(inner) for inner in module.modules()}
            latest = module
        if latest is module:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
            self.rows = next((x.size(0) for x in tensors), None)  # nested tensors have no `len`
            if self.observing and any(_is_standardized(x, self.rows) for x in tensors):
                self._standardized = True

    def problem(self) -> str | None:
        """Why batches must be equal on all ranks, of the first module that has a reason."""
        if self._standardized:
            return "the model's inputs are standardized by those of their batch"
        problems = (_problem_of(model) for model in self._trained)
        return next((problem for problem in problems if problem is not None), None)

    def state(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Sum and absolute sum of every buffer of the models that train, by the order in which these came."""
        sums: dict[tuple[int, str], torch.Tensor] = {}
        for place, model in enumerate(self._trained):
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and not buffer.is_meta and not isinstance(buffer, DTensor):
                    values = buffer.detach().double()
                    sums[place, name] = torch.stack([values.sum(), values.abs().sum()])
        return {key: (float(whole), float(size)) for key, (whole, size) in sums.items()}

    def learning_rates(self) -> float:
        """The sum of those of the followed module's optimizers."""
        steps = None if self.followed is None else self._steps.get(self.followed)
        groups = (
            group for optimizer in (steps.optimizers if steps else ()) for group in optimizer.param_groups
        )
        return float(sum(float(group.get("lr", 0.0)) for group in groups))

    def follow(self, clock: Callable[[], LocalClock | None]) -> None:
        """From here on the steps of the latest module count; the listener hears of them."""
        model = self.latest
        assert model is not None
        self._followed = weakref.ref(model)
        if model in self._steps:
            return
        parameters = {id(p) for p in (*model.parameters(), *sharded_parameters(model))}
        sharded = not isinstance(model, nn.parallel.DistributedDataParallel)
        self._steps[model] = TrainingSteps(model, parameters, self._listener, skipped=True, first=sharded)
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                leave_out(module, clock)


def _problem_of(model: nn.Module) -> str | None:
    """Why batches of a DDP or FSDP2 module must be equal on all ranks; None if they need not."""
    for name, module in model.named_modules():
        normalizes = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        if normalizes and not isinstance(module, nn.SyncBatchNorm):
            return f"{type(module).__name__} {name} normalizes by each rank's own samples"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            return f"a hook on {name} gets the gradient of each rank's own samples (register_hook)"
    if getattr(getattr(model, "_join_config", None), "enable", False):
        return "ranks may run out of data one by one (DDP's join)"
    group = getattr(model, "process_group", None)
    if group is not None and group.size() != dist.get_world_size():
        return "DistributedDataParallel averages over some of the ranks only"
    return None


def _is_standardized(values: torch.Tensor, rows: int | None) -> bool:
    return has_standardized_columns(values, rows) or bool(rows and is_standardized(values, rows))


def _averages_over_all(model: nn.Module) -> bool:
    """Whether all ranks have a part in a module, so that they meet where it is made and where it runs."""
    if not dist.is_initialized():
        return False
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group.size() == dist.get_world_size()
    sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    return sharded is not None and sharded.device_mesh.size() == dist.get_world_size()
