"""Dropout whose random numbers belong to units, not to ranks.

A mask depends on (seed, data-parallel replica, module, number of calls, unit, element). So it is the same for every
assignment of units and any number of ranks, and the same on all ranks for replicated values. It uses the
counter-based random bits of `trimtab.random_bits`, at about 25 elementwise integer operations per value, and
attention with dropout materializes its weights instead of using a fused kernel. None of this applies outside
training, or with p = 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of
from trimtab.random_bits import block_keys, stream, uniform16
from trimtab.sharding.find_units import FoundBlock, attention_dropout
from trimtab.sharding.unit_block import ShardedModel, UnitBlock
from trimtab.sharding.unit_kinds import Attention

_LEVELS = 1 << 16


class KeyedDropout(nn.Module):
    """Replaces an `nn.Dropout`: inside a block it masks by unit, elsewhere all ranks use the same mask."""

    def __init__(self, p: float, name: str, sharded: ShardedModel) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.sharded = sharded
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.calls += _new_call()
        block = self.sharded.inside
        if block is None:
            return x * _mask(x.shape, self.p, self.sharded, self.name, self.calls, None, x)
        return _drop_units(x, self.p, block, self.name, self.calls)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _KeyedAttention(nn.Module):
    """Mixed into an attention module: its forward pass, with dropout of attention weights by unit."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block, kind = state_of(self).unit_block
        if not self.training or attention_dropout(self, kind) == 0:
            return super().forward(*args, **kwargs)
        block.calls += _new_call()
        with _DropUnits(block):
            return super().forward(*args, **kwargs)


class _DropUnits(TorchFunctionMode):
    """While active, functional dropout inside the block is by unit."""

    def __init__(self, block: UnitBlock) -> None:
        super().__init__()
        self._block = block
        self._drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._block.sharded.inside is self._block:
            if func is F.dropout:
                return self._dropout(*args, **kwargs)
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        self._drawn += 1
        return _drop_units(x, p, self._block, f"{self._block.name}#{self._drawn}", self._block.calls)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
        weights = self._dropout(scores.softmax(-1), dropout_p)
        return weights @ value


def key_dropout(model: nn.Module, sharded: ShardedModel, found_blocks: Mapping[str, FoundBlock]) -> None:
    """Make every dropout of a model keyed by unit, in place."""
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                keyed = KeyedDropout(child.p, f"{path}.{name}", sharded).train(child.training)
                setattr(module, name, keyed)
    for name, each in found_blocks.items():
        if isinstance(each.kind, Attention) and each.kind.dropout:
            kind = type(each.parent)
            sharded.blocks[name].draws = attention_dropout(each.parent, each.kind) > 0
            attach_state(each.parent).unit_block = (sharded.blocks[name], each.kind)
            # Like torch's fully_shard: still an instance of its class, with one more method.
            each.parent.__class__ = type(f"ShardedModel{kind.__name__}", (_KeyedAttention, kind), {})


def _new_call() -> int:
    """1 in a forward pass; 0 when activation checkpointing recomputes one, which must use the same masks."""
    return 0 if torch._C._current_graph_task_id() != -1 else 1


def _drop_units(x: Tensor, p: float, block: UnitBlock, name: str, calls: int) -> Tensor:
    heads, count = block.heads_per_unit, max(1, block.computing)
    owned = torch.as_tensor(block.computed or [0], device=x.device)
    if heads and x.ndim == 4 and x.shape[1] == count * heads:
        ids = (owned.unsqueeze(1) * heads + torch.arange(heads, device=x.device)).flatten()
        axis = 1
    elif not heads and x.shape[-1] == count:
        ids, axis = owned, x.ndim - 1
    else:
        raise TrimtabError(
            f"tensor_parallel: dropout inside {block.name} on a tensor of shape {tuple(x.shape)}, which has no axis "
            f"for the {count} units of this rank; apply dropout after the block instead"
        )
    return x * _mask(x.shape, p, block.sharded, name, calls, (axis, ids, block.units * max(1, heads)), x)


def _mask(
    shape: torch.Size,
    p: float,
    sharded: ShardedModel,
    name: str,
    calls: int,
    keyed: tuple[int, Tensor, int] | None,
    like: Tensor,
) -> Tensor:
    """0 for dropped values, 1 / (1 - p) for kept ones; `keyed` is (axis, ids along it, total number of ids)."""
    dropped = round(p * _LEVELS)
    if dropped == _LEVELS:
        return like.new_zeros(shape)
    axis, ids, total = keyed or (0, torch.zeros(1, dtype=torch.int64, device=like.device), 1)
    keys = block_keys(
        stream(sharded.seed, calls, sharded.replica, 0), zlib.crc32(name.encode()), 0, total, like.device
    )
    bits = uniform16(keys[ids], math.prod(shape) // len(ids))
    kept = (bits >= dropped).to(like.dtype) * (_LEVELS / (_LEVELS - dropped))
    if keyed is None:
        return kept.view(shape)
    rest = [*shape[:axis], *shape[axis + 1 :]]
    return kept.view(len(ids), *rest).movedim(0, axis)
