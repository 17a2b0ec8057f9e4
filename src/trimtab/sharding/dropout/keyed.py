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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of
from trimtab.random_bits import block_keys, stream, uniform16
from trimtab.sharding.dropout.passes import Passes
from trimtab.sharding.find_units import FoundBlock
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
        self.passes = Passes()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return _drop(x, self.p, self.sharded, self.name, self.passes.next(self.name))

    def extra_repr(self) -> str:
        return f"p={self.p}"


@dataclass(eq=False)
class DropoutCalls:
    """Counts the training passes of a module that calls functional dropout outside any block."""

    name: str
    passes: Passes = field(default_factory=Passes)


@dataclass(eq=False)
class _Functional:
    """What keys the functional dropout of a module."""

    counter: UnitBlock | DropoutCalls
    sharded: ShardedModel
    sources: list[tuple[nn.Module, str]]
    """The attributes with the probabilities: numbers, or dropout modules."""

    @property
    def active(self) -> bool:
        values = (getattr(module, name, 0.0) for module, name in self.sources)
        return any(float(getattr(value, "p", value)) > 0 for value in values)


class _KeyedModule(nn.Module):
    """Mixed into a module that calls functional dropout: its forward pass, with dropout keyed by unit."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        functional: _Functional = state_of(self).keyed_dropout
        if not self.training or not functional.active:
            return super().forward(*args, **kwargs)
        number = functional.counter.passes.next(functional.counter.name)
        with _DropUnits(functional.counter.name, number, functional.sharded):
            return super().forward(*args, **kwargs)


class _DropUnits(TorchFunctionMode):
    """While active, functional dropout is by unit inside a block, and elsewhere the same on all ranks."""

    def __init__(self, name: str, number: int, sharded: ShardedModel) -> None:
        super().__init__()
        self._name, self._number, self._sharded = name, number, sharded
        self._drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self._sharded.inside is not None:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        self._drawn += 1
        return _drop(x, p, self._sharded, f"{self._name}#{self._drawn}", self._number)

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
    attentions = {
        id(each.parent): (sharded.blocks[name], list(_probabilities(each)))
        for name, each in found_blocks.items()
        if sharded.blocks[name].heads_per_unit
    }
    for path, module in list(model.named_modules()):
        block, sources = attentions.get(id(module), (None, []))
        if block is None:
            sources = [(module, name) for name in probabilities(module)]
        if not sources or isinstance(module, (nn.Dropout, KeyedDropout)):
            continue
        functional = _Functional(block or DropoutCalls(path), sharded, sources)
        if block is None and not functional.active:
            continue
        attach_state(module).keyed_dropout = functional
        if block is not None:
            block.draws = functional.active
        # Like torch's fully_shard: still an instance of its class, with one more method.
        kind = type(module)
        module.__class__ = type(f"ShardedModel{kind.__name__}", (_KeyedModule, kind), {})


def dropout_calls(model: nn.Module) -> list[DropoutCalls]:
    """The counters of functional dropout outside blocks."""
    functionals = (state_of(module).keyed_dropout for module in model.modules())
    return [f.counter for f in functionals if f is not None and isinstance(f.counter, DropoutCalls)]


def _probabilities(found_block: FoundBlock) -> Iterator[tuple[nn.Module, str]]:
    """The attributes with the dropout of an attention's weights: the declared one, or all that look like it."""
    parent, kind = found_block.parent, found_block.kind
    if isinstance(kind, Attention) and not found_block.declared:
        if kind.dropout:
            yield parent, kind.dropout
        return
    for module in parent.modules():
        yield from ((module, name) for name in probabilities(module))
        yield from (
            (module, name) for name, child in module.named_children() if isinstance(child, KeyedDropout)
        )


def probabilities(module: nn.Module) -> list[str]:
    """Attributes of a module that hold a probability of dropout."""
    return [
        name
        for name, value in vars(module).items()
        if "drop" in name and isinstance(value, float) and 0 <= value <= 1
    ]


def _drop(x: Tensor, p: float, sharded: ShardedModel, name: str, calls: int) -> Tensor:
    if sharded.inside is not None:
        return _drop_units(x, p, sharded.inside, name, calls)
    sequence = sharded.sequence
    if sequence is None or not sequence.local:
        return x * _mask(x.shape, p, sharded, name, calls, None, x)
    own = sequence.own(sequence.places)
    samples, shape = sequence.samples, x.shape
    if shape[:-1] not in ((samples, len(own)), (samples * len(own),)):
        raise TrimtabError(
            f"tensor_parallel: sequence=True: dropout {name} on a tensor of shape {tuple(x.shape)}, of which the "
            "places of the sequence are unknown; leave sequence out"
        )
    if not own:
        return x
    ids = torch.arange(own.start, own.stop, device=x.device)
    by_sample = (samples, len(own), shape[-1])
    mask = _mask(torch.Size(by_sample), p, sharded, name, calls, (1, ids, sequence.places), x)
    return x * mask.reshape(shape)


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
