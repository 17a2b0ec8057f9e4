"""Divide the embedding and the output head of a model by vocabulary: an entry is a unit.

An entry's row of the embedding is looked up on the rank that has it, and the rows of all tokens are summed over the
ranks. An entry's logit is computed on the same rank, with its row of the head; tied matrices stay one parameter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.sharding.group import apart, summed
from trimtab.sharding.overlap import linear
from trimtab.sharding.unit_axis import UnitAxis
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor, grown
from trimtab.sharding.unit_table import UnitTable
from trimtab.sharding.vocabulary.find import NAME, FoundVocabulary
from trimtab.sharding.vocabulary.logits import VocabularyLogits
from trimtab.sharding.vocabulary.slots import Slots


class VocabularyEmbedding(nn.Module):
    """Replaces an `nn.Embedding`."""

    def __init__(self, full: nn.Embedding, slots: Slots) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = full.num_embeddings, full.embedding_dim
        self.padding_idx, self.slots = full.padding_idx, slots
        self.weight = full.weight

    def forward(self, tokens: Tensor) -> Tensor:
        block, slots = self.slots.block, self.slots.of(tokens)
        weight = block.stored(self.weight, into=True)
        if block.count == 0:
            return summed(F.embedding(torch.zeros_like(slots), self.weight[:1]) * 0, block.group)
        padding = None
        if self.padding_idx is not None and self.padding_idx in block.owned:
            padding = block.owned.index(self.padding_idx)
        rows = F.embedding(slots.clamp(min=0), weight, padding)
        return summed(rows.masked_fill((slots < 0).unsqueeze(-1), 0), block.group)

    def extra_repr(self) -> str:
        return f"{self.slots.block.count} of {self.num_embeddings}, {self.embedding_dim}"


class VocabularyHead(nn.Module):
    """Replaces the `nn.Linear` that computes logits."""

    def __init__(self, full: nn.Linear, slots: Slots) -> None:
        super().__init__()
        self.in_features, self.out_features, self.slots = full.in_features, full.out_features, slots
        self.weight, self.bias = full.weight, full.bias

    def forward(self, x: Tensor) -> Tensor:
        block = self.slots.block
        self.slots.of(torch.zeros(0, dtype=torch.int64, device=x.device))  # up to date
        try:
            x = block.enter(x, self.training, self)
            bias = None if self.bias is None else block.stored(self.bias, into=True)
            y = linear(x, block.stored(self.weight, into=True), bias, block.late, block.row_places)
        finally:
            block.leave()
        return VocabularyLogits(apart(y, block.group), self.slots)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, {self.slots.block.count} of {self.out_features}"


def unit_bytes(found: FoundVocabulary) -> int:
    """Bytes of one entry."""
    matrices = {
        id(p): p for module in found.modules for name, p in module.named_parameters() if name == "weight"
    }
    return sum(weight.nbytes for weight in matrices.values()) // found.entries


def split_vocabulary(
    model: nn.Module, found: FoundVocabulary, table: UnitTable, sharded: ShardedModel
) -> UnitBlock:
    """Keep only this rank's entries, in place."""
    counts = tuple(sharded.slots_for(count) for count in table.counts)
    block = UnitBlock(
        name=NAME, units=found.entries, heads_per_unit=0, parent=next(iter(found.modules)), local_widths=[],
        group=sharded.group, sharded=sharded, table=table, capacity=counts, vocabulary=True,
    )  # fmt: skip
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    owned = torch.tensor(block.owned, dtype=torch.int64)
    axis = UnitAxis(units=found.entries, axis=0, parts=(1,))
    parameters = {id(p): p for module in found.modules for p in module.parameters(recurse=False)}
    scored = {id(p) for head in found.heads for p in head.parameters(recurse=False)}
    for full in parameters.values():
        rows = grown(axis.select(full.data, owned), sharded.slots_for(len(owned)))
        own = nn.Parameter(rows, requires_grad=full.requires_grad)
        first, *aliases = names[id(full)]
        for name in (first, *aliases):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, own)
        path, _, attribute = first.rpartition(".")
        block.tensors.append(
            UnitTensor(
                name=first, aliases=tuple(aliases), module=model.get_submodule(path), attribute=attribute, into=True,
                axis=axis, full_shape=tuple(full.shape), multiplied=id(full) in scored,
            )
        )  # fmt: skip
    slots = Slots(block)
    for module, paths in found.modules.items():
        new: nn.Module
        if isinstance(module, nn.Embedding):
            new = VocabularyEmbedding(module, slots)
        else:
            assert isinstance(module, nn.Linear)
            new = VocabularyHead(module, slots)
        new.train(module.training)
        for tensor in block.tensors:
            if tensor.module is module:
                tensor.module = new
        for path in paths:
            holder, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(holder), leaf, new)
    return block
