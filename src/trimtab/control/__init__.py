"""What acts while training runs: adaptive bits, batch shares, following a plan, balancing.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.control.shares.loader import Loader as Loader
    from trimtab.control.shares.sampler import ShareSampler as ShareSampler
    from trimtab.control.tensor.balancer import decisions as decisions
    from trimtab.control.tensor.resizing import clear_resize as clear_resize
    from trimtab.control.tensor.resizing import resized as resized
    from trimtab.control.tensor.resizing import set_resize as set_resize
    from trimtab.control.tensor.resizing import watch_resize as watch_resize

_MODULES = {
    "Loader": "trimtab.control.shares.loader",
    "ShareSampler": "trimtab.control.shares.sampler",
    "clear_resize": "trimtab.control.tensor.resizing",
    "decisions": "trimtab.control.tensor.balancer",
    "resized": "trimtab.control.tensor.resizing",
    "set_resize": "trimtab.control.tensor.resizing",
    "watch_resize": "trimtab.control.tensor.resizing",
}
__all__ = [
    "Loader",
    "ShareSampler",
    "clear_resize",
    "decisions",
    "resized",
    "set_resize",
    "watch_resize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
