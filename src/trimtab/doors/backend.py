"""The backend "trimtab": a process group that sends large all-reduces of floats in fewer bits.

`TrimtabGroup` wraps Gloo (CPU tensors) and NCCL (CUDA tensors). Only `allreduce` and its coalesced form are
ever changed, and only on a group that was opted in; everything else goes directly to the wrapped backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._compile import _disable_dynamo

from trimtab import environment
from trimtab.codec import Block, Uncompressed
from trimtab.codec.packing import DTYPES
from trimtab.collectives.hierarchy import Hierarchy, one_host
from trimtab.collectives.layout import fingerprint
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.doors.backend_plain import ForwardingGroup, register_view
from trimtab.doors.backend_reducer import Reducer, encoded_tensors
from trimtab.errors import TrimtabError

Judge = Callable[
    [Block | Uncompressed, Sequence[dist.ProcessGroup], torch.device, int, Hierarchy | None], tuple[bool, str]
]
"""Measures whether a codec, or shared memory with exact values, pays on a group's link: that, and the reason."""

NAME = "trimtab"
MIN_NUMEL = 1 << 16
"""Smaller all-reduces (losses, norms, metrics, batch statistics) are exact."""

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a group of the backend "trimtab" sends its all-reduces: the `pg_options` of its constructor."""

    compress: bool = True
    """False: every all-reduce is exact."""

    codec: Block | None = None
    """How to encode; None decides at the first large all-reduce: exact through shared memory where all ranks are on one
    host (Gloo); between hosts the link is measured, and values travel in 4 bits, or exactly if that won't pay."""

    min_numel: int = MIN_NUMEL
    """All-reduces of fewer values are exact."""

    seed: int = 0
    """Of the stochastic rounding."""

    def __post_init__(self) -> None:
        if self.codec is not None and not isinstance(self.codec, Block):
            raise TrimtabError(
                f"backend {NAME}: {self.codec} needs to know the parameters, and a process group sees only flat "
                "buffers; give a Block(bits=...), or use trimtab.compress(model, codec)"
            )


