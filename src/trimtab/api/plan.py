"""`trimtab.plan`: what each rank should do, from a probed cluster and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import trimtab
from trimtab.cluster import Cluster, Profile, load_cluster
from trimtab.cluster.profile import check_profile
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.damage.indicators import gradient_damage as damage_of
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.products import refuse_wrong_products
from trimtab.models.data import filled
from trimtab.models.spec import NAMES, load_model
from trimtab.planning.make_plan import Bits, make_plan
from trimtab.planning.plan import Plan
from trimtab.planning.plan_search import BUDGET
from trimtab.precision.products import DTYPES
from trimtab.precision_names import PRECISIONS
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.operators.estimate import with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import probed
from trimtab.predict.step import rank_counts

RANKING = ("depth", "curvature", "random")
"""Indicators that only rank operators."""

BATCHES = 2
"""Batches for calibrating the indicator of a model given by name."""


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
        model: as it will be trained, on a device; or a name, as for `trimtab probe --model`.
        cluster: a cluster with its profile, or the file that `trimtab probe` wrote.
        batch_size: the global batch: samples per step, over all ranks. The plan divides exactly these.
        batches: two or so, each as the model is called with it; the effect of lower precision on the gradient is
            measured on them. Not needed for a model given by name.
        loss: computes the scalar loss from the model's output, if that is not a loss itself.
        batch: "free" lets batch shares follow speed, and lowers operators of any rank where that gains more;
            "fixed" gives every rank the same share and lowers only operators of slow ranks.
        damage: allowed with "free": the expected squared relative error of a step's gradient.
        bits: bits of gradients: 1 to 8, None, "adaptive", or "auto" for the fastest according to the prediction.
        indicator: how damage is estimated; see `trimtab.measure.gradient_damage`.
        precisions: to choose from; by default all that were probed.
        autocast: "bf16" or "fp16", if the job runs under it.

    Raises:
        TrimtabError: something is missing or does not fit; the message says what to do.
    """
    target = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    profile = _profile(target)
    if batch_size < target.world_size:
        raise TrimtabError(
            f"plan: a batch of {batch_size} is smaller than the {target.world_size} ranks of the cluster, and each "
            f"needs at least one sample; use a batch size of {target.world_size} or more"
        )
    if not (isfinite(damage) and damage >= 0):
        raise TrimtabError(f"plan: a damage of {damage} is not possible; use a finite number of at least 0")
    if batch == "free" and indicator in RANKING:
        raise TrimtabError(
            f"plan: the indicator {indicator!r} ranks operators but does not tell how much gradients change, so it "
            "cannot be compared with the allowed damage; use variance or measured, or --batch fixed"
        )
    offered = _precisions(target, profile, precisions)
    kinds: set[Literal["cpu", "cuda"]] = {target.devices[name].kind for name in rank_counts(target)}
    here = torch.device("cuda" if kinds == {"cuda"} and torch.cuda.is_available() else "cpu")
    trained, batches, loss = _job(model, batches, loss, here)
    workload = capture_workload(trained, batches[0], loss=loss, autocast=autocast, device=min(kinds))
    measured = Measured(workload, profile)
    for name in rank_counts(target):  # report what was not measured before the long work
        measured.costs(name, batch_size // target.world_size, {})
    half = DTYPES[autocast] if autocast is not None else None  # unknown names were rejected above
    device = next((p.device for p in trained.parameters()), torch.device("cpu"))
    refuse_wrong_products(device)
    with torch.autocast(device.type, dtype=half) if half is not None else nullcontext():
        damages = damage_of(trained, batches, loss, precisions=offered, indicator=indicator)
    progress(1, 12)
    made = make_plan(
        target,
        workload,
        {name: by for name, by in damages.items() if name in workload.settings},
        model=fingerprint(trained),
        trimtab=trimtab.__version__,
        batch_size=batch_size,
        batch=batch,
        budget=damage,
        bits=bits,
        progress=progress,
    )
    samples = [(role.device, role.samples) for role in made.roles.values()]
    if (warning := out_of_reach(profile, workload.model, samples)) is not None:
        logger().warning("plan: %s", warning)
    return made


def _job(
    model: nn.Module | str,
    batches: Sequence[Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    device: torch.device,
) -> tuple[nn.Module, list[Any], Callable[[Any], torch.Tensor] | None]:
    """The model, the batches for its calibration, and its loss."""
    if isinstance(model, nn.Module):
        if not batches:
            raise TrimtabError(
                "plan: the effect of lower precision is measured on data: pass batches=, two or so, each as the "
                "model is called with it"
            )
        return model, list(batches), loss
    torch.manual_seed(0)
    spec = load_model(model, device)
    calibration = list(batches) if batches else [spec.batch]
    if model in NAMES and not batches:
        calibration = [filled(spec, step) for step in range(BATCHES)]
    return spec.model, calibration, loss or spec.loss


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
