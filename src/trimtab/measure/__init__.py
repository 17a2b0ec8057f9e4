"""Everything that is timed or recorded: models, devices, operators, links, the codec and running steps.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.measure.capture.capture import capture_workload
    from trimtab.measure.damage.calibrate import Refresh
    from trimtab.measure.damage.indicators import gradient_damage

_NAMES = {
    "trimtab.measure.capture.capture": ("capture_workload",),
    "trimtab.measure.damage.calibrate": ("Refresh",),
    "trimtab.measure.damage.indicators": ("gradient_damage",),
}
__all__ = ["Refresh", "capture_workload", "gradient_damage"]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
