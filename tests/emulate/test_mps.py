from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.emulate.machines import jobs_of, traces
from tests.support.requirements import requires

from trimtab.cluster import Cluster, Device, Host
from trimtab.emulate import Emulation
from trimtab.emulate.mps import PARTS, PROCESSES, _parts, check_products, share_out
from trimtab.emulate.placement import nodes, place_ranks
from trimtab.errors import TrimtabError


def _cards(memory_gib: float | None = None) -> Cluster:
    """A host with a full and a slow card, and one with a full card."""
    return Cluster(
        version=1,
        devices={
            "full": Device(kind="cuda", speed=1.0, memory_gib=memory_gib),
            "slow": Device(kind="cuda", speed=0.5, memory_gib=memory_gib),
        },
        hosts=(Host(name="a", devices={"full": 1, "slow": 1}), Host(name="b", devices={"full": 1})),
    )


def test_one_gpu_is_shared_out_by_speed() -> None:
    shares = share_out(place_ranks(_cards(memory_gib=20.0), [0, 1, 2]), [("gpu", 80.0)])
    assert [shares[rank].percentage for rank in range(3)] == pytest.approx([26.2, 14.0, 26.2], abs=2)
    assert [shares[rank].memory_fraction for rank in range(3)] == [0.25] * 3


def test_speeds_keep_their_proportion_over_several_gpus() -> None:
    shares = share_out(place_ranks(_cards(), [0, 1, 2]), [("x", 80.0), ("y", 80.0)])
    assert [shares[rank].gpu for rank in range(3)] == ["x", "y", "x"]
    assert [shares[rank].percentage for rank in range(3)] == pytest.approx([50.4, 26.2, 50.4], abs=0.1)


@pytest.mark.parametrize(
    "speeds", [[1.0], [1.0, 1.0], [0.7, 0.3], [1.0, 0.5], [1.0, 0.25], [1.0, 0.75], [1.0] * 4]
)
def test_parts_are_near_the_speeds_and_fit_one_gpu(speeds: list[float]) -> None:
    parts = _parts(speeds, [0] * len(speeds))
    assert sum(parts) <= 1
    assert set(parts) <= set(PARTS)
    assert [part / max(parts) for part in parts] == pytest.approx(
        [speed / max(speeds) for speed in speeds], rel=0.07
    )


def test_more_ranks_than_a_gpu_has_parts_for_are_refused() -> None:
    with pytest.raises(TrimtabError, match="do not fit"):
        _parts([1.0] * 10, [0] * 10)


@requires(cuda=1)
def test_a_whole_gpu_multiplies_rightly() -> None:
    check_products()


def test_refuses_more_memory_than_there_is() -> None:
    with pytest.raises(TrimtabError, match=r"GPU gpu ask for 60 GiB in all and it has 40\.0"):
        share_out(place_ranks(_cards(memory_gib=20.0), [0, 1, 2]), [("gpu", 40.0)])


def test_each_rank_of_a_shared_gpu_is_a_node() -> None:
    found = nodes(place_ranks(_cards(), [0, 1, 2]))
    assert [(node.host, len(node.placements)) for node in found] == [("a", 1), ("a", 1), ("b", 1)]


def test_without_a_gpu_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with (
        pytest.raises(TrimtabError, match="needs an NVIDIA GPU and the program `nvidia-smi`"),
        Emulation(_cards()),
    ):
        pass


_SCRIPT = """
import json, os, time, torch
from torch import distributed
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
distributed.init_process_group("nccl", device_id=device)
matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
for _ in range(5):
    matrix @ matrix
distributed.barrier()
torch.cuda.synchronize()
start, count = time.perf_counter(), 0
while time.perf_counter() - start < 3:
    for _ in range(5):
        matrix @ matrix
    torch.cuda.synchronize()
    count += 5
rates = torch.zeros(distributed.get_world_size(), device=device)
rates[distributed.get_rank()] = count
distributed.all_reduce(rates)
try:
    torch.empty(11 << 30, dtype=torch.uint8, device=device)
    limited = False
except torch.cuda.OutOfMemoryError:
    limited = True
if distributed.get_rank() == 0:
    print(json.dumps([rates.tolist(), limited]))
distributed.destroy_process_group()
"""


@requires(cuda=1, tools=["nvidia-cuda-mps-control"])
def test_parts_of_a_gpu_have_their_speed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    with Emulation(_cards(memory_gib=10.0)) as emulation:
        (job,) = jobs_of(os.getpid())
        outcome = emulation.run([str(tmp_path / "script.py")], capture=True, timeout=100)
    assert outcome.failure is None
    (first, slow, second), limited = json.loads(outcome.stdout)
    print(f"rates {first} {slow} {second}")
    assert 0.4 <= slow / first <= 0.62
    assert 0.85 <= second / first <= 1.15
    assert limited
    assert traces(job, []) == []
    commands = [path.read_bytes().split(b"\0")[0].decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if Path(command).name in PROCESSES]
