"""Measure what FSDP2 adds to a rank's work, besides its collectives: copies, and torch's own code.

Collective, for the groups that are made; what is timed is of this rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

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
PARAMETERS = 1, 9
"""Of a unit: two numbers, to tell what each of them takes."""

COLLECTIVES = 3
"""Of a unit in a step: its weights are gathered twice, its gradients reduced once."""

Step = Callable[[], object]


class ShardedProbe:
    """Times small models in rounds, sharded and not sharded: they differ by torch's own code.

    On a CPU they are sharded over all ranks, but nothing is sent: over one rank torch leaves out much of its code. On a
    GPU, whose host works ahead, they are sharded over this rank alone, and parameters are not told from units.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        ranks = torch.arange(dist.get_world_size()).view(-1, 1)
        alone = device.type != "cpu" or dist.get_world_size() == 1
        mesh = DeviceMesh(device.type, ranks if alone else ranks.T, mesh_dim_names=("apart", "together"))
        self._steps: dict[int, tuple[Step, Step]] = {}
        for parameters in PARAMETERS[:1] if alone else PARAMETERS:
            plain = nn.Sequential(*(_unit(parameters, device) for _ in range(UNITS)))
            sharded = copy.deepcopy(plain)
            for unit in (*sharded, sharded):
                fully_shard(unit, mesh=mesh["together"])
                if not alone:
                    _send_nothing(unit)
            self._steps[parameters] = self._step(sharded), self._step(plain)
            if parameters == 1:
                self._updates = self._update(sharded), self._update(plain)
        self._copies = {numel: self._copy(numel) for numel in NUMELS[device.type]}

    def round(self) -> ShardedTime:
        """Times of this moment."""
        a, c = fit_line([(numel, self._seconds(run)) for numel, run in self._copies.items()])
        units = [(parameters, self._added(steps) / COLLECTIVES) for parameters, steps in self._steps.items()]
        few, unit = units[0]
        many, whole = units[-1]
        each = max(0.0, whole - unit) / (many - few) if many > few else 0.0
        return ShardedTime(
            copy=Line(a=a, c=c),
            unit_s=max(0.0, unit - few * each),
            unit_parameter_s=each,
            parameter_s=self._added(self._updates),
        )

    def typical(self, rounds: int) -> ShardedTime:
        """The median of several moments, each figure by itself."""
        every = [self.round() for _ in range(rounds)]
        return ShardedTime(
            copy=Line(a=median(time.copy.a for time in every), c=median(time.copy.c for time in every)),
            unit_s=median(time.unit_s for time in every),
            unit_parameter_s=median(time.unit_parameter_s for time in every),
            parameter_s=median(time.parameter_s for time in every),
        )

    def _added(self, runs: Sequence[Step]) -> float:
        """Seconds of a unit that sharding adds."""
        sharded, plain = runs
        return max(0.0, self._seconds(sharded) - self._seconds(plain)) / UNITS

    def _seconds(self, run: Step) -> float:
        return median(
            seconds_per_call(run, self._device, at_least_s=0.015, gpu_calls=4, warmup=1) for _ in range(3)
        )

    def _step(self, model: nn.Module) -> Step:
        x = torch.ones(1, WIDTH, device=self._device)
        return lambda: model(x).sum().backward()

    def _update(self, model: nn.Module) -> Step:
        model(torch.ones(1, WIDTH, device=self._device)).sum().backward()
        return torch.optim.AdamW(model.parameters(), lr=0.0).step

    def _copy(self, numel: int) -> Step:
        source, target = (torch.zeros(numel, device=self._device) for _ in range(2))
        return lambda: target.copy_(source)


def _unit(parameters: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(parameters)))


def _send_nothing(module: Any) -> None:
    module.set_custom_all_gather(_Silent())
    module.set_custom_reduce_scatter(_Silent())


class _Silent:
    """In place of FSDP2's `AllGather` and `ReduceScatter`, whose classes are private: it sends nothing."""

    def __call__(self, output_tensor: torch.Tensor, *_arguments: Any, **_named: Any) -> None:
        output_tensor.zero_()  # what was in memory may be slow to compute with

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)
