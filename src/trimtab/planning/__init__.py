"""Every decision, as pure functions of what was measured and predicted; and the plan they add up to.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.planning.compression.layer_options import LayerOptions, uniform_cost, uniform_error
    from trimtab.planning.compression.policies import choose_bits
    from trimtab.planning.drift import Follow
    from trimtab.planning.plan import Plan, Role, load_plan, save_plan
    from trimtab.planning.shares.batch import Adjust
    from trimtab.planning.tensor.shares import water_fill
    from trimtab.wire_format import encoded_bytes

_NAMES = {
    "trimtab.planning.compression.layer_options": ("LayerOptions", "uniform_cost", "uniform_error"),
    "trimtab.planning.compression.policies": ("choose_bits",),
    "trimtab.planning.drift": ("Follow",),
    "trimtab.planning.plan": ("Plan", "Role", "load_plan", "save_plan"),
    "trimtab.planning.shares.batch": ("Adjust",),
    "trimtab.planning.tensor.shares": ("water_fill",),
    "trimtab.wire_format": ("encoded_bytes",),
}
__all__ = [
    "Adjust", "Follow", "LayerOptions", "Plan", "Role", "choose_bits", "encoded_bytes", "load_plan", "save_plan",
    "uniform_cost", "uniform_error", "water_fill",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
