"""`trimtab run --auto`: a plan made by the job itself, for the model and the data that it trains with.

1. The first steps run as the script has them. One of them is observed: the model's arguments, and the gradient of its
   output (`observed_step.py`).
2. Between two steps all ranks time a copy of the model in lockstep, as `trimtab probe` does, with few repeats; the
   model itself, its optimizer and the random numbers are not touched (`measuring.py`).
3. Rank 0 makes the plan in a low-priority thread while the training goes on.
4. When every rank has it, all apply it between the same two steps: precisions, and shares and bits as a starting point.
   From there on shares follow measured speeds and bits the gradients. Without shares the plan follows the speeds.

The plan is kept by model and cluster: the next start applies it before its first step. Whatever fails, on any rank, is
said in one line, and the training goes on as it was.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.autopilot.measuring import (
    COMMUNICATES,
    Measured,
    agree_on_step,
    collectives_begun,
    measure_job,
    together,
)
from trimtab.control.autopilot.observed_step import ObservedStep, StepKind
from trimtab.control.autopilot.plan_cache import KnownPlan, PlanCache
from trimtab.control.background import FAILED, Background
from trimtab.control.compression.ddp import compresses
from trimtab.control.plans.active_plan import plan_text
from trimtab.control.plans.applying import apply_plan
from trimtab.control.plans.follower import Follow
from trimtab.control.rank_values import gather_numbers
from trimtab.control.shares.takeover import Takeover
from trimtab.control.training_steps import TrainingSteps, in_training_mode
from trimtab.environment import listed_by_rank, logger
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.model_state import JobHook, attach_state
from trimtab.planning.make_plan import Bits, make_plan
from trimtab.planning.plan import Plan, parse_plan
from trimtab.planning.plan_search import BUDGET
from trimtab.planning.restrict import restricted
from trimtab.report import events

OBSERVED_STEP = 3
"""The step that is observed; the first one also allocates memory and opens connections. After it the take-over of the
batches knows whether they can be cut."""

LOOK = 4
"""Steps between two looks whether every rank has the plan."""


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
            _apply(ddp, known.plan)
            if rank == 0:
                logger().info("autopilot: plan %s of an earlier start applies from step one", known.plan.hash)
        except Exception as error:
            _give_up(rank, "the plan of an earlier start does not apply", error)
            known = None
    pilot = Autopilot(ddp, adjust, budget, cache, known)
    attach_state(ddp).autopilot = pilot


def _apply(ddp: DistributedDataParallel, plan: Plan) -> None:
    """Set the precisions of a plan and start from its bits and shares; fails on all ranks or on none. Collective."""
    # Where shares follow speeds, the times of a rank change with its samples, and tell nothing about the plan.
    follow = Follow() if plan.batch == "fixed" else None
    together(lambda: apply_plan(ddp, plan, follow=follow), next(ddp.parameters()).device)
    if Takeover.current is not None and plan.batch == "free":
        lowers = any(role.precisions for role in plan.roles.values())
        Takeover.current.start_from(plan.shares, replace=lowers)


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


def _give_up(rank: int, what: str, error: BaseException) -> None:
    if rank == 0:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        reason = first if isinstance(error, TrimtabError) else f"{type(error).__name__}: {first}"
        logger().warning("autopilot: %s (%s); training goes on as it is", what, reason)


class Autopilot:
    """Watches the first steps of a DDP module, measures, plans and applies; every rank makes the same calls."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        adjust: frozenset[str],
        budget: float,
        cache: PlanCache,
        known: KnownPlan | None,
    ) -> None:
        """`known` is the plan that runs already."""
        self._adjust, self._budget, self._cache = adjust, budget, cache
        self._known = known
        self._group = ddp.process_group
        self._rank = self._group.rank()
        self._device = next(ddp.parameters()).device
        self._ddp = weakref.ref(ddp)
        self._step, self._began, self._step_s = 0, 0.0, 0.0
        self._start = time.perf_counter()
        self._observed: ObservedStep | None = None
        self._problem: Exception | None = None
        self._begun: int | None = None
        """Collectives before the observed forward pass of the model itself, during it."""
        self._background: Background | None = None
        self._future: Future[dict[str, Any]] | None = None
        self._measured: Measured | None = None
        self._kind: StepKind | None = None
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

        def before_model(_module: nn.Module, _args: Any) -> None:
            pilot = alive()
            own = None if pilot is None else pilot._ddp()
            if pilot is not None and own is not None and pilot._is_observing(own):
                pilot._begun = collectives_begun()

        def after_model(_module: nn.Module, _args: Any, _output: Any) -> None:
            pilot = alive()
            if pilot is not None and pilot._begun is not None:
                begun, pilot._begun = pilot._begun, None
                if collectives_begun() != begun and pilot._problem is None:
                    pilot._problem = TrimtabError(COMMUNICATES)

        ddp.register_forward_pre_hook(JobHook(torch.compiler.disable(before_forward)), with_kwargs=True)
        ddp.register_forward_hook(JobHook(torch.compiler.disable(after_forward)))
        # Inside DDP, which sends buffers before it calls the model.
        ddp.module.register_forward_pre_hook(JobHook(torch.compiler.disable(before_model)))
        ddp.module.register_forward_hook(JobHook(torch.compiler.disable(after_model)))
        self._ends_with_ddp = weakref.finalize(ddp, self._close)
        self._ends_with_ddp.atexit = False

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
        takeover = Takeover.current
        if self._step == OBSERVED_STEP:
            with nullcontext() if takeover is None else takeover.waiting():
                self._after_observed_step(model, takeover)
            self._began = time.perf_counter()
        elif self._future is not None and self._step % LOOK == 0:
            # Here a fast rank waits for a slow one's optimizer, which says nothing about its own speed.
            with nullcontext() if takeover is None else takeover.waiting():
                self._apply_when_ready(model)
        if self._step >= OBSERVED_STEP and self._future is None:
            # Nothing is left to do in any later step.
            self._ends_with_ddp.detach()
            attach_state(model).autopilot = None

    def _is_observing(self, module: nn.Module) -> bool:
        repeated = torch._C._current_graph_task_id() != -1
        observed = self._step == OBSERVED_STEP - 1
        return observed and in_training_mode(module) and torch.is_grad_enabled() and not repeated

    def _observe_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._observed is None and self._problem is None:
            try:
                self._observed = ObservedStep.of_call(module.module, args, kwargs)  # type: ignore[arg-type]
            except Exception as error:
                self._problem = error

    def _observe_output(self, output: Any) -> None:
        if self._observed is not None and not self._observed.followed:
            self._observed.follow_output(output)

    def _after_observed_step(self, ddp: DistributedDataParallel, takeover: Takeover | None) -> None:
        observed, self._observed = self._observed, None
        try:
            step, samples = agree_on_step(observed, self._problem, self._device)
            kind = step.kind
            if self._known is not None:
                alike = kind.like(self._known.kind)
                if alike and sum(samples) == sum(self._known.samples):
                    return
                self._say(
                    "autopilot: batches of %s samples%s are not those of the cached plan",
                    listed_by_rank(samples),
                    "" if alike else ", of this length and in this precision,",
                )
            precise = "precision" in self._adjust
            measured = measure_job(ddp, step, samples, precise=precise, step_s=self._step_s)
        except Exception as error:
            _give_up(self._rank, "no plan is made", error)
            return
        self._say(
            "autopilot: %d operators timed in %.1f s, the time of %.1f steps; planning beside the training",
            *(len(measured.workload.operators), measured.seconds, measured.seconds / self._step_s),
        )
        self._measured, self._kind = measured, kind
        self._background = Background(self._group)
        bits: Bits = None  # what does not pay by itself does not pay beside a computation either
        if compresses(ddp):
            bits = "auto" if measured.codec else "adaptive"
        model, shares = fingerprint(ddp), takeover is not None and takeover.is_cutting
        if self._rank == 0:
            self._future = self._background.decide("plan", lambda: self._plan(measured, model, bits, shares))
        else:
            self._future = self._background.fetch("plan")

    def _plan(self, measured: Measured, model: str, bits: Bits, shares: bool) -> dict[str, Any]:
        """On rank 0, beside the training."""

        def made(damages: Mapping[str, Mapping[str, float]]) -> Plan:
            return make_plan(
                measured.cluster,
                measured.workload,
                damages,
                model=model,
                trimtab=trimtab.__version__,
                batch_size=sum(measured.samples),
                batch="free" if shares and "shares" in self._adjust else "fixed",
                budget=self._budget,
                bits=bits,
                layout="data",
                own_buckets=True,
            )

        plan = made(measured.damages)
        if plan.predicted.damage > self._budget:
            plan = made({})  # with fixed shares slow ranks are lowered as far as that gains
        if plan.wrapper != "ddp" or plan.accumulate > 1:
            raise RuntimeError("the prediction says that this job does not fit in memory, and it runs")
        return {"plan": plan_text(restricted(plan, self._adjust | {"bits"}))}

    def _apply_when_ready(self, ddp: DistributedDataParallel) -> None:
        """Apply the plan at the first look at which every rank has it. Collective."""
        assert self._future is not None
        assert self._measured is not None
        assert self._kind is not None
        if not all(ready for (ready,) in gather_numbers([float(self._future.done())], self._group)):
            return
        future, self._future = self._future, None
        try:
            decision = future.result()
            if FAILED in decision:
                raise RuntimeError(decision[FAILED])
            plan = parse_plan(decision["plan"], source="rank 0's plan")
            _apply(ddp, plan)
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
                "measuring_s": self._measured.seconds,
                "plan_applied_s": time.perf_counter() - self._start,
            }
            decided = f"plan {plan.hash} of the autopilot"
            why = "; ".join(plan.reasons)
            events.emit("decision", what="plan", noticed=None, decided=decided, why=why, expected=expected,
                        before=None, after=plan.hash)  # fmt: skip
            self._cache.save(plan, self._measured.samples, self._kind)

    def _say(self, text: str, *values: Any) -> None:
        if self._rank == 0:
            logger().info(text, *values)

    def _close(self) -> None:
        if self._background is not None:
            self._background.close(timeout=0.0)
