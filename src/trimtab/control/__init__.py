"""What acts while training runs: adaptive bits, batch shares, following a plan, balancing.

The names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.control.shares.loader import Loader
    from trimtab.control.shares.sampler import ShareSampler
    from trimtab.control.tensor.balancer import decisions
    from trimtab.control.tensor.resizing import clear_resize, resized, set_resize, watch_resize

_NAMES = {
    "trimtab.control.shares.loader": ("Loader",),
    "trimtab.control.shares.sampler": ("ShareSampler",),
    "trimtab.control.tensor.balancer": ("decisions",),
    "trimtab.control.tensor.resizing": ("clear_resize", "resized", "set_resize", "watch_resize"),
}
__all__ = ["Loader", "ShareSampler", "clear_resize", "decisions", "resized", "set_resize", "watch_resize"]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
