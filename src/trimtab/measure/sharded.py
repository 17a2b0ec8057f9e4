"""Measure what FSDP2 adds to a rank's work, besides its collectives: copies, and torch's own code.

Collective, for the groups that are made; what is timed is of this rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from trimtab.cluster.profile import Line, ShardedTime
from trimtab.measure.timing import seconds_per_call
from trimtab.predict.linear_fit import fit_line

NUMELS = {"cpu": (1 << 14, 1 << 18, 1 << 21), "cuda": (1 << 16, 1 << 21, 1 << 24)}
UNITS = 6
WIDTH = 32
COLLECTIVES = 3
"""Of a unit in a step: its weights are gathered twice, its gradients reduced once."""


class ShardedProbe:
    """Times small models in rounds, sharded over this rank alone and not sharded: they differ by torch's own code."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        ranks = torch.arange(dist.get_world_size()).view(-1, 1)
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("apart", "alone"))["alone"]
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(UNITS)]
        plain = nn.Sequential(*layers)
        sharded = copy.deepcopy(plain)
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        self._steps, self._updates = (
            [make(model) for model in (sharded, plain)] for make in (self._step, self._update)
        )
        self._copies = {numel: self._copy(numel) for numel in NUMELS[device.type]}

    def round(self) -> ShardedTime:
        """Times of this moment."""
        copies = [(numel, self._seconds(run)) for numel, run in self._copies.items()]
        a, c = fit_line(copies)
        unit, parameter = (
            max(0.0, self._seconds(sharded) - self._seconds(plain)) / UNITS
            for sharded, plain in (self._steps, self._updates)
        )
        return ShardedTime(copy=Line(a=a, c=c), unit_s=unit / COLLECTIVES, parameter_s=parameter)

    def _seconds(self, run: Callable[[], object]) -> float:
        return median(
            seconds_per_call(run, self._device, at_least_s=0.015, gpu_calls=4, warmup=1) for _ in range(3)
        )

    def _step(self, model: nn.Module) -> Callable[[], object]:
        x = torch.ones(1, WIDTH, device=self._device)
        return lambda: model(x).sum().backward()

    def _update(self, model: nn.Module) -> Callable[[], object]:
        model(torch.ones(1, WIDTH, device=self._device)).sum().backward()
        return torch.optim.AdamW(model.parameters(), lr=0.0).step

    def _copy(self, numel: int) -> Callable[[], object]:
        source, target = (torch.zeros(numel, device=self._device) for _ in range(2))
        return lambda: target.copy_(source)
