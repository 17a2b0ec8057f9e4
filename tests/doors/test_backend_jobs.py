"""Jobs on the backend "trimtab": DDP, compiled graphs, objects, restarts, and how torch finds its name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.doors.trimtab_default import (
    CODEC,
    default_store,
    error,
    exact,
    same_everywhere,
    trimtab_default,
    values,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
import trimtab.backend
from trimtab.codec import Block, PowerSGD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


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
    broadcast = [{"from": rank}]
    dist.broadcast_object_list(broadcast, src=1)
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
        "broadcast": broadcast,
        "received": received.tolist(),
        "compiled": error(compiled(values()), 2 * exact() + 1),
        "backend": dist.get_backend(),
        "name": group.name(),
    }


def test_objects_points_barriers_and_compiled_graphs(ranks: Pool) -> None:
    for rank, outcome in enumerate(ranks(3, around_it, allow_groups=True)):
        assert outcome["objects"] == [{"rank": r} for r in range(3)]
        assert outcome["broadcast"] == [{"from": 1}]
        assert outcome["received"] == [float((rank - 1) % 3)] * 3
        assert outcome["compiled"] < 1e-6
        assert outcome["backend"] == "cpu:trimtab,cuda:trimtab"
        assert outcome["name"] == "trimtab"


def left_to_decide() -> tuple[str, str, float, int]:
    group = trimtab_default()
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    before = trimtab.explain(ddp)
    total = values()
    os.environ["GROUP_RANK"] = str(dist.get_rank())  # a host for each rank
    try:
        dist.all_reduce(total)
    finally:
        del os.environ["GROUP_RANK"]
    return before, trimtab.explain(ddp), error(total, exact()), group.sequence


def test_without_a_codec_it_measures_decides_and_says_so(ranks: Pool) -> None:
    for before, explanation, wrong, sequence in ranks(2, left_to_decide, allow_groups=True):
        assert before.startswith("backend trimtab: decides at the first all-reduce of 65,536 floats or more")
        assert "the link is" in explanation
        assert (wrong < 1e-6) == (sequence == 0) == ("stays off" in explanation)


def on_one_host() -> tuple[list[float], bool, str]:
    """Errors of sums and averages, of one tensor and of several together, and what the group says."""
    group = trimtab_default()

    def judge(_codec: Any, _groups: Any, _device: Any, _numel: Any, hierarchy: Any) -> tuple[bool, str]:
        return hierarchy is not None, "as measured"

    group._judge = judge
    total, small, average = values(), values(numel=10), values(seed=1)
    dist.all_reduce(total)
    work: Any = dist.all_reduce_coalesced([average, small], op=dist.ReduceOp.SUM, async_op=True)
    work.wait()
    agree = all(same_everywhere(tensor) for tensor in (total, average, small))
    return (
        [error(total, exact()), error(average, exact(1)), error(small, exact(numel=10))],
        agree,
        group.explanation,
    )


def test_on_one_host_all_reduces_are_exact_through_shared_memory(ranks: Pool) -> None:
    for errors, agree, explanation in ranks(3, on_one_host, allow_groups=True):
        assert max(errors) < 1e-6
        assert agree
        assert explanation == "backend trimtab: as measured"


def name_read_on_one_rank() -> float:
    group = trimtab_default(codec=CODEC)
    if dist.get_rank() == 0:
        assert group.group_name == "0-exact"
    total = values()
    dist.all_reduce(total)
    return error(total, exact())


def test_reading_the_groups_name_on_one_rank_changes_nothing(ranks: Pool) -> None:
    assert 0 < max(ranks(2, name_read_on_one_rank, allow_groups=True)) < 0.25


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
        elif case == "settings":
            trimtab_default(codec=Block(bits=4 + dist.get_rank()))
            dist.all_reduce(values())
    except trimtab.TrimtabError as refusal:
        return str(refusal)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another backend", "does not use the backend 'trimtab'"),
        ("codec", "sees only flat buffers"),
        ("view", "exact view of the default group"),
        ("state", "seed mismatch: found 2"),
        ("settings", "with other settings than rank 0"),
    ],
)
def test_what_is_refused(ranks: Pool, case: str, words: str) -> None:
    world = 2 if case == "settings" else 1
    assert words in ranks(world, refused, case, allow_groups=True)[0]


BY_NAME = """
import torch.distributed as dist, torch, sys
heavy = {"trimtab.codec", "trimtab.collectives", "trimtab.api", "trimtab.measure"} & sys.modules.keys()
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
        [sys.executable, "-m", "trimtab.cli.bootstrap", str(script)],
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
