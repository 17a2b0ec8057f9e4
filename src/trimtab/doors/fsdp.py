"""FSDP2: reduce-scatters gradients, and optionally gathers weights, in fewer bits.

`fully_shard` lets a module's two collectives be replaced. The all-reduce over the replicas of HSDP cannot be
replaced, so its process group is, by one that compresses. Settings are by parameter name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab._compat import all_gather_single, reduce_scatter_single
from trimtab.codec import Block
from trimtab.codec.packing import DTYPES, RAW
from trimtab.collectives import Piece, Reduction, finish, reduction_for
from trimtab.collectives.layout import fingerprint
from trimtab.collectives.reduction import Works
from trimtab.doors.agreement import check_state_version, require_agreement
from trimtab.doors.backend_plain import ForwardingGroup
from trimtab.doors.fsdp_shards import ShardLayout, WeightGather, gradient_key, plan_shards, reduce_scatter
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.random_bits import absorb

STATE_VERSION = 1
WEIGHT_BLOCK = 256
"""Block of gathered weights: rounding to the nearest is more accurate in small blocks."""


class FsdpCompression:
    """The compression of one model of `fully_shard` modules, and what must survive a restart."""

    def __init__(
        self,
        model: nn.Module,
        codec: Block,
        pieces: Mapping[str, tuple[int, int, int]],
        *,
        weight_bits: int | None = None,
        seed: int = 0,
        shard: bool = True,
        replicate: bool = True,
    ) -> None:
        """`pieces` gives for every parameter name its numel, bits (0: exact) and block.

        `shard` and `replicate` say on which axes of the mesh gradients travel compressed.
        """
        self.codec, self.seed, self.weight_bits = codec, seed, weight_bits
        self.pieces = dict(pieces)
        names = {id(module): name for name, module in model.named_modules()}
        self.groups = [
            ShardedGroup(self, module, group, names)
            for module in sharded_modules(model)
            for group in param_groups(module)
        ]
        for group in self.groups:
            group.attach(shard=shard, replicate=replicate)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same bits; the same on every rank."""
        steps = {name: group.steps for group in self.groups for name in group.names}
        return {"version": STATE_VERSION, "seed": self.seed, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_version("compression state", state, STATE_VERSION)
        own = {name for group in self.groups for name in group.names}
        if own != state["steps"].keys():
            other = sorted(own ^ state["steps"].keys())
            raise TrimtabError(f"the compression state belongs to another model: see {', '.join(other[:3])}")
        self.seed = state["seed"]
        for group in self.groups:
            scattered, reduced = state["steps"][group.names[0]]
            group.steps = scattered, reduced
            group.forget()

    def close(self) -> None:
        """Does nothing: FSDP2 runs its collectives itself."""


class ShardedGroup:
    """One group of parameters that FSDP2 sends together."""

    def __init__(
        self, owner: FsdpCompression, module: Any, param_group: Any, names: Mapping[int, str]
    ) -> None:
        self.steps = 0, 0
        """Reduce-scatters and all-reduces of gradients so far: what keys the random numbers."""
        self._owner, self._module, self._param_group = owner, module, param_group
        self._params = {parameter_name(p, names): p for p in param_group.fsdp_params}
        self._layouts: dict[Any, ShardLayout | None] = {}
        self._reductions: dict[Any, Reduction] = {}

    @property
    def names(self) -> list[str]:
        """Of the parameters, as in the model's `named_parameters`."""
        return list(self._params)

    def attach(self, *, shard: bool, replicate: bool) -> None:
        """Replace FSDP2's collectives."""
        if shard:
            self._module.set_custom_reduce_scatter(_Collective(self.reduce_scatter))
        if self._owner.weight_bits is not None:
            self._module.set_custom_all_gather(_Collective(self.all_gather))
        info = self._param_group.mesh_info
        if replicate and getattr(info, "replicate_process_group", None) is not None:
            info = copy.copy(info)  # the parameters keep theirs: only this group's all-reduce changes
            info.replicate_process_group = _ReplicaGroup(self, info.replicate_process_group)
            self._param_group.mesh_info = info

    def forget(self) -> None:
        """Drop what was planned with the old seed."""
        self._layouts.clear()
        self._reductions.clear()

    def reduce_scatter(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any
    ) -> None:
        """What FSDP2 calls with the gradients of the parameters that have one. It orders this by stream."""
        output, values = output_tensor, input_tensor
        params = {name: p for name, p in self._params.items() if p.sharded_param.requires_grad}
        layout = self._layout("gradients", params, values, values.numel() // group.size(), group)
        if layout is None:
            reduce_scatter_single(output, values, group, op)
            return
        step, reduced = self.steps
        self.steps = step + 1, reduced
        key, scale = gradient_key(self._owner.seed, step), self._scale(op, group.size())
        stochastic = self._owner.codec.stochastic
        reduce_scatter(output, values, layout, group, key=key, scale=scale, stochastic=stochastic)

    def all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """What FSDP2 calls with its shards of all parameters."""
        output, values = output_tensor, input_tensor
        layout = self._layout("weights", self._params, values, values.numel(), group)
        if layout is None:
            return all_gather_single(output, values, group, async_op=async_op)
        work = WeightGather(output, values, layout, group)
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
        if key not in self._reductions:
            self._reductions[key] = self._plan_replicas(shards, flat, group)
        scattered, step = self.steps
        self.steps = scattered, step + 1
        scale = self._scale(op, group.size())
        finish(self._reductions[key].steps(flat, step=step, scale=scale))
        return True

    def _plan_replicas(self, shards: list[Piece], flat: torch.Tensor, group: dist.ProcessGroup) -> Reduction:
        shard_rank = getattr(self._param_group.mesh_info, "shard_mesh_rank", 0)
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
        for name, parameter in params.items():
            _, bits, block = self._owner.pieces[name]
            if what == "weights" and bits != RAW:
                assert self._owner.weight_bits is not None
                bits, block = self._owner.weight_bits, WEIGHT_BLOCK
            numel = parameter.padded_sharded_param_size.numel()
            shards.append(Piece(name=name, offset=offset, numel=numel, bits=bits, block=block))
            offset += numel
        return shards

    def _scale(self, op: Any, world: int) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1.0 / world
        # NCCL's sum of scaled values, whose factor cannot be read back: FSDP2 makes it from this one.
        factor = self._param_group.gradient_divide_factor
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


def sharded_modules(model: nn.Module) -> list[Any]:
    """The model's modules that `fully_shard` was called on."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


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
