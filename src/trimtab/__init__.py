"""Trimtab: train PyTorch models at full speed on uneven hardware.

The public verbs are imported on first use, so that ``import trimtab`` costs almost
nothing and touches no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab import frameworks as frameworks
    from trimtab.api.apply import apply as apply
    from trimtab.api.checkpoint import load_state_dict as load_state_dict
    from trimtab.api.checkpoint import state_dict as state_dict
    from trimtab.api.compress import compress as compress
    from trimtab.api.explain import explain as explain
    from trimtab.api.explain import observe_loss as observe_loss
    from trimtab.api.loader import loader as loader
    from trimtab.api.local_steps import agreed_weights as agreed_weights
    from trimtab.api.local_steps import local_steps as local_steps
    from trimtab.api.mesh import mesh as mesh
    from trimtab.api.plan import plan as plan
    from trimtab.api.set_precision import set_precision as set_precision
    from trimtab.api.tensor_parallel import tensor_parallel as tensor_parallel
    from trimtab.cluster import Cluster as Cluster
    from trimtab.control.compression.adaptive import Adaptive as Adaptive
    from trimtab.errors import TrimtabError as TrimtabError
    from trimtab.planning.tensor.balance import Balance as Balance

__version__ = "0.1.0"

_MODULES = {
    "Adaptive": "trimtab.control.compression.adaptive",
    "Balance": "trimtab.planning.tensor.balance",
    "Cluster": "trimtab.cluster",
    "TrimtabError": "trimtab.errors",
    "agreed_weights": "trimtab.api.local_steps",
    "apply": "trimtab.api.apply",
    "compress": "trimtab.api.compress",
    "explain": "trimtab.api.explain",
    "load_state_dict": "trimtab.api.checkpoint",
    "loader": "trimtab.api.loader",
    "local_steps": "trimtab.api.local_steps",
    "mesh": "trimtab.api.mesh",
    "observe_loss": "trimtab.api.explain",
    "plan": "trimtab.api.plan",
    "set_precision": "trimtab.api.set_precision",
    "state_dict": "trimtab.api.checkpoint",
    "tensor_parallel": "trimtab.api.tensor_parallel",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "frameworks":  # a module: its `enable` needs no import of its own
        return import_module("trimtab.frameworks")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
