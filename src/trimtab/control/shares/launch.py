"""`trimtab run`: every DDP and FSDP2 module of the script may have uneven batches."""

from __future__ import annotations

import atexit
import functools
import os
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.control.shares.script_hooks import take_over
from trimtab.control.shares.sizes import parse_sizes
from trimtab.control.shares.takeover import Takeover
from trimtab.environment import logger
from trimtab.errors import TrimtabError


def cut_batches(batch_sizes: str) -> None:
    """From here on the batches of this process are cut; `batch_sizes` as in ``trimtab run --batch-sizes``."""
    sizes = parse_sizes(batch_sizes)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if sizes is not None and len(sizes) != world_size:
        raise TrimtabError(
            f"run: --batch-sizes {batch_sizes} has {len(sizes)} sizes for {world_size} ranks; give one for each"
        )
    takeover, _ = take_over(sizes)
    construct, shard = DistributedDataParallel.__init__, torch_fsdp.fully_shard

    @functools.wraps(construct)
    def construct_and_watch(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        takeover.watch(self)

    @functools.wraps(shard)
    def shard_and_watch(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = shard(module, *args, **kwargs)
        if isinstance(module, nn.Module):  # the root is the last to be sharded, and the first to run
            takeover.watch(module)
        return sharded

    DistributedDataParallel.__init__ = construct_and_watch  # type: ignore[method-assign]
    torch_fsdp.fully_shard = shard_and_watch
    if sizes is not None and os.environ.get("RANK") == "0":
        atexit.register(_say_if_unused, takeover, batch_sizes)


def script_failed() -> None:
    """An error of the script says more than what it has not used until then."""
    atexit.unregister(_say_if_unused)


def _say_if_unused(takeover: Takeover, batch_sizes: str) -> None:
    if not takeover.texts:
        logger().warning(
            f"--batch-sizes {batch_sizes} were not used: no DataLoader with a DistributedSampler fed a "
            "DistributedDataParallel or FSDP2 module"
        )
