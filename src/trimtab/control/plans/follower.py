"""Following a plan while it runs: measured beside predicted times, and another plan on all ranks at once.

1. Every step each rank counts its own time, waiting for others left out (`LocalClock`).
2. Every `look` steps the medians go to all ranks, in one small all-gather.
3. Rank 0 compares them with the plan's predictions, role by role, in a thread of low priority. When the pace of
   the roles has changed for some looks it plans anew (`trimtab.planning.replan`), and publishes the outcome.
4. All ranks take the new plan up between the same two steps, known since the look.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab.control.background import Background
from trimtab.control.plans.active_plan import Switch, text_of
from trimtab.control.rank_values import gather
from trimtab.control.training_steps import TrainingSteps
from trimtab.environment import logger
from trimtab.measure.local_clock import LocalClock
from trimtab.planning.drift import Drift, Follow, ratios
from trimtab.planning.replan import replan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.control.plans.active_plan import InForce
    from trimtab.planning.plan import Plan

__all__ = ["Follow", "Follower"]


class Follower:
    """Watches one DDP module under one plan; the same calls on every rank."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        in_force: InForce,
        rules: Follow,
        *,
        switch: Callable[[Plan], None],
        anew: Callable[[Plan, Mapping[str, float]], Plan] = replan,
    ) -> None:
        """`switch` takes up another plan's precisions on this rank; `anew` is `trimtab.planning.replan`."""
        self._in_force, self._rules, self._switch, self._anew = in_force, rules, switch, anew
        self._group = ddp.process_group
        self._rank = dist.get_rank(self._group)
        self._clock = LocalClock(next(ddp.parameters()).device)
        in_force.clocks.add(self._clock)
        self._background = Background(self._group)
        self._drift = Drift(rules)
        self._step = 0
        self._shares: tuple[int, ...] | None = None
        self._pending: tuple[int, Future[dict[str, Any]]] | None = None
        self._steps = TrainingSteps(ddp, {id(p) for p in ddp.parameters()}, self)
        alive = weakref.ref(self)

        def after_forward(module: nn.Module, _inputs: Any, output: Any) -> None:
            follower = alive()
            if follower is not None and module.training and torch.is_grad_enabled():
                follower._watch(output)

        # A compiled model calls it between its graphs: what it does is not for tracing.
        self._handle = ddp.register_forward_hook(torch.compiler.disable(after_forward))
        weakref.finalize(ddp, self._background.close).atexit = False

    def close(self) -> None:
        """Watch no more."""
        self._handle.remove()
        self._background.close()

    def begins(self) -> None:
        """Nothing: the clock runs from average to average."""

    def ends(self) -> None:
        """Nothing: the optimiser's time is the rank's own."""

    def between(self, model: nn.Module) -> None:
        """After a step, before the next forward pass."""
        self._step += 1
        if self._step == 1:
            self._say_what_is_unused()
        shares = self._dealt()
        # A step of other shares than the one before says nothing of either.
        self._clock.end_step(keep=shares == self._shares)
        self._shares = shares
        if self._pending is not None and self._step >= self._pending[0]:
            self._take_up()
        if self._step % self._rules.look == 0 and self._followed and not _joining(model):
            self._look()

    @property
    def _followed(self) -> bool:
        """Whether the job does what the plan says: without a loader of ours, shares are the script's."""
        return self._in_force.dealer is not None or len(set(self._in_force.plan.shares)) == 1

    def _watch(self, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._clock.follow(tensor)

    def _dealt(self) -> tuple[int, ...]:
        """Samples of a step by rank, as they are dealt out now."""
        dealer = self._in_force.dealer
        return self._in_force.plan.shares if dealer is None else dealer.shares

    def _look(self) -> None:
        with self._clock.waiting():
            every = gather([self._clock.read()], self._group)
        seconds = [own for (own,) in every]
        if not all(own > 0 for own in seconds):
            return
        plan = self._in_force.plan
        dealt = self._dealt()
        # In the plan's units: a loader's batch may be another than the plan's.
        samples = [share * plan.batch_size / sum(dealt) for share in dealt]
        key = f"plan-{self._step}"
        if self._rank == 0:
            future = self._background.decide(key, lambda: self._decide(plan, seconds, samples))
        else:
            future = self._background.fetch(key)
        self._pending = (self._step + self._rules.delay, future)

    def _decide(self, plan: Plan, seconds: list[float], samples: list[float]) -> dict[str, Any]:
        """On rank 0, beside the training: another plan, or none."""
        drift = self._drift.look(ratios(plan, seconds, samples))
        if drift is None:
            return {"plan": None, "reasons": []}
        said = ", ".join(f"{role} takes {times:.2f} times as long" for role, times in drift.items())
        try:
            new = self._anew(
                plan, {role: plan.roles[role].compute_s * times for role, times in drift.items()}
            )
        except Exception as error:  # a job that trains is worth more than its next plan
            return {"plan": None, "reasons": [f"{said} as at first; planning anew failed: {error!r}"]}
        if new.hash == plan.hash:
            return {"plan": None, "reasons": [f"{said} as at first; no other plan is worth its damage"]}
        return {"plan": text_of(new), "reasons": [f"{said} as at first", *new.reasons]}

    def _take_up(self) -> None:
        from trimtab.planning.plan_file import parse_plan

        assert self._pending is not None
        decision = self._pending[1].result()
        self._pending = None
        if self._rank == 0:
            for reason in decision["reasons"]:
                logger().info("step %d: %s", self._step, reason)
        if decision["plan"] is None:
            return
        before, plan = self._in_force.plan, parse_plan(decision["plan"], source="rank 0's new plan")
        self._switch(plan)
        self._in_force.history.append(
            Switch(step=self._step, before=before.hash, after=plan.hash, reasons=tuple(decision["reasons"]))
        )
        self._in_force.become(plan)
        self._clock.forget()
        if self._rank == 0:
            logger().info("step %d: plan %s instead of %s on all ranks", self._step, plan.hash, before.hash)

    def _say_what_is_unused(self) -> None:
        if self._rank == 0 and not self._followed:
            logger().warning(
                "the plan shares a batch out as %s, and this script shares it out itself: ranks keep what it gives "
                "them; use trimtab.loader for the plan's shares",
                "/".join(map(str, self._in_force.plan.shares)),
            )


def _joining(model: nn.Module) -> bool:
    """Whether ranks may run out of data one by one (DDP's `join`): then they could not all meet."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))
