"""What the ranks of a chaos sequence train: small jobs in which trimtab keeps changing something.

Every job saves a checkpoint in a folder of its own every few steps, renames it when it is whole, and resumes
from the newest one that can be read.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import trimtab
from trimtab.bench.trainer import KINDS
from trimtab.control.compression.ddp import adaptive_of
from trimtab.control.plans.active_plan import active_plan_of
from trimtab.control.tensor.balancer import decisions
from trimtab.measure.fingerprint import fingerprint
from trimtab.models.gpt import Gpt
from trimtab.planning.drift import Follow
from trimtab.planning.plan import PLAN_VERSION, Choice, Plan, Predicted, Role
from trimtab.planning.shares.batch import Adjust
from trimtab.sharding import Checkpoint
from trimtab.sharding.unit_block import sharded_model

STEPS, SAVE_EVERY = 40, 5
BATCH, WIDTH, TEXT = 24, 32, 16
_ADAPTIVE = trimtab.Adaptive(family="bits", start_bits=8, warmup=8, look=4, period=8)
_LATE_S = 4e-4
"""How long the slow rank takes for a sample (or a unit) more than the others."""


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.middle(F.gelu(self.up(x)))))
        return y


class Job(ABC):
    """One rank of a training job; `spec` is the same on all ranks, `settings` may be this rank's own."""

    ranks = 3

    def __init__(self, spec: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.spec, self.settings = spec, settings
        torch.manual_seed(spec["seed"])
        self.model, self.slowed = self.build()
        self.module: nn.Module = getattr(self.model, "module", self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)

    @abstractmethod
    def build(self) -> tuple[nn.Module, nn.Module]:
        """The model to train, and the layer whose output faults spoil and delays hold back."""

    @abstractmethod
    def batches(self, first: int) -> Iterator[Callable[[], torch.Tensor]]:
        """For each step from `first` on, what computes its loss."""

    @abstractmethod
    def adjustments(self) -> dict[str, int]:
        """How often trimtab changed something, by what it was."""

    def late(self) -> float:
        """Seconds that this rank's layer takes longer while it is slow."""
        return BATCH / self.ranks * _LATE_S

    def digests(self) -> dict[str, str]:
        """Hashes of what other ranks must have to the bit as well, by what it is."""
        return {"parameters": digest(dict(self.module.named_parameters()))}

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Resume from a checkpoint."""

    @staticmethod
    @abstractmethod
    def new_model() -> nn.Module:
        """The model on a single device."""

    @classmethod
    def parameters_at_start(cls, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return cls.new_model().state_dict()

    @staticmethod
    @abstractmethod
    def parameters_in(folder: Path) -> dict[str, torch.Tensor]:
        """All parameters of a checkpoint, as a single device has them."""


class DataParallel(Job):
    """DDP with adaptive bits, and batch shares that follow the ranks' speeds."""

    def __init__(self, spec: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(spec, settings)
        samples = torch.randn(BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(spec["seed"]))
        options: dict[str, Any] = (
            {"plan": self.model} if active_plan_of(self.module) else {"adjust": Adjust(window=4)}
        )
        if spec["workers"]:
            options |= {"num_workers": spec["workers"], "multiprocessing_context": "fork"}
        self.data = trimtab.loader(TensorDataset(samples), BATCH, **options)
        self.shares = [self.data.shares]

    @staticmethod
    def new_model() -> Net:
        return Net()

    def build(self) -> tuple[nn.Module, nn.Module]:
        net = self.new_model()
        ddp = DistributedDataParallel(net)
        trimtab.compress(
            ddp,
            self.settings.get("codec", _ADAPTIVE),
            min_numel=64,
            seed=self.settings.get("compress_seed", 0),
            log=self.settings.get("log"),
            log_every=4,
        )
        return ddp, net.middle

    def batches(self, first: int) -> Iterator[Callable[[], torch.Tensor]]:
        for (batch,) in self.data:
            if self.data.shares != self.shares[-1]:
                self.shares.append(self.data.shares)
            yield partial(self._loss, batch)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.data.weigh((self.model(batch) - batch.roll(1, 1).tanh()).square().mean())

    def save(self, folder: Path) -> None:
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "trimtab": trimtab.state_dict(self.model),
            "data": self.data.state_dict(),
        }
        torch.save(state, folder / f"{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / f"{dist.get_rank()}.pt")
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        trimtab.load_state_dict(self.model, state["trimtab"])
        self.data.load_state_dict(state["data"])

    @staticmethod
    def parameters_in(folder: Path) -> dict[str, torch.Tensor]:
        model: dict[str, torch.Tensor] = torch.load(folder / "0.pt")["model"]
        return model

    def adjustments(self) -> dict[str, int]:
        controller = adaptive_of(self.model)
        return {"shares": len(self.shares) - 1, "bits": 0 if controller is None else len(controller.history)}


class Planned(DataParallel):
    """A plan that is applied, and made anew when the slow rank's speed changes."""

    def build(self) -> tuple[nn.Module, nn.Module]:
        net = self.new_model()
        plan = a_plan(net, self.ranks, slow=self.settings.get("plan_samples", 6))
        ddp = DistributedDataParallel(net)
        trimtab.apply(ddp, plan, follow=Follow(look=4, threshold=1.5))
        return ddp, net.middle

    def adjustments(self) -> dict[str, int]:
        active = active_plan_of(self.module)
        return {"plans": 0 if active is None else len(active.history)}


class TensorParallel(Job):
    """Units that move away from the slow rank."""

    def build(self) -> tuple[nn.Module, nn.Module]:
        mesh = init_device_mesh("cpu", (self.ranks,))
        model = trimtab.tensor_parallel(self.new_model(), mesh, kinds=KINDS, headroom=1.0, balance="auto")
        return model, model.get_submodule("blocks.0.up")

    @staticmethod
    def new_model() -> Gpt:
        return Gpt(width=24, layers=1, heads=6, context=TEXT)

    def late(self) -> float:
        return sum(block.count for block in sharded_model(self.module, "chaos").blocks.values()) * _LATE_S / 4

    def batches(self, first: int) -> Iterator[Callable[[], torch.Tensor]]:
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(step)
            start = torch.randint(256, (4, 1), generator=generator)
            text = (start + 3 * torch.arange(TEXT + 1)) % 256
            yield partial(self.model, text)

    def adjustments(self) -> dict[str, int]:
        return {"moves": len(decisions(self.module))}

    def digests(self) -> dict[str, str]:
        sharded = {tensor.name for _, tensor in sharded_model(self.module, "chaos").tensors()}
        kept = {name: value for name, value in self.module.named_parameters() if name not in sharded}
        return {"replicated parameters": digest(kept)}

    def save(self, folder: Path) -> None:
        save({"app": Checkpoint(self.module, self.optimizer)}, checkpoint_id=folder / "units")

    def load(self, folder: Path) -> None:
        load({"app": Checkpoint(self.module, self.optimizer)}, checkpoint_id=folder / "units")

    @staticmethod
    def parameters_in(folder: Path) -> dict[str, torch.Tensor]:
        values = {
            name: torch.empty_like(value) for name, value in TensorParallel.new_model().state_dict().items()
        }
        load({"app": {"model": values}}, checkpoint_id=folder / "units", no_dist=True)
        return values


class Grid(TensorParallel):
    """Two copies of a model on two ranks each: adaptive bits between the copies, moves inside."""

    ranks = 4

    def build(self) -> tuple[nn.Module, nn.Module]:
        # Groups that torch makes for a mesh wait 30 minutes, whatever the timeout of the default group.
        timeout = timedelta(seconds=self.spec["timeout_s"])
        groups = [
            dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]
            for ranks in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
        ]
        mesh = DeviceMesh.from_group(groups, "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        model = trimtab.tensor_parallel(self.new_model(), mesh, kinds=KINDS, headroom=1.0, balance="auto")
        self.column = mesh["tp"].get_local_rank()
        ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        trimtab.compress(ddp, self.settings.get("codec", _ADAPTIVE), min_numel=64)
        return ddp, model.get_submodule("blocks.0.up")

    def adjustments(self) -> dict[str, int]:
        controller = adaptive_of(self.model)
        return super().adjustments() | {"bits": 0 if controller is None else len(controller.history)}

    def digests(self) -> dict[str, str]:
        own = digest(dict(self.module.named_parameters()))
        return super().digests() | {f"units of column {self.column}": own}

    def save(self, folder: Path) -> None:
        super().save(folder)
        torch.save(trimtab.state_dict(self.model), folder / f"{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        super().load(folder)
        trimtab.load_state_dict(self.model, torch.load(folder / f"{dist.get_rank()}.pt"))


JOBS: dict[str, type[Job]] = {
    "data": DataParallel,
    "planned": Planned,
    "tensor": TensorParallel,
    "grid": Grid,
}


def a_plan(model: nn.Module, ranks: int, *, slow: int) -> Plan:
    """A plan in which the last rank is slow, made by hand."""
    choice = {"own": Choice(seconds=2e-3, damage=0.0), "bf16": Choice(seconds=1e-3, damage=1.0)}
    role = Role(
        device="fast",
        kind="cpu",
        samples=(BATCH - slow) // (ranks - 1),
        precisions={},
        compute_s=6e-3,
        peak_bytes=1 << 20,
        choices=dict.fromkeys(("up", "middle", "down"), choice),
    )
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab.__version__,
        model=fingerprint(model),
        batch="free",
        bits="adaptive",
        roles={"fast": role, "slow": replace(role, device="slow", samples=slow)},
        ranks=(("fast", ranks - 1), ("slow", 1)),
        predicted=Predicted(step_s=8e-3, plain_step_s=1e-2, damage=1.0, uniform_damage=2.0),
        reasons=("made by hand",),
    )


def digest(values: Mapping[str, torch.Tensor]) -> str:
    """A hash of tensors, to the bit."""
    content = hashlib.sha256()
    for name, value in sorted(values.items()):
        content.update(name.encode())
        content.update(value.detach().contiguous().numpy().tobytes())
    return content.hexdigest()
