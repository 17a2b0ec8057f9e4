"""`trimtab run --auto`: a plan made by the job itself, for the model and the data that it trains with.

1. The first steps run as the script has them. One of them is observed: the model's arguments, and the gradient of its
   output (`observed_step.py`).
2. Between two steps all ranks time a copy of the model in lockstep, as `trimtab probe` does, with few repeats; the
   model itself, its optimizer and the random numbers are not touched.
3. Rank 0 makes the plan in a low-priority thread while the training goes on.
4. When every rank has it, all apply it between the same two steps. From there on shares follow measured speeds; if they
   may not be adjusted, the plan does.

The plan is kept by model and cluster: the next start applies it before its first step. Whatever fails is said in one
line, and the training goes on as it was.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.cluster import Cluster
from trimtab.control.autopilot.observed_step import JobSpec, ObservedStep
from trimtab.control.autopilot.plan_cache import PlanCache
from trimtab.control.background import FAILED, Background
from trimtab.control.compression.ddp import compression_of
from trimtab.control.plans.active_plan import plan_text
from trimtab.control.plans.applying import apply_plan
from trimtab.control.plans.follower import Follow
from trimtab.control.rank_values import gather_numbers
from trimtab.control.training_steps import TrainingSteps
from trimtab.environment import logger
from trimtab.measure.device import Task, usual_precisions
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.probe import measure_cluster, measure_damages
from trimtab.model_state import JobHook, attach_state
from trimtab.planning.make_plan import Bits, make_plan
from trimtab.planning.plan import parse_plan
from trimtab.planning.plan_search import BUDGET
from trimtab.planning.restrict import restricted
from trimtab.precision.setting import set_operators
from trimtab.predict.damage import Damage
from trimtab.report import events
from trimtab.run_settings import own_steps
from trimtab.workload import Workload

OBSERVED_STEP = 2
"""The step that is observed; the first one also allocates memory and opens connections."""

LOOK = 4
"""Steps between two looks whether every rank has the plan."""

MOST_STEPS, LEAST_S, MOST_S = 10.0, 2.0, 45.0
"""Operators are timed for at most so many steps' time, within these seconds: 3 % of 500 steps with all the rest."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the job after its ranks were timed."""

    cluster: Cluster
    workload: Workload
    damages: Damage
    seconds: float
    """That all this took."""


def start_autopilot(ddp: DistributedDataParallel, adjust: frozenset[str], budget: float = BUDGET) -> None:
    """Plan for this module from its own steps, or apply the plan of an earlier start. Collective."""
    rank = ddp.process_group.rank()
    problem = _unsuitable(ddp)
    if problem is not None:
        if rank == 0:
            logger().warning("autopilot: no plan is made: %s", problem)
        return
    cache = PlanCache.of_job(ddp, adjust, budget)
    known = cache.load()
    if known is not None:
        try:
            apply_plan(ddp, known.plan, follow=_follow(adjust))
            if rank == 0:
                logger().info("autopilot: plan %s of an earlier start applies from step one", known.plan.hash)
        except Exception as error:
            _give_up(rank, "the plan of an earlier start does not apply", error)
            known = None
    pilot = Autopilot(ddp, adjust, budget, cache, known.samples if known is not None else None)
    attach_state(ddp).autopilot = pilot


def _unsuitable(ddp: DistributedDataParallel) -> str | None:
    """Why no plan can be made for a module."""
    if ddp.process_group.size() == 1:
        return "there is one rank, so nothing is uneven"
    if ddp.process_group.size() != dist.get_world_size():
        return "the module does not average over all ranks"
    if hasattr(ddp.module, "_orig_mod"):
        return "the model is compiled before DDP; wrap it first and compile DDP"
    if len({p.device for p in ddp.parameters()}) > 1:
        return "the model is spread over several devices"
    return None


def _follow(adjust: frozenset[str]) -> Follow | None:
    """Where shares follow speeds, the times of a rank change with its samples, and tell nothing about the plan."""
    return None if "shares" in adjust else Follow()


def _give_up(rank: int, what: str, error: BaseException) -> None:
    if rank == 0:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        logger().warning(
            "autopilot: %s (%s: %s); training goes on as it is", what, type(error).__name__, first
        )


