"""Uneven clusters on one machine.

Names are imported on first use, so that the small processes of an emulation (guardian, duty cycle, worker) start
quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.emulate.cleanup import sweep as sweep
    from trimtab.emulate.emulation import Emulation as Emulation
    from trimtab.emulate.emulation import emulate as emulate
    from trimtab.emulate.outcome import Failure as Failure
    from trimtab.emulate.outcome import Outcome as Outcome
    from trimtab.emulate.throttling.schedule import Contention as Contention
    from trimtab.emulate.throttling.schedule import parse_contention as parse_contention

_MODULES = {
    "Contention": "trimtab.emulate.throttling.schedule",
    "Emulation": "trimtab.emulate.emulation",
    "Failure": "trimtab.emulate.outcome",
    "Outcome": "trimtab.emulate.outcome",
    "emulate": "trimtab.emulate.emulation",
    "parse_contention": "trimtab.emulate.throttling.schedule",
    "sweep": "trimtab.emulate.cleanup",
}
__all__ = ["Contention", "Emulation", "Failure", "Outcome", "emulate", "parse_contention", "sweep"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(
            f"module 'trimtab.emulate' has no attribute {name!r}; it has {', '.join(_MODULES)}"
        )
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
