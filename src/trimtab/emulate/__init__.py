"""Real uneven clusters on one machine.

The names are imported on first use: the small processes of an emulation (guardian,
duty cycle, worker) start without what they do not need.
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

_HOMES = {
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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'trimtab.emulate' has no attribute {name!r}; it offers {', '.join(_HOMES)}"
        )
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
