"""`trimtab.apply`: run a model as a plan says."""

from __future__ import annotations

from os import PathLike
from typing import TypeVar

from torch import nn

from trimtab import environment
from trimtab.control.plans.applying import apply_plan
from trimtab.control.plans.follower import Follow
from trimtab.planning.plan import Plan
from trimtab.selector import selected

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Plan | str | PathLike[str],
    *,
    seed: int = 0,
    follow: Follow | None = Follow(),  # noqa: B008  # frozen
    adjust: str = "auto",
) -> Model:
    """Run a model as a plan says; in place, and returns the model. Every rank calls it, before training.

    ::

        ddp = DistributedDataParallel(model)
        trimtab.apply(ddp, "plan.json")
        data = trimtab.loader(dataset, batch_size=256, plan=ddp)

    The operators of this rank's role compute in the plan's precisions. On a DDP module the gradients are also
    compressed as the plan says, and the ranks are timed: when the relative speed of the roles changes, all ranks
    switch to another plan between the same two steps. A model sharded by `fully_shard` (FSDP2) computes and
    communicates as a plan for FSDP2 says, and keeps it. So does a model of `trimtab.tensor_parallel`, plain or in DDP
    over ``mesh.get_group("dp")``, with a plan that has its tensor groups. On another plain
    module only the precisions are set. Applying another plan replaces the previous one.

    Args:
        plan: a `Plan`, or the path of its file.
        seed: seed of the stochastic rounding of precisions and gradients.
        follow: when to make a new plan; None keeps the plan as it is.
        adjust: what of the plan may be used: "auto" for all, "exact" for what changes no result, or some of bits,
            shares and precision, comma-separated. As in `trimtab run --adjust`.

    Raises:
        TrimtabError: on every rank, if any rank cannot run the plan: it was made for another model, number of
            ranks, device, wrapper or version of trimtab, or differs between ranks. Nothing has been changed then.
    """
    if not environment.disabled():
        apply_plan(model, plan, seed=seed, follow=follow, adjust=selected(adjust))
    return model
