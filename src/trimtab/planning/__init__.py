"""Every decision, as pure functions of what was measured and predicted; and the plan they add up to.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.planning.compression.layer_options import LayerOptions as LayerOptions
    from trimtab.planning.compression.layer_options import uniform_cost as uniform_cost
    from trimtab.planning.compression.layer_options import uniform_error as uniform_error
    from trimtab.planning.compression.policies import choose_bits as choose_bits
    from trimtab.planning.drift import Follow as Follow
    from trimtab.planning.plan import Plan as Plan
    from trimtab.planning.plan import Role as Role
    from trimtab.planning.plan import load_plan as load_plan
    from trimtab.planning.plan import save_plan as save_plan
    from trimtab.planning.shares.batch import Adjust as Adjust
    from trimtab.planning.tensor.shares import water_fill as water_fill
    from trimtab.wire_format import encoded_bytes as encoded_bytes

_MODULES = {
    "Adjust": "trimtab.planning.shares.batch",
    "Follow": "trimtab.planning.drift",
    "LayerOptions": "trimtab.planning.compression.layer_options",
    "Plan": "trimtab.planning.plan",
    "Role": "trimtab.planning.plan",
    "choose_bits": "trimtab.planning.compression.policies",
    "encoded_bytes": "trimtab.wire_format",
    "load_plan": "trimtab.planning.plan",
    "save_plan": "trimtab.planning.plan",
    "uniform_cost": "trimtab.planning.compression.layer_options",
    "uniform_error": "trimtab.planning.compression.layer_options",
    "water_fill": "trimtab.planning.tensor.shares",
}
__all__ = [
    "Adjust",
    "Follow",
    "LayerOptions",
    "Plan",
    "Role",
    "choose_bits",
    "encoded_bytes",
    "load_plan",
    "save_plan",
    "uniform_cost",
    "uniform_error",
    "water_fill",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
