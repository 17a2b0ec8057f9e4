"""`trimtab.plan`: what should each rank do? From a probed cluster and a model to a `Plan`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

import trimtab
from trimtab.cluster import Cluster, load_cluster
from trimtab.cluster.profile import check_profile
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.damage.indicators import gradient_damage as damage_of
from trimtab.measure.fingerprint import fingerprint
from trimtab.models.data import filled
from trimtab.models.spec import NAMES, load_model
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan_search import BUDGET
from trimtab.precision.half import DTYPES
from trimtab.precision_names import PRECISIONS
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.operators.estimate import with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import probed
from trimtab.predict.step import rank_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trimtab.cluster import Profile
    from trimtab.planning.make_plan import Bits
    from trimtab.planning.plan import Plan

RANKING = ("depth", "curvature", "random")
"""Indicators whose numbers mean nothing but an order."""

BATCHES = 2
"""On which the indicator is calibrated, for models by name."""


def plan(
    model: nn.Module | str,
    cluster: Cluster | str | Path,
    batch_size: int,
    *,
    batches: Sequence[Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    batch: Literal["fixed", "free"] = "free",
    damage: float = BUDGET,
    bits: Bits = "auto",
    indicator: str = "variance",
    precisions: Sequence[str] | None = None,
    autocast: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide what every rank of a job does: samples, precisions of operators, bits of gradients.

    Args:
        model: as it will be trained, on a device; or a name, as `trimtab probe --model` takes it.
        cluster: with its profile, as `trimtab probe` writes it, or that file.
        batch_size: samples of a step over all ranks. The plan shares out exactly these.
        batches: two or so, each as the model is called with it; what lowering does to the gradient is measured on
            them. Not needed for a model by name.
        loss: makes the scalar loss of what the model returns, where that is none itself.
        batch: "free" lets shares follow speed, and lowers operators of any rank where that gains beyond;
            "fixed" gives every rank the same share and lowers only slow ranks.
        damage: that "free" may do: the expected squared relative error of a step's gradient.
        bits: of gradients: 1 to 8, None, "adaptive", or "auto" for what is predicted to be fastest.
        indicator: how damage is found; see `trimtab.measure.damage.indicators.damage`.
        precisions: to choose among; by default all that were probed.
        autocast: "bf16" or "fp16", if the job runs under it.

    Raises:
        TrimtabError: what is missing, or does not fit, and what to do.
    """
    given = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    profile = _profile(given)
    if batch_size < given.world_size:
        raise TrimtabError(
            f"plan: a batch of {batch_size} is smaller than the {given.world_size} ranks of the cluster, and each "
            f"takes at least a sample; give a batch size of {given.world_size} or more"
        )
    if not (isfinite(damage) and damage >= 0):
        raise TrimtabError(f"plan: a damage of {damage} cannot be allowed; give a number from 0 up")
    if batch == "free" and indicator in RANKING:
        raise TrimtabError(
            f"plan: the indicator {indicator!r} ranks operators but does not tell how much gradients move, so that no "
            "damage can be allowed; use variance or measured, or --batch fixed"
        )
    offered = _precisions(given, profile, precisions)
    kinds: set[Literal["cpu", "cuda"]] = {given.devices[name].kind for name in rank_counts(given)}
    here = torch.device("cuda" if kinds == {"cuda"} and torch.cuda.is_available() else "cpu")
    job = _job(model, batches, loss, here)
    workload = capture_workload(
        job.model, job.batches[0], loss=job.loss, autocast=autocast, device=min(kinds)
    )
    measured = Measured(workload, profile)
    for name in rank_counts(given):  # what was not measured is said before the long work
        measured.costs(name, batch_size // given.world_size, {})
    half = DTYPES[autocast] if autocast is not None else None  # a name that is none was refused by now
    with torch.autocast(job.device.type, dtype=half) if half is not None else nullcontext():
        found = damage_of(job.model, job.batches, job.loss, precisions=offered, indicator=indicator)
    progress(1, 12)
    made = make_plan(
        given,
        workload,
        {name: by for name, by in found.items() if name in workload.settings},
        model=fingerprint(job.model),
        trimtab=trimtab.__version__,
        batch_size=batch_size,
        batch=batch,
        budget=damage,
        bits=bits,
        progress=progress,
    )
    samples = [(role.device, role.samples) for role in made.roles.values()]
    if (said := out_of_reach(profile, workload.model, samples)) is not None:
        logger().warning("plan: %s", said)
    return made


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A model, and what it is calibrated on."""

    model: nn.Module
    batches: list[Any]
    loss: Callable[[Any], torch.Tensor] | None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def _job(
    model: nn.Module | str,
    batches: Sequence[Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    device: torch.device,
) -> _Job:
    if isinstance(model, nn.Module):
        if not batches:
            raise TrimtabError(
                "plan: what lowering does to a model is measured on data: pass batches=, two or so, each as the "
                "model is called with it"
            )
        return _Job(model=model, batches=list(batches), loss=loss)
    torch.manual_seed(0)
    spec = load_model(model, device)
    given = list(batches) if batches else [spec.batch]
    if model in NAMES and not batches:
        given = [filled(spec, step) for step in range(BATCHES)]
    return _Job(model=spec.model, batches=given, loss=loss or spec.loss)


def _profile(cluster: Cluster) -> Profile:
    if cluster.profile is None:
        raise TrimtabError(
            "plan: the cluster holds no measurements; run `trimtab probe --model MODEL --out cluster.json` under "
            "torchrun on its ranks, or on one machine of each kind, and merge the files with `trimtab probe --merge`"
        )
    check_profile(cluster.profile, trimtab=trimtab.__version__)
    return with_estimates(cluster, cluster.profile)


def _precisions(cluster: Cluster, profile: Profile, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The precisions to choose among: those that some device class was probed with, or those of them asked for."""
    known = {name: probed(profile, name) for name in rank_counts(cluster) if name in profile.devices}
    every = tuple(dict.fromkeys(p for several in known.values() for p in several if p in PRECISIONS))
    for precision in wanted or ():
        if precision not in every:
            had = "; ".join(f"{name}: {', '.join(several)}" for name, several in known.items())
            raise TrimtabError(
                f"plan: {precision!r} was not probed on any device class ({had}); run there: "
                f"trimtab probe --precision {precision}"
            )
    return every if wanted is None else tuple(wanted)
