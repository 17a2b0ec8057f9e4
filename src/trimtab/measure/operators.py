"""Time every operator of a model inside a real training step.

An operator alone in a loop finds its data in the cache and has the memory to itself; in a step it does not.
So operators are timed where they run. Modules whose precision can be set are timed individually; what runs
between two of them is timed as a whole and divided among the workload's operators there, by the bytes
they move. The intervals add up to the step: nothing is omitted or counted twice.

Ranks that share a machine, a link or a power limit slow each other down. So all ranks of a job start every timed
step together, and its optimizer too, as they do in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.cluster.profile import DeviceProfile, Line, OperatorTime
from trimtab.measure.out_of_memory import Agreement
from trimtab.measure.timing import StepTimes, Timed, anchored, meet, never_falling
from trimtab.precision.products import DTYPES
from trimtab.precision.setting import set_operators
from trimtab.precision_names import ATTENTION
from trimtab.predict.operators.costs import key_of, workload_key
from trimtab.predict.operators.low_precision import DeviceKind
from trimtab.predict.operators.precision_graph import PrecisionGraph, results_of
from trimtab.workload import Operator, Workload

NONE = -1

AHEAD_CYCLES = 20_000_000
"""About ten milliseconds: longer than the kernel launches of an optimizer step."""


class StepClock:
    """Records when the operators of a model begin and end."""

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device) -> None:
        self._model, self._workload, self._cuda = model, workload, device.type == "cuda"
        self._marks: list[tuple[str, int, Any]] = []
        self._hooks: list[Any] = []

    def step(
        self,
        loss: Callable[[], torch.Tensor],
        update: Callable[[], None],
        *,
        ready: Callable[[], None] | None = None,
        whole: bool = False,
    ) -> StepTimes:
        """Run one step: `loss` runs the model, `update` the optimizer. Backward is called here.

        Args:
            ready: called before the optimizer and not timed, so that all ranks of a job start it together.
            whole: time each pass as a whole, without hooks inside it.
        """
        self._marks = []
        if not whole:
            self._attach()
        try:
            self._mark("start", -1)
            result = loss()
            self._mark("turn", -1)
            result.backward()
            self._mark("ready", -1)
            if ready is not None:
                ready()
            self._mark("update", -1)
            update()
            self._mark("stop", -1)
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        return self._read()

    def _attach(self) -> None:
        for name, indices in self._workload.settings.items():
            if name.endswith(ATTENTION):
                continue  # not a module of its own: part of what runs between modules
            self._attach_to(self._model.get_submodule(name), cycle(indices))

    def _attach_to(self, module: nn.Module, calls: Iterator[int]) -> None:
        running: list[int] = []

        def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
            running.append(index := next(calls))
            x = args[0] if args else None
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _: self._mark("backward ends", index))
            self._mark("forward begins", index)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            index = running.pop()
            self._mark("forward ends", index)
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _: self._mark("backward begins", index))

        self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _mark(self, what: str, index: int) -> None:
        if self._cuda:
            moment: Any = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        self._marks.append((what, index, moment))

    def _read(self) -> StepTimes:
        if self._cuda:
            torch.cuda.synchronize()
        count = len(self._workload.operators)
        timed = {index for _, index, _ in self._marks}
        forward, backward, optimizer = [0.0] * count, [0.0] * count, 0.0
        into, running, ended = forward, NONE, NONE
        for (what, index, moment), (following, coming, later) in pairwise(self._marks):
            taken = self._between(moment, later)
            if what == "ready":
                continue
            if what == "update":
                optimizer = taken
                break
            if what == "turn":
                into, running, ended = backward, NONE, count
            elif what.endswith("begins"):
                running = index
            elif (
                running == index
            ):  # the gradient of two operators comes after both: only one of them ends here
                running, ended = NONE, index
            if running != NONE:
                into[running] += taken
                continue
            last = count if into is forward else NONE
            self._share(into, taken, ended, coming if following.endswith("begins") else last, timed)
        return StepTimes(forward=tuple(forward), backward=tuple(backward), optimizer=optimizer)

    def _between(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b)) / 1e3 if self._cuda else b - a

    def _share(self, into: list[float], taken: float, a: int, b: int, timed: set[int]) -> None:
        """Divide the time between operators a and b among the operators in between."""
        low, high = min(a, b), max(a, b)
        inside = [o for o in self._workload.operators[low + 1 : high] if o.index not in timed]
        if not inside:
            # Only views in between: the host's work for the next operator.
            into[b if 0 <= b < len(into) else min(max(a, 0), len(into) - 1)] += taken
            return
        weights = [_moved(operator) for operator in inside]
        whole = sum(weights)
        for operator, weight in zip(inside, weights, strict=True):
            into[operator.index] += taken * weight / whole


def host_ahead(device: torch.device) -> None:
    """Keep a GPU busy until the host has queued some work: what follows is timed without gaps between kernels.

    In a job it is the same after the last average: while the device waited for it, the host went on.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(AHEAD_CYCLES)


