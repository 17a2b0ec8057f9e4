"""Modules that compute with parameters of their own instead of linear maps: torch's attention, and experts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.model_state import attach_state, state_of
from trimtab.sharding.group import enter, leave
from trimtab.sharding.projection import by_part
from trimtab.sharding.unit_block import UnitBlock
from trimtab.sharding.unit_kinds import Experts, TorchAttention


def functional_kind(module: nn.Module) -> TorchAttention | Experts | str | None:
    """The kind of such a module, a reason why it cannot be split, or None if it is no such module."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            return "its keys or values have another width than its queries, or get an extra entry"
        return TorchAttention()
    count = getattr(module, "num_experts", None)
    stacked = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim >= 2}
    if not isinstance(count, int) or len(stacked) < 2 or any(p.shape[0] != count for p in stacked.values()):
        return None
    if {"top_k_index", "top_k_weights"} <= inspect.signature(module.forward).parameters.keys():
        return Experts(names=tuple(name for name, _ in module.named_parameters(recurse=False)))
    return None


def adapt_attention(block: UnitBlock) -> None:
    """Let an `nn.MultiheadAttention` compute this rank's heads."""
    parent: Any = block.parent
    attach_state(parent).functional_block = block
    parent.__class__ = type(f"Sharded{type(parent).__name__}", (_TorchAttention, type(parent)), {})
    # nn.TransformerEncoderLayer would read the projections itself, in a fused kernel.
    parent._qkv_same_embed_dim = False


def adapt_experts(block: UnitBlock) -> None:
    """Let a module of experts compute this rank's experts."""
    parent = block.parent
    attach_state(parent).functional_block = block
    parent.__class__ = type(f"Sharded{type(parent).__name__}", (_Experts, type(parent)), {})


class _TorchAttention(nn.Module):
    """Mixed into an `nn.MultiheadAttention`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; weights are averaged over the heads of all ranks."""
        own: Any = self
        block: UnitBlock = state_of(self).functional_block
        batched = query.ndim == 3
        swapped = batched and not own.batch_first
        inputs = [
            x.unsqueeze(0) if not batched else x.transpose(0, 1) if swapped else x
            for x in (query, key, value)
        ]
        if key is query and value is query:
            inputs = [inputs[0]] * 3
        elif value is key:
            inputs[2] = inputs[1]
        dim, heads = own.head_dim, max(1, block.computing)
        q, k, v = (self._projected(block, x, part) for part, x in enumerate(inputs))
        q, k, v = (x.unflatten(-1, (heads, dim)).transpose(1, 2) for x in (q, k, v))
        mask = _mask(block, attn_mask, key_padding_mask, q, k, dim)
        p = own.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * dim**-0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            attended = F.dropout(weights, p, True) @ v if p else weights @ v
            weights = self._all_weights(block, weights, average_attn_weights)
            weights = weights if batched or weights is None else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, p)
        y = own.out_proj(attended.transpose(1, 2).flatten(2))
        return (y.squeeze(0) if not batched else y.transpose(0, 1) if swapped else y), weights

    def _projected(self, block: UnitBlock, x: Tensor, part: int) -> Tensor:
        own: Any = self
        dim = own.head_dim
        x = block.enter(x, self.training, part)
        weight, bias = (
            None if p is None else by_part(block.stored(p, into=True), (dim,) * 3)[part].flatten(0, 1)
            for p in (own.in_proj_weight, own.in_proj_bias)
        )
        y = F.linear(x, weight, bias)  # type: ignore[arg-type]
        return F.pad(y, (0, dim)) if block.computing == 0 else y

    def _all_weights(self, block: UnitBlock, weights: Tensor, average: bool) -> Tensor | None:
        """Of the heads of all ranks; None in a trial of one rank alone, which does not have them."""
        if block.group.process_group is None:
            return None
        if block.computing == 0:
            weights = weights[:, :0]
        if average:
            return leave(weights.sum(1), block.group) / block.units
        full = weights.new_zeros((weights.shape[0], block.units, *weights.shape[2:]))
        ids = torch.as_tensor(block.computed, dtype=torch.long, device=weights.device)
        return leave(full.index_copy(1, ids, weights), block.group)


def _mask(
    block: UnitBlock, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, dim: int
) -> Tensor | None:
    """What is added to the scores: (batch or 1, heads or 1, queries or 1, keys)."""
    del dim

    def added(values: Tensor) -> Tensor:
        if values.dtype != torch.bool:
            return values.to(q.dtype)
        return torch.zeros_like(values, dtype=q.dtype).masked_fill_(values, float("-inf"))

    total = None
    if mask is not None:
        total = added(mask)
        if total.ndim == 3:  # of every head
            total = total.unflatten(0, (q.shape[0], block.units))
            total = total[:, torch.as_tensor(block.computed or [0], device=total.device)]
        else:
            total = total[None, None]
    if padding is not None:
        padded = added(padding).view(-1, 1, 1, k.shape[-2])
        total = padded if total is None else total + padded
    return total


class _Experts(nn.Module):
    """Mixed into a module of experts: tokens of other ranks' experts get the index that means none."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        block: UnitBlock = state_of(self).functional_block
        x = block.enter(hidden_states, self.training, "experts")
        weights = enter(top_k_weights, block.group)
        computing = block.computing
        slots = torch.full((block.units,), max(1, computing), device=x.device)
        slots[torch.as_tensor(block.computed, dtype=torch.long, device=x.device)] = torch.arange(
            computing, device=x.device
        )
        names = [tensor.attribute for tensor in block.tensors]
        used = []
        try:
            for tensor in block.tensors:  # in front of the parameters, where attributes are looked up first
                stored = block.stored(tensor.parameter, into=True)
                if computing == 0:
                    stored = F.pad(stored, (0, 0) * (stored.ndim - 1) + (0, 1))
                used.append(stored)
                self.__dict__[tensor.attribute] = stored
            y: Tensor = super().forward(x, slots[top_k_index], weights)
        finally:
            for name in names:
                self.__dict__.pop(name, None)
        # Without a token for this rank's experts the graph would end here, and other ranks would wait in backward.
        y = y + sum(values.flatten()[:0].sum() for values in (x, weights, *used))
        y = leave(y, block.group)
        block.leave()
        return y