class TrimtabGroup(ForwardingGroup):
    """A process group over Gloo and NCCL whose large SUM and AVG all-reduces of floats may travel compressed.

    Every rank is left with the same bits. The random numbers of the rounding are keyed by `sequence`, the
    number of all-reduces compressed so far, so ranks must call collectives in one order, as with any backend.
    """

    def __init__(
        self, plain: dist.ProcessGroup, options: GroupOptions, *, judge: Judge, is_default: bool
    ) -> None:
        super().__init__(plain)
        self.options = options
        self.sequence = 0
        self.explanation = ""
        """Whether the group compresses, and why; empty until its first large all-reduce."""
        self._judge, self._is_default = judge, is_default
        self._view_name: str | None = None
        self._reducers: dict[torch.device, Reducer | None] = {}
        self._is_shut = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def group_name(self) -> Any:
        """The name under which torch finds this group; for the default group, that of an exact view of it.

        A DeviceMesh over all ranks takes the default group by this name, and functional collectives and compiled
        graphs find their groups by name: tensor-parallel activations travel there, and must stay exact.
        """
        own = dist.ProcessGroup.group_name.fget(self)  # type: ignore[attr-defined]
        if not self._is_default or self not in dist.distributed_c10d._world.pg_map:
            return own
        if self._view_name is None:
            self._view_name = register_view(self, self._plain, f"{own}-exact")
        return self._view_name

    @_disable_dynamo
    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Compressed when the group is and the tensor is large; otherwise the wrapped backend's.

        torch's short forms, with an operator in the place of the options, are exact.
        """
        opts = c10d.AllreduceOptions() if opts is None and not named else opts
        if not isinstance(opts, c10d.AllreduceOptions) or isinstance(tensors, torch.Tensor):
            return self._plain.allreduce(tensors, *(() if opts is None else (opts,)), **named)
        if len(tensors) == 1 and self._large(tensors, opts.reduceOp):
            reducer = self._reducer(tensors[0])
            if reducer is not None:
                return reducer.reduce(tensors, self._next(), self._scale(opts.reduceOp))
        return self._plain.allreduce(tensors, opts)

    @_disable_dynamo
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """As `allreduce`, the tensors together: large ones compressed, small ones and vectors beside matrices exact."""
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        if self._large(tensors, opts.reduceOp) and len({(t.dtype, t.device) for t in tensors}) == 1:
            reducer = self._reducer(tensors[0])
            if reducer is not None:
                return reducer.reduce(tensors, self._next(), self._scale(opts.reduceOp))
        return self._plain.allreduce_coalesced(tensors, opts)

    @_disable_dynamo
    def barrier(self, *args: Any, **named: Any) -> Any:
        """The wrapped backend's, after every all-reduce that was started here before."""
        for reducer in self._reducers.values():
            if reducer is not None:
                reducer.wait()
        return self._plain.barrier(*args, **named)

    def describe(self) -> str:
        """What happens to the all-reduces of this group, and why."""
        if not self.options.compress:
            return f"backend {NAME}: every all-reduce is exact, as requested"
        size = f"{self.options.min_numel:,} floats or more"
        return self.explanation or f"backend {NAME}: decides at the first all-reduce of {size}; none yet"

    def set_options(self, options: GroupOptions) -> None:
        """From the next all-reduce on; every rank of the group does the same."""
        self._close_reducers(destroy=True)
        self.options = options
        self.explanation = ""

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs to continue with the same random numbers."""
        return {"version": STATE_VERSION, "sequence": self.sequence, "seed": self.options.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        check_state_version("state of the group", state, STATE_VERSION)
        if state["seed"] != self.options.seed:
            raise TrimtabError(
                f"state of the group: seed mismatch: found {state['seed']}, the group has {self.options.seed}"
            )
        self.sequence = state["sequence"]

    def shutdown(self) -> None:
        """Finish what was started, then stop the threads and the wrapped backends."""
        if self._is_shut:
            return
        self._is_shut = True
        self._close_reducers(destroy=not self._is_default)
        if self._view_name is None:  # otherwise torch shuts the view down, and with it the backends
            self._plain.shutdown()

    def _large(self, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        options = self.options
        return (
            options.compress
            and self.size() > 1
            and bool(op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG)
            and any(encoded_tensors(tensors, options.min_numel))
            and all(
                tensor.dtype in DTYPES and not tensor.is_sparse and tensor.is_contiguous()
                for tensor in tensors
            )
            # A captured graph replays its kernels without the thread that feeds ours.
            and not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def _scale(self, op: Any) -> float:
        return 1.0 / self.size() if op == dist.ReduceOp.AVG else 1.0

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence - 1

    def _reducer(self, tensor: torch.Tensor) -> Reducer | None:
        """The reducer for this tensor's device; None if compression would not pay.

        Created at the first large all-reduce, which every rank calls at the same point: it opens connections.
        """
        if tensor.device not in self._reducers:
            self._reducers[tensor.device] = self._decide(tensor)
        return self._reducers[tensor.device]

    def _decide(self, tensor: torch.Tensor) -> Reducer | None:
        if environment.disabled():
            self.explanation = "TRIMTAB_DISABLE is set: nothing is compressed"
            return None
        codec = self.options.codec or Block()
        hierarchy = one_host(self, tensor.device) if self.options.codec is None else None
        settings: dict[str, Any] = {"min_numel": self.options.min_numel, "seed": self.options.seed}
        reducer = Reducer(self, codec, tensor.device, hierarchy=hierarchy, **settings)
        require_agreement(
            fingerprint(self.options, self.sequence),
            tensor.device,
            reducer.groups[0],
            what="all-reduces",
            remedy="give every rank of the group the same GroupOptions",
        )
        pays, reason = True, f"compressing with {codec}, as requested"
        if self.options.codec is None:
            link = reducer.groups, tensor.device, tensor.numel()
            pays, reason = False, ""
            if hierarchy is not None:
                pays, reason = self._judge(Uncompressed(), *link, hierarchy)
                if not pays:
                    reducer.close(destroy=True)
                    reducer = Reducer(self, codec, tensor.device, **settings)
                    link = reducer.groups, tensor.device, tensor.numel()
            if not pays:
                pays, reason = self._judge(codec, *link, None)
        self.explanation = f"backend {NAME}: {reason}"
        if self.rank() == 0:
            environment.logger().info(self.explanation)
        if not pays:
            reducer.close(destroy=True)
            return None
        return reducer

    def _close_reducers(self, *, destroy: bool) -> None:
        for reducer in self._reducers.values():
            if reducer is not None:
                reducer.close(destroy=destroy)
        self._reducers.clear()


def trimtab_group(group: dist.ProcessGroup | None) -> TrimtabGroup:
    """The group (by default the default group) if it belongs to this backend; raises otherwise."""
    group = dist.group.WORLD if group is None else group
    if isinstance(group, TrimtabGroup):
        return group
    view = getattr(group, "group_desc", "").endswith("exact view")
    raise TrimtabError(
        "this is the exact view of the default group that a mesh over all ranks uses; compress "
        "dist.group.WORLD instead, or give the mesh its own groups"
        if view
        else f"this process group does not use the backend {NAME!r}: create it with init_process_group({NAME!r}) or "
        f"new_group(..., backend={NAME!r})"
    )
