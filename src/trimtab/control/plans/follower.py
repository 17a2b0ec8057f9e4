"""Follow a plan while it runs: compare measured with predicted times, and switch all ranks to a new plan together.

1. In every step each rank measures its own time, without waiting for others (`LocalClock`): under DDP they wait at
   the end of backward, under FSDP2 in every unit.
2. Every `look` steps the ranks exchange their medians in one small all-gather.
3. Rank 0 compares them with the plan's predictions, role by role, in a low-priority thread. If the relative speed
   of the roles has changed for some looks, it makes a new plan (`trimtab.planning.replan`) and publishes it. Of tensor
   groups the whole group counts, and only their samples change (`trimtab.planning.tensor.resample`).
   Which operators are sensitive changes while a model learns: rank 0 samples it in few steps (`SensitivityWatch`), and
   the new plan is made with damages as they are now.
4. All ranks switch to the new plan at a step that was fixed at the look.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trimtab.control.background import FAILED, Background
from trimtab.control.plans.active_plan import ActivePlan, Switch, emit_plan, plan_text
from trimtab.control.plans.sensitivity_watch import SensitivityWatch
from trimtab.control.rank_values import gather_numbers
from trimtab.control.sharded_waits import leave_out_waits
from trimtab.control.training_steps import TrainingSteps
from trimtab.environment import listed_by_rank, logger
from trimtab.measure.local_clock import LocalClock
from trimtab.model_state import JobHook
from trimtab.planning.drift import Drift, Follow, ratios
from trimtab.planning.plan import Plan, parse_plan
from trimtab.planning.precision.current_damage import with_current_damages
from trimtab.planning.replan import replan
from trimtab.planning.tensor.resample import resample

__all__ = ["Follow", "Follower"]


class Follower:
    """Follows the plan of one DDP module or `fully_shard` model; every rank makes the same calls."""

    def __init__(
        self,
        model: nn.Module,
        active: ActivePlan,
        rules: Follow,
        *,
        switch: Callable[[Plan], None],
        make_plan: Callable[[Plan, Mapping[str, float]], Plan] = replan,
    ) -> None:
        """
        Args:
            switch: sets another plan's precisions on this rank.
        """
        self._active, self.rules = active, rules
        self._switch, self._make_plan = switch, make_plan
        world = dist.group.WORLD
        assert world is not None
        # Of tensor groups DDP has only the ranks in the same place, and of HSDP a model's group only one copy's.
        ddp = model if isinstance(model, DistributedDataParallel) else None
        self._group = world if ddp is None or active.plan.tensor_groups else ddp.process_group
        self._rank = dist.get_rank(self._group)
        self._clock = LocalClock(next(model.parameters()).device)
        leave_out_waits(model, weakref.ref(self._clock))
        active.clocks.add(self._clock)
        self._background = Background(self._group)
        self._failed = False
        self._drift = Drift(rules)
        self._watch: SensitivityWatch | None = None
        if ddp is not None and self._rank == 0 and not active.plan.tensor_groups:
            self._watch = SensitivityWatch(ddp.module, active.plan)
        self._step = 0
        self._shares: tuple[int, ...] | None = None
        self._pending: tuple[int, Future[dict[str, Any]]] | None = None
        self._steps = TrainingSteps(model, {id(p) for p in model.parameters()}, self, first=ddp is None)
        alive = weakref.ref(self)

        def after_forward(module: nn.Module, _inputs: Any, output: Any) -> None:
            follower = alive()
            if follower is not None and module.training and torch.is_grad_enabled():
                follower._time_backward(output)

        # A compiled model calls the hook between its graphs; it must not be traced.
        self._handle = model.register_forward_hook(JobHook(torch.compiler.disable(after_forward)))
        weakref.finalize(model, self._background.close).atexit = False

    def close(self) -> None:
        """Stop following."""
        self._handle.remove()
        if self._watch is not None:
            self._watch.close()
        self._background.close()

    def begins(self) -> None:
        """Nothing to do: the clock runs from one average to the next."""

    def ends(self) -> None:
        """The optimizer's time counts as the rank's own; a step that was sampled does not count at all."""
        if self._watch is not None:
            self._watch.ends()

    def between(self, model: nn.Module) -> None:
        """After a step, before the next forward pass."""
        self._step += 1
        if self._step == 1:
            self._warn_about_unused_shares()
        shares = self._current_shares()
        sampled = self._watch is not None and self._watch.between()
        # A step with other shares than the previous one cannot be compared with either.
        self._clock.end_step(keep=shares == self._shares and not sampled)
        self._shares = shares
        if self._pending is not None and self._step >= self._pending[0]:
            self._switch_plan()
        if self._step % self.rules.look == 0 and self._is_followed and not _joining(model):
            self._look()

    @property
    def _is_followed(self) -> bool:
        """Whether the job uses the plan's shares: without our loader the script decides them."""
        plan = self._active.plan
        alike = len(set(plan.shares)) == 1 and not plan.tensor_groups  # of these nothing but shares changes
        return self._active.last_loader is not None or alike

    def _time_backward(self, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._clock.follow(tensor)

    def _current_shares(self) -> tuple[int, ...]:
        """Samples of each rank in the current step."""
        loader = self._active.last_loader
        return self._active.plan.shares if loader is None else loader.shares

    def _look(self) -> None:
        with self._clock.waiting():
            by_rank = gather_numbers([self._clock.read()], self._group)
        seconds = [own for (own,) in by_rank]
        if not all(own > 0 for own in seconds):
            return
        plan = self._active.plan
        shares = self._current_shares()
        # In the plan's units: the loader's global batch may differ from the plan's.
        samples = [share * plan.batch_size / sum(shares) for share in shares]
        key = f"plan-{self._step}"
        if self._rank == 0:
            grown = {} if self._watch is None else self._watch.growth()
            future = self._background.decide(
                key, lambda: self._decide(with_current_damages(plan, grown), seconds, samples)
            )
        else:
            future = self._background.fetch(key)
        self._pending = (self._step + self.rules.delay, future)

    def _decide(self, plan: Plan, seconds: list[float], samples: list[float]) -> dict[str, Any]:
        """On rank 0, beside the training: a new plan, or None."""
        if plan.tensor_groups:
            # Its ranks wait for each other in every block, so that each of them measures the time of the group.
            seconds = [median(seconds[rank] for rank in group) for group in plan.tensor_groups]
            pairs = zip(seconds, samples, strict=True)
            measured = {f"tensor group {index}": own / share for index, (own, share) in enumerate(pairs)}
        else:
            measured = ratios(plan, seconds, samples)
            listed = ", ".join(f"{role} {ratio:.2f}" for role, ratio in measured.items())
            logger().debug(f"plan {plan.hash}: measured over predicted time of a step by role: {listed}")
        drift = self._drift.look(measured)
        if drift is None:
            return {"plan": None, "reasons": []}
        change = ", ".join(
            f"{role} takes {times:.2f} times as long as at first" for role, times in drift.items()
        )
        try:
            if plan.tensor_groups:
                new = resample(plan, seconds)
            else:
                new = self._make_plan(
                    plan, {role: plan.roles[role].compute_s * times for role, times in drift.items()}
                )
        except Exception as error:  # the training must not stop because planning failed
            return {"plan": None, "reasons": [f"{change}; making a new plan failed: {error!r}"]}
        if new.hash == plan.hash:
            return {"plan": None, "reasons": [f"{change}; no other plan is worth its damage"]}
        return {"plan": plan_text(new), "reasons": [change, *new.reasons]}

    def _switch_plan(self) -> None:
        assert self._pending is not None
        decision = self._background.wait(self._pending[1])
        self._pending = None
        if FAILED in decision:
            if self._rank == 0 and not self._failed:
                logger().warning(
                    "step %d: the plan stays; comparing it failed: %s", self._step, decision[FAILED]
                )
            self._failed = True
            return
        if self._rank == 0:
            for reason in decision["reasons"]:
                logger().info("step %d: %s", self._step, reason)
        if decision["plan"] is None:
            return
        before, plan = self._active.plan, parse_plan(decision["plan"], source="rank 0's new plan")
        self._switch(plan)
        self._active.history.append(
            Switch(step=self._step, before=before.hash, after=plan.hash, reasons=tuple(decision["reasons"]))
        )
        self._active.replace(plan)
        self._clock.forget()
        if self._watch is not None:
            self._watch.follow(plan)
        if self._rank == 0:
            logger().info("step %d: plan %s instead of %s on all ranks", self._step, plan.hash, before.hash)
            emit_plan(plan, before, decision["reasons"])

    def _warn_about_unused_shares(self) -> None:
        if self._rank == 0 and not self._is_followed:
            logger().warning(
                "the plan divides a batch as %s, but this script divides it itself, so the plan's shares are not used; "
                "use trimtab.loader to use them",
                listed_by_rank(self._active.plan.shares),
            )


def _joining(model: nn.Module) -> bool:
    """Whether ranks may run out of data one by one (DDP's `join`): then a collective would hang."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))
