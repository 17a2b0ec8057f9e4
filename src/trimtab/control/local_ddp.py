"""DDP of a worker: silent, or averaging among the ranks of a host; and back to exchanging every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.control.compression.ddp import compress_ddp
from trimtab.control.compression.explanation import record_explanation
from trimtab.doors.silent_ddp import SilentDdp
from trimtab.errors import TrimtabError
from trimtab.model_state import JobBound

Hook = Callable[[Any, Any], Any]


class DdpOfWorker(JobBound):
    """What DDP does while its model takes local steps."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._silence = SilentDdp(ddp)
        self._ddp = weakref.ref(ddp)
        self._averaging: dist.ProcessGroup | None = None
        self._back = False
        self._deferred: tuple[object, Hook] | None = None

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "the model is there while it trains"
        return ddp

    @property
    def joins(self) -> bool:
        """Whether ranks may take different numbers of steps: torch's Join."""
        return bool(self._module()._join_config.enable)

    @property
    def can_go_back(self) -> bool:
        """Whether DDP can exchange every step again."""
        return self._silence.can_end(self._module())

    def average_in(self, group: dist.ProcessGroup) -> None:
        """From now on gradients are averaged in a group, in every step, when the script says so."""
        registered = self._averaging is not None
        self._averaging, self._silence.averages = group, True
        if not registered:
            self._module().register_comm_hook(None, self._average)

    def _average(self, _state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses string annotations
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        if not self._back:
            assert self._averaging is not None
            return allreduce_hook(self._averaging, bucket)
        if self._deferred is not None:
            state, hook = self._deferred
            return hook(state, bucket)
        return allreduce_hook(self._module().process_group, bucket)

    def defer(self, state: object, hook: Hook) -> None:
        """Register a communication hook of the script when DDP exchanges every step again."""
        self._deferred = (state, hook)

    def take_back(self, reason: str, *, compressed: bool) -> None:
        """DDP exchanges gradients in every step again, compressed where that pays. Collective if `compressed`."""
        self._back = True
        ddp = self._module()
        self._silence.end(ddp)
        decision = "gradients are sent as by DDP alone"
        if self._deferred is not None:
            decision = "gradients are sent by the script's communication hook"
            if self._averaging is None:
                ddp.register_comm_hook(*self._deferred)
        elif compressed:
            try:
                decision = compress_ddp(ddp)
            except TrimtabError as error:
                decision = f"{decision}: {error}"
        record_explanation(ddp, f"{reason}; {decision}")
