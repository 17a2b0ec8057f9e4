"""Every decision, as pure functions of what was measured and predicted; and the plan they add up to.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.planning.compression.bits import LayerOptions as LayerOptions
    from trimtab.planning.compression.bits import block_cost as block_cost
    from trimtab.planning.compression.bits import choose_bits as choose_bits
    from trimtab.planning.compression.bits import uniform_cost as uniform_cost
    from trimtab.planning.compression.bits import uniform_error as uniform_error
    from trimtab.planning.drift import Follow as Follow
    from trimtab.planning.plan import Plan as Plan
    from trimtab.planning.plan import Role as Role
    from trimtab.planning.plan_file import load_plan as load_plan
    from trimtab.planning.plan_file import save_plan as save_plan
    from trimtab.planning.tensor.shares import water_fill as water_fill

_MODULES = {
    "Follow": "trimtab.planning.drift",
    "LayerOptions": "trimtab.planning.compression.bits",
    "Plan": "trimtab.planning.plan",
    "Role": "trimtab.planning.plan",
    "block_cost": "trimtab.planning.compression.bits",
    "choose_bits": "trimtab.planning.compression.bits",
    "load_plan": "trimtab.planning.plan_file",
    "save_plan": "trimtab.planning.plan_file",
    "uniform_cost": "trimtab.planning.compression.bits",
    "uniform_error": "trimtab.planning.compression.bits",
    "water_fill": "trimtab.planning.tensor.shares",
}
__all__ = [
    "Follow",
    "LayerOptions",
    "Plan",
    "Role",
    "block_cost",
    "choose_bits",
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
