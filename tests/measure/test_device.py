"""Devices are measured with whatever model and batch they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.measure.probes import CPU, group_of_one
from torch import nn

from trimtab.measure.cache import ProbeCache
from trimtab.measure.device import DeviceProbe, Task
from trimtab.models.spec import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path


class Partly(nn.Module):
    """The loss depends neither on a layer that is not called nor on one whose output it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.beside, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.beside(x), self.used(x)


class Tables(nn.Module):
    """Keeps a table that is as long as its first input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape[1], 1)
        y: torch.Tensor = self.down(torch.relu(self.up(x * self.table)))
        return y


class Named(nn.Module):
    """Takes a dict, and a mask that has nothing to do with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.samples: set[int] = set()

    def forward(self, batch: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        self.samples.add(len(batch["x"]))
        y: torch.Tensor = mask @ self.layer(batch["x"])
        return y


class Alone(nn.Module):
    """No operator has a precision to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def probed(model: nn.Module, batch: tuple[Any, ...], folder: Path, **changes: Any) -> DeviceProbe:
    spec = ModelSpec(
        name="own",
        model=model,
        batch=batch,
        loss=lambda y: (y[-1] if isinstance(y, tuple) else y).square().mean(),
    )
    task = Task(spec=spec, **{"batches": (2, 4), "precisions": ("bf16",), "bits": (), **changes})
    cache = ProbeCache("cpu", "", torch="", trimtab="", keep=False, folder=folder)
    with group_of_one():
        probe = DeviceProbe(task, CPU, cache)
        profile, left = probe.run(lambda done, total: None)
    assert not left
    assert list(profile.batches.values()) == [(2, 4)]
    return probe


def test_parameters_that_the_loss_does_not_depend_on(tmp_path: Path) -> None:
    assert probed(Partly(), (torch.ones(2, 8),), tmp_path).workload.leaves_parameters_out()


def test_what_a_model_keeps_from_other_inputs_is_forgotten(tmp_path: Path) -> None:
    model = Tables()
    assert not probed(model, (torch.ones(2, 5, 8),), tmp_path).workload.leaves_parameters_out()
    assert model.table is not None
    assert model.table.shape == (5, 1)
    assert type(model.table) is torch.Tensor


def test_a_batch_in_a_dict_is_measured_at_every_size(tmp_path: Path) -> None:
    model = Named()
    probed(model, ({"x": torch.ones(3, 5, 8)}, torch.ones(5, 5)), tmp_path)
    assert model.samples == {2, 4}


def test_a_model_without_operators_to_lower(tmp_path: Path) -> None:
    probed(Alone(), (torch.ones(2, 8),), tmp_path)
