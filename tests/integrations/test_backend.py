"""The backend "trimtab": what is compressed, what never is, and that torch works on top of it as on Gloo."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.integrations.trimtab_default import default_store, trimtab_default
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import trimtab
import trimtab.backend
from trimtab.codec import Block, PowerSGD
from trimtab.collectives import all_reduce

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

LARGE = 100_000
CODEC = Block(bits=4)


def values(seed: int = 0, numel: int = LARGE, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def exact(seed: int = 0, numel: int = LARGE, members: Any = None) -> torch.Tensor:
    members = range(dist.get_world_size()) if members is None else members
    return torch.stack([values(seed, numel, rank) for rank in members]).sum(0)


def error(got: torch.Tensor, meant: torch.Tensor) -> float:
    return float((got - meant).norm() / meant.norm())


def same_everywhere(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in everyone)


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


def test_no_mesh_group_and_no_functional_collective_is_ever_quantised(ranks: Pool) -> None:
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
    return results


def test_many_at_once_do_not_mix(ranks: Pool) -> None:
    for results in ranks(3, in_flight, allow_groups=True):
        assert max(results["errors"]) < 0.02
        assert results["completed"]
        assert results["futures"]
        assert 1e-4 < results["coalesced large"] < 0.02
        assert results["coalesced small"] == [6.0] * 7


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


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 4096), nn.GELU(), nn.Linear(4096, 32))


def trained(codec: Block | None, steps: int, compiled: bool = False) -> dict[str, Any]:
    group = trimtab_default(codec=codec, compress=codec is not None)
    model = DistributedDataParallel(wide(), bucket_cap_mb=1)
    run: Any = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x = values(step, 32 * 16).view(16, 32)
        optimizer.zero_grad()
        loss = (run(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(functional.all_reduce(loss.detach(), "sum", dist.group.WORLD) + 0.0))  # type: ignore[arg-type]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "agree": same_everywhere(flat), "sequence": group.sequence}


@pytest.mark.parametrize("compiled", [False, True])
def test_ddp_trains_and_replicas_agree(ranks: Pool, compiled: bool) -> None:
    plain = ranks(3, trained, None, 30, compiled, allow_groups=True)[0]
    for outcome in ranks(3, trained, CODEC, 30, compiled, allow_groups=True):
        assert outcome["agree"]
        assert outcome["sequence"] >= 30
        assert outcome["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.1)
        assert outcome["losses"] != plain["losses"]


def resumed() -> tuple[bool, bool]:
    group = trimtab_default(codec=CODEC)
    dist.all_reduce(values())
    state = trimtab.backend.state_dict()
    first = values(1)
    dist.all_reduce(first)
    second = values(1)
    dist.all_reduce(second)
    trimtab.backend.load_state_dict(state)
    again = values(1)
    dist.all_reduce(again)
    assert group.sequence == 2
    return torch.equal(first, again), torch.equal(first, second)


def test_a_resumed_run_draws_the_same_numbers(ranks: Pool) -> None:
    assert ranks(2, resumed, allow_groups=True) == [(True, False)] * 2


def around_it() -> dict[str, Any]:
    group = trimtab_default(backend="cpu:trimtab,cuda:trimtab", codec=CODEC)
    world, rank = dist.get_world_size(), dist.get_rank()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    told = [{"from": rank}]
    dist.broadcast_object_list(told, src=1)
    dist.barrier()
    group.monitored_barrier()  # type: ignore[attr-defined]
    received = torch.zeros(3)
    request = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    assert request is not None
    request.wait()
    everyone: Any = dist.group.WORLD

    def graph(x: torch.Tensor) -> Any:
        return functional.all_reduce(x * 2, "sum", everyone) + 1

    compiled: Any = torch.compile(graph, backend="aot_eager", fullgraph=True)
    return {
        "objects": objects,
        "told": told,
        "received": received.tolist(),
        "compiled": error(compiled(values()), 2 * exact() + 1),
        "backend": dist.get_backend(),
        "name": group.name(),
    }


def test_objects_points_barriers_and_compiled_graphs(ranks: Pool) -> None:
    for rank, outcome in enumerate(ranks(3, around_it, allow_groups=True)):
        assert outcome["objects"] == [{"rank": r} for r in range(3)]
        assert outcome["told"] == [{"from": 1}]
        assert outcome["received"] == [float((rank - 1) % 3)] * 3
        assert outcome["compiled"] < 1e-6
        assert outcome["backend"] == "cpu:trimtab,cuda:trimtab"
        assert outcome["name"] == "trimtab"


def left_to_decide() -> tuple[str, float, int]:
    group = trimtab_default()
    total = values()
    dist.all_reduce(total)
    return group.explanation, error(total, exact()), group.sequence


def test_without_a_codec_it_measures_decides_and_says_so(ranks: Pool) -> None:
    for explanation, wrong, sequence in ranks(2, left_to_decide, allow_groups=True):
        assert "the link is" in explanation
        assert (wrong < 1e-6) == (sequence == 0) == ("stays off" in explanation)


def disabled() -> float:
    os.environ["TRIMTAB_DISABLE"] = "1"
    try:
        trimtab_default(codec=CODEC)
        total = values()
        dist.all_reduce(total)
        return error(total, exact())
    finally:
        del os.environ["TRIMTAB_DISABLE"]


def test_disabled_it_is_exact(ranks: Pool) -> None:
    assert max(ranks(2, disabled)) < 1e-6


def destroyed() -> int:
    before = threading.active_count()
    trimtab_default(codec=CODEC)
    init_device_mesh("cpu", (2,))
    dist.all_reduce(values())
    store = default_store()
    dist.destroy_process_group()
    left = threading.active_count() - before
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.PrefixStore("after", store), rank=rank, world_size=2)  # type: ignore[attr-defined]
    return left


def test_destroying_leaves_no_thread(ranks: Pool) -> None:
    assert ranks(2, destroyed) == [0, 0]


def refused(case: str) -> str:
    try:
        if case == "another backend":
            trimtab.backend.compress_group()
        elif case == "codec":
            trimtab.backend.GroupOptions(codec=PowerSGD())  # type: ignore[arg-type]
        elif case == "view":
            trimtab_default(codec=CODEC)
            trimtab.backend.compress_group(init_device_mesh("cpu", (1,)).get_group())
        elif case == "state":
            trimtab_default(codec=CODEC, seed=1)
            trimtab.backend.load_state_dict({"version": 1, "sequence": 3, "seed": 2})
    except trimtab.TrimtabError as refusal:
        return str(refusal)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another backend", "not of the backend 'trimtab'"),
        ("codec", "sees only flat buffers"),
        ("view", "exact view of the default group"),
        ("state", "made with seed 2"),
    ],
)
def test_what_is_refused(ranks: Pool, case: str, words: str) -> None:
    assert words in ranks(1, refused, case, allow_groups=True)[0]


BY_NAME = """
import torch.distributed as dist, torch, sys
heavy = {"trimtab.codec", "trimtab.collectives", "trimtab.runtime"} & sys.modules.keys()
assert not heavy, heavy
dist.init_process_group("trimtab", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.tolist())
"""


def test_installed_the_name_alone_is_enough(tmp_path: Path) -> None:
    """As pip leaves it: torch reads the entry points of installed packages when it is imported."""
    folder = tmp_path / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\ntrimtab = trimtab.backend:register\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for autoload in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", BY_NAME],
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        )
        assert (done.stdout == "[1.0, 1.0, 1.0]\n") == (autoload == "1"), done.stderr


def test_trimtab_run_makes_the_name_known(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BY_NAME.replace("assert not heavy, heavy\n", ""))
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.runtime.bootstrap", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.stdout == "[1.0, 1.0, 1.0]\n", done.stderr


def test_importing_the_module_registers_nothing() -> None:
    code = "import torch.distributed as dist, trimtab.backend; assert 'TRIMTAB' not in dist.Backend._plugins"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
