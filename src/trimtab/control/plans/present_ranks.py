"""A plan for the ranks that are there, in a job whose nodes come and go.

Each node's launcher keeps a folder while it lives. There its ranks record the device class that the plan gave them, so
that they keep it when they are started again with other rank numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimtab import environment
from trimtab.control.rank_values import rank_and_world_size
from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan
from trimtab.planning.replan import devices_of, plan_for_ranks


class NoPlanForRanksError(TrimtabError):
    """The plan is for other ranks, and none for these can be made from it."""


class PresentRanks:
    """The ranks of a group. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size = rank_and_world_size(group, "apply")
        path = _record()
        recorded = path.read_text(encoding="utf-8") if path is not None and path.is_file() else None
        everyone: list[Any] = [(environment.elastic(), recorded)]
        if dist.is_initialized():
            everyone *= self.world_size
            dist.all_gather_object(everyone, everyone[self.rank], group=group)
        self._elastic = any(elastic for elastic, _ in everyone)
        self._devices = [device for _, device in everyone]

    def fit(self, plan: Plan) -> Plan:
        """The plan, or with `--nnodes MIN:MAX` one that is made from it for the ranks that are there."""
        if plan.tensor_groups and dist.is_initialized():  # `group` may be the peers of one place
            require_world_size(plan, dist.get_world_size())
            return plan
        if not self._elastic:
            require_world_size(plan, self.world_size)
            return plan
        try:
            fitted = plan_for_ranks(plan, self._devices)
        except TrimtabError as error:
            raise NoPlanForRanksError(
                f"the plan is for {plan.world_size} ranks, and none can be made from it for the {self.world_size} that "
                f"are here: {error}; make one with `trimtab plan`"
            ) from error
        if fitted is not plan and self.rank == 0:
            environment.logger().info(
                "the plan is for %d ranks (%s), and here are %d (%s): made anew for them, with %s samples",
                *(
                    plan.world_size,
                    ", ".join(devices_of(plan)),
                    self.world_size,
                    ", ".join(devices_of(fitted)),
                ),
                environment.listed_by_rank(fitted.shares),
            )
        return fitted

    def record(self, plan: Plan) -> None:
        """Remember on this node which device class this rank is."""
        path = _record()
        if path is not None:
            rank = dist.get_rank() if plan.tensor_groups else self.rank
            path.write_text(devices_of(plan)[rank], encoding="utf-8")


def require_world_size(plan: Plan, world_size: int) -> None:
    """Raise if the plan is for another number of ranks."""
    if plan.world_size == world_size:
        return
    roles = ", ".join(f"{count} x {name}" for name, count in plan.ranks)
    raise TrimtabError(
        f"the plan is for {plan.world_size} ranks ({roles}), and this job has {world_size}; start "
        f"{plan.world_size}, or make a new plan with `trimtab plan`"
    )


def _record() -> Path | None:
    """Where this process's device class is recorded; None without `trimtab run`."""
    folder = os.environ.get(environment.RUN_FOLDER)
    if folder is None or not Path(folder).is_dir():
        return None
    return Path(folder, f"device-{os.environ.get('LOCAL_RANK', '0')}")
