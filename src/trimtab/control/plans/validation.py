"""Whether a rank can run a plan for its world size: the same trimtab, model and device."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

import torch
from torch import nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.model_state import state_of
from trimtab.planning.plan import Plan
from trimtab.precision.devices import refuse_unsupported
from trimtab.precision.operators import operators
from trimtab.precision_names import ATTENTION, OperatorKind, Precision

_REMEDY = "make a new plan with `trimtab plan`"


def require_runnable(root: nn.Module, plan: Plan, rank: int) -> None:
    """Raise if this rank cannot run the plan; the message shows the difference."""
    if hasattr(root, "_orig_mod"):
        raise TrimtabError(
            "apply: this model is already compiled; apply the plan first, then torch.compile it"
        )
    if plan.trimtab != trimtab.__version__:
        raise TrimtabError(
            f"the plan was made by trimtab {plan.trimtab}, and this is {trimtab.__version__}; {_REMEDY}"
        )
    known = _operators_by_name(root)
    _require_same_model(root, plan, known)
    for name, role in plan.roles.items():
        for operator in role.precisions:
            if operator not in known:
                raise TrimtabError(
                    f"the plan lowers {operator!r} of role {name}, but the model has no such operator; "
                    f"{_similar(operator, known)}; {_REMEDY}"
                )
    role_name = plan.role_of(rank)
    role, device = plan.roles[role_name], _device(root)
    if role.kind is not None and role.kind != device.type:
        raise TrimtabError(
            f"rank {rank} has role {role_name}, which is for {role.kind} ({role.device}), but its model is on "
            f"{device}; move the model before trimtab.apply, or start the ranks in the order of the plan"
        )
    for operator, value in role.precisions.items():
        try:
            precision = Precision.of(value)
        except ValueError as error:
            raise TrimtabError(f"the plan's role {role_name}: {operator}: {error}; {_REMEDY}") from error
        refuse_unsupported(f"role {role_name}: {operator}", known[operator], precision, device)


def require_same_bits(model: nn.Module, plan: Plan) -> None:
    """Raise if an earlier plan already replaced the module's collectives with others."""
    earlier = state_of(model).compression_plan
    if earlier is not None and _exchange(earlier) != _exchange(plan):
        raise TrimtabError(
            f"apply: an earlier plan set gradients of this module to {_exchange(earlier)}, and the new one to "
            f"{_exchange(plan)}; they are set once: make a new module, wrapped anew, for the new plan"
        )


def _exchange(plan: Plan) -> str:
    """How gradients are sent, in words that differ where the plans' hooks would."""
    words = [f"{plan.bits or 'their own'} bits"]
    if plan.weight_bits is not None:
        words.append(f"weights in {plan.weight_bits}")
    if plan.layer_bits:
        words.append(f"other bits for {_some([f'{n}: {bits}' for n, bits in plan.layer_bits.items()])}")
    return ", ".join(words if plan.route is None else [*words, plan.route.name])


def _operators_by_name(root: nn.Module) -> dict[str, OperatorKind]:
    """Every operator name that a plan may contain."""
    known: dict[str, OperatorKind] = dict(operators(root))
    return known | {
        name + ATTENTION: "attention" for name, _ in root.named_modules() if name and name not in known
    }


def _require_same_model(root: nn.Module, plan: Plan, known: Mapping[str, OperatorKind]) -> None:
    own = fingerprint(root)
    if plan.model == own:
        return
    planned = {name for role in plan.roles.values() for name in (*role.choices, *role.precisions)}
    differences = []
    if missing := sorted(planned - known.keys()):
        differences.append(f"the plan contains {_some(missing)}, which this model lacks")
    if planned and (unplanned := [name for name in operators(root) if name not in planned]):
        differences.append(f"the plan does not contain {_some(unplanned)}")
    if not differences:
        differences.append("its operators have the same names, but other shapes, types or parameters")
    raise TrimtabError(
        f"the plan is for another model (fingerprint {plan.model}, and this {type(root).__name__} has {own}): "
        f"{'; '.join(differences)}; {_REMEDY} for this model"
    )


def _similar(name: str, known: Mapping[str, OperatorKind]) -> str:
    matches = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(matches)}?" if matches else f"it has {_some(list(known))}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _device(root: nn.Module) -> torch.device:
    first = next(root.parameters(), None)
    return torch.device("cpu") if first is None else first.device
