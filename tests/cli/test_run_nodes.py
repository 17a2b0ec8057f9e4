"""`trimtab run` on two hosts, each in a network namespace of its own, with a slow link between them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.emulate import Emulation
from trimtab.emulate.links import INTERFACE

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json, os
import torch, torch.distributed as dist, trimtab
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(512, 512))
for _ in range(3):
    ddp(torch.randn(4, 512)).square().mean().backward()
totals = [torch.zeros(1) for _ in range(2)]
dist.all_gather(totals, ddp.module.weight.grad.sum().reshape(1))
if dist.get_rank() == 0:
    nodes = os.environ["GROUP_WORLD_SIZE"]
    print(json.dumps({"nodes": nodes, "explained": trimtab.explain(ddp), "equal": bool(totals[0] == totals[1])}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(400)
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_two_hosts_meet_and_compress(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with Emulation(pair(gbit_per_s=0.1)) as emulation:
        endpoint = f"{emulation.address('a')}:29500"
        command = [sys.executable, "-m", "trimtab.cli", "run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "two"]
        hosts = [
            emulation.start(
                host,
                [
                    *command,
                    "--local-addr",
                    emulation.address(host),
                    "--rdzv-conf",
                    f"is_host={host == 'a'}",
                    "train.py",
                ],
                env=environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in ("a", "b")
        ]
        outputs = [host.communicate(timeout=360) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    (line,) = [line for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    outcome = json.loads(line)
    assert outcome["nodes"] == "2"
    assert outcome["equal"]
    assert "the link is the bottleneck" in outcome["explained"]
