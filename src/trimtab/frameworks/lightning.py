"""Lightning: importing this module registers ``strategy="trimtab"`` for `Trainer` and `Fabric`.

Lightning has two names, `lightning` and `pytorch_lightning`, with a registry each: the strategy is registered in that
of every name which the script has imported already, or else in the first that is installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from trimtab.frameworks import enable, needs_extra

NAME = "trimtab"
_DESCRIPTION = "DDP with gradients in fewer bits and batch shares by speed, where that pays"
_PACKAGES = {"lightning": ("lightning.pytorch", "lightning.fabric"),
             "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}  # fmt: skip


class _Enables:
    """A DDP strategy that enables trimtab's adjustments on every rank before the process group exists."""

    def __init__(self, *args: Any, trimtab: dict[str, Any] | None = None, **options: Any) -> None:
        """`trimtab` has the options of `trimtab.frameworks.enable`; all others are those of Lightning's DDPStrategy."""
        super().__init__(*args, **options)
        self._trimtab = trimtab or {}

    def setup_environment(self) -> None:
        enable(**self._trimtab)
        super().setup_environment()  # type: ignore[misc]  # of the strategy beside it


def _registered(package: str) -> tuple[type[Any], type[Any]]:
    """The strategies of a package, for its `Trainer` and its `Fabric`."""
    trainers, fabrics = (import_module(f"{name}.strategies") for name in _PACKAGES[package])
    of_trainer = type("TrimtabStrategy", (_Enables, trainers.DDPStrategy), {"strategy_name": NAME})
    of_fabric = type("FabricTrimtabStrategy", (_Enables, fabrics.DDPStrategy), {})
    for registry, strategy in (
        (trainers.StrategyRegistry, of_trainer),
        (fabrics.STRATEGY_REGISTRY, of_fabric),
    ):
        if NAME not in registry:
            registry.register(NAME, strategy, description=_DESCRIPTION)
    return of_trainer, of_fabric


def _in_use() -> list[str]:
    # A name that must not be imported has None there.
    imported = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    installed = [name for name in _PACKAGES if name not in sys.modules and find_spec(name) is not None]
    return imported or installed[:1] or ["lightning"]  # whose import then says that it is missing


with needs_extra("lightning"):
    _strategies = [_registered(package) for package in _in_use()]
TrimtabStrategy, FabricTrimtabStrategy = _strategies[0]
"""``Trainer(strategy="trimtab")``, or ``Trainer(strategy=TrimtabStrategy(trimtab={"plan": "plan.json"}))``; so with
``Fabric``."""
