"""Chooses the reduction of a bucket; a compressed all-reduce of a single tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from trimtab.codec.codec import Block, Codec, Uncompressed
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.kernels import Kernels, kernels_for
from trimtab.codec.packing import DTYPES, RAW
from trimtab.codec.powersgd import PowerSGD
from trimtab.collectives.block import AllGather, ScatterReduceAllGather
from trimtab.collectives.codec_gather import CodecAllGather
from trimtab.collectives.halving import Halving, owners
from trimtab.collectives.hierarchy import HierarchicalReduction, Hierarchy, PlainShard, ShardFeedback
from trimtab.collectives.layout import Piece, plan_layout
from trimtab.collectives.low_rank import LowRankReduction
from trimtab.collectives.reduction import PlainReduction, Reduction, finish
from trimtab.collectives.ring import Ring
from trimtab.collectives.tree import Tree
from trimtab.wire_format import in_one_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

Method = Literal["all_gather", "scatter_reduce", "ring", "tree", "halving"]
_KINDS: dict[Method, type[AllGather | ScatterReduceAllGather | Ring | Tree | Halving]] = {
    "all_gather": AllGather,
    "scatter_reduce": ScatterReduceAllGather,
    "ring": Ring,
    "tree": Tree,
    "halving": Halving,
}


def reduction_for(
    pieces: Sequence[tuple[Piece, torch.Size]],
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    codec: Codec,
    *,
    seed: int,
    feedback: ErrorFeedback | None = None,
    rights: dict[str, torch.Tensor] | None = None,
    kernels: Kernels | None = None,
    hierarchy: Hierarchy | None = None,
    method: Method | None = None,
) -> Reduction:
    """The reduction of a bucket that holds these pieces (each with its tensor's shape).

    `feedback` (error feedback) and `rights` (PowerSGD's starting factors) outlive the bucket: both are
    keyed by parameter name.

    Types that the codec does not support (float64, complex) use the backend's own all-reduce.
    With a `hierarchy`, `Block` and `Uncompressed` reduce exactly inside each host first, and each rank sends only
    its shard between hosts; PowerSGD and top-k need whole parameters, and stay flat.
    `method` chooses how block-quantized values are reduced (between hosts, with a hierarchy); by
    default two ranks, and tiny fp32 buckets, use one all-gather, all others scatter-reduce-allgather.
    """
    if dtype not in DTYPES:
        return PlainReduction(tuple(groups))
    if isinstance(codec, PowerSGD):
        feedback = ErrorFeedback() if feedback is None else feedback
        rights = {} if rights is None else rights
        return LowRankReduction(pieces, groups, codec, seed=seed, feedback=feedback, rights=rights)
    whole = [piece for piece, _ in pieces]
    if hierarchy is not None and isinstance(codec, (Block, Uncompressed)):
        return _hierarchical_reduction(
            whole, dtype, device, hierarchy, codec, seed, feedback, kernels, method
        )
    if not isinstance(codec, Block):
        return CodecAllGather(pieces, groups, codec, seed=seed, feedback=feedback)
    return _block_reduction(whole, dtype, device, groups, codec, seed, feedback, kernels, method)


def _hierarchical_reduction(
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    device: torch.device,
    hierarchy: Hierarchy,
    codec: Block | Uncompressed,
    seed: int,
    feedback: ErrorFeedback | None,
    kernels: Kernels | None,
    method: Method | None,
) -> Reduction:
    between: Reduction | None = None
    residuals: ShardFeedback | None = None
    if isinstance(codec, Uncompressed):
        # Uncompressed, shards of equal payload are shards of equal size.
        pieces, feedback = [replace(piece, bits=RAW) for piece in pieces], None
    shard = hierarchy.shard(pieces, dtype)
    if hierarchy.between and shard.pieces and isinstance(codec, Uncompressed):
        between = PlainShard(hierarchy.between, *shard.cuts[hierarchy.index : hierarchy.index + 2])
    elif hierarchy.between and shard.pieces and isinstance(codec, Block):
        residuals = None if feedback is None else ShardFeedback()
        between = _block_reduction(
            shard.pieces, dtype, device, hierarchy.between, codec, seed, residuals, kernels, method
        )
    return HierarchicalReduction(
        hierarchy.inside, shard, between, pieces=pieces, feedback=feedback, residuals=residuals
    )


def _block_reduction(
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    codec: Block,
    seed: int,
    feedback: ErrorFeedback | None,
    kernels: Kernels | None,
    method: Method | None,
) -> Reduction:
    world = dist.get_world_size(groups[0])
    whole = plan_layout(pieces, dtype, 1)
    if method is None:
        # In half precision every payload that is added rounds the sums: their owner rounds them once.
        gather = in_one_gather(whole.chunks[0].nbytes, world) and (dtype == torch.float32 or world <= 2)
        method = "all_gather" if gather else "scatter_reduce"
    kind = _KINDS[method]
    layout = whole
    if kind not in (AllGather, Tree):
        layout = plan_layout(pieces, dtype, owners(world) if kind is Halving else world)
    return kind(
        layout,
        groups,
        kernels or kernels_for(device),
        seed=seed,
        stochastic=codec.stochastic,
        device=device,
        feedback=feedback,
    )


def all_reduce(
    tensor: torch.Tensor,
    codec: Codec,
    *,
    op: Literal["sum", "avg"] = "sum",
    weight: float | None = None,
    name: str = "",
    step: int = 0,
    seed: int = 0,
    groups: Sequence[dist.ProcessGroup] | None = None,
    hierarchy: Hierarchy | None = None,
    method: Method | None = None,
) -> None:
    """Reduce a tensor over the ranks in place, compressed, to the same bits everywhere.

    With `weight`, which may differ between ranks, the result is the weighted average
    Σ weight·tensor / Σ weight, and `op` is ignored. `groups` gives one process group for each
    stage; by default both stages run on the default group, one after the other. `hierarchy` and `method` are
    those of `reduction_for`.
    """
    groups = groups or (dist.group.WORLD,) * 2  # type: ignore[assignment]
    assert groups is not None
    if weight is not None:
        scale = weight / _total(weight, tensor.device, groups[0])
    else:
        scale = 1.0 / dist.get_world_size(groups[0]) if op == "avg" else 1.0
    if tensor.numel() == 0:
        return
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    bits = RAW if isinstance(codec, Uncompressed) else getattr(codec, "bits", 1)
    block = getattr(codec, "block", 1024)
    piece = Piece(name=name, offset=0, numel=flat.numel(), bits=bits, block=block)
    reduction = reduction_for(
        [(piece, tensor.shape)],
        flat.dtype,
        flat.device,
        groups,
        codec,
        seed=seed,
        hierarchy=hierarchy,
        method=method,
    )
    finish(reduction.steps(flat, step=step, scale=scale))
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))


def _total(weight: float, device: torch.device, group: dist.ProcessGroup) -> float:
    if not weight >= 0:
        raise ValueError(f"a weight cannot be negative or NaN; got {weight}")
    total = torch.tensor([weight], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    if not float(total) > 0:
        raise ValueError("the weights of all ranks are zero: there is nothing to average")
    return float(total)
