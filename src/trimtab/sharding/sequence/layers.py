"""Let the layers of a converted model work on this rank's places of the sequence.

Between layers the activations stay divided (`SequenceActivations`); whatever else uses them, a final norm say, gets
them whole. Inside a layer the model's code sees this rank's places only. In front of a block of units they are
gathered, and the block's output is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of
from trimtab.sharding.sequence.divided import DividedTensor
from trimtab.sharding.sequence.exchange import AXIS, Sequence, shared
from trimtab.sharding.sequence.plan import LayerPlan
from trimtab.sharding.unit_block import ShardedModel


class SequenceActivations(DividedTensor):
    """Represents activations of (samples, places, width); only this rank's places are here."""

    sequence: Sequence
    places: int
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, places: int, sequence: Sequence) -> SequenceActivations:
        shape = (local.shape[0], places, *local.shape[2:])
        self: SequenceActivations = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        self.local, self.places, self.sequence, self._whole = local, places, sequence, None
        return self

    def whole(self) -> Tensor:
        """All places. Every rank calls it; only the first call is a collective."""
        if self._whole is None:
            self._whole = self.sequence.join(self.local, self.places)
        return self._whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SequenceActivations({tuple(self.shape)}, {self.local.shape[AXIS]} places here)"


@dataclass(eq=False)
class _Layer:
    """What a layer needs to work on divided activations."""

    name: str
    first: str
    """Name of its first argument, the activations."""

    shared: list[tuple[nn.Module, str]]
    """The modules with the parameters that all places share."""

    last: bool
    """Whether what follows is no layer of the same list, and gets all places."""

    sequence: Sequence


@dataclass(eq=False)
class _Gathering:
    """A module whose arguments are gathered."""

    arguments: frozenset[int | str]
    """Positions and names of those that are divided."""

    whole: bool
    """Whether its output is whole on every rank, and divided again."""

    sequence: Sequence


def divide_layers(model: nn.Module, plans: Mapping[str, LayerPlan], sharded: ShardedModel) -> None:
    """Divide the activations in these layers, in place."""
    sequence = Sequence(sharded)
    sharded.sequence = sequence
    owners = set()
    last = {name.rpartition(".")[0]: name for name in plans}
    for name, plan in plans.items():
        layer = model.get_submodule(name)
        shared_parameters = []
        for path in plan.shared:
            holder, _, attribute = path.rpartition(".")
            shared_parameters.append((layer.get_submodule(holder), attribute))
        state = _Layer(name, plan.first, shared_parameters, last[name.rpartition(".")[0]] == name, sequence)
        attach_state(layer).sequence_layer = state
        _mix(layer, _DividedLayer)
        for path, arguments in plan.gathered.items():
            module = layer.get_submodule(path)
            attach_state(module).sequence_inputs = _Gathering(arguments, path in plan.whole, sequence)
            _mix(module, _GatheredInputs)
        for path in plan.projections:
            projection: Any = layer.get_submodule(path)
            projection.divided = True
        for block in plan.blocks:
            sharded.blocks[block].sequence = sequence
        owners.add(name.rpartition(".")[0].rpartition(".")[0])
    for owner in owners:  # what leaves the module with the layers is whole
        model.get_submodule(owner).register_forward_hook(_join_outputs)


def _mix(module: nn.Module, mixin: type[nn.Module]) -> None:
    kind = type(module)
    module.__class__ = type(f"{mixin.__name__.lstrip('_')}{kind.__name__}", (mixin, kind), {})


def _join_outputs(_module: nn.Module, _args: Any, output: Any) -> Any:
    return tree_map(lambda value: value.whole() if isinstance(value, SequenceActivations) else value, output)


class _DividedLayer(nn.Module):
    """Mixed into a layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer: _Layer = state_of(self).sequence_layer
        sequence = layer.sequence
        if torch.compiler.is_compiling():
            raise TrimtabError(
                "tensor_parallel: sequence=True does not work with torch.compile; use one of them"
            )
        x = args[0] if args else kwargs[layer.first]
        if not isinstance(x, SequenceActivations):
            if x.ndim != 3:
                raise TrimtabError(
                    f"tensor_parallel: {layer.name} gets activations of shape {tuple(x.shape)}; sequence=True needs "
                    "(samples, places, width)"
                )
            x = SequenceActivations(sequence.cut(x), x.shape[AXIS], sequence)
        args, kwargs = ((x.local, *args[1:]), kwargs) if args else (args, {**kwargs, layer.first: x.local})
        own = shared([getattr(module, name) for module, name in layer.shared], sequence.group)
        try:
            for (module, name), parameter in zip(layer.shared, own, strict=True):
                module.__dict__[name] = (
                    parameter  # in front of the parameters, where attributes are looked up first
                )
            with sequence.layer(x.local.shape[0], x.places):
                output = super().forward(*args, **kwargs)
        finally:
            for module, name in layer.shared:
                module.__dict__.pop(name, None)
        several = isinstance(output, (tuple, list))
        divided = SequenceActivations(output[0] if several else output, x.places, sequence)
        hidden = divided.whole() if layer.last else divided
        return type(output)([hidden, *output[1:]]) if several else hidden


class _GatheredInputs(nn.Module):
    """Mixed into a module that needs all places of its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gathering: _Gathering = state_of(self).sequence_inputs
        sequence, gathered = gathering.sequence, {}

        def gather(key: int | str, x: Any) -> Any:
            if key not in gathering.arguments or not isinstance(x, Tensor):
                return x
            if id(x) not in gathered:
                full = sequence.join(x, sequence.places) if gathering.whole else sequence.gather(x)
                gathered[id(x)] = full
            return gathered[id(x)]

        args = tuple(gather(index, x) for index, x in enumerate(args))
        kwargs = {name: gather(name, x) for name, x in kwargs.items()}
        sequence.local = False
        if not gathering.whole:  # the block's last projection divides its output
            sequence.gathered = list(gathered.values())
            return super().forward(*args, **kwargs)
        output = super().forward(*args, **kwargs)
        sequence.local = True
        if isinstance(output, (tuple, list)):
            return type(output)([sequence.cut(output[0]), *output[1:]])
        return sequence.cut(output)
