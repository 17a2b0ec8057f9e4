"""DDP without its communication: gradients and buffers stay on their rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab.model_state import JobBound, JobHook


class SilentDdp(JobBound):
    """Silences a DDP module while its forward pass runs, which is when DDP looks whether it is to communicate.

    Outside of it DDP's flags are the script's own, which sets them to accumulate gradients: by `no_sync()`, which
    restores what it found, or by hand in every micro-batch. So neither breaks the silence, nor what follows it.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Hooks of the module that were registered before see it as the script left it, and may end the silence."""
        self.averages = False
        """Whether gradients are averaged, by a communication hook, when the script says so; buffers are silent."""
        self._found: list[tuple[bool, bool]] = []
        """What the script had set: in a forward pass one entry."""
        self._ended = self._was_silent = False
        # A compiled model calls hooks between its graphs; they must not be traced.
        before, after = (JobHook(torch.compiler.disable(hook)) for hook in (self._before, self._after))
        self._handles = [
            ddp.register_forward_pre_hook(before),
            ddp.register_forward_hook(after, always_call=True),
        ]

    def _before(self, ddp: DistributedDataParallel, _inputs: Any) -> None:
        if self._ended:
            return
        # A static graph is observed in the first step, which is to communicate.
        observed = getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)
        self._found.append((ddp.require_backward_grad_sync, observed))
        ddp.require_forward_param_sync = False
        if not self.averages:
            self._was_silent = True
            ddp.require_backward_grad_sync = False
            ddp._static_graph_delay_allreduce_enqueued = True

    def _after(self, ddp: DistributedDataParallel, _inputs: Any, _outputs: Any) -> None:
        if not self._found:
            return
        wanted, observed = self._found.pop()
        ddp.require_forward_param_sync = False
        if not self.averages:
            ddp.require_backward_grad_sync = wanted
            ddp._static_graph_delay_allreduce_enqueued = observed

    def can_end(self, ddp: DistributedDataParallel) -> bool:
        """Not with a static graph after a silent pass: torch's reducer then never communicates."""
        return not (ddp.static_graph and self._was_silent)

    def end(self, ddp: DistributedDataParallel) -> None:
        """From the next forward pass on DDP communicates as the script says; from this one on, if called before it."""
        self._ended = True
        ddp.require_forward_param_sync = True
        for handle in self._handles:
            handle.remove()
