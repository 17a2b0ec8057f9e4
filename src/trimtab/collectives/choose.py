"""Chooses the reduction of a bucket; a compressed all-reduce of a single tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from trimtab.codec.codec import Block, Codec, Uncompressed
from trimtab.codec.contract import Kernels
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import DTYPES, RAW
from trimtab.codec.powersgd import PowerSGD
from trimtab.collectives.block import AllGather, Ring, ScatterReduceAllGather, Tree
from trimtab.collectives.halving import Halving, owners
from trimtab.collectives.hierarchy import (
    HierarchicalReduction,
    Hierarchy,
    ShardFeedback,
    SharedMemoryIntraHost,
    SharedReduction,
)
from trimtab.collectives.layout import Piece, plan_layout
from trimtab.collectives.reduction import PlainReduction, Reduction, finish
from trimtab.collectives.whole_tensors import CodecAllGather, LowRankReduction
from trimtab.wire_format import in_one_gather

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
    spared: Sequence[int] = (),
) -> Reduction:
    """The reduction of a bucket that holds these pieces (each with its tensor's shape).

    `feedback` (error feedback) and `rights` (PowerSGD's starting factors) outlive the bucket: both are
    keyed by parameter name.

    Types that the codec does not support (float64, complex) use the backend's own all-reduce.
    With a `hierarchy`, `Block` and `Uncompressed` reduce exactly inside each host first, and each rank sends only
    its shard between hosts, if there are several; PowerSGD and top-k need whole parameters, and stay flat.
    `method` chooses how block-quantized values are reduced (between hosts, with a hierarchy); by
    default two ranks, and tiny fp32 buckets, use one all-gather, all others scatter-reduce-allgather.
    `spared` ranks, those behind slow links, own nothing of what is scatter-reduced without a hierarchy.
    """
    if dtype not in DTYPES:
        return PlainReduction(groups)
    if isinstance(codec, PowerSGD):
        feedback = ErrorFeedback() if feedback is None else feedback
        rights = {} if rights is None else rights
        return LowRankReduction(pieces, groups, codec, seed=seed, feedback=feedback, rights=rights)
    whole = [piece for piece, _ in pieces]

    def block_reduction(
        pieces: Sequence[Piece], groups: Sequence[dist.ProcessGroup], feedback: ErrorFeedback | None
    ) -> Reduction:
        assert isinstance(codec, Block)
        world, layout = dist.get_world_size(groups[0]), plan_layout(pieces, dtype, 1)
        # In half precision every payload that is added rounds the sums: their owner rounds them once.
        gather = in_one_gather(layout.chunks[0].nbytes, world) and (dtype == torch.float32 or world <= 2)
        kind = _KINDS[method or ("all_gather" if gather else "scatter_reduce")]
        if kind not in (AllGather, Tree):
            idle = spared if kind is ScatterReduceAllGather and hierarchy is None else ()
            layout = plan_layout(pieces, dtype, owners(world) if kind is Halving else world, idle)
        return kind(
            layout,
            groups,
            kernels or kernels_for(device),
            seed=seed,
            stochastic=codec.stochastic,
            device=device,
            feedback=feedback,
        )

    if hierarchy is None or not isinstance(codec, (Block, Uncompressed)):
        if isinstance(codec, Block):
            return block_reduction(whole, groups, feedback)
        return CodecAllGather(pieces, groups, codec, seed=seed, feedback=feedback)
    if (
        hierarchy.hosts.count == 1
        and feedback is None
        and isinstance(hierarchy.inside, SharedMemoryIntraHost)
    ):
        return SharedReduction(hierarchy.inside)
    if isinstance(codec, Uncompressed):
        # Uncompressed, shards of equal payload are shards of equal size.
        whole, feedback = [replace(piece, bits=RAW) for piece in whole], None
    shard = hierarchy.shard(whole, dtype)
    between: Reduction | None = None
    residuals = None if feedback is None else ShardFeedback()
    if hierarchy.between and shard.pieces:
        if isinstance(codec, Block):
            between = block_reduction(shard.pieces, hierarchy.between, residuals)
        else:
            span = slice(*shard.cuts[hierarchy.index : hierarchy.index + 2])
            between = PlainReduction(hierarchy.between, span)
    return HierarchicalReduction(
        hierarchy.inside, shard, between, pieces=whole, feedback=feedback, residuals=residuals
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
