"""A plan's damages brought up to date with what was sampled while the job trains. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum, isfinite

from trimtab.planning.plan import Plan
from trimtab.precision_names import OWN
from trimtab.predict.damage import Damage, Sensitivity

Sensitivities = Mapping[str, Sensitivity]
"""By operator."""


def growth(first: Sensitivities, now: Sensitivities) -> Damage:
    """By operator and precision, how many times the damage of `first` it does now.

    An operator's damage is the relative error of its rounding times the effect of that on the whole gradient. The
    effect is taken to grow as the operator's part of all sizes.
    """
    both = [name for name in first if name in now]
    before, after = (fsum(own[name].size for name in both) for own in (first, now))
    if not (before > 0 and after > 0):
        return {}
    grown: Damage = {}
    for name in both:
        if not first[name].size > 0:
            continue
        part = now[name].size / after / (first[name].size / before)
        for precision, error in first[name].errors.items():
            # What is rounded already has no error to compare: its own part alone counts.
            rounding = now[name].errors.get(precision, error) / error if error > 0 else 1.0
            if isfinite(part * rounding):
                grown.setdefault(name, {})[precision] = part * rounding
    return grown


def with_current_damages(plan: Plan, grown: Mapping[str, Mapping[str, float]]) -> Plan:
    """The same plan, whose choices do `grown` times the damage; what is not in it does the same as before."""
    if not grown:
        return plan
    roles = {
        name: replace(
            role,
            choices={
                operator: {
                    precision: replace(
                        choice, damage=choice.damage * grown.get(operator, {}).get(precision, 1.0)
                    )
                    for precision, choice in by.items()
                }
                for operator, by in role.choices.items()
            },
        )
        for name, role in plan.roles.items()
    }
    damage = fsum(
        count
        * fsum(
            by[roles[name].precisions.get(operator, OWN)].damage
            for operator, by in roles[name].choices.items()
        )
        for name, count in plan.ranks
    )
    return replace(plan, roles=roles, predicted=replace(plan.predicted, damage=damage))
