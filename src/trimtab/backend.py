"""The backend "trimtab": `torch.distributed.init_process_group("trimtab")`.

With trimtab installed, torch finds the name by itself (entry point `torch.backends`); otherwise, or with
TORCH_DEVICE_BACKEND_AUTOLOAD=0, call `trimtab.backend.register()` first. Importing this module has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    import torch.distributed as dist

    from trimtab.codec import Block, Uncompressed
    from trimtab.collectives import Hierarchy
    from trimtab.doors.backend import GroupOptions as GroupOptions

__all__ = ["GroupOptions", "compress_group", "exact_group", "load_state_dict", "register", "state_dict"]

_NAME = "trimtab"


def register(options: GroupOptions | None = None) -> None:
    """Register the backend "trimtab" with torch.distributed in this process; may be called again.

    `options` apply to a default group that is created without `pg_options`. Registering imports
    nothing heavy: where trimtab is installed, torch calls it in every process that imports torch.
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
    """Compress the large float all-reduces of a group of this backend, for example one from `new_group`.

    Every rank of the group calls it. Without `codec` the link is measured at the first large all-reduce:
    values then travel in 4 bits or, where that would not pay, exactly; ranks on one host use shared memory (Gloo).
    """
    from trimtab.doors.backend import GroupOptions, trimtab_group

    trimtab_group(group).set_options(GroupOptions(codec=codec, seed=seed))


def exact_group(group: dist.ProcessGroup | None = None) -> None:
    """Make every all-reduce of a group exact from now on; every rank of the group calls it."""
    from trimtab.doors.backend import GroupOptions, trimtab_group

    trimtab_group(group).set_options(GroupOptions(compress=False))


def state_dict(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """For the checkpoint: the position in the group's random streams. The same on every rank."""
    from trimtab.doors.backend import trimtab_group

    return trimtab_group(group).state_dict()


def load_state_dict(state: Mapping[str, int], group: dist.ProcessGroup | None = None) -> None:
    """Continue the random streams from where `state_dict` was taken."""
    from trimtab.doors.backend import trimtab_group

    trimtab_group(group).load_state_dict(state)


class _Defaults:
    options: GroupOptions | None = None


def _create(group: Any, pg_options: Any) -> Any:
    """Called by torch for every group of this backend; the default group is the one without a list of ranks."""
    from trimtab.doors.backend import GroupOptions, TrimtabGroup
    from trimtab.doors.backend_plain import plain_group
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
    plain = plain_group(group, nccl_options)
    return TrimtabGroup(plain, options, judge=_judge, is_default=is_default)


_MIN_TRIAL_NUMEL = 1 << 20


def _judge(
    codec: Block | Uncompressed,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    numel: int,
    hierarchy: Hierarchy | None,
) -> tuple[bool, str]:
    """Measure whether compression, or shared memory, pays on this group's link; returns that and the reason."""
    from trimtab.measure.exchange import measure_exchange
    from trimtab.planning.compression.payoff import decide, decide_shared_memory

    # DDP's first bucket is smaller than the following ones: measure with a buffer of their size.
    exchange = measure_exchange(codec, groups, device, max(numel, _MIN_TRIAL_NUMEL), hierarchy=hierarchy)
    decision = (decide if hierarchy is None else decide_shared_memory)(exchange, exchange.nbytes)
    return decision.compress, decision.reason


def __getattr__(name: str) -> Any:
    if name == "GroupOptions":  # imported on first use: this module is loaded with torch itself
        from trimtab.doors.backend import GroupOptions

        return GroupOptions
    raise AttributeError(f"module 'trimtab.backend' has no attribute {name!r}")
