"""The backend "trimtab": `torch.distributed.init_process_group("trimtab")`.

Installed, torch finds the name by itself (the entry point `torch.backends`); otherwise, and where
TORCH_DEVICE_BACKEND_AUTOLOAD=0, call `trimtab.backend.register()` first. Importing this changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    import torch.distributed as dist

    from trimtab.codec import Block
    from trimtab.doors.backend import GroupOptions as GroupOptions

__all__ = ["GroupOptions", "compress_group", "exact_group", "load_state_dict", "register", "state_dict"]

_NAME = "trimtab"


def register(options: GroupOptions | None = None) -> None:
    """Make the name "trimtab" known to torch.distributed in this process; again is allowed.

    `options` are those of a default group that is made without `pg_options`. Registering imports
    nothing heavy: torch itself calls it, in every process that imports torch where trimtab is installed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    if options is not None:
        _Defaults.options = options
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def compress_group(
    group: dist.ProcessGroup | None = None, codec: Block | None = None, *, seed: int = 0
) -> None:
    """Compress the large all-reduces of floats of a group of this backend, such as one from `new_group`.

    Every rank of the group calls it. Without `codec` the link is measured at the first large all-reduce,
    which then travels in 4 bits a value or, where that would not pay, exactly.
    """
    from trimtab.doors.backend import GroupOptions, trimtab_group

    trimtab_group(group).set_options(GroupOptions(codec=codec, seed=seed))


def exact_group(group: dist.ProcessGroup | None = None) -> None:
    """Leave every all-reduce of a group exact from now on; every rank of the group calls it."""
    from trimtab.doors.backend import GroupOptions, trimtab_group

    trimtab_group(group).set_options(GroupOptions(compress=False))


def state_dict(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """For the checkpoint: how far the group's random numbers are. The same on every rank."""
    from trimtab.doors.backend import trimtab_group

    return trimtab_group(group).state_dict()


def load_state_dict(state: Mapping[str, int], group: dist.ProcessGroup | None = None) -> None:
    """Continue with the random numbers that come after `state_dict`'s."""
    from trimtab.doors.backend import trimtab_group

    trimtab_group(group).load_state_dict(state)


class _Defaults:
    options: GroupOptions | None = None


def _create(group: Any, pg_options: Any) -> Any:
    """What torch calls for every group of this backend; the default group is the one without a list of ranks."""
    from trimtab.doors.backend import GroupOptions, TrimtabGroup
    from trimtab.errors import TrimtabError

    is_default = not group.global_ranks_in_group
    nccl_options = None
    if isinstance(pg_options, GroupOptions):
        options = pg_options
    else:
        options = (_Defaults.options if is_default else None) or GroupOptions(compress=is_default)
        if pg_options is not None:
            if type(pg_options).__module__.partition(".")[0] != "torch":
                raise TrimtabError(
                    f"backend {_NAME}: pg_options must be a trimtab.backend.GroupOptions or "
                    f"ProcessGroupNCCL.Options; got {type(pg_options).__name__}"
                )
            nccl_options = pg_options
    return TrimtabGroup(
        group.store,
        group.group_rank,
        group.group_size,
        group.timeout,
        options,
        judge=_judge,
        is_default=is_default,
        group_name=group.group_id,
        global_ranks=group.global_ranks_in_group,
        nccl_options=nccl_options,
    )


_TRIAL_NUMEL = 1 << 20


def _judge(
    codec: Block, groups: Sequence[dist.ProcessGroup], device: torch.device, numel: int
) -> tuple[bool, str]:
    """Whether compressing pays on this group's link, measured; and the reason in words."""
    from trimtab.measure.exchange import measure_exchange
    from trimtab.planning.compression.payoff import decide

    # DDP's first bucket is smaller than those that follow: judge by a buffer of their size.
    exchange = measure_exchange(codec, groups, device, max(numel, _TRIAL_NUMEL))
    decision = decide(exchange, exchange.nbytes)
    return decision.compress, decision.reason


def __getattr__(name: str) -> Any:
    if name == "GroupOptions":  # imported on first use: this module is loaded with torch itself
        from trimtab.doors.backend import GroupOptions

        return GroupOptions
    raise AttributeError(f"module 'trimtab.backend' has no attribute {name!r}")
