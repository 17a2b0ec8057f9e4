"""Which change to a cluster is worth it? Every case is planned anew, so that each is compared at its best. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.cluster import Cluster
from trimtab.planning.cluster_changes import added, faster_links, without
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan import Plan
from trimtab.planning.what_if import price_per_hour
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.operators.estimate import with_estimates
from trimtab.predict.step import rank_counts
from trimtab.workload import Workload

NOTICEABLE = 1.02
"""A case is faster if it has at least so many times the samples per second."""

GIVEN = "as given, planned"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster with what its plan is predicted to achieve."""

    name: str
    cluster: Cluster
    batch_size: int
    step_s: float
    plan: Plan | None = None
    """None if there was no time to plan it: every rank has the same share then, and nothing is compressed."""

    out_of_reach: str | None = None
    """A warning when batches are extrapolated far from those that were probed."""

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_s

    @property
    def price_per_hour(self) -> float | None:
        return price_per_hour(self.cluster)

    @property
    def cost_per_million(self) -> float | None:
        """Cost of a million samples; None unless every device has a price."""
        hourly = self.price_per_hour
        return None if hourly is None else hourly / 3600 / self.samples_per_s * 1e6

    def row(self) -> dict[str, Any]:
        """The case as one row of a table."""
        assert self.cluster.profile is not None
        profile = with_estimates(self.cluster, self.cluster.profile)
        estimated = [name for name in rank_counts(self.cluster) if profile.devices[name].estimated]
        row: dict[str, Any] = {
            "what": self.name,
            "planned": self.plan is not None,
            "ranks": self.cluster.world_size,
            "batch_size": self.batch_size,
            "step_ms": self.step_s * 1e3,
            "samples_per_s": self.samples_per_s,
            "estimated": ", ".join(estimated) or None,
            "out_of_reach": self.out_of_reach,
        }
        if (cost := self.cost_per_million) is not None:
            row |= {"price_per_hour": self.price_per_hour, "cost_per_million_samples": cost}
        return row


def changed_clusters(
    cluster: Cluster,
    *,
    remove: Sequence[str] = (),
    add: Sequence[str] = (),
    link_factor: float | None = None,
    always: bool = False,
) -> list[tuple[str, Cluster]]:
    """The cluster as given, and with each single change; empty if none is asked for, unless `always`."""
    changes = [(f"without {what}", without(cluster, what)) for what in remove]
    changes += [(f"with {what}", added(cluster, what)) for what in add]
    if link_factor is not None:
        changes.append((f"links {link_factor:g} times as fast", faster_links(cluster, link_factor)))
    return [(GIVEN, cluster), *changes] if changes or always else []


def planned_case(
    name: str,
    cluster: Cluster,
    workload: Workload,
    damages: Mapping[str, Mapping[str, float]],
    batch_size: int,
) -> Case:
    """A cluster with the best plan for it.

    Raises:
        TrimtabError: something was not measured or does not fit.
    """
    plan = make_plan(cluster, workload, damages, model="", trimtab="", batch_size=batch_size)
    assert cluster.profile is not None
    shares = [(role.device, role.samples // plan.accumulate) for role in plan.roles.values()]
    return Case(
        name=name,
        cluster=cluster,
        batch_size=batch_size,
        step_s=plan.predicted.step_s,
        plan=plan,
        out_of_reach=out_of_reach(with_estimates(cluster, cluster.profile), workload, shares),
    )


def verdicts(cases: Sequence[Case], budget_per_hour: float | None = None) -> list[str]:
    """What each change is worth beside the cluster as given, and which is best within a budget, in words."""
    base, *others = cases
    words = [f"{case.name}: {_verdict(base, case)}" for case in others]
    if budget_per_hour is None:
        return words
    unpriced = [case.name for case in cases if case.price_per_hour is None]
    if unpriced:
        words.append(f"not every device has a price in: {', '.join(unpriced)}; give --price NAME=PRICE")
    within = [
        case
        for case in cases
        if (case.price_per_hour or 0.0) <= budget_per_hour and case.name not in unpriced
    ]
    if within:
        best = max(within, key=lambda case: case.samples_per_s)
        words.append(
            f"within {budget_per_hour:g} an hour the fastest is: {best.name} ({best.price_per_hour:.4g} an hour, "
            f"{best.samples_per_s:.4g} samples/s)"
        )
    elif len(unpriced) < len(cases):
        words.append(f"none of these costs at most {budget_per_hour:g} an hour")
    return words


def _verdict(base: Case, case: Case) -> str:
    gain = case.samples_per_s / base.samples_per_s
    speed = f"{gain:.3g} times the samples/s"
    before, after = base.cost_per_million, case.cost_per_million
    faster, slower = gain >= NOTICEABLE, gain * NOTICEABLE <= 1
    if before is None or after is None:
        return f"{speed}, {'faster' if faster else 'slower' if slower else 'which gains nothing'}"
    cost = f"{speed}, {after:.4g} for a million samples instead of {before:.4g}"
    if slower:
        return f"{cost}: cheaper but slower" if after < before else f"{cost}: not worth it"
    if faster and after > before:
        assert base.price_per_hour is not None
        assert case.price_per_hour is not None
        more = (
            (case.price_per_hour - base.price_per_hour)
            / 3600
            / (case.samples_per_s - base.samples_per_s)
            * 1e6
        )
        return f"{cost}: faster but dearer, {more:.4g} for a million of the samples that it adds"
    if faster or after * NOTICEABLE <= before:
        return f"{cost}: worth it"
    return f"{cost}: not worth it" if after >= before * NOTICEABLE else f"{cost}: it makes no difference"
