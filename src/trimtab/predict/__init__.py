"""Time, memory and damage of a step, before it runs.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.predict.damage import plan_damage
    from trimtab.predict.fsdp import predict_fsdp
    from trimtab.predict.fsdp_units import Sharding
    from trimtab.predict.memory.sharded_peak import sharded_memory
    from trimtab.predict.memory.step_peak import step_memory
    from trimtab.predict.operators.cost_mapper import CostMapper
    from trimtab.predict.operators.costs import DeviceCosts, OperatorKey
    from trimtab.predict.operators.measured import Measured
    from trimtab.predict.precision_patterns import matched
    from trimtab.predict.step import JobSetting, RankSetting, predict_memory, predict_step

_NAMES = {
    "trimtab.predict.damage": ("plan_damage",),
    "trimtab.predict.fsdp": ("predict_fsdp",),
    "trimtab.predict.fsdp_units": ("Sharding",),
    "trimtab.predict.memory.sharded_peak": ("sharded_memory",),
    "trimtab.predict.memory.step_peak": ("step_memory",),
    "trimtab.predict.operators.cost_mapper": ("CostMapper",),
    "trimtab.predict.operators.costs": ("DeviceCosts", "OperatorKey"),
    "trimtab.predict.operators.measured": ("Measured",),
    "trimtab.predict.precision_patterns": ("matched",),
    "trimtab.predict.step": ("JobSetting", "RankSetting", "predict_memory", "predict_step"),
}
__all__ = [
    "CostMapper", "DeviceCosts", "JobSetting", "Measured", "OperatorKey", "RankSetting", "Sharding", "matched",
    "plan_damage", "predict_fsdp", "predict_memory", "predict_step", "sharded_memory", "step_memory",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
