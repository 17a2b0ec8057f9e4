"""`trimtab.plan`: what each rank should do, from a probed cluster and a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import trimtab
from trimtab.cluster import Cluster, Profile, load_cluster
from trimtab.cluster.profile import ProbedModel, check_profile
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.damage.indicators import gradient_damage as damage_of
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.products import refuse_wrong_products
from trimtab.models.data import calibration
from trimtab.models.spec import load_model
from trimtab.planning.cluster_changes import require_one_kind
from trimtab.planning.local_steps import MAX_PENALTY, require_penalty
from trimtab.planning.make_plan import Bits, make_plan
from trimtab.planning.plan import Plan
from trimtab.planning.plan_search import BUDGET
from trimtab.planning.tensor.plan_layout import LayoutOption, require_layout
from trimtab.precision.products import DTYPES
from trimtab.precision_names import PRECISIONS
from trimtab.predict.damage import Damage
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.operators.estimate import measured_kinds, with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import probed
from trimtab.predict.step import rank_counts
from trimtab.selector import ALL, selected, selection_text
from trimtab.workload import Workload

RANKING = ("depth", "curvature", "random")
"""Indicators that only rank operators."""


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
    layout: LayoutOption = "auto",
    max_penalty: float = MAX_PENALTY,
    indicator: str = "variance",
    precisions: Sequence[str] | None = None,
    autocast: str | None = None,
    adjust: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide what every rank of a job does: samples, precisions of operators, bits of gradients.

    Args:
        model: as it will be trained, on a device; or a name, as for `trimtab probe --model`. A model that was probed
            under this name is planned from the cluster's profile: neither its code nor its device is needed, but
            without its code precisions are planned only if the profile has their damages (`trimtab probe --damage`).
        cluster: a cluster with its profile, or the file that `trimtab probe` wrote.
        batch_size: the global batch: samples per step, over all ranks. The plan divides exactly these.
        batches: two or so, each as the model is called with it; the effect of lower precision on the gradient is
            measured on them. Not needed for a model given by name.
        loss: computes the scalar loss from the model's output, if that is not a loss itself.
        batch: "free" lets batch shares follow speed, and lowers operators of any rank where that gains more;
            "fixed" gives every rank the same share and lowers only operators of slow ranks.
        damage: allowed with "free": the expected squared relative error of a step's gradient.
        bits: bits of gradients: 1 to 8, None, "adaptive", or "auto" for the fastest according to the prediction.
        layout: "data" gives every rank a copy of the model; a number makes tensor groups of so many ranks, which
            hold a copy together; "auto" makes them where that is predicted to be faster, or a copy does not fit.
        max_penalty: where local steps would be much faster, the plan mentions them (`Plan.local_steps`), with rounds
            within this expected relative increase of the loss.
        indicator: how damage is estimated; see `trimtab.measure.gradient_damage`.
        precisions: to choose from; by default all that were probed.
        autocast: "bf16" or "fp16", if the job runs under it.
        adjust: what may be adjusted: "auto" for all, "exact" for what changes no result, "none", or some of bits,
            shares and precision, comma-separated. As in `trimtab run --adjust`.

    Raises:
        TrimtabError: something is missing or does not fit; the message says what to do.
    """
    _require_arguments(model, cluster, batch_size, batch, batches)
    allowed = selected(adjust)
    for name, value, usual in (("bits", bits, ("auto", None)), ("precision", precisions, (None, ()))):
        if name not in allowed and value not in usual:
            raise TrimtabError(
                f"plan: --{name} {value} and --adjust {adjust} exclude each other: drop one, or allow {name}"
            )
    batch = batch if "shares" in allowed else "fixed"
    bits = bits if "bits" in allowed else None
    precisions = precisions if "precision" in allowed else ()
    target = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    profile = _profile(target)
    if batch_size < target.world_size:
        raise TrimtabError(
            f"plan: a batch of {batch_size} is smaller than the {target.world_size} ranks of the cluster, and each "
            f"needs at least one sample; use a batch size of {target.world_size} or more"
        )
    require_layout(layout, target.world_size)
    require_penalty("plan", max_penalty)
    if not (isfinite(damage) and damage >= 0):
        raise TrimtabError(f"plan: a damage of {damage} is not possible; use a finite number of at least 0")
    if batch == "free" and indicator in RANKING:
        raise TrimtabError(
            f"plan: the indicator {indicator!r} ranks operators but does not tell how much gradients change, so it "
            "cannot be compared with the allowed damage; use variance or measured, or --batch fixed"
        )
    offered = _precisions(target, profile, precisions)
    kinds = measured_kinds(target, profile)
    require_one_kind(target)
    stored = _stored(model, profile, kinds)
    workload = None if stored is None else stored.workload(kinds, autocast)
    damages: Damage = {}
    if isinstance(model, str) and not batches and stored is not None and stored.indicator == indicator:
        damages = {
            name: {precision: value for precision, value in by.items() if precision in offered}
            for name, by in stored.damages.items()
        }
    job: _Job | None = None
    if workload is None or not damages:
        job = _job(model, batches, loss, kinds, optional=workload is not None)
    if workload is None or stored is None:
        assert job is not None
        own = fingerprint(job.model)
        workload = capture_workload(
            job.model, job.batches[0], loss=job.loss, autocast=autocast, device=min(kinds)
        )
    else:
        own = stored.fingerprint
        if job is not None and fingerprint(job.model) != own:
            raise TrimtabError(
                f"plan: {model} is another model than the one that was probed under this name; run `trimtab probe "
                f"--model {model}` again"
            )
    measured = Measured(workload, profile)
    for name in rank_counts(target):  # report what was not measured before the long work
        measured.costs(name, batch_size // target.world_size, {})
    if job is not None and not damages and set(offered) - {"fp32"}:  # fp32 does none
        damages = _measured_damages(job, workload, offered, indicator)
    progress(1, 12)
    made = make_plan(
        target,
        workload,
        damages,
        model=own,
        trimtab=trimtab.__version__,
        batch_size=batch_size,
        batch=batch,
        budget=damage,
        bits=bits,
        layout=layout,
        max_penalty=max_penalty,
        progress=progress,
    )
    if allowed != ALL:
        known = [reason for reason in made.reasons if not reason.startswith("nothing is lowered")]
        made = replace(made, reasons=(f"only {selection_text(allowed)} may be adjusted", *known))
    samples = [(role.device, role.samples // made.accumulate) for role in made.roles.values()]
    if (warning := out_of_reach(profile, workload, samples)) is not None:
        logger().warning("plan: %s", warning)
    if workload.caveat is not None:
        made = replace(made, reasons=(*made.reasons, workload.caveat))
    return made


class _Job(NamedTuple):
    """A model that can be run here."""

    model: nn.Module
    batches: list[Any]
    loss: Callable[[Any], torch.Tensor] | None


def _stored(model: nn.Module | str, profile: Profile, kinds: Collection[str]) -> ProbedModel | None:
    """What the profile holds of a model; of one that is given in Python only if it cannot be captured here."""
    if isinstance(model, str):
        return profile.models.get(model)
    if "cuda" not in kinds or torch.cuda.is_available():
        return None
    own = fingerprint(model)
    return next((probed for probed in profile.models.values() if probed.fingerprint == own), None)


def _job(
    model: nn.Module | str,
    batches: Sequence[Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    kinds: Collection[str],
    *,
    optional: bool,
) -> _Job | None:
    """The model, the batches for its calibration, and its loss; None if it is optional and its code is not here."""
    if isinstance(model, nn.Module):
        if not batches:
            raise TrimtabError(
                "plan: the effect of lower precision is measured on data: pass batches=, two or so, each as the "
                "model is called with it"
            )
        return _Job(model, list(batches), loss)
    torch.manual_seed(0)
    try:
        spec = load_model(
            model, torch.device("cuda" if kinds == {"cuda"} and torch.cuda.is_available() else "cpu")
        )
    except TrimtabError:
        if optional:
            return None
        raise
    return _Job(spec.model, list(batches) if batches else calibration(spec), loss or spec.loss)


def _measured_damages(job: _Job, workload: Workload, precisions: Sequence[str], indicator: str) -> Damage:
    half = None if workload.autocast is None else DTYPES[workload.autocast]
    device = next((p.device for p in job.model.parameters()), torch.device("cpu"))
    refuse_wrong_products(device)
    with torch.autocast(device.type, dtype=half) if half is not None else nullcontext():
        damages = damage_of(job.model, job.batches, job.loss, precisions=precisions, indicator=indicator)
    return {name: by for name, by in damages.items() if name in workload.settings}


def _require_arguments(
    model: object, cluster: object, batch_size: object, batch: object, batches: object
) -> None:
    """Refuse what is of another kind than is documented."""
    expected = {
        f"model: expected an nn.Module or a name, got {type(model).__name__}": isinstance(
            model, nn.Module | str
        ),
        f"cluster: expected a Cluster or the path of its file, got {type(cluster).__name__}": isinstance(
            cluster, Cluster | str | Path
        ),
        f"batch_size={batch_size!r}: give a whole number of samples, over all ranks": hasattr(
            batch_size, "__index__"
        ),
        f"batch is free or fixed; got {batch!r}": batch in ("free", "fixed"),
        f"batches: expected a list of batches, got one {type(batches).__name__}": not isinstance(
            batches, torch.Tensor | Mapping
        ),
    }
    for message, holds in expected.items():
        if not holds:
            raise TrimtabError(f"plan: {message}")


def _profile(cluster: Cluster) -> Profile:
    if cluster.profile is None:
        raise TrimtabError(
            "plan: the cluster has no measurements; run `trimtab probe --model MODEL --out cluster.json` under "
            "torchrun on its ranks, or on one machine of each kind, and merge the files with `trimtab probe --merge`"
        )
    check_profile(cluster.profile, trimtab=trimtab.__version__)
    return with_estimates(cluster, cluster.profile)


def _precisions(cluster: Cluster, profile: Profile, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The precisions to choose from: all that some device class was probed with, or the wanted ones of them."""
    known = {name: probed(profile, name) for name in rank_counts(cluster) if name in profile.devices}
    every = tuple(dict.fromkeys(p for several in known.values() for p in several if p in PRECISIONS))
    for precision in wanted or ():
        if precision not in every:
            probed_by_class = "; ".join(f"{name}: {', '.join(several)}" for name, several in known.items())
            raise TrimtabError(
                f"plan: {precision!r} was not probed on any device class ({probed_by_class}); run there: "
                f"trimtab probe --precision {precision}"
            )
    return every if wanted is None else tuple(wanted)
