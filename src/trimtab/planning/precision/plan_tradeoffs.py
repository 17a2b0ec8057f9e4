"""Trade-offs of ranks from a plan's own choices, corrected by observed times."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

from trimtab.planning.plan import Choice, Plan, Role
from trimtab.planning.precision.options import (
    Chosen,
    Option,
    Options,
    memory_of,
    option_of,
    own_only,
    scaled,
    seconds_of,
)
from trimtab.planning.precision.tradeoffs import RankMenu, Tradeoffs
from trimtab.precision_names import OWN


class PlanTradeoffs(Tradeoffs):
    """Times of the plan's roles by device class, each scaled by observed over predicted."""

    def __init__(self, plan: Plan, observed: Mapping[str, float]) -> None:
        self.roles: dict[str, Role] = {}
        self.slower: dict[str, float] = {}
        """By device class: observed over predicted."""

        for name, role in plan.roles.items():
            self.roles.setdefault(role.device, role)
            ratio = observed.get(name, role.compute_s) / role.compute_s
            # Among several roles of one class the slowest counts, because a step waits for it.
            self.slower[role.device] = max(self.slower.get(role.device, 0.0), ratio)
        super().__init__({d: role.memory_bytes for d, role in self.roles.items()})

    def _menu(self, device: str, samples: int) -> RankMenu:
        role, slower = self.roles[device], self.slower[device]
        part = samples / role.samples
        options = scaled(options_of(role), seconds=slower * part, damage=part**2, memory=part)
        whole = slower * (role.fixed_s - role.after_s + (role.compute_s - role.fixed_s) * part)
        base = max(0.0, whole - seconds_of(options, chosen_of(role)))
        return RankMenu(
            base_s=base, own_s=fsum((base, seconds_of(options, own_only(options)))), options=options
        )

    def peak(self, device: str, samples: int, chosen: Mapping[str, str]) -> int:
        role = self.roles[device]
        options = self.menu(device, samples).options
        every = {operator: chosen.get(operator, OWN) for operator in options}
        grown = role.peak_bytes + (samples - role.samples) * role.bytes_per_sample
        return round(grown) + memory_of(options, every)

    def reduce_s(self, device: str, samples: int, chosen: Mapping[str, str]) -> float:
        """Compute time of a rank until gradients are reduced."""
        menu = self.menu(device, samples)
        every = {operator: chosen.get(operator, OWN) for operator in menu.options}
        return menu.base_s + seconds_of(menu.options, every)


def options_of(role: Role) -> Options:
    """The options that a role's plan chose among."""
    return {
        operator: tuple(
            Option(precision=name, seconds=c.seconds, damage=c.damage, memory=c.memory)
            for name, c in by.items()
        )
        for operator, by in role.choices.items()
    }


def choices_of(options: Options, chosen: Mapping[str, str]) -> dict[str, dict[str, Choice]]:
    """The options in the form of a plan: memory relative to what was chosen."""
    return {
        operator: {
            o.precision: Choice(
                seconds=o.seconds,
                damage=o.damage,
                memory=o.memory - option_of(options, operator, chosen[operator]).memory,
            )
            for o in several
        }
        for operator, several in options.items()
    }


def chosen_of(role: Role) -> Chosen:
    return {operator: role.precisions.get(operator, OWN) for operator in role.choices}
