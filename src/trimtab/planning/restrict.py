"""A plan without the adjustments that the user does not allow."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan, Role
from trimtab.precision_names import OWN
from trimtab.selector import selection_text


def restricted(plan: Plan, adjust: frozenset[str]) -> Plan:
    """The plan with some of its adjustments only; later plans made from it keep to them.

    Raises:
        TrimtabError: shares are not allowed, and the plan's batch cannot be divided evenly.
    """
    dropped = []
    if "bits" not in adjust and plan.bits is not None:
        plan = replace(plan, bits=None, layer_bits={}, route=None, weight_bits=None)
        dropped.append("bits")
    if "precision" not in adjust and any(role.precisions for role in plan.roles.values()):
        plan = replace(plan, roles={name: _own_precision(role) for name, role in plan.roles.items()})
        dropped.append("precision")
    if "shares" not in adjust and len(set(plan.shares)) > 1:
        samples, rest = divmod(plan.batch_size, len(plan.shares))
        if rest:
            raise TrimtabError(
                f"adjust: without shares the plan's {plan.batch_size} samples must divide evenly among "
                f"{len(plan.shares)} ranks; make a plan with `adjust` instead"
            )
        roles = {name: replace(role, samples=samples) for name, role in plan.roles.items()}
        plan = replace(plan, batch="fixed", roles=roles)
        dropped.append("shares")
    if not dropped:
        return plan
    reason = (
        f"only {selection_text(adjust)} may be adjusted: {' and '.join(dropped)} of the plan are left out"
    )
    return replace(plan, reasons=(*plan.reasons, reason))


def _own_precision(role: Role) -> Role:
    """The role with every operator in the model's own precision, now and in later plans."""
    extra = fsum(
        role.choices[operator][OWN].seconds - role.choices[operator][precision].seconds
        for operator, precision in role.precisions.items()
        if {OWN, precision} <= role.choices.get(operator, {}).keys()
    )
    return replace(
        role,
        precisions={},
        compute_s=role.compute_s + max(0.0, extra),
        choices={op: {OWN: by[OWN]} for op, by in role.choices.items() if OWN in by},
    )
