"""Lightning: importing this module registers ``strategy="trimtab"`` for `Trainer` and `Fabric`."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from trimtab.frameworks import enable

NAME = "trimtab"
_DESCRIPTION = "DDP with gradients in fewer bits and batch shares by speed, where that pays"


class _Enables:
    """A DDP strategy that enables trimtab's adjustments on every rank before the process group exists."""

    def __init__(self, *args: Any, trimtab: dict[str, Any] | None = None, **options: Any) -> None:
        """`trimtab` has the options of `trimtab.frameworks.enable`; all others are those of Lightning's DDPStrategy."""
        super().__init__(*args, **options)
        self._trimtab = trimtab or {}

    def setup_environment(self) -> None:
        enable(**self._trimtab)
        super().setup_environment()  # type: ignore[misc]  # of the strategy beside it


class TrimtabStrategy(_Enables, DDPStrategy):  # type: ignore[misc]  # not typed here
    """``Trainer(strategy="trimtab")``, or ``Trainer(strategy=TrimtabStrategy(trimtab={"plan": "plan.json"}))``."""

    strategy_name = NAME


class FabricTrimtabStrategy(_Enables, FabricDDPStrategy):  # type: ignore[misc]  # not typed here
    """``Fabric(strategy="trimtab")``."""


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, TrimtabStrategy, description=_DESCRIPTION)
if NAME not in STRATEGY_REGISTRY:
    STRATEGY_REGISTRY.register(NAME, FabricTrimtabStrategy, description=_DESCRIPTION)
