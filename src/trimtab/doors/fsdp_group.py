"""One group of parameters that FSDP2 sends together, its collectives replaced by compressed ones.

`fully_shard` lets a module's two collectives be replaced. The all-reduce over the replicas of HSDP cannot be
replaced, so its process group is, by one that compresses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab._compat import reduce_scatter_single
from trimtab.codec.packing import DTYPES, RAW
from trimtab.collectives import Piece, Reduction, finish, reduction_for
from trimtab.collectives.duplex import all_gather, is_gloo
from trimtab.collectives.layout import fingerprint
from trimtab.collectives.reduction import Works
from trimtab.doors.agreement import require_agreement
from trimtab.doors.backend_plain import ForwardingGroup
from trimtab.doors.fsdp_shards import (
    ShardLayout,
    WeightGather,
    all_gather_inside,
    gradient_key,
    plan_shards,
    reduce_scatter,
    reduce_scatter_inside,
)
from trimtab.environment import logger
from trimtab.random_bits import absorb
from trimtab.wire_format import WEIGHT_BLOCK

if TYPE_CHECKING:
    from trimtab.doors.fsdp import FsdpCompression


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


def parameter_name(fsdp_param: Any, names: Mapping[int, str]) -> str:
    """A parameter's name in the model, from the names of its modules: FSDP2 may replace the parameter itself."""
    info = fsdp_param._module_info
    prefix = names[id(info.module)]
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)
