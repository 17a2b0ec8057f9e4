"""FSDP2: reduce-scatters gradients, and optionally gathers weights, in fewer bits.

`fully_shard` lets a module's two collectives be replaced. The all-reduce over the replicas of HSDP cannot be
replaced, so its process group is, by one that compresses. Settings are by parameter name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab._compat import reduce_scatter_single
from trimtab.codec import Block
from trimtab.codec.packing import DTYPES, RAW
from trimtab.collectives import Hierarchy, Piece, Reduction, finish, reduction_for
from trimtab.collectives.duplex import all_gather, is_gloo
from trimtab.collectives.groups import destroy_groups
from trimtab.collectives.layout import fingerprint
from trimtab.collectives.reduction import Works
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.doors.backend_plain import ForwardingGroup
from trimtab.doors.changing_bits import ChangingBits
from trimtab.doors.fsdp_communicators import gather_groups
from trimtab.doors.fsdp_prefetch import ForwardPrefetch
from trimtab.doors.fsdp_shards import (
    ScatterFeedback,
    ShardLayout,
    WeightGather,
    all_gather_inside,
    gradient_key,
    plan_shards,
    reduce_scatter,
    reduce_scatter_inside,
)
from trimtab.doors.loss_scale import observe_loss_scales
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.random_bits import absorb
from trimtab.wire_format import WEIGHT_BLOCK

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


class ShardedGroup:
    """One group of parameters that FSDP2 sends together."""

    def __init__(
        self, owner: FsdpCompression, module: Any, param_group: Any, names: Mapping[int, str]
    ) -> None:
        self.steps = 0, 0
        """Reduce-scatters and all-reduces of gradients so far: what keys the random numbers."""
        self._owner, self._module, self.param_group = owner, module, param_group
        self._params = {parameter_name(p, names): p for p in param_group.fsdp_params}
        self._layouts: dict[Any, ShardLayout | None] = {}
        self._reductions: dict[Any, Reduction] = {}

    def shard_numel(self, name: str) -> int:
        """Values of a parameter in a chunk, padding included."""
        return int(self._params[name].padded_sharded_param_size.numel())

    @property
    def names(self) -> list[str]:
        """Of the parameters, as in the model's `named_parameters`."""
        return list(self._params)

    def attach(self, *, shard: bool, replicate: bool) -> bool:
        """Replace FSDP2's collectives; returns whether weights travel over Gloo."""
        if shard:
            self._module.set_custom_reduce_scatter(_Collective(self.reduce_scatter))
        info = self.param_group.mesh_info
        group = getattr(info, "shard_process_group", None)
        over_gloo = group is not None and is_gloo(self._owner.device, group)
        if "shard" in self._owner.hosts or over_gloo:
            self._module.set_custom_all_gather(_Collective(self.all_gather))
        else:
            self.attach_gather()
        if over_gloo:
            # On a CPU no stream overlaps anything: FSDP2 waits for the weights that it prefetches in backward.
            self.param_group.unshard_async_op = True
        if replicate and getattr(info, "replicate_process_group", None) is not None:
            info = copy.copy(info)  # the parameters keep theirs: only this group's all-reduce changes
            info.replicate_process_group = _ReplicaGroup(self, info.replicate_process_group)
            self.param_group.mesh_info = info
        return over_gloo

    def attach_gather(self) -> None:
        """Replace FSDP2's gather where weights are compressed."""
        if self._owner.weight_bits is not None:
            self._module.set_custom_all_gather(_Collective(self.all_gather))

    def forget(self) -> None:
        """Drop what was planned with the old seed."""
        self._layouts.clear()
        self._reductions.clear()

    def reduce_scatter(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any
    ) -> None:
        """What FSDP2 calls with the gradients of the parameters that have one. It orders this by stream."""
        output, values = output_tensor, input_tensor
        host = self._owner.hosts.get("shard")
        if host is not None and values.dtype in DTYPES:
            reduce_scatter_inside(output, values, host, scale=self._scale(op, group.size()))
            return
        params = {name: p for name, p in self._params.items() if p.sharded_param.requires_grad}
        owner, (step, reduced) = self._owner, self.steps
        owner.begin(step)
        layout = self._layout("gradients", params, values, values.numel() // group.size(), group)
        if layout is None:
            reduce_scatter_single(output, values, group, op)
            return
        self.steps = step + 1, reduced
        shards = self._shards("gradients", params)
        own = values[group.rank() * layout.chunk : (group.rank() + 1) * layout.chunk]
        if owner.watcher is not None:
            owner.watcher.local(step, shards, own)
        reduce_scatter(
            output,
            values,
            layout,
            group,
            key=gradient_key(owner.seed, step),
            scale=self._scale(op, group.size()),
            stochastic=owner.codec.stochastic,
            feedback=None if owner.residuals is None else (owner.residuals, self.names[0]),
        )
        if owner.watcher is not None:
            owner.watcher.reduced(step, shards, output)

    def all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """What FSDP2 calls with its shards of all parameters."""
        output, values = output_tensor, input_tensor
        host, layout = self._owner.hosts.get("shard"), None
        if self._owner.weight_bits is not None:
            layout = self._layout("weights", self._params, values, values.numel(), group)
        elif host is not None and values.dtype in DTYPES and group.size() == host.inside.world:
            all_gather_inside(output, values, host)
            return Works(values.device) if async_op else None
        if layout is None:
            work: dist.Work = all_gather(output, values, group, in_stream=not async_op, ahead=async_op)
        else:
            apart = self._owner.gathers.get(group, group)
            work = WeightGather(output, values, layout, apart, in_stream=not async_op)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, flat: torch.Tensor, group: dist.ProcessGroup, op: Any) -> bool:
        """What FSDP2 calls with the reduced shards, for HSDP; returns whether it reduced them."""
        params = {name: p for name, p in self._params.items() if p.sharded_param.requires_grad}
        shards = self._shards("gradients", params)
        if sum(shard.numel for shard in shards) != flat.numel() or flat.dtype not in DTYPES:
            return False
        key = *params, flat.dtype
        scattered, step = self.steps
        self._owner.begin(step)
        if key not in self._reductions:
            self._reductions[key] = self._plan_replicas(self._shards("gradients", params), flat, group)
        self.steps = scattered, step + 1
        scale = self._scale(op, group.size())
        finish(self._reductions[key].steps(flat, step=step, scale=scale))
        return True

    def _plan_replicas(self, shards: list[Piece], flat: torch.Tensor, group: dist.ProcessGroup) -> Reduction:
        shard_rank = getattr(self.param_group.mesh_info, "shard_mesh_rank", 0)
        # Each shard draws its own random numbers: the ranks in the replicas' groups are the same for all shards.
        pieces = [replace(shard, name=f"{shard.name}[{shard_rank}]") for shard in shards]
        self._compare(fingerprint(pieces, str(flat.dtype), self._owner.codec, self._owner.seed), flat, group)
        return reduction_for(
            [(piece, torch.Size((piece.numel,))) for piece in pieces],
            flat.dtype,
            flat.device,
            (group, group),
            self._owner.codec,
            seed=absorb(self._owner.seed, 1),  # apart from the reduce-scatter's numbers
            hierarchy=self._owner.hosts.get("replicate"),
        )

    def _layout(
        self, what: str, params: Mapping[str, Any], flat: torch.Tensor, chunk: int, group: dist.ProcessGroup
    ) -> ShardLayout | None:
        """How a buffer travels; None (exactly) if it does not hold the shards of `params`."""
        key = what, *params, chunk, flat.dtype, group.size()
        if key not in self._layouts:
            shards = self._shards(what, params)
            if sum(shard.numel for shard in shards) == chunk and flat.dtype in DTYPES:
                self._compare(fingerprint(shards, str(flat.dtype), self._owner.seed), flat, group)
                self._layouts[key] = plan_shards(shards, flat.dtype, group.size(), group.rank())
            else:
                self._layouts[key] = None
                logger().warning(
                    "%s: its %s travel exactly when a parameter has no gradient, has a type that the codec "
                    "does not support, or is resharded to part of the mesh after forward",
                    self.names[0],
                    what,
                )
        return self._layouts[key]

    def _shards(self, what: str, params: Mapping[str, Any]) -> list[Piece]:
        """The parameters' parts of a chunk, padding included."""
        shards, offset = [], 0
        for name in params:
            _, bits, block = self._owner.pieces[name]
            if what == "weights" and bits != RAW:
                assert self._owner.weight_bits is not None
                bits, block = self._owner.weight_bits, WEIGHT_BLOCK
            numel = self.shard_numel(name)
            shards.append(Piece(name=name, offset=offset, numel=numel, bits=bits, block=block))
            offset += numel
        return shards

    def _scale(self, op: Any, world: int) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1.0 / world
        # NCCL's sum of scaled values, whose factor cannot be read back: FSDP2 makes it from this one.
        factor = self.param_group.gradient_divide_factor
        assert factor is not None, f"FSDP2 reduces by SUM, AVG, or SUM with a factor, not by {op}"
        return 1.0 / float(factor)

    def _compare(self, own: int, like: torch.Tensor, group: dist.ProcessGroup) -> None:
        remedy = "give trimtab.compress the same model and arguments on every rank"
        require_agreement(own, like.device, group, what=self.names[0], remedy=remedy)


class _Collective:
    """Implements FSDP2's `ReduceScatter` and `AllGather`, whose classes are private."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(*arguments, **named)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReplicaGroup(ForwardingGroup):
    """The group of a shard's replicas, with compressed all-reduces."""

    def __init__(self, sharded: ShardedGroup, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._sharded = sharded

    def allreduce(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        (flat,) = tensors
        if self._sharded.all_reduce(flat, self._plain, opts.reduceOp):
            return Works(flat.device)
        return self._plain.allreduce(tensors, opts)


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


def parameter_name(fsdp_param: Any, names: Mapping[int, str]) -> str:
    """A parameter's name in the model, from the names of its modules: FSDP2 may replace the parameter itself."""
    info = fsdp_param._module_info
    prefix = names[id(info.module)]
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


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
