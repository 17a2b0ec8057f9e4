"""Records where the time of each step goes, for the run folder: a few timestamps a step, and the rest beside it.

Timestamps are taken at the first forward pass, at this rank's last gradient, when DDP has the averages, and after
the optimizer. On a GPU they are events on the stream. The writer's thread makes samples of them (`StepSamples`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves

from trimtab.control.job_length import JobLength, observe_loaders
from trimtab.control.sharded_waits import observe_waits
from trimtab.control.step_samples import StepSamples, StepTimes, is_sampled, is_traced
from trimtab.control.training_steps import TrainingSteps
from trimtab.model_state import JobBound, JobHook, attach_state, find_state
from trimtab.report import events
from trimtab.run_settings import OwnSteps

_UNSCALED = "_trimtab_unscaled"


class StepRecorder(JobBound):
    """Records the steps of one model; a `StepListener`."""

    def __init__(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(trained.values())).device
        self._model = weakref.ref(model)
        self._samples = StepSamples(self.device, model)
        self._times = StepTimes()
        self._open = self._in_backward = self._watched = False
        self._length = JobLength(model) if events.is_first_rank() else None
        self._progress: dict[str, int | None] = {}
        self._finished: StepTimes | None = None
        """A step that is not handed to the writer yet: another optimizer may prolong it."""
        parameters = {id(p) for p in trained.values()}
        self._steps = TrainingSteps(model, parameters, self, skipped=True, first=True)
        model.register_forward_pre_hook(JobHook(torch.compiler.disable(self._count)), with_kwargs=True)
        model.register_forward_hook(JobHook(torch.compiler.disable(self._after_forward)))
        observe_waits(model, self)
        _recorders.add(self)
        events.at_close(self._close)
        events.emit("device", **_describe(self.device))
        if events.is_first_rank():
            layers = [[name.removeprefix("module."), p.numel(), p.dim()] for name, p in trained.items()]
            events.emit("layers", layers=layers)

    def begins(self) -> None:
        self._hand_over()
        step, last_end = self._times.step + 1, self._times.end
        self._times = StepTimes(step=step, last_end=last_end, begin=self.now())
        self._open, self._watched = True, is_sampled(step) or is_traced(step)
        compression = find_state(self._model(), "compression")
        if compression is not None:
            self._samples.pieces = compression.pieces
            compression.observe_stages(self._times.stages.append if self._watched else None)
        elif (sharded := find_state(self._model(), "fsdp_compression")) is not None:
            self._samples.pieces = sharded.pieces

    def ends(self) -> None:
        self._times.end = self.now()
        self._finished, self._open = self._times, False
        events.count_step(self._times.step)
        if self._watched and self._length is not None:
            progress = self._length.after(self._times.step)
            if progress != self._progress and any(progress.values()):
                events.emit("progress", **progress)
            self._progress = progress

    def waits(self) -> Callable[[tuple[str, Any, Any]], None] | None:
        """Takes the collectives of a sharded model; None in steps that are not sampled."""
        return self._times.waits.append if self._open and self._watched else None

    def between(self, model: nn.Module) -> None:
        """Nothing to do: the next step begins right after."""

    def observe_loss(self, loss: torch.Tensor | float, *, by_script: bool) -> None:
        """Record a loss of this step; what the script reports takes precedence over what is seen."""
        times = self._times
        if by_script and not times.loss_by_script:
            times.losses, times.loss_by_script = [], True
        if by_script or (self._open and not times.loss_by_script):
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            # Reading it would wait for a GPU; elsewhere the script may change it in place.
            times.losses.append(value if isinstance(value, torch.Tensor) and value.is_cuda else float(value))

    def _hand_over(self) -> None:
        times, self._finished = self._finished, None
        writer = events.writer()
        if times is not None and writer is not None:
            writer.put(partial(self._samples.add, times, writer))

    def _close(self) -> None:
        self._hand_over()
        writer = events.writer()
        if writer is not None:
            writer.put(self._samples.finish)

    def _count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the samples of a forward pass: the first axis of its first tensor."""
        if self._open and module.training and torch.is_grad_enabled():
            # Most models take a tensor first; flattening all arguments takes longer than the rest of this hook.
            leaves = args if args and isinstance(args[0], torch.Tensor) else tree_leaves((args, kwargs))
            tensors = (x for x in leaves if isinstance(x, torch.Tensor) and x.dim())
            self._times.samples += next((x.size(0) for x in tensors), 0)  # nested tensors have no shape

    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._open and module.training and torch.is_grad_enabled():
            self._times.forward_end = self.now()
            for tensor in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._last_gradient)

    def _last_gradient(self) -> None:
        """Queued when the pass begins, before DDP's own callback, which waits for the averages."""
        self._in_backward = False
        self._times.ready = self.now()
        torch.autograd.Variable._execution_engine.queue_callback(self._averaged)

    def _averaged(self) -> None:
        self._times.exchanged = self.now()

    def now(self) -> Any:
        """A timestamp: on a GPU an event on the stream; None while a CUDA graph is captured."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def record_steps(model: nn.Module) -> None:
    """Record the steps of a model from now on, if there is a run folder; may be called again."""
    if not events.active() or find_state(model, "recorder") is not None:
        return
    if any(p.requires_grad for p in model.parameters()):
        attach_state(model).recorder = StepRecorder(model)


def recorder_of(model: object) -> StepRecorder | None:
    """The recorder of a model, if its steps are recorded."""
    recorder: StepRecorder | None = find_state(model, "recorder")
    return recorder


_recorders: weakref.WeakSet[StepRecorder] = weakref.WeakSet()


def observe_backward() -> None:
    """From now on, a scalar that a script calls `backward` on is the loss of the step that runs.

    For scripts that report none: `Tensor.backward` is wrapped, and `GradScaler.scale` to know the loss before it.
    """
    observe_loaders()
    backward, scale = torch.Tensor.backward, GradScaler.scale

    def observed_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1 and not OwnSteps.running:
            for recorder in _recorders:
                recorder.observe_loss(getattr(self, _UNSCALED, self), by_script=False)
        return backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    def observed_scale(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    torch.Tensor.backward = observed_backward  # type: ignore[method-assign]
    # Not `functools.wraps`: `trimtab.doors.loss_scale` knows its own wrapper by that.
    GradScaler.scale = observed_scale  # type: ignore[method-assign]


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": str(device), "name": properties.name, "memory_limit": properties.total_memory}
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    with suppress(OSError, ValueError):  # no limit, or no cgroups
        limits.append(int(cgroup.read_text(encoding="ascii")))
    return {"device": str(device), "name": f"{os.cpu_count()} CPUs", "memory_limit": min(limits)}
