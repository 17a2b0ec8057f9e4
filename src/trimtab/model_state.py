"""What trimtab keeps on a model: one object, under one key of the module's ``__dict__``.

The key is no parameter, buffer or submodule, so that the module's own ``state_dict`` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_KEY = "_trimtab"


class Detached:
    """Replaces something `JobBound` in copies of a model and in saved models; does nothing."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Detached:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class JobBound:
    """Base of what belongs to a model of the running job (threads, groups, hooks): copies and saved models lack it."""

    def __deepcopy__(self, _memo: Any) -> Any:
        return Detached()

    def __reduce__(self) -> Any:
        return Detached, ()


class JobHook(JobBound):
    """A module's hook that is not copied with the module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


@dataclass(eq=False)
class ModelState:
    """One attribute for each thing that trimtab attaches to a module; None until it does."""

    compression: Any = None
    """`trimtab.doors.ddp.DdpCompression` of a DDP module."""

    fsdp_compression: Any = None
    """`trimtab.doors.fsdp.FsdpCompression` of a model of `fully_shard` modules."""

    adaptive: Any = None
    """`trimtab.control.compression.adaptive.Controller`, which chooses the bits while the model trains."""

    explanation: str | None = None
    """What `trimtab.compress` decided, and why."""

    left_alone: dict[str, str] | None = None
    """Operators that `trimtab.set_precision` passed over, and why."""

    active_plan: Any = None
    """`trimtab.control.plans.active_plan.ActivePlan`: the plan that the model runs under."""

    plan_follower: Any = None
    """`trimtab.control.plans.follower.Follower`, which replaces the plan when ranks drift."""

    autopilot: Any = None
    """`trimtab.control.autopilot.pilot.Autopilot`, which makes the plan."""

    compression_plan: Any = None
    """`trimtab.planning.plan.Plan` that decided whether this DDP module is compressed, and to how many bits."""

    unused_state: Any = None
    """The part of a loaded checkpoint that has no use on these ranks, for the next checkpoint."""

    balancer: Any = None
    """`trimtab.control.tensor.balancer.Balancer` of a tensor-parallel model."""

    local_steps: Any = None
    """`trimtab.control.local_steps.LocalSteps` of a model that agrees on its weights now and then."""

    recorder: Any = None
    """`trimtab.control.step_recorder.StepRecorder`, which writes the model's steps to the run folder."""

    tensor_parallel: Any = None
    """`trimtab.sharding.unit_block.ShardedModel`: all units of a tensor-parallel model."""

    whole_fingerprint: str | None = None
    """Fingerprint of a tensor-parallel model before it was sharded: that of its plans."""

    keyed_dropout: Any = None
    """What a module that calls functional dropout needs to key it: `trimtab.sharding.dropout`."""

    aligned_block: Any = None
    """`trimtab.sharding.unit_block` unit block of an attention module with a bias or parameters by head."""

    local_shapes: Any = None
    """Replaces sizes of all heads in an attention module's forward pass: `trimtab.sharding.structure.shapes`."""

    functional_block: Any = None
    """`trimtab.sharding.unit_block` unit block of torch's attention, or of a module of experts."""

    sequence_layer: Any = None
    """What a layer needs to work on parts of the sequence: `trimtab.sharding.sequence.layers`."""

    sequence_inputs: Any = None
    """Which inputs of a module are gathered along the sequence: `trimtab.sharding.sequence.layers`."""

    shared_parameters: Any = None
    """Names of parameters whose gradients are summed over the ranks, with the unit blocks that use them."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and saved models keep what their forward pass needs; the rest belongs to the running job."""
        kept = (
            "tensor_parallel",
            "whole_fingerprint",
            "keyed_dropout",
            "aligned_block",
            "local_shapes",
            "functional_block",
            "shared_parameters",
            "sequence_layer",
            "sequence_inputs",
        )
        return {name: getattr(self, name) for name in kept}


def state_of(module: object) -> ModelState:
    """What is attached to a module, for reading: a module that trimtab has not touched stays untouched."""
    state = getattr(module, "__dict__", {}).get(_KEY)
    return state if isinstance(state, ModelState) else ModelState()


def attach_state(module: object) -> ModelState:
    """What is attached to a module, for writing."""
    return module.__dict__.setdefault(_KEY, ModelState())  # type: ignore[no-any-return]


def find_state(model: object, attribute: str) -> Any:
    """An attribute of a model's state, or of the model inside DistributedDataParallel; None where neither has it."""
    value = getattr(state_of(model), attribute)
    return value if value is not None else getattr(state_of(getattr(model, "module", None)), attribute)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the model may run: afterwards its modules have the attributes, and the buffers, that they had.

    Models keep things between forward passes (a table of positions, the size of a window), which belong to the inputs
    of the pass: those of an example, or of tensors without values, would be wrong in the next one.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    containers = [
        (value, value.copy())
        for _, own in attributes
        for name, value in own.items()
        if type(value) in (list, dict, set) and name not in vars(nn.Module())
    ]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, own in attributes:
            vars(module).clear()
            vars(module).update(own)
        for value, before in containers:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)
        for buffer, version, values in buffers:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(values)
