"""Ray Train: a backend config for its `TorchTrainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.frameworks import enable, needs_extra

with needs_extra("ray"):
    import ray
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend


class _TrimtabBackend(_TorchBackend):  # type: ignore[misc]  # not typed here
    def on_start(self, worker_group: Any, backend_config: TrimtabConfig) -> None:
        ray.get(worker_group.execute_async(enable, **backend_config.options))
        super().on_start(worker_group, backend_config)


@dataclass
class TrimtabConfig(TorchConfig):  # type: ignore[misc]  # not typed here
    """``TorchTrainer(..., torch_config=TrimtabConfig())``: workers train as under `trimtab run`."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `trimtab.frameworks.enable`."""

    @property
    def backend_cls(self) -> type[_TrimtabBackend]:
        return _TrimtabBackend
