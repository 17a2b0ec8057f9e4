"""Everything that is timed or recorded: models, devices, operators, links, the codec and running steps.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.measure.capture.capture import capture_workload as capture_workload
    from trimtab.measure.damage.calibrate import Refresh as Refresh
    from trimtab.measure.damage.indicators import gradient_damage as gradient_damage

_MODULES = {
    "Refresh": "trimtab.measure.damage.calibrate",
    "capture_workload": "trimtab.measure.capture.capture",
    "gradient_damage": "trimtab.measure.damage.indicators",
}
__all__ = [
    "Refresh",
    "capture_workload",
    "gradient_damage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
