"""Uneven clusters on one machine.

Names are imported on first use, so that the small processes of an emulation (guardian, duty cycle, worker) start
quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.emulate.cleanup import sweep
    from trimtab.emulate.emulation import Emulation, emulate
    from trimtab.emulate.outcome import Failure, Outcome
    from trimtab.emulate.throttling.schedule import Contention, parse_contention

_NAMES = {
    "trimtab.emulate.cleanup": ("sweep",),
    "trimtab.emulate.emulation": ("Emulation", "emulate"),
    "trimtab.emulate.outcome": ("Failure", "Outcome"),
    "trimtab.emulate.throttling.schedule": ("Contention", "parse_contention"),
}
__all__ = ["Contention", "Emulation", "Failure", "Outcome", "emulate", "parse_contention", "sweep"]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
