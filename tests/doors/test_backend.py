"""The backend "trimtab": what is compressed, what never is, and that torch works on top of it as on Gloo."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.doors.trimtab_default import (
    CODEC,
    LARGE,
    error,
    exact,
    same_everywhere,
    trimtab_default,
    values,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trimtab
import trimtab.backend
from trimtab.codec import Block
from trimtab.collectives import all_reduce

if TYPE_CHECKING:
    from tests.support.pool import Pool


def compressed_sums(bits: int) -> dict[str, Any]:
    group = trimtab_default(codec=Block(bits=bits), seed=5)
    total, average, half = values(), values(1), values(2).bfloat16()
    dist.all_reduce(total)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.all_reduce(half)
    # What the collectives give by themselves, of the same sequence number, seed and codec.
    reference = values()
    all_reduce(reference, Block(bits=bits), name="0", step=0, seed=5)
    return {
        "sum": error(total, exact()),
        "avg": error(average, exact(1) / dist.get_world_size()),
        "half": error(half.float(), exact(2)),
        "agree": all(same_everywhere(t) for t in (total, average, half)),
        "reference": torch.equal(total, reference),
        "sequence": group.sequence,
    }


@pytest.mark.parametrize(("world", "bits", "bound"), [(2, 4, 0.25), (3, 4, 0.3), (3, 8, 0.02)])
def test_large_sums_and_averages_travel_compressed(ranks: Pool, world: int, bits: int, bound: float) -> None:
    for outcome in ranks(world, compressed_sums, bits, allow_groups=True):
        assert outcome["sequence"] == 3
        assert outcome["agree"]
        assert outcome["reference"]
        for op in ("sum", "avg", "half"):
            assert 1e-4 < outcome[op] < bound, op


def exact_cases() -> dict[str, bool]:
    group = trimtab_default(codec=CODEC)
    results = {}

    def check(name: str, got: torch.Tensor, meant: torch.Tensor) -> None:
        results[name] = torch.equal(got, meant)

    small = torch.full((1000,), 1.0 + dist.get_rank())
    dist.all_reduce(small)
    check("small", small, torch.full((1000,), 6.0))
    whole = torch.arange(LARGE) * (dist.get_rank() + 1)
    dist.all_reduce(whole)
    check("integers", whole, torch.arange(LARGE) * 6)
    double = values().double()
    dist.all_reduce(double)
    results["double"] = bool((double - exact().double()).abs().max() < 1e-5)
    largest = values()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    check("max", largest, torch.stack([values(rank=r) for r in range(3)]).amax(0))
    copied = values()
    dist.broadcast(copied, 1)
    check("broadcast", copied, values(rank=1))
    scattered = torch.empty(LARGE // 4 * 4 // 3 + 1)
    parts = [values(r, len(scattered)) for r in range(3)]
    dist.reduce_scatter(scattered, parts)
    results["reduce_scatter"] = error(scattered, exact(dist.get_rank(), len(scattered))) < 1e-6
    trimtab.backend.exact_group()
    off = values()
    dist.all_reduce(off)
    results["switched off"] = error(off, exact()) < 1e-6
    results["none compressed"] = group.sequence == 0
    return results


def test_everything_else_is_exact(ranks: Pool) -> None:
    for results in ranks(3, exact_cases, allow_groups=True):
        assert all(results.values()), results


def groups_of_some() -> dict[str, Any]:
    trimtab_default(codec=CODEC)
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    pair, others = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = pair if rank in (0, 2) else others
    members = dist.get_process_group_ranks(mine)
    total = values()
    dist.all_reduce(total, group=mine)
    results["members"] = members
    results["passes through"] = error(total, exact(members=members))
    trimtab.backend.compress_group(mine, CODEC)
    again = values()
    dist.all_reduce(again, group=mine)
    results["opted in"] = error(again, exact(members=members))
    results["sequence"] = trimtab.backend.state_dict(mine)["sequence"]
    by_options: Any = dist.new_group(pg_options=trimtab.backend.GroupOptions(codec=CODEC))
    third = values()
    dist.all_reduce(third, group=by_options)
    results["by options"] = error(third, exact())
    threads = threading.active_count()
    dist.destroy_process_group(mine)
    results["threads ended"] = threads - threading.active_count()
    return results


def test_new_groups_reduce_over_their_own_ranks_and_pass_through_unless_opted_in(ranks: Pool) -> None:
    for rank, results in enumerate(ranks(4, groups_of_some, allow_groups=True)):
        assert results["members"] == ([0, 2] if rank in (0, 2) else [1, 3])
        assert results["passes through"] < 1e-6
        assert 0.01 < results["opted in"] < 0.25
        assert results["sequence"] == 1
        assert 0.01 < results["by options"] < 0.35
        assert results["threads ended"] > 0


def meshes() -> dict[str, float]:
    group = trimtab_default(codec=CODEC)
    results = {}
    line = init_device_mesh("cpu", (4,))
    total = values()
    dist.all_reduce(total, group=line.get_group())
    results["mesh over all ranks"] = error(total, exact())
    results["functional on it"] = error(functional.all_reduce(values(), "sum", line) + 0.0, exact())
    results["functional on the default group"] = error(
        functional.all_reduce(values(), "sum", dist.group.WORLD) + 0.0,  # type: ignore[arg-type]
        exact(),
    )
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    column = values()
    dist.all_reduce(column, group=square.get_group("tensor"))
    results["mesh of two axes"] = error(
        column, exact(members=dist.get_process_group_ranks(square.get_group("tensor")))
    )
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 2048))
    x = values(0, 64 * 32, rank=0).view(64, 32)
    meant = whole(x).detach()
    layers: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    results["tensor parallelism"] = error(parallelize_module(whole, line, layers)(x).detach(), meant)
    assert group.sequence == 0
    assert dist.get_rank(line.get_group()) == dist.get_rank()
    return results


def test_no_mesh_group_and_no_functional_collective_is_ever_quantized(ranks: Pool) -> None:
    for results in ranks(4, meshes, allow_groups=True):
        for case, wrong in results.items():
            assert wrong < 1e-6, case


def in_flight() -> dict[str, Any]:
    trimtab_default(codec=Block(bits=8))
    tensors = [values(seed) for seed in range(6)]
    works: Any = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    for work in reversed(works):
        assert work.wait()
    results: dict[str, Any] = {
        "errors": [error(tensor, exact(seed)) for seed, tensor in enumerate(tensors)],
        "completed": all(work.is_completed() and work.is_success() for work in works),
        "futures": all(f.wait()[0].data_ptr() == t.data_ptr() for f, t in zip(futures, tensors, strict=True)),
    }
    large, small = values(), torch.full((7,), 2.0)
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(large)
        dist.all_reduce(small)
    results["coalesced large"] = error(large, exact())
    results["coalesced small"] = small.tolist()
    matrix, vector = values().view(4, -1), values(1)
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(matrix)
        dist.all_reduce(vector)
    results["matrix"], results["its bias"] = error(matrix.view(-1), exact()), error(vector, exact(1))
    return results


def test_many_at_once_do_not_mix(ranks: Pool) -> None:
    for results in ranks(3, in_flight, allow_groups=True):
        assert max(results["errors"]) < 0.02
        assert results["completed"]
        assert results["futures"]
        assert 1e-4 < results["coalesced large"] < 0.02
        assert results["coalesced small"] == [6.0] * 7
        assert 1e-4 < results["matrix"] < 0.02
        assert results["its bias"] < 1e-6


def dropped_at_once() -> bool:
    """Gloo frees an operation's tensors on its own thread, maybe while the next operation is being queued."""
    trimtab_default(codec=CODEC)
    for _ in range(60):
        mine = torch.ones(1000)
        dist.all_gather([torch.empty(1000) for _ in range(3)], mine)
        dist.all_reduce(mine)
    return bool((mine == 3).all())


def test_operations_whose_tensors_die_at_once_do_not_hang(ranks: Pool) -> None:
    assert ranks(3, dropped_at_once, allow_groups=True) == [True] * 3


def not_finite() -> tuple[bool, bool, bool]:
    trimtab_default(codec=CODEC)
    seen = []
    for bad in (math.nan, math.inf):
        gradient = values()
        if dist.get_rank() == 1:
            gradient[12_345] = bad
        dist.all_reduce(gradient)
        seen.append(not bool(torch.isfinite(gradient[12_345])))
    return seen[0], seen[1], bool(torch.isfinite(gradient[50_000]))


def test_nan_and_inf_reach_every_rank(ranks: Pool) -> None:
    assert ranks(3, not_finite, allow_groups=True) == [(True, True, True)] * 3
