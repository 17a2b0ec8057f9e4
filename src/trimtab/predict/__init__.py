"""Time, memory and damage of a step, before it runs.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.predict.damage import plan_damage as plan_damage
    from trimtab.predict.memory.step_peak import step_memory as step_memory
    from trimtab.predict.operators.cost_mapper import CostMapper as CostMapper
    from trimtab.predict.operators.costs import DeviceCosts as DeviceCosts
    from trimtab.predict.operators.costs import OperatorKey as OperatorKey
    from trimtab.predict.operators.measured import Measured as Measured
    from trimtab.predict.precision_patterns import matched as matched
    from trimtab.predict.step import JobSetting as JobSetting
    from trimtab.predict.step import RankSetting as RankSetting
    from trimtab.predict.step import predict_memory as predict_memory
    from trimtab.predict.step import predict_step as predict_step

_MODULES = {
    "CostMapper": "trimtab.predict.operators.cost_mapper",
    "DeviceCosts": "trimtab.predict.operators.costs",
    "JobSetting": "trimtab.predict.step",
    "Measured": "trimtab.predict.operators.measured",
    "OperatorKey": "trimtab.predict.operators.costs",
    "RankSetting": "trimtab.predict.step",
    "matched": "trimtab.predict.precision_patterns",
    "plan_damage": "trimtab.predict.damage",
    "predict_memory": "trimtab.predict.step",
    "predict_step": "trimtab.predict.step",
    "step_memory": "trimtab.predict.memory.step_peak",
}
__all__ = [
    "CostMapper",
    "DeviceCosts",
    "JobSetting",
    "Measured",
    "OperatorKey",
    "RankSetting",
    "matched",
    "plan_damage",
    "predict_memory",
    "predict_step",
    "step_memory",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
