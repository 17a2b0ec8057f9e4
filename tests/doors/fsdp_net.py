"""A small model of `fully_shard` modules for the tests of FSDP2 and HSDP, and what they compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import trimtab
from trimtab.codec import Block

WIDTH = 100


class Net(nn.Module):
    """Layers of sizes that no number of ranks divides, and a branch that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(33, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, 33)
        self.spare = nn.Linear(33, 70)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.norm(self.up(x))))
        return y + self.spare(x).mean() if spare else y


def make(
    codec: Block | None, *, replicas: int = 1, precision: MixedPrecisionPolicy | None = None, **settings: Any
) -> Any:
    torch.manual_seed(0)
    net = Net()
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (world,))
        if replicas == 1
        else init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    )
    for module in (net.up, net.down, net):
        fully_shard(module, mesh=mesh, mp_policy=precision or MixedPrecisionPolicy())
    return trimtab.compress(net, codec, **settings) if codec is not None else net  # type: ignore[arg-type]


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 33, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))


def loss_of(net: Any, step: int, **arguments: Any) -> torch.Tensor:
    x = batch(step)
    return F.mse_loss(net(x, **arguments).float(), x.flip(1))


def full(net: Any, gradients: bool = True) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad if gradients else p).full_tensor().detach()
        for name, p in net.named_parameters()
        if p.grad is not None or not gradients
    }


def same_everywhere(tensors: dict[str, torch.Tensor]) -> bool:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, flat) for other in everyone)