def without_communication(ddp: DistributedDataParallel) -> None:
    """Let DDP fill its buckets but send nothing: what remains is a rank's own work."""
    ddp.register_comm_hook(None, _hand_back)


def _hand_back(_state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects a hook with string annotations
    values = bucket.buffer()
    on = None if values.device.type == "cpu" else [values.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on)
    future.set_result(values)
    return future


class _WithLoss(nn.Module):
    """A model that returns its loss, so that DDP sees which parameters the loss depends on."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return self._loss_of(self.model(*args, **keywords))


class StepTrainer:
    """Trains a model with DDP without communication. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        device: torch.device,
        *,
        batch_of: Callable[[int], tuple[Any, ...] | dict[str, Any]],
        loss_of: Callable[[Any], torch.Tensor] = lambda output: output,
        autocast: str | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        """
        Args:
            model: is trained in place; `close` restores its precisions.
            batch_of: the model's arguments for a number of samples, by position or by keyword.
            loss_of: the scalar loss from the model's output.
            find_unused_parameters: as DDP's: the loss of a step does not depend on all parameters, as with experts
                without tokens, or a layer that is not called.
        """
        self._agreement = Agreement(device)
        with self._agreement.attempt():
            # Ranks need not agree on parameters: sending them takes longer than a step where the link is slow.
            self._ddp = DistributedDataParallel(
                _WithLoss(model, loss_of),
                find_unused_parameters=find_unused_parameters,
                init_sync=False,
            )
            without_communication(self._ddp)
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self._model, self._workload, self._device = model, workload, device
        self._batch_of, self._autocast = batch_of, autocast

    def timed(self, samples: int, precisions: Mapping[str, str], *, update: bool = True) -> StepTimes:
        """One step with this many samples, with some operators, by name, in lower precision.

        Args:
            update: whether the optimizer is part of it: its time depends neither on samples nor on precisions.

        Raises:
            OutOfMemoryOnRanksError: on every rank, if one has no memory for its step; the trainer is of no use then.
            FailedOnRanksError: another rank failed otherwise.
        """
        step = self._step(samples, precisions, update, whole=False)
        if self._device.type == "cpu":
            return step  # reading a clock costs next to nothing
        return anchored(step, self._step(samples, precisions, update, whole=True))

    def close(self) -> None:
        """Restore the model's own precision."""
        set_operators(self._model, {})
        self._optimizer.zero_grad()

    def _step(
        self, samples: int, precisions: Mapping[str, str], with_update: bool, *, whole: bool
    ) -> StepTimes:
        with self._agreement.attempt(samples):
            set_operators(self._model, precisions)
            batch = self._batch_of(samples)

        def forward() -> torch.Tensor:
            kind = self._autocast
            with torch.autocast(self._device.type, DTYPES[kind]) if kind else nullcontext():
                loss: torch.Tensor = self._ddp(**batch) if isinstance(batch, dict) else self._ddp(*batch)
                return loss

        def ready() -> None:
            # After the last average all ranks start their update together.
            self._agreement.check()
            meet(self._device)
            host_ahead(self._device)

        def update() -> None:
            if with_update:
                self._optimizer.step()
                self._optimizer.zero_grad()

        clock = StepClock(self._model, self._workload, self._device)
        meet(self._device)
        with self._agreement.attempt(samples):
            step = clock.step(forward, update, ready=ready, whole=whole)
            if with_update:
                return step
            self._optimizer.zero_grad()
            return step._replace(optimizer=0.0)


def operator_times(
    graph: PrecisionGraph, steps: Sequence[StepTimes], precisions: Mapping[str, str]
) -> dict[str, OperatorTime]:
    """Times by operator key: medians over steps, then means over the operators with this key.

    They are scaled so that they add up to the median pass: the median of a short operator leaves out the pauses of a
    rank with a CPU quota, which fall into a few of its calls, but into every pass.

    Args:
        graph: of the workload with the timed batch size, in its own precision.
        precisions: those that were set, by operator name.
    """
    for name, chosen in precisions.items():
        graph.set(name, chosen)
    gathered: dict[str, list[tuple[float, float]]] = {}
    forward_s = _medians([step.forward for step in steps])
    backward_s = _medians([step.backward for step in steps])
    for operator in graph.workload.operators:
        precision = precisions.get(operator.setting) if operator.setting is not None else None
        # What was not lowered may compute in the type that the operator before it hands on.
        follows = graph.leaving[operator.index] != graph.captured[operator.index] and precision is None
        dtype = graph.leaving[operator.index] if follows else None
        times = forward_s[operator.index], backward_s[operator.index]
        gathered.setdefault(str(key_of(operator, precision, dtype)), []).append(times)
    return {
        key: OperatorTime(forward_s=mean(f for f, _ in taken), backward_s=mean(b for _, b in taken))
        for key, taken in gathered.items()
    }


def _medians(passes: Sequence[Sequence[float]]) -> list[float]:
    """The median of each place, scaled so that they add up to the median sum."""
    medians = [median(times) for times in zip(*passes, strict=True)]
    whole = sum(medians)
    scale = median(map(sum, passes)) / whole if whole else 1.0
    return [seconds * scale for seconds in medians]


def with_steps(
    profile: DeviceProfile, workload: Workload, timed: Sequence[Timed], device_type: str = "cpu"
) -> DeviceProfile:
    """The profile with the times of some steps added: of operators, and the median of the optimizer.

    Operators in their own precision take their times from steps without lowered operators, in any order of steps.
    """
    operators = dict(profile.operators)
    sizes = set(profile.batches.get(workload_key(workload), ()))
    timed = never_falling(timed)
    for samples, precisions, steps in timed:
        at = workload.at_batch(samples)
        kind: DeviceKind = "cuda" if device_type == "cuda" else "cpu"
        graph = PrecisionGraph(at, results=results_of(workload, profile.casts), kind=kind)
        times = operator_times(graph, steps, precisions)
        lowered = {
            str(key_of(o, precisions[o.setting]))
            for o in at.operators
            if o.setting is not None and o.setting in precisions
        }
        operators |= {k: t for k, t in times.items() if not precisions or k in lowered or k not in operators}
        sizes.add(samples)
    elements = sum(p.tensor.numel for p in workload.parameters if p.trainable)
    updates = [step.optimizer for _, _, steps in timed for step in steps if step.optimizer > 0]
    return replace(
        profile,
        operators=operators,
        batches={**profile.batches, workload_key(workload): tuple(sorted(sizes))},
        optimiser=Line(a=median(updates) / elements, c=0.0) if updates else profile.optimiser,
    )


def _moved(operator: Operator) -> float:
    """The weight of an operator when an interval is divided."""
    # A matrix product does about a hundred operations in the time of moving a byte.
    return operator.bytes_read + operator.bytes_written + operator.flops / 100 + 1024
