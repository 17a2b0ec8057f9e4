"""The backend "trimtab" and FSDP2 on a GPU: two NCCL ranks on slices of one card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.gpu.ranks import agree, on_slices
from tests.support.requirements import requires
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trimtab
import trimtab.backend
from trimtab.codec import Block
from trimtab.collectives import all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"])

DEVICE = "cuda"
CODEC = Block(bits=4)
STEPS = 20


def values(seed: int, numel: int = 3_000_000, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed * 100 + rank))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(4)]
    return nn.Sequential(*layers).to(DEVICE)


def train(model: nn.Module) -> bool:
    """Whether the loss falls by a tenth."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = values(step, 64 * 512).view(64, 512).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[-1] < 0.9 * losses[0]


def on_every_rank(results: dict[str, bool]) -> dict[str, bool]:
    flags = torch.tensor([float(value) for value in results.values()], device=DEVICE)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return dict(zip(results, (bool(flag) for flag in flags.tolist()), strict=True))


def restart_as_trimtab() -> None:
    """The default group once more, by the backend's name, over the store of the first."""
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


def check_backend(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, bool]:
    restart_as_trimtab()
    group: Any = dist.group.WORLD
    cpu: Any = dist.new_group(backend="gloo")
    wrong_bits = 0
    for step in range(STEPS):
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
            wrong_bits += not torch.equal(tensor.cpu(), reference)
    overwritten = 0
    for step in range(STEPS):  # a tensor whose last reference goes before the kernels have run
        dist.all_reduce(values(step).to(DEVICE), async_op=True)
        filler = torch.full((3_000_000,), float(step), device=DEVICE)
        torch.cuda.synchronize()
        overwritten += not bool((filler == step).all())
    exact = values(1).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    dist.all_reduce(exact, group=mesh.get_group())
    expected = torch.stack([values(1, rank=r) for r in range(dist.get_world_size())]).sum(0)
    infinite = values(2).to(DEVICE)
    if dist.get_rank() == 1:
        infinite[1234] = float("inf")
    dist.all_reduce(infinite)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())
    before = group.sequence
    ddp = DistributedDataParallel(network(), bucket_cap_mb=1)
    learns = train(ddp)
    return on_every_rank(
        {
            "all-reduces have the CPU's bits": wrong_bits == 0,
            "dropped tensors are kept until they are used": overwritten == 0,
            "a mesh of its own is exact": torch.allclose(exact.cpu(), expected, rtol=1e-5, atol=1e-5),
            "an infinity arrives": not bool(torch.isfinite(infinite[1234])),
            "objects arrive": objects == list(range(dist.get_world_size())),
            "DDP's parameters agree": agree(torch.cat([p.detach().flatten() for p in ddp.parameters()])),
            "DDP learns": learns,
            "DDP's gradients are compressed": group.sequence > before + STEPS,
            "FSDP works on it": all(fsdp_case(1, None, None)[0].values()),
        }
    )


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


def fsdp_case(
    replicas: int, policy: MixedPrecisionPolicy | None, weights: int | None
) -> tuple[dict[str, bool], float]:
    plain = gradients(sharded(replicas, policy))
    model = sharded(replicas, policy)
    trimtab.compress(model, Block(bits=8), weight_bits=weights)  # type: ignore[arg-type]
    compressed = gradients(model)
    error = float((compressed - plain).norm() / plain.norm())
    learning = sharded(replicas, policy)
    trimtab.compress(learning, CODEC, weight_bits=weights)  # type: ignore[arg-type]
    return {
        "compressed, and little": 1e-4 < error < 0.05,
        "agrees": agree(compressed),
        "learns": train(learning),
    }, error


def check_fsdp(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results: dict[str, Any] = {}
    for name, replicas, policy, weights in (
        ("fsdp", 1, None, None),
        ("fsdp with weights in 8 bits", 1, None, 8),
        ("fsdp in bf16", 1, half, None),
        ("hsdp", dist.get_world_size(), None, None),
    ):
        flags, error = fsdp_case(replicas, policy, weights)
        results[name] = {"flags": on_every_rank(flags), "error": error}
    quick = trimtab.Adaptive(family="bits-scaled", warmup=4, period=8, look=4)
    for name, settings in (
        ("fsdp, adaptive bits", {"codec": quick}),
        ("fsdp, error feedback", {"codec": Block(bits=2, stochastic=False), "error_feedback": True}),
    ):
        model: Any = sharded(1)
        trimtab.compress(model, **settings)
        learns = train(model)
        results[name] = {
            "flags": on_every_rank({"learns": learns, "agrees": agree(gradients(model))}),
            "error": 0.0,
        }
    return results


def test_backend() -> None:
    results = on_slices(2, check_backend)
    assert [what for what, right in results.items() if not right] == []


def test_fsdp(record_property: Callable[[str, object], None]) -> None:
    results = on_slices(2, check_fsdp)
    record_property("relative_error_in_8_bits", {name: row["error"] for name, row in results.items()})
    assert {name: row["flags"] for name, row in results.items() if not all(row["flags"].values())} == {}
