"""A script as no launcher runs it: alone on each rank, or with gradients that are visibly damaged.

python -m trimtab.bench.scenarios.autopilot.variants alone|canary SCRIPT ARGS
"""

from __future__ import annotations

import functools
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any


def alone() -> None:
    """Every rank is a job of its own; its record has the rank's number."""
    rank = os.environ["RANK"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    zero = dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    os.environ |= one | zero | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    record = sys.argv.index("--record") + 1
    sys.argv[record] = f"{sys.argv[record]}.{rank}"


def canary() -> None:
    """Gradients in one bit of large blocks, biases and norms too: more noise than gradient, and losses must show it."""
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.api.compress import compress
    from trimtab.codec import Block

    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_damaged(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        one_bit = Block(bits=1, block=1 << 16)
        compress(self, one_bit, overrides={"*": one_bit}, error_feedback=False)

    DistributedDataParallel.__init__ = construct_damaged  # type: ignore[method-assign]


def main() -> None:
    variant = {"alone": alone, "canary": canary}[sys.argv[1]]
    sys.argv = sys.argv[2:]
    variant()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
