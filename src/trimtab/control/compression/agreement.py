"""Before anything is measured or sent: every rank is there, has the same arguments, and can do its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.codec import Block, Codec, PowerSGD, TopK
from trimtab.codec.codec import Uncompressed
from trimtab.collectives import layout
from trimtab.collectives.roll_call import announce, roll_call
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.fsdp import is_fsdp
from trimtab.errors import TrimtabError
from trimtab.sharding.unit_block import find_sharded_model

DISABLED = "disabled"
_READY = "ready"
_REFUSED = "refused: "


def compression_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that compress a model's gradients together; None if there is one rank, or the model is not wrapped."""
    if isinstance(model, DistributedDataParallel):
        group: dist.ProcessGroup | None = model.process_group
    elif is_fsdp(model):
        from trimtab.doors.fsdp import process_groups

        shard, replicate = process_groups(model)
        group = shard if shard is not None and shard.size() > 1 else replicate
    else:
        return None
    return group if group is not None and group.size() > 1 else None


def tensor_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which a model's units are sharded, if they are.

    What is replicated there has the same gradient on all of them, and must be rounded alike: so every choice that a
    measurement or a statistic decides is that of the first of these ranks.
    """
    sharded = find_sharded_model(model)
    return sharded.group.process_group if sharded is not None and sharded.group.size > 1 else None


def agree_to_compress(
    group: dist.ProcessGroup | None,
    codec: object,
    overrides: Mapping[str, Codec | None] | None,
    log: str | Path | None,
    check: Callable[[], None],
    **settings: object,
) -> list[int]:
    """Check this rank's arguments and wait for the other ranks; returns the ranks on which trimtab is disabled.

    `check` raises a TrimtabError where the model cannot be compressed. `settings` are the other arguments: ranks with
    different ones would start different collectives, and wait for each other until the group's timeout.

    Raises:
        TrimtabError: on every rank, if one of them cannot continue.
    """
    try:
        check()
        _check_codecs(codec, overrides or {})
        if log is not None and (group is None or group.rank() == 0):
            _check_log(log)
    except TrimtabError as error:
        if group is not None:
            announce(group, "trimtab.compress", f"{_REFUSED}{error}")
        raise
    if group is None:
        return []
    own = f"{_READY}: {dict(codec=codec, overrides=overrides, **settings, wire_format=layout.WIRE_VERSION)}"
    answers = roll_call(group, "trimtab.compress", own)
    for rank, answer in enumerate(answers):
        if answer.startswith(_REFUSED):
            raise TrimtabError(f"rank {rank} of the group refused: {answer.removeprefix(_REFUSED)}")
    disabled = [rank for rank, answer in enumerate(answers) if answer == DISABLED]
    differing = [rank for rank, answer in enumerate(answers) if answer not in (own, DISABLED)]
    if differing and not disabled:
        other = answers[differing[0]].removeprefix(f"{_READY}: ")
        raise TrimtabError(
            f"ranks {differing} of the group compress gradients with other settings than rank {group.rank()}: {other} "
            f"instead of {own.removeprefix(f'{_READY}: ')}; give trimtab.compress the same arguments on every rank"
        )
    return disabled


def _check_codecs(codec: object, overrides: Mapping[str, Codec | None]) -> None:
    if codec is not None and not isinstance(codec, (Adaptive, Block, PowerSGD, TopK, Uncompressed)):
        raise TrimtabError(
            f"compress: {codec!r} is not a codec; give trimtab.codec.Block(bits=4), PowerSGD(rank=4), "
            "TopK(0.01) or trimtab.Adaptive(), or nothing to let trimtab choose"
        )
    if not isinstance(overrides, Mapping):
        raise TrimtabError(
            f"compress: overrides: expected codecs by pattern of parameter names, got {type(overrides).__name__}"
        )
    for pattern, choice in overrides.items():
        if choice is not None and not isinstance(choice, (Block, PowerSGD, TopK, Uncompressed)):
            raise TrimtabError(
                f"compress: overrides[{pattern!r}] is {choice!r}; give a codec such as trimtab.codec.Block(bits=8), "
                "or None to leave it uncompressed"
            )


def _check_log(log: str | Path) -> None:
    try:
        with Path(log).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise TrimtabError(f"compress: log={str(log)!r} cannot be written: {error}") from error
