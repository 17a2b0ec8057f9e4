"""FSDP2: reduce-scatters gradients, and optionally gathers weights, in fewer bits.

What a model's groups of parameters (`fsdp_group`) have in common: bits, steps, what survives a restart. Settings are by
parameter name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.codec import Block
from trimtab.collectives import Hierarchy
from trimtab.collectives.groups import destroy_groups
from trimtab.doors.agreement import check_state_version
from trimtab.doors.changing_bits import ChangingBits
from trimtab.doors.fsdp_communicators import gather_groups
from trimtab.doors.fsdp_group import ShardedGroup
from trimtab.doors.fsdp_prefetch import ForwardPrefetch
from trimtab.doors.fsdp_shards import ScatterFeedback
from trimtab.doors.loss_scale import observe_loss_scales
from trimtab.errors import TrimtabError

STATE_VERSION = 1


class FsdpCompression(ChangingBits):
    """The compression of one model of `fully_shard` modules, and what must survive a restart."""

    def __init__(
        self,
        model: nn.Module,
        codec: Block,
        pieces: Mapping[str, tuple[int, int, int]],
        *,
        weight_bits: int | None = None,
        weights_measured: bool = False,
        seed: int = 0,
        shard: bool = True,
        replicate: bool = True,
        hosts: Mapping[str, Hierarchy] | None = None,
        fixed: Collection[str] = (),
        error_feedback: bool = False,
    ) -> None:
        """`pieces` gives for every parameter name its numel, bits (0: exact) and block.

        `weights_measured` says that `weight_bits` was chosen by measuring: a resumed run keeps what it had before.
        `shard` and `replicate` say on which axes of the mesh gradients travel compressed. `hosts` has the shared
        memory of axes whose ranks are on one host: there gradients are exact, and weights too without `weight_bits`.
        `fixed` are the parameters whose bits never change. With `error_feedback` what a reduce-scatter rounds away is
        added to the next one.
        """
        super().__init__()
        self.step = 0
        self.fixed = set(fixed)
        self.residuals = ScatterFeedback() if error_feedback else None
        if error_feedback:
            observe_loss_scales()
        parameters = list(model.parameters())
        self.device = local_device(parameters[0])
        self._parameter_ids = frozenset(map(id, parameters))
        self.hosts = dict(hosts or {})
        self.codec: Block = codec
        self.seed, self.weight_bits = seed, weight_bits
        self._weights_measured = weights_measured
        self.gathers: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        """By the group that shards, the one in which compressed weights are gathered, if that is another."""
        names = {id(module): name for name, module in model.named_modules()}
        self.groups = [
            ShardedGroup(self, module, group, names)
            for module in sharded_modules(model)
            for group in param_groups(module)
        ]
        # A tied weight is sent under one of its names, and what no `fully_shard` manages is not sent here.
        sent = {name for group in self.groups for name in group.names}
        self.pieces = {name: piece for name, piece in pieces.items() if name in sent}
        self._gather_apart()
        over_gloo = [group.attach(shard=shard, replicate=replicate) for group in self.groups]
        if all(over_gloo):
            ForwardPrefetch(sharded_modules(model))

    @property
    def carries_error(self) -> bool:
        return self.residuals is not None

    @property
    def parameter_ids(self) -> frozenset[int]:
        return self._parameter_ids

    def local_numel(self, name: str) -> int:
        return next(group.shard_numel(name) for group in self.groups if name in group.names)

    def switch_codec(self, codec: Block, *, error_feedback: bool) -> None:
        assert not error_feedback, "no family with error feedback is offered here"
        super().switch_codec(codec, error_feedback=False)
        self._forget()

    def begin(self, step: int) -> None:
        """Called before a group's gradients are sent; the first of a step may change bits."""
        if step > self._begun:
            self.step = step + 1
            if self._start(step):
                self._forget()

    def _forget(self) -> None:
        for group in self.groups:
            group.forget()

    def _gather_apart(self) -> None:
        """Make the groups in which compressed weights are gathered. Collective."""
        if self.weight_bits is not None and "shard" not in self.hosts and not self.gathers:
            self.gathers = gather_groups([group.param_group for group in self.groups], self.device)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same bits; but for error feedback, the same on every rank."""
        steps = {name: group.steps for group in self.groups for name in group.names}
        state = {
            "version": STATE_VERSION,
            "seed": self.seed,
            "steps": steps,
            "weight_bits": self.weight_bits,
            **self._saved_bits(),
        }
        if self.residuals is not None:
            state |= {"residuals": self.residuals.state_dict(), "rank": dist.get_rank()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_version("compression state", state, STATE_VERSION)
        own = {name for group in self.groups for name in group.names}
        if own != state["steps"].keys():
            other = sorted(own ^ state["steps"].keys())
            raise TrimtabError(f"the compression state belongs to another model: see {', '.join(other[:3])}")
        self.seed = state["seed"]
        if self._weights_measured and "weight_bits" in state:
            self.weight_bits = state["weight_bits"]
            self._gather_apart()
            for group in self.groups:
                group.attach_gather()
        self._load_bits(state.get("bits", {}), state.get("changes", {}))
        for group in self.groups:
            scattered, reduced = state["steps"][group.names[0]]
            group.steps = scattered, reduced
            self._begun = max(self._begun, scattered - 1, reduced - 1)
        self.step = self._begun + 1
        if self.residuals is not None:
            is_own = state.get("rank") == dist.get_rank()  # another rank's error would count twice
            self.residuals.load_state_dict(state.get("residuals", {}) if is_own else {}, self.device)
        self._forget()

    def close(self) -> None:
        """Release shared memory and communicators; FSDP2 runs its collectives itself."""
        for host in self.hosts.values():
            host.close()
        destroy_groups(list(self.gathers.values()))
        self.gathers.clear()


def local_device(parameter: Any) -> torch.device:
    """Where this rank's part of a parameter is."""
    return torch.device(parameter.to_local().device if hasattr(parameter, "to_local") else parameter.device)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The model's modules that `fully_shard` was called on."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered_values(model: nn.Module) -> tuple[torch.dtype, int]:
    """The type in which most weights are gathered, and how many values all weights have, padding included."""
    numel: dict[torch.dtype, int] = {}
    for group in (group for module in sharded_modules(model) for group in param_groups(module)):
        for param in group.fsdp_params:
            dtype = group.mp_policy.param_dtype or param.sharded_param.dtype
            whole = param.padded_sharded_param_size.numel() * param.mesh_info.shard_mesh_size
            numel[dtype] = numel.get(dtype, 0) + whole
    return max(numel, key=lambda dtype: (numel[dtype], str(dtype))), sum(numel.values())


def process_groups(model: nn.Module) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups over which the gradients are scattered, and over which replicas are summed (HSDP)."""
    for module in sharded_modules(model):
        for group in param_groups(module):
            info = group.mesh_info
            return getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None)
    return None, None


def param_groups(module: Any) -> list[Any]:
    """What FSDP2 gathers and reduces together of a module that `fully_shard` was called on."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, without the plural
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    if len(groups) > 1:
        raise TrimtabError(
            "compress: a module of this model is sharded over several meshes at once (shard_placement_fn); "
            "FSDP2 does not let their collectives be replaced"
        )
    return list(groups)
