"""Trimtab: train PyTorch models at full speed on uneven hardware.

The public verbs are imported on first use, so that ``import trimtab`` costs almost
nothing and touches no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.cluster import Cluster as Cluster
    from trimtab.errors import TrimtabError as TrimtabError
    from trimtab.runtime.adaptive import Adaptive as Adaptive
    from trimtab.runtime.apply import apply as apply
    from trimtab.runtime.compress import compress as compress
    from trimtab.runtime.compress import explain as explain
    from trimtab.runtime.compress import load_state_dict as load_state_dict
    from trimtab.runtime.compress import observe_loss as observe_loss
    from trimtab.runtime.compress import state_dict as state_dict
    from trimtab.runtime.loader import loader as loader
    from trimtab.runtime.plan import plan as plan
    from trimtab.runtime.set_precision import set_precision as set_precision
    from trimtab.runtime.tensor_parallel import tensor_parallel as tensor_parallel

__version__ = "0.1.0"

_HOMES = {
    "Adaptive": "trimtab.runtime.adaptive",
    "Cluster": "trimtab.cluster",
    "TrimtabError": "trimtab.errors",
    "apply": "trimtab.runtime.apply",
    "compress": "trimtab.runtime.compress",
    "explain": "trimtab.runtime.compress",
    "load_state_dict": "trimtab.runtime.compress",
    "loader": "trimtab.runtime.loader",
    "observe_loss": "trimtab.runtime.compress",
    "set_precision": "trimtab.runtime.set_precision",
    "state_dict": "trimtab.runtime.compress",
}
__all__ = [
    "Adaptive",
    "Cluster",
    "TrimtabError",
    "__version__",
    "apply",
    "compress",
    "explain",
    "load_state_dict",
    "loader",
    "observe_loss",
    "plan",
    "set_precision",
    "state_dict",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    if name in ("plan", "tensor_parallel"):  # packages that are the verbs: Python binds their names here
        return import_module(f"trimtab.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
