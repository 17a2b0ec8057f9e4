"""DDP: a communication hook that reduces each bucket through a codec.

All state is keyed by parameter name, because DDP rebuilds its buckets in another order after the first
backward pass, and that must not change the result.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from trimtab.codec import Block, Codec, ErrorFeedback
from trimtab.codec.contract import Kernels
from trimtab.collectives import (
    STAGE_GROUPS,
    Hierarchy,
    Method,
    Piece,
    Reduction,
    finish,
    reduction_for,
    runner_for,
)
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.collectives.layout import fingerprint
from trimtab.collectives.pipeline import StageObserver
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.doors.changing_bits import ChangingBits
from trimtab.doors.ddp_resume import SavedBuckets
from trimtab.doors.loss_scale import observe_loss_scales, running_loss_scale
from trimtab.doors.parameters import choose_bits
from trimtab.errors import TrimtabError
from trimtab.model_state import Detached, JobBound
from trimtab.wire_format import MIN_NUMEL

Observer = Callable[[int, Sequence[Piece], torch.Tensor], None]

STATE_VERSION = 2


class DdpCompression(JobBound, ChangingBits):
    """The compression of one DDP module: which parameters, how, and what must survive a restart."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        codec: Codec,
        *,
        overrides: Mapping[str, Codec | None] | None = None,
        min_numel: int = MIN_NUMEL,
        error_feedback: bool | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
        observe: Observer | None = None,
        groups: tuple[dist.ProcessGroup, ...] | None = None,
        hierarchy: Hierarchy | None = None,
        method: Method | None = None,
        spared: tuple[int, ...] = (),
    ) -> None:
        """`overrides` and `min_numel` are those of `choose_bits`.

        `error_feedback` defaults to on for biased codecs and off for stochastic `Block`.
        `observe` is called with (step, pieces, values) before each bucket is reduced.
        `groups` are those of `stage_groups`, made here when absent.
        `hierarchy` (of the same ranks), `method` and `spared` are those of `trimtab.collectives.reduction_for`.
        """
        super().__init__()
        self.codec = codec
        self.automatic = False
        """Whether `trimtab run` made it, so that the script's own choice may replace it."""
        self.step = 0
        self.seed = seed
        if error_feedback is None:
            error_feedback = not isinstance(codec, Block)
        self._hold_unused = bool(ddp.find_unused_parameters)
        self.feedback = self._new_feedback() if error_feedback else None
        self._rights: dict[str, torch.Tensor] = {}
        self._kernels, self._observe = kernels, observe
        self._hierarchy, self._method, self._spared = hierarchy, method, spared
        self._replacement: tuple[object, Callable[[Any, Any], Any]] | None = None
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        sizes = {name: (_real_numel(p), p.dim()) for name, p in ddp.module.named_parameters()}
        pieces, self.fixed = choose_bits(sizes, codec, overrides or {}, min_numel)
        self.pieces = {name: piece for name, piece in pieces.items() if name not in ddp.parameters_to_ignore}
        self.device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
        self._ddp = weakref.ref(ddp)
        self._own_group = ddp.process_group
        self.groups = groups or stage_groups(ddp.process_group, self.device)
        self.scale = 1.0 / dist.get_world_size(self.groups[0])
        self._reductions: dict[Any, tuple[Reduction, list[Piece]]] = {}
        self._in_step: dict[Any, None] = {}
        """Keys of this step's reductions, in the order of its buckets."""
        self._saved_buckets: SavedBuckets | None = None
        self._runner = runner_for(self.device)

    def reduce(self, _state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses a hook with string annotations
        """The communication hook: a future of the bucket's average over the ranks."""
        if not isinstance(bucket, GradBucket):
            raise TrimtabError(
                "torch.compile's optimize_ddp='python_reducer' does not call communication hooks as DDP "
                "does; set torch._dynamo.config.optimize_ddp to True (the default) or False"
            )
        if self._replacement is not None:
            state, hook = self._replacement
            return hook(state, bucket)
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise TrimtabError(
                "compress: join(divide_by_initial_world_size=False) averages over the ranks that are left, which a "
                "communication hook cannot know; use join(), or train without trimtab.compress"
            )
        flat = bucket.buffer()
        if flat.is_sparse:  # ranks have values at different indices: use torch's own reduction
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            return allreduce_hook(self._own_group, bucket)
        if self.feedback is not None:
            self.feedback.loss_scale = running_loss_scale()
        step = self.step
        if bucket.is_last():
            self.step += 1
        if self._saved_buckets is not None:
            saved_buckets = self._saved_buckets
            if bucket.is_last():
                self._saved_buckets = None
            return saved_buckets.take(bucket, lambda p, g, flat: finish(self._steps(p, g, flat, step)))
        return self._runner.submit(self._steps(bucket.parameters(), bucket.gradients(), flat, step), flat)

    def switch_codec(self, codec: Block, *, error_feedback: bool) -> None:
        super().switch_codec(codec, error_feedback=error_feedback)
        if error_feedback != (self.feedback is not None):
            self.feedback = self._new_feedback() if error_feedback else None
        self._reductions.clear()
        self._in_step.clear()

    @property
    def parameter_ids(self) -> frozenset[int]:
        """The ids of the parameters that are reduced here."""
        return frozenset(self._names)

    def defer_to(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Pass every bucket to another communication hook from now on: DDP itself accepts only one."""
        self._replacement = (state, hook)

    @property
    def deferred(self) -> bool:
        """Whether another communication hook gets the buckets."""
        return self._replacement is not None

    def observe_stages(self, observe: StageObserver | None) -> None:
        """Call `observe` with the times of every stage of this step's reductions; called before a step."""
        self._runner.observe = observe

    def close(self) -> None:
        """Stop the communication threads and destroy their groups; the module must not train after this."""
        self._runner.close()
        destroy_groups(self.groups)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same bits."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "step": self.step,
            "rank": self.groups[0].rank(),
            "world_size": self.groups[0].size(),
            **self._saved_bits(),
            "residuals": self.feedback.state_dict() if self.feedback is not None else {},
            "rights": {name: factor.clone() for name, factor in self._rights.items()},
            "buckets": [[piece.name for piece in self._reductions[key][1]] for key in self._in_step],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_version("compression state", state, STATE_VERSION)
        unknown = sorted({*state["residuals"], *state["rights"], *state["bits"]} - self.pieces.keys())
        if unknown:
            raise TrimtabError(
                f"the compression state belongs to another model: it names {', '.join(unknown[:3])}"
            )
        self.seed, self.step = state["seed"], state["step"]
        self._begun = self.step - 1
        self._load_bits(state["bits"], state["changes"])
        if self.feedback is not None:
            own = state.get("rank") in (None, self.groups[0].rank())  # another rank's error would count twice
            residuals = state["residuals"] if own else {}
            on_device = {name: value.to(self.device) for name, value in residuals.items()}
            self.feedback.load_state_dict(on_device)
        self._rights.clear()
        self._rights.update({name: value.to(self.device) for name, value in state["rights"].items()})
        self._reductions.clear()  # they hold the seed and the bits
        self._in_step.clear()
        buckets = state.get("buckets")
        self._saved_buckets = SavedBuckets(buckets, self._names) if buckets else None

    def _new_feedback(self) -> ErrorFeedback:
        observe_loss_scales()
        return ErrorFeedback(hold_unused=self._hold_unused)

    def _steps(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], flat: torch.Tensor, step: int
    ) -> Iterator[dist.Work]:
        if step != self._begun:
            self._begin(step)
        key = (*map(id, parameters), flat.dtype)
        if key not in self._reductions:
            self._reductions[key] = self._plan(parameters, gradients, flat)
        self._in_step[key] = None
        reduction, pieces = self._reductions[key]
        if self._observe is not None:
            self._observe(step, pieces, flat)
        if self.watcher is not None:
            self.watcher.local(step, pieces, flat)
        yield from reduction.steps(flat, step=step, scale=self.scale)
        if self.watcher is not None:
            self.watcher.reduced(step, pieces, flat)

    def _begin(self, step: int) -> None:
        """Apply new bits: the first bucket of a step is about to be encoded.

        One thread runs the first stage of every bucket, in order, so no reduction can see half a
        change. No reduction of an earlier step is in flight: DDP begins a backward pass only when it has
        the results of the last one. On CUDA that holds in the order of the first stage's stream, to
        which the buffers belong: it has just waited for gradients that were computed after the optimizer
        had waited for all stages of the step before. So freed buffers are safe to reuse here.
        """
        changed = self._start(step)
        # DDP rebuilds its buckets after the first step: free the buffers of the old ones.
        self._reductions = {key: self._reductions[key] for key in self._in_step if key in self._reductions}
        self._in_step.clear()
        if changed:
            self._reductions.clear()

    def _plan(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], flat: torch.Tensor
    ) -> tuple[Reduction, list[Piece]]:
        pieces: list[tuple[Piece, torch.Size]] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._names[id(parameter)]
            numel, bits, block = self.pieces[name]
            offset = int(gradient.storage_offset()) - int(flat.storage_offset())
            piece = Piece(name=name, offset=offset, numel=numel, bits=bits, block=block)
            pieces.append((piece, gradient.shape))
        whole = [piece for piece, _ in pieces]
        levels = None if self._hierarchy is None else (self._hierarchy.hosts, self._hierarchy.shared_memory)
        require_agreement(
            fingerprint(whole, str(flat.dtype), self.codec, self.seed, levels, self._method, self._spared),
            self.device,
            self.groups[0],  # of the first stage, whose collectives start in one order on every rank
            what="gradients",
            remedy="give trimtab.compress the same model and arguments on every rank",
        )
        reduction = reduction_for(
            pieces,
            flat.dtype,
            flat.device,
            self.groups,
            self.codec,
            seed=self.seed,
            feedback=self.feedback,
            rights=self._rights,
            kernels=self._kernels,
            hierarchy=self._hierarchy,
            method=self._method,
            spared=self._spared,
        )
        return reduction, whole


def _real_numel(parameter: torch.Tensor) -> int:
    """Values of a parameter in DDP's buckets, where a complex one is two real ones."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def stage_groups(group: dist.ProcessGroup, device: torch.device) -> tuple[dist.ProcessGroup, ...]:
    """A process group for each stage of a reduction: Gloo needs one for each thread. Collective."""
    return private_groups(group, device, STAGE_GROUPS, overlapped=True)


def has_other_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered; one of ours that a copied module inherited does not count."""
    hooks = getattr(ddp, "_comm_hooks", ())
    return any(not isinstance(getattr(hook, "__self__", hook), Detached) for hook, _ in hooks)


def refuse_python_reducer() -> None:
    """Raise before training if torch.compile would bypass the hook."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.optimize_ddp == "python_reducer":
        raise TrimtabError(
            "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's communication hooks; "
            "set it to True (the default) or False"
        )
