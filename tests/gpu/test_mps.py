"""Parts of a GPU for ranks, by the Multi-Process Service."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.emulate.machines import jobs_of, traces
from tests.support.requirements import requires

from trimtab.cluster import Cluster, Device, Host
from trimtab.emulate import Emulation
from trimtab.emulate.mps import PROCESSES, check_products

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


def test_a_whole_gpu_multiplies_rightly() -> None:
    check_products()


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