class Autopilot:
    """Watches the first steps of a DDP module, measures, plans and applies; every rank makes the same calls."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        adjust: frozenset[str],
        budget: float,
        cache: PlanCache,
        known_samples: tuple[int, ...] | None,
    ) -> None:
        """`known_samples` are those of the ranks when the plan that runs already was made."""
        self._adjust, self._budget, self._cache = adjust, budget, cache
        self._known_samples = known_samples
        self._group = ddp.process_group
        self._rank = self._group.rank()
        self._device = next(ddp.parameters()).device
        self._ddp = weakref.ref(ddp)
        self._step, self._began, self._step_s = 0, 0.0, 0.0
        self._start = time.perf_counter()
        self._observed: ObservedStep | None = None
        self._problem: Exception | None = None
        self._background: Background | None = None
        self._future: Future[dict[str, Any]] | None = None
        self._samples: tuple[int, ...] = ()
        self._measuring_s = 0.0
        self._steps = TrainingSteps(ddp, {id(p) for p in ddp.parameters()}, self, skipped=True)
        alive = weakref.ref(self)

        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            pilot = alive()
            if pilot is not None and pilot._is_observing(module):
                pilot._observe_call(module, args, kwargs)

        def after_forward(module: nn.Module, _args: Any, output: Any) -> None:
            pilot = alive()
            if pilot is not None and pilot._is_observing(module):
                pilot._observe_output(output)

        ddp.register_forward_pre_hook(JobHook(torch.compiler.disable(before_forward)), with_kwargs=True)
        ddp.register_forward_hook(JobHook(torch.compiler.disable(after_forward)))
        weakref.finalize(ddp, self._close).atexit = False

    def begins(self) -> None:
        """Nothing to do: steps are timed from one to the next."""

    def ends(self) -> None:
        """Nothing to do."""

    def between(self, model: nn.Module) -> None:
        """After a step, before the next forward pass."""
        assert isinstance(model, DistributedDataParallel)
        self._step += 1
        now = time.perf_counter()
        self._step_s, self._began = now - self._began, now
        if self._step == OBSERVED_STEP:
            self._after_observed_step(model)
            self._began = time.perf_counter()
        elif self._future is not None and self._step % LOOK == 0:
            self._apply_when_ready(model)

    def _is_observing(self, module: nn.Module) -> bool:
        repeated = torch._C._current_graph_task_id() != -1
        return (
            self._step == OBSERVED_STEP - 1 and module.training and torch.is_grad_enabled() and not repeated
        )

    def _observe_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._observed is None and self._problem is None:
            try:
                self._observed = ObservedStep.of_call(module.module, args, kwargs)  # type: ignore[arg-type]
            except Exception as error:
                self._problem = error

    def _observe_output(self, output: Any) -> None:
        if self._observed is not None and not self._observed.followed:
            self._observed.follow_output(output)

    def _after_observed_step(self, ddp: DistributedDataParallel) -> None:
        observed, self._observed = self._observed, None
        try:
            step = self._agreed_step(observed)
            if self._known_samples is not None:
                if self._samples == self._known_samples:
                    return
                self._say(
                    "autopilot: batches of %s samples are not those of the cached plan",
                    _listed(self._samples),
                )
            measured = self._measured(ddp, step)
        except Exception as error:
            _give_up(self._rank, "no plan is made", error)
            return
        self._say(
            "autopilot: %d operators timed in %.1f s, the time of %.1f steps; planning beside the training",
            *(len(measured.workload.operators), measured.seconds, measured.seconds / self._step_s),
        )
        self._measuring_s = measured.seconds
        self._background = Background(self._group)
        bits: Bits = None if compression_of(ddp) is None else "adaptive"
        model = fingerprint(ddp)
        if self._rank == 0:
            self._future = self._background.decide("plan", lambda: self._plan(measured, model, bits))
        else:
            self._future = self._background.fetch("plan")

    def _agreed_step(self, observed: ObservedStep | None) -> ObservedStep:
        """The observed step; that of rank 0 where the ranks' batches have different shapes. Collective."""
        problem, own = self._problem, None
        try:
            if observed is not None:
                own = observed.shapes, observed.samples, observed.autocast
        except Exception as error:
            problem = error
        everyone = _gather((None if problem is None else str(problem), own))
        for rank, (text, theirs) in enumerate(everyone):
            if text is not None or theirs is None:
                raise RuntimeError(f"rank {rank}: {text or 'no forward pass of the module was seen'}")
        assert observed is not None
        if len({autocast for _, (_, _, autocast) in everyone}) > 1:
            raise RuntimeError("ranks run under different autocasts")
        self._samples = tuple(samples for _, (_, samples, _) in everyone)
        if any(shapes != everyone[0][1][0] for _, (shapes, _, _) in everyone):
            if self._rank == 0:
                observed.to(torch.device("cpu"))
            shared: list[Any] = [observed if self._rank == 0 else None]
            dist.broadcast_object_list(shared, device=self._device if self._device.type == "cuda" else None)
            observed = shared[0]
            assert isinstance(observed, ObservedStep)
            observed.to(self._device)
        return observed

    def _measured(self, ddp: DistributedDataParallel, step: ObservedStep) -> Measured:
        """Time a copy of the model on all ranks in lockstep. Collective."""
        start = time.perf_counter()
        devices = [self._device] if self._device.type == "cuda" else []
        with own_steps(), torch.random.fork_rng(devices):
            model, problem = None, None
            try:
                model = copy.deepcopy(ddp.module)
                set_operators(model, {})
            except Exception as error:
                problem = f"the model cannot be copied: {error}"
            for rank, theirs in enumerate(_gather(problem)):
                if theirs is not None:
                    raise RuntimeError(f"rank {rank}: {theirs}")
            assert model is not None
            spec = JobSpec(name=type(model).__name__, model=model, batch=step.batch, step=step)
            least = min(self._samples)
            precise = "precision" in self._adjust
            task = Task(
                spec=spec,
                batches=(max(1, least // 2), max(2, least)),
                precisions=usual_precisions(self._device, step.autocast) if precise else (),
                bits=() if compression_of(ddp) is None else (4,),
                autocast=step.autocast,
                seconds=min(MOST_S, max(LEAST_S, MOST_STEPS * self._step_s)),
                quick=True,
            )
            cluster, probed = measure_cluster(task, self._device)
            unfinished = {unit.rpartition(" ")[2] for units in _gather(probed.left) for unit in units}
            if "plain" in unfinished:
                raise RuntimeError(f"a step takes too long to time it within {task.seconds:.0f} s")
            task = replace(task, precisions=tuple(p for p in task.precisions if p not in unfinished))
            damages: Damage = {}
            if any(_gather(task.precisions)):
                every = tuple(dict.fromkeys(p for names in _gather(task.precisions) for p in names))
                damages = measure_damages(
                    replace(task, precisions=every), self._device, probed.workload, [step.batch]
                )
            del model, spec, task
        gc.collect()
        return Measured(
            cluster=cluster,
            workload=probed.workload,
            damages=damages,
            seconds=time.perf_counter() - start,
        )

    def _plan(self, measured: Measured, model: str, bits: Bits) -> dict[str, Any]:
        """On rank 0, beside the training."""
        plan = make_plan(
            measured.cluster,
            measured.workload,
            measured.damages,
            model=model,
            trimtab=trimtab.__version__,
            batch_size=sum(self._samples),
            batch="fixed",  # the samples of a rank follow its measured speed: `control/shares`
            budget=self._budget,
            bits=bits,
            layout="data",
        )
        if plan.wrapper != "ddp" or plan.accumulate > 1:
            raise RuntimeError("the prediction says that this job does not fit in memory, and it runs")
        return {"plan": plan_text(restricted(plan, self._adjust | {"bits"}))}

    def _apply_when_ready(self, ddp: DistributedDataParallel) -> None:
        """Apply the plan at the first look at which every rank has it. Collective."""
        assert self._future is not None
        if not all(ready for (ready,) in gather_numbers([float(self._future.done())], self._group)):
            return
        future, self._future = self._future, None
        try:
            decision = future.result()
            if FAILED in decision:
                raise RuntimeError(decision[FAILED])
            plan = parse_plan(decision["plan"], source="rank 0's plan")
            apply_plan(ddp, plan, follow=_follow(self._adjust))
        except Exception as error:
            _give_up(self._rank, "no plan is applied", error)
            return
        finally:
            self._close()
        predicted = plan.predicted
        self._say(
            "autopilot: step %d, %.0f s after the start: plan %s, predicted %.0f -> %.0f ms a step, damage %.2g",
            *(self._step, time.perf_counter() - self._start, plan.hash),
            *(predicted.plain_step_s * 1e3, predicted.step_s * 1e3, predicted.damage),
        )
        for reason in plan.reasons:
            self._say("autopilot: %s", reason)
        if self._rank == 0:
            expected = {
                "step_s": predicted.step_s,
                "plain_step_s": predicted.plain_step_s,
                "measuring_s": self._measuring_s,
                "plan_applied_s": time.perf_counter() - self._start,
            }
            decided = f"plan {plan.hash} of the autopilot"
            why = "; ".join(plan.reasons)
            events.emit("decision", what="plan", noticed=None, decided=decided, why=why, expected=expected,
                        before=None, after=plan.hash)  # fmt: skip
            self._cache.save(plan, self._samples)

    def _say(self, text: str, *values: Any) -> None:
        if self._rank == 0:
            logger().info(text, *values)

    def _close(self) -> None:
        if self._background is not None:
            self._background.close(timeout=0.0)


def _gather(own: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank


def _listed(samples: tuple[int, ...]) -> str:
    return "/".join(map(str, samples))
