"""Exiting: threads of ours are told to leave and waited for, so that the interpreter can end in peace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

SLOW_END = """
class Slow:  # the interpreter takes a moment to go down, as with a large model to free
    def __del__(self, usleep=__import__("ctypes").CDLL(None).usleep): usleep(600000)
keep = Slow()
"""

LATE_CALLBACK = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import trimtab
from trimtab.codec import Block
from trimtab.collectives import pipeline
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(128, 128))
trimtab.compress(ddp, Block(bits=4))
def wide(self, steps, result):
    future = torch.futures.Future()
    self._queues[0].put((1, steps, None, result, future))
    out = future.then(torch.futures.Future.value)
    future.then(lambda f: time.sleep(0.2))  # between DDP's waking and the end of set_result
    return out
pipeline.ThreadPipeline.submit = wide
ddp(torch.randn(4, 128)).square().mean().backward()
dist.destroy_process_group()
"""

DECISION_THAT_NEVER_COMES = """
import time, torch.distributed as dist
from trimtab.control.background import Background
dist.init_process_group("gloo")
background = Background(dist.group.WORLD)
if dist.get_rank() == 1:
    background.fetch("look-20")
time.sleep(0.3)
dist.barrier()
dist.destroy_process_group()
"""


def exit_codes(script: str, world: int = 2) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TRIMTAB_LOG": "error",
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env={**common, "RANK": str(rank)})
        for rank in range(world)
    ]
    return [process.wait(timeout=90) for process in processes]


@pytest.mark.parametrize("script", [LATE_CALLBACK, DECISION_THAT_NEVER_COMES], ids=["callback", "decision"])
def test_exiting_does_not_abort(script: str) -> None:
    """Either aborted nearly always before threads were waited for."""
    assert exit_codes(script + SLOW_END) == [0, 0]
