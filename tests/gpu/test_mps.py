"""Parts of a GPU for ranks, by the Multi-Process Service."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.emulate.machines import jobs_of, traces
from tests.support.requirements import requires

from trimtab.cluster import Cluster, Device, Host
from trimtab.emulate import Emulation
from trimtab.emulate.mps import PROCESSES
from trimtab.measure.products import wrong_product

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = requires(cuda=1)

CARDS = Cluster(
    version=1,
    devices={
        "full": Device(kind="cuda", speed=1.0, memory_gib=10.0),
        "slow": Device(kind="cuda", speed=0.5, memory_gib=10.0),
    },
    hosts=(Host(name="a", devices={"full": 1, "slow": 1}), Host(name="b", devices={"full": 1})),
)


_NOTHING = "print('trained')"

_DDP = """
import torch
from torch import distributed, nn
from trimtab.measure.products import is_part_of_gpu, refuse_wrong_products
assert is_part_of_gpu()
refuse_wrong_products(torch.device("cuda"))
distributed.init_process_group("nccl")
ddp = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).cuda())
import trimtab
trimtab.compress(ddp)
ddp(torch.ones(4, 512, device="cuda")).sum().backward()
print("trained")
distributed.destroy_process_group()
"""


def test_a_whole_gpu_multiplies_rightly() -> None:
    assert wrong_product(torch.device("cuda")) is None


@requires(tools=["nvidia-cuda-mps-control"])
def test_a_part_that_multiplies_wrongly_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70/30 of an H200: 92 and 38 of its 132 multiprocessors."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("which parts are wrong is known of GPUs with 132 multiprocessors")
    monkeypatch.setattr("trimtab.emulate.mps.PARTS", (92 / 132, 38 / 132))
    (tmp_path / "script.py").write_text(_NOTHING)
    cards = Cluster(
        version=1,
        devices={"fast": Device(kind="cuda", speed=1.0), "slow": Device(kind="cuda", speed=38 / 92)},
        hosts=(Host(name="a", devices={"fast": 1, "slow": 1}),),
    )
    with Emulation(cards) as emulation:
        outcome = emulation.run([str(tmp_path / "script.py")], capture=True, timeout=100)
    assert outcome.failure is not None
    message = str(outcome.failure)
    assert "computes wrong products" in message
    assert "multiprocessors" in message
    assert "rank 0 has GPU" in message or "rank 1 has GPU" in message
    assert "trained" not in outcome.stdout


@requires(tools=["nvidia-cuda-mps-control"])
def test_right_parts_pass_in_every_door(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_DDP)
    with Emulation(CARDS) as emulation:
        outcome = emulation.run([str(tmp_path / "script.py")], capture=True, timeout=100)
    assert outcome.failure is None
    assert "trained" in outcome.stdout


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


@requires(tools=["nvidia-cuda-mps-control"])
def test_parts_of_a_gpu_have_their_speed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    with Emulation(CARDS) as emulation:
        (job,) = jobs_of(os.getpid())
        outcome = emulation.run([str(tmp_path / "script.py")], capture=True, timeout=100)
    assert outcome.failure is None
    (first, slow, second), limited = json.loads(outcome.stdout)
    record_property("products_in_3_s", [first, slow, second])
    assert 0.4 <= slow / first <= 0.62
    assert 0.85 <= second / first <= 1.15
    assert limited
    assert traces(job, []) == []
    commands = [path.read_bytes().split(b"\0")[0].decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if Path(command).name in PROCESSES]
