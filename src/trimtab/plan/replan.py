"""A plan made anew while training runs, from what the ranks were measured to take. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.plan.plan import Plan


def replan(plan: Plan, observed: Mapping[str, float]) -> Plan:
    """The plan that fits what was observed, or the same one where nothing is worth changing.

    Args:
        observed: measured compute seconds of a step, waiting and communication left out, by role. Roles that
            are not named count as predicted. Every rank passes the same numbers, so all get the same plan.
    """
    return plan
