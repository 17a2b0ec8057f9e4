"""Check the backend and FSDP2 on a GPU: two NCCL ranks on slices of one card.

    PYTHONPATH=src:. python3 tools/gpu_doors.py

Prints one JSON object; every "wrong_*" must be 0 and every "ok_*" true. Without a GPU it runs the same over Gloo.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trimtab
import trimtab.backend
from trimtab.bench.ranks import run_on_ranks, slices, two_hosts
from trimtab.codec import Block
from trimtab.collectives import all_reduce
from trimtab.emulate import Emulation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODEC = Block(bits=4)
STEPS = 20


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    results: dict[str, Any] = {"torch": torch.__version__, "world": dist.get_world_size()}
    results.update(fsdp_checks())
    restart_as_trimtab()
    results.update(backend_checks(spec["steps"]))
    results["ok_fsdp_on_the_backend"] = fsdp_checks()["ok_fsdp"]
    flags = torch.tensor(
        [float(value) for key, value in results.items() if key.startswith("ok_")], device=DEVICE
    )
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    results["ok_on_every_rank"] = bool(flags.min() > 0)
    return results


def restart_as_trimtab() -> None:
    """The default group once more, by the backend's name; the launcher's environment still says where to meet."""
    store: Any = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]  # type: ignore[index]
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    trimtab.backend.register()
    dist.init_process_group(
        "cpu:trimtab,cuda:trimtab",
        store=dist.PrefixStore("doors", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        pg_options=trimtab.backend.GroupOptions(codec=CODEC),
    )


def values(seed: int, numel: int = 3_000_000, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed * 100 + rank))


def backend_checks(steps: int) -> dict[str, Any]:
    group: Any = dist.group.WORLD
    cpu: Any = dist.new_group(backend="gloo")
    wrong_bits = 0
    for step in range(steps):
        # Several under way at once, some of the same size; on the CPU the same sums by themselves.
        sizes = [3_000_000, 3_000_000, 100_001, 70_000]
        tensors = [values(step * 10 + i, size).to(DEVICE) for i, size in enumerate(sizes)]
        first = group.sequence
        works: Any = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            reference = values(step * 10 + i, size)
            all_reduce(reference, CODEC, name="0", step=first + i, groups=(cpu, cpu))
            wrong_bits += int(not torch.equal(tensor.cpu(), reference))
    dropped = 0
    for step in range(steps):  # a tensor whose last reference goes before the kernels have run
        dist.all_reduce(values(step).to(DEVICE), async_op=True)
        filler = torch.full((3_000_000,), float(step), device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        dropped += int(not bool((filler == step).all()))
    exact = values(1).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    dist.all_reduce(exact, group=mesh.get_group())
    meant = torch.stack([values(1, rank=r) for r in range(dist.get_world_size())]).sum(0)
    bad = values(2).to(DEVICE)
    if dist.get_rank() == 1:
        bad[1234] = float("inf")
    dist.all_reduce(bad)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())
    agreeing, falling, compressed = ddp_checks(group)
    return {
        "wrong_all_reduces": wrong_bits,
        "wrong_after_drop": dropped,
        "ok_mesh_is_exact": torch.allclose(exact.cpu(), meant, rtol=1e-5, atol=1e-5),
        "ok_inf_arrives": not bool(torch.isfinite(bad[1234])),
        "ok_objects": objects == list(range(dist.get_world_size())),
        "ok_ddp_agrees": agreeing,
        "ok_ddp_learns": falling,
        "ok_ddp_is_compressed": compressed,
    }


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(4)]
    return nn.Sequential(*layers).to(DEVICE)


def agree(tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, flat)


def ddp_checks(group: Any) -> tuple[bool, bool, bool]:
    model = DistributedDataParallel(network(), bucket_cap_mb=1)
    before = group.sequence
    losses = train(model, list(model.parameters()))
    return agree(list(model.parameters())), losses[-1] < 0.9 * losses[0], group.sequence > before + STEPS


def train(model: nn.Module, parameters: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = values(step, 64 * 512).view(64, 512).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def sharded(replicas: int, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    world = dist.get_world_size()
    shape, names = (
        ((world,), None) if replicas == 1 else ((replicas, world // replicas), ("replicate", "shard"))
    )
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())  # type: ignore[return-value]


def gradients(model: nn.Module) -> torch.Tensor:
    x = values(7, 64 * 512).view(64, 512).to(DEVICE)
    (model(x).float() - x.flip(1)).square().mean().backward()
    parameters: Any = model.parameters()
    return torch.cat([p.grad.full_tensor().flatten().float() for p in parameters])


def fsdp_checks() -> dict[str, Any]:
    results: dict[str, Any] = {}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, replicas, policy, weights in (
        ("fsdp", 1, None, None),
        ("fsdp_weights", 1, None, 8),
        ("fsdp_bf16", 1, half, None),
        ("hsdp", dist.get_world_size(), None, None),
    ):
        plain = gradients(sharded(replicas, policy))
        model = sharded(replicas, policy)
        trimtab.compress(model, Block(bits=8), weight_bits=weights)  # type: ignore[arg-type]
        got = gradients(model)
        off = float((got - plain).norm() / plain.norm())
        learning = sharded(replicas, policy)
        trimtab.compress(learning, CODEC, weight_bits=weights)  # type: ignore[arg-type]
        losses = train(learning, list(learning.parameters()))
        results[f"error_{name}"] = off
        results[f"ok_{name}"] = 1e-4 < off < 0.05 and agree([got]) and losses[-1] < 0.9 * losses[0]
    return results


if __name__ == "__main__":
    from tools.gpu_doors import on_rank as imported  # by its importable name, for the ranks

    with Emulation(slices(2) if DEVICE == "cuda" else two_hosts(None)) as emulation:
        print(json.dumps(run_on_ranks(emulation, imported, {"steps": STEPS, "device": DEVICE}), indent=2))
