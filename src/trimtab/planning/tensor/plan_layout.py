"""A plan with tensor groups where that pays or memory demands it, else the data-parallel plan. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trimtab.errors import TrimtabError
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.plan_search import GAIN, PlanSearch
from trimtab.planning.precision.damage_curve import pareto
from trimtab.planning.precision.options import DoesNotFitError
from trimtab.planning.reasons import Adjustment
from trimtab.planning.tensor.layout import LARGEST, MANY_RANKS, Layout, LayoutSearch, even_samples
from trimtab.planning.tensor.lowering import FEW_KINDS, Lowering
from trimtab.predict.tensor import TensorJob

LayoutOption = Literal["auto", "data"] | int
""""data" for a copy of the model on every rank, a number for tensor groups of so many ranks."""

NO_CURVE = (
    f"beyond {MANY_RANKS} ranks or {FEW_KINDS} kinds of tensor groups time against damage is not computed"
)


def require_layout(layout: LayoutOption, world: int) -> None:
    """Refuse groups that so many ranks cannot be divided into; it needs no model, so it comes before any long work."""
    if isinstance(layout, str):
        if layout not in ("auto", "data"):
            raise TrimtabError(f"plan: layout {layout!r}: use auto, data, or a number of ranks from 2")
    elif layout < 2 or world % layout:
        sizes = [size for size in range(2, min(world, LARGEST) + 1) if world % size == 0]
        raise TrimtabError(
            f"plan: layout {layout}: tensor groups of {layout} ranks are impossible with {world} ranks; "
            f"possible sizes: {', '.join(map(str, sizes)) or 'none'}"
        )


def with_layout(
    search: PlanSearch,
    data_parallel: Callable[[], Plan],
    layout: LayoutOption,
    *,
    model: str,
    trimtab: str,
    batch: Literal["fixed", "free"],
    bits: Sequence[int | Literal["adaptive"] | None],
    budget: float = 0.0,
) -> Plan:
    """The data-parallel plan, unless groups of ranks that hold a copy together are faster, or it does not fit.

    Args:
        bits: of gradients, to choose from. Those that adapt during training are predicted as 4.
        budget: damage allowed with free shares, of lowered projections.

    Raises:
        TrimtabError: as `data_parallel`, or if no layout fits or the one that was asked for is impossible.
    """
    world = len(search.devices)
    require_layout(layout, world)
    if layout == "data" or world == 1:
        return data_parallel()
    if not search.workload.units:
        why = f"no blocks of {search.workload.model} are known that tensor parallelism could divide"
        if layout != "auto":
            raise TrimtabError(f"plan: layout {layout}: {why}; plan with --layout data")
        return _noted(data_parallel(), f"there are no tensor groups: {why}")
    layouts = LayoutSearch(
        job=TensorJob(search.measured.operators, search.cluster),
        total=search.total,
        limits=search.tradeoffs.limits,
        batch=batch,
    )
    lowering = Lowering(
        layouts=layouts,
        measured=search.measured,
        damages=search.tradeoffs.damages,
        budget=budget if batch == "free" else 0.0,
        level=batch == "fixed",
    )
    sizes = layouts.sizes()
    adaptive = "adaptive" in bits
    known = search.bits_measured()
    tried = [(4 if 4 in known else min(known)) if each == "adaptive" else each for each in bits]
    if layout != "auto":
        if layout not in sizes:
            possible = ", ".join(map(str, sizes)) or "none"
            raise TrimtabError(
                f"plan: layout {layout}: tensor groups of {layout} ranks are impossible with {world} ranks and this "
                f"model; possible sizes: {possible}"
            )
        best = layouts.best(layout, tried)
        best = None if best is None else lowering.best(best)
        if best is None:
            raise TrimtabError(
                f"plan: layout {layout}: no rank has memory for its part of the model and of a batch of "
                f"{search.total}; lower the batch size, or use larger groups"
            )
        best = worthwhile_bits(layouts, best, tried)
        return _plan(search, lowering, best, None, model, trimtab, batch, adaptive, "as asked for", tried)
    failure = ""
    plan: Plan | None = None
    try:
        plan = data_parallel()
    except DoesNotFitError as error:
        failure = str(error)
    if plan is not None and world > MANY_RANKS:  # a search takes long here
        tried = [plan.bits] if plan.bits in tried else tried[:1]
        bounds = {size: layouts.bound_s(size) for size in sizes}
        sizes = [size for size in sizes if GAIN * bounds[size] < plan.predicted.step_s]
        if bounds and not sizes:
            least = min(bounds, key=lambda size: bounds[size])
            return _noted(
                plan,
                no_groups(plan.predicted.step_s, least, bounds[least], layouts.sums_s(least), " or more"),
            )
    fitting = [each for size in sizes if (each := layouts.best(size, tried)) is not None]
    if world > MANY_RANKS and fitting:
        fitting = [min(fitting, key=lambda each: each.order)]  # lowering takes long here, too
    best = min(map(lowering.best, fitting), key=lambda each: each.order, default=None)
    if best is not None:
        best = worthwhile_bits(layouts, best, tried)
    if plan is None:
        if best is None:
            raise DoesNotFitError(f"{failure} (nor does it fit in tensor groups)")
        why = f"a copy on every rank does not fit: {failure}"
        return _plan(search, lowering, best, None, model, trimtab, batch, adaptive, why, tried)
    if best is None:
        return plan
    seconds = best.step.step_s
    if plan.predicted.step_s < GAIN * seconds:
        why = no_groups(plan.predicted.step_s, len(best.shares), seconds, best.step.all_reduce_s)
        return _noted(plan, why)
    return _plan(
        search,
        lowering,
        best,
        plan,
        model,
        trimtab,
        batch,
        adaptive,
        f"{_otherwise(plan)} a step would take {_ms(plan.predicted.step_s)}",
        tried,
    )


def _otherwise(plan: Plan) -> str:
    return "with a copy on every rank" if plan.wrapper == "ddp" else "with the model sharded by FSDP2"


def _noted(plan: Plan, note: str) -> Plan:
    """The plan with one more reason; the last one remains the conclusion."""
    return replace(plan, reasons=(*plan.reasons[:-1], note, *plan.reasons[-1:]))


def _plan(
    search: PlanSearch,
    lowering: Lowering,
    layout: Layout,
    instead: Plan | None,
    model: str,
    trimtab: str,
    batch: Literal["fixed", "free"],
    adaptive: bool,
    why: str,
    tried: Sequence[int | None],
) -> Plan:
    """The plan of a layout; `instead` is the best one with a copy on every rank, if that fits and was searched for."""
    layouts = lowering.layouts
    curve = lowering.curve(layout) if _has_curve(lowering, layout) else []
    for point in curve:
        if (
            batch == "free"
            and not point.over
            and point.damage <= lowering.budget
            and point.order < layout.order
        ):
            layout = point
    without = _without(layouts, layout)
    if "precision" in without and not without["precision"].over:
        plain = without["precision"]
        if plain.step.step_s < GAIN * layout.step.step_s:
            layout, without = plain, _without(layouts, plain)
    better = [one for name, one in without.items() if not one.over and (name != "bits" or None in tried)]
    if better and (fastest := min(better, key=lambda one: one.order)).order < layout.order:
        layout, without = fastest, _without(layouts, fastest)
    layout = replace(layout, damage=lowering.damage(layout.setting))
    setting, step = layout.setting, layout.step
    adjustments = _adjustments(layouts, layout, without, instead)
    devices = search.devices
    more = layouts.job.step(replace(setting, samples=tuple(own + 1 for own in setting.samples)))
    roles: dict[str, Role] = {}
    of_rank: list[str] = [""] * len(devices)
    names: dict[tuple[str, int, int, tuple[tuple[str, str], ...]], str] = {}
    for index, group in enumerate(setting.groups):
        low = setting.of_group(index)
        for place, rank in enumerate(group):
            key = devices[rank], place, setting.samples[index], tuple(sorted(low[place].items()))
            if key not in names:
                name = f"{devices[rank][:20]}_t{place}"
                while name in roles:
                    name += "_"
                names[key] = name
                own = setting.samples[index]
                compute_s = step.compute_s[index][place]
                peak, larger = (
                    layouts.peak(
                        devices[rank],
                        setting.counts[place],
                        n,
                        len(setting.groups),
                        setting.bits,
                        low[place],
                    )
                    for n in (own, own + 1)
                )
                roles[name] = Role(
                    device=devices[rank],
                    kind=search.cluster.devices[devices[rank]].kind,
                    samples=own,
                    precisions=dict(low[place]),
                    compute_s=compute_s,
                    fixed_s=max(0.0, compute_s - own * (more.compute_s[index][place] - compute_s)),
                    peak_bytes=peak,
                    bytes_per_sample=max(0, larger - peak),
                    memory_bytes=search.tradeoffs.limits[devices[rank]],
                    tensor_share=layout.shares[place],
                )
            of_rank[rank] = names[key]
    ranks: list[tuple[str, int]] = []
    for name in of_rank:
        if ranks and ranks[-1][0] == name:
            ranks[-1] = name, ranks[-1][1] + 1
        else:
            ranks.append((name, 1))
    plain_s = search.plain().step_s
    reasons = _reasons(layout, adjustments, devices, why, plain_s)
    if layout.damage and not curve:
        reasons.insert(-1, NO_CURVE)
    chosen = "adaptive" if adaptive and len(setting.groups) > 1 and setting.bits is not None else setting.bits
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab,
        model=model,
        batch=batch,
        bits=chosen,  # type: ignore[arg-type]
        roles=roles,
        ranks=tuple(ranks),
        tensor_groups=setting.groups,
        predicted=Predicted(
            step_s=step.step_s,
            plain_step_s=plain_s,
            damage=layout.damage,
            uniform_damage=search.uniform_damage(),
            alone={one.name: one.alone_s for one in adjustments if one.alone_s is not None},
            without={one.name: one.without_s for one in adjustments if one.without_s is not None},
            tradeoff=pareto(
                (step.step_s, layout.damage), [(p.step.step_s, p.damage) for p in curve if not p.over]
            )
            if curve
            else (),
        ),
        reasons=tuple(reasons),
    )


def worthwhile_bits(layouts: LayoutSearch, layout: Layout, bits: Sequence[int | None]) -> Layout:
    """The layout with as many bits as do not make the step longer by what an adjustment must gain."""
    setting = layout.setting
    if len(setting.groups) == 1 or setting.bits is None:
        return layout
    more = [each for each in bits if each is None or each > setting.bits]
    for each in sorted(more, key=lambda each: -math.inf if each is None else -each):
        one = layouts.at(setting.groups, layout.shares, setting.samples, each, setting.precisions)
        if not one.over and one.step.step_s < GAIN * layout.step.step_s:
            return replace(one, damage=layout.damage)
    return layout


def no_groups(step_s: float, size: int, seconds: float, sums_s: float, more: str = "") -> str:
    """Why a plan of `step_s` has no tensor groups, where the best ones would need `seconds`."""
    little = f", not {GAIN - 1:.0%} less than the {_ms(step_s)} without" if seconds < step_s else ""
    return (
        f"there are no tensor groups: in groups of {size} ranks a step would take {_ms(seconds)}{more}"
        f"{little}, {_ms(sums_s)} of it to sum activations"
    )


def _has_curve(lowering: Lowering, layout: Layout) -> bool:
    return len(lowering.layouts.job.ranks) <= MANY_RANKS and lowering.few_kinds(layout)


def _without(layouts: LayoutSearch, layout: Layout) -> dict[str, Layout]:
    """The layout without each of its adjustments, all else the same."""
    setting, size = layout.setting, len(layout.shares)
    equal, samples = (1 / size,) * size, even_samples(layouts.total, len(setting.groups))
    jobs = {}
    if max(map(abs, (a - b for a, b in zip(layout.shares, equal, strict=True)))) > 1e-9:
        jobs["units"] = layouts.at(setting.groups, equal, setting.samples, setting.bits, setting.precisions)
    if setting.samples != samples:
        jobs["shares"] = layouts.at(setting.groups, layout.shares, samples, setting.bits, setting.precisions)
    if any(own for group in setting.precisions for own in group):
        # With the shares that are best then: those of lowered ranks would be unfair.
        jobs["precision"] = layouts.improved(
            layouts.at(setting.groups, layout.shares, setting.samples, setting.bits)
        )
    if setting.bits is not None:
        jobs["bits"] = layouts.at(setting.groups, layout.shares, setting.samples, None, setting.precisions)
    return jobs


def _adjustments(
    layouts: LayoutSearch, layout: Layout, without: Mapping[str, Layout], instead: Plan | None
) -> list[Adjustment]:
    """What each part of the layout is worth. Alone, other parts than the groups are those of a data-parallel job."""
    setting, size = layout.setting, len(layout.shares)
    samples = even_samples(layouts.total, len(setting.groups))
    groups_alone = layouts.at(setting.groups, (1 / size,) * size, samples, None)
    alone = dict(instead.predicted.alone) if instead is not None and instead.wrapper == "ddp" else {}
    if not groups_alone.over:
        alone["layout"] = groups_alone.step.step_s
    without_s = {name: one.step.step_s for name, one in without.items() if not one.over}
    if instead is not None:
        without_s["layout"] = instead.predicted.step_s
    words = {
        "units": f"units are divided as {'/'.join(f'{share:.2f}' for share in layout.shares)}, so that the ranks of a "
        "group finish together",
        "shares": f"groups share the batch as {'/'.join(map(str, setting.samples[:8]))}"
        f"{'/...' if len(setting.samples) > 8 else ''}",
        "precision": _precision_words(layouts, layout),
        "bits": f"groups exchange gradients in {setting.bits} bits",
    }
    return [
        Adjustment(
            name=name,
            words=words.get(name, "") if name in without else "",
            without_s=without_s.get(name),
            alone_s=alone.get(name),
        )
        for name in dict.fromkeys(("layout", *without, *alone))
    ]


def _precision_words(layouts: LayoutSearch, layout: Layout) -> str:
    """What each kind of rank lowers."""
    count, setting = len(layouts.job.projections()), layout.setting
    words: dict[str, None] = {}
    for index, group in enumerate(setting.groups):
        for place, rank in enumerate(group):
            if low := setting.of_group(index)[place]:
                names = ", ".join(sorted(set(low.values())))
                device = layouts.job.ranks[rank].device
                words[f"{device} in place {place}: {len(low)} of {count} projections in {names}"] = None
    return "; ".join(list(words)[:4]) + ("; ..." if len(words) > 4 else "")


def _reasons(
    layout: Layout, adjustments: Sequence[Adjustment], devices: Sequence[str], why: str, plain_s: float
) -> list[str]:
    setting, step = layout.setting, layout.step
    groups = "; ".join(
        "+".join(f"{rank} ({devices[rank]})" for rank in group) for group in setting.groups[:4]
    )
    more = f"; and {len(setting.groups) - 4} more" if len(setting.groups) > 4 else ""
    reasons = [
        f"{len(layout.shares)} ranks hold a copy of the model together, {why}",
        f"tensor groups: ranks {groups}{more}",
        *(one.reason(step.step_s) for one in adjustments if one.words),
    ]
    if len(setting.groups) > 1:
        reasons.append(f"the exchange of gradients between groups adds {_ms(step.exchange_s)}")
    if layout.damage:
        reasons.append(
            f"damage {layout.damage:.2g}; what all ranks of a group compute alike keeps the model's precision, so that "
            "they stay alike"
        )
    else:
        reasons.append("nothing is lowered")
    reasons.append(
        f"a step is predicted to take {_ms(step.step_s)}, {_ms(step.all_reduce_s)} of it to sum activations, instead "
        f"of plain DDP's {_ms(plain_s)}"
    )
    return reasons


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
