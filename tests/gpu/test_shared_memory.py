"""CUDA tensors through shared, pinned host memory: 2 and 4 ranks on slices of one card."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.ranks import on_slices, summed
from tests.support.requirements import requires

from trimtab._compat import all_gather_single
from trimtab.bench.harness import AA, interleave
from trimtab.codec import Block
from trimtab.collectives import Hierarchy, Hosts, Method, Piece, SharedMemory, reduction_for, runner_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"], kernels=True)

METHODS: tuple[Method, ...] = ("all_gather", "scatter_reduce", "ring", "tree", "halving")


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def values_of(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(100 + rank)
    return torch.randn(numel, generator=generator, device=device).to(dtype)


def wrong_sums(device: torch.device) -> int:
    """All-reduces of all types and awkward sizes, against scaled values added in rank order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared = SharedMemory(world_group(), device, nbytes=1 << 20)
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for numel in (0, 1, 1000, 3_000_001):
            for scale in (1.0, 0.37):
                tensor = values_of(rank, numel, dtype, device)
                shared.all_reduce(tensor, scale=scale)
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                total = torch.zeros(numel, dtype=wide, device=device)
                for other in range(world):
                    theirs = values_of(other, numel, dtype, device).mul_(scale).to(wide)
                    total = theirs if other == 0 else total + theirs
                wrong += not torch.equal(tensor, total.to(dtype))
    dist.barrier()
    shared.close()
    return wrong


def wrong_reductions(device: torch.device, hosts: Hosts) -> int:
    """Overlapping buckets in two levels on streams: shared memory and NCCL inside a host, the same bits everywhere."""
    results: list[list[torch.Tensor]] = []
    for shared in (True, False):
        level = Hierarchy(world_group(), device, hosts=hosts, shared_memory=shared)
        runner = runner_for(device)
        flats, futures = [], []
        for index in range(16):
            numel = 100_000 + 150_000 * index
            piece = Piece(name=f"p{index}", offset=0, numel=numel, bits=4, block=1024)
            reduction = reduction_for(
                [(piece, torch.Size([numel]))],
                torch.float32,
                device,
                (world_group(),) * 2,
                Block(),
                seed=1,
                hierarchy=level,
                method=METHODS[index % 4],
            )
            flats.append(values_of(dist.get_rank(), numel, torch.float32, device))
            futures.append(runner.submit(reduction.steps(flats[-1], step=index, scale=0.25), flats[-1]))
        for future in futures:
            future.wait()
        torch.cuda.synchronize()
        runner.close()
        dist.barrier()
        torch.cuda.synchronize()
        level.close()
        results.append(flats)
    wrong = sum(not torch.equal(a, b) for a, b in zip(*results, strict=True))
    for flat in results[0]:
        everyone = torch.empty(dist.get_world_size() * flat.numel(), device=device)
        all_gather_single(everyone, flat, world_group())
        wrong += not bool((everyone.view(-1, flat.numel()) == flat).all())
    return wrong


def timings(device: torch.device, mb: int, repeats: int) -> dict[str, float]:
    """Milliseconds beside NCCL over its socket transport, which is measured twice: the A/A pair."""
    shared = SharedMemory(world_group(), device)
    tensor = torch.ones(mb * 1_000_000 // 4, device=device)
    part = 1 / dist.get_world_size()

    def case(run: Callable[[], None]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            return time.perf_counter() - start

        return timed

    def nccl() -> None:
        dist.all_reduce(tensor)
        tensor.mul_(part)

    cases = {
        "nccl sockets": case(nccl),
        "nccl sockets" + AA: case(nccl),
        "shared memory": case(lambda: shared.all_reduce(tensor, scale=part)),
    }
    measured = interleave(cases, warmup=2, repeats=repeats)
    dist.barrier()
    torch.cuda.synchronize()
    shared.close()
    return {name: round(timing.median_ms, 3) for name, timing in measured.items()}


def check(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    world = dist.get_world_size()
    half = world // 2
    hosts = Hosts(ranks=(tuple(range(half)), tuple(range(half, world))))
    sums, reductions = summed(wrong_sums(device), wrong_reductions(device, hosts) if half > 1 else 0)
    return {
        "wrong": {"sums": sums, "reductions": reductions},
        "ms": {f"{mb} MB": timings(device, mb, 5) for mb in (16, 64, 256)},
    }


@pytest.mark.parametrize("count", [2, 4])
def test_sums_are_those_of_one_rank(count: int, record_property: Callable[[str, object], None]) -> None:
    result = on_slices(count, check)
    record_property("ms", result["ms"])
    assert result["wrong"] == {"sums": 0, "reductions": 0}
