"""Run a model once on small random inputs and record which linear map feeds which.

The output of every linear map is cut from the autograd graph and made a leaf. The gradient of another map's input then
says from which maps it was computed, with nothing but activations, attention and the like in between, and from which
of their outputs: units are read off that graph, so neither the names of modules nor their classes matter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.model_state import unchanged
from trimtab.sharding.structure.example import (
    Arguments,
    is_transformers,
    layer_examples,
    model_examples,
    repeated_layers,
)
from trimtab.sharding.structure.linear import is_linear


@dataclass(frozen=True)
class Call:
    """The arguments of a module's call."""

    args: Any
    kwargs: Any
    graded: tuple[bool, ...] = ()
    """For each leaf of the arguments, as a tree, whether it had a gradient; empty if that is unknown."""


@dataclass(eq=False)
class LinearCall:
    """One call of a linear map."""

    path: str
    x: Tensor
    """Its input, with the graph that leads to the outputs of earlier linear maps."""

    y: Tensor
    """Its output, a leaf of the graph."""


@dataclass
class Trace:
    """What one pass recorded."""

    linears: dict[str, LinearCall] = field(default_factory=dict)
    """The linear maps that were called once, by name, in order."""

    repeated: set[str] = field(default_factory=set)
    """Those called more than once."""

    first: dict[str, LinearCall] = field(default_factory=dict)
    """The first call of every linear map."""

    calls: dict[str, Call] = field(default_factory=dict)
    """The first call of each module, by name."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Its activations in the graph."""

    entries: dict[str, list[Any]] = field(default_factory=dict)
    """The nodes of the graph that computed them."""

    given: list[tuple[int, Any]] = field(default_factory=list)
    """The same of all calls, with the number of linear maps that had been called by then."""

    results: dict[str, tuple[list[Tensor], int]] = field(default_factory=dict)
    """What the first call of each module returned, with that number afterwards."""

    outputs: list[Tensor] = field(default_factory=list)
    """What the model, or its layers, returned."""

    order: list[LinearCall] = field(default_factory=list)
    """Every call of a linear map."""

    problem: str = ""
    """Why the pass failed; empty if it did not."""

    def add(self, other: Trace) -> None:
        """Add what another pass recorded, of other modules."""
        count = len(self.order)
        again = self.first.keys() & other.first.keys()  # a map of several layers
        self.repeated |= other.repeated | again
        linears = {**other.linears, **self.linears}
        self.linears = {name: call for name, call in linears.items() if name not in self.repeated}
        self.first = {**other.first, **self.first}
        self.calls = {**other.calls, **self.calls}
        self.inputs = {**other.inputs, **self.inputs}
        self.entries = {**other.entries, **self.entries}
        for name, (values, ended) in other.results.items():
            self.results.setdefault(name, (values, ended + count))
        self.given += [(number + count, node) for number, node in other.given]
        self.order += other.order
        self.outputs += other.outputs

    def gradients(self, of: LinearCall, to: Sequence[Tensor], channels: slice) -> list[Tensor | None]:
        """Gradients of some random combination of a map's inputs; None where there is no dependence."""
        if not of.x.requires_grad or not to:
            return [None] * len(to)
        values = of.x[..., channels]
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values)
        total = (values * weights).sum()
        return list(torch.autograd.grad(total, to, retain_graph=True, allow_unused=True))


def trace_model(model: nn.Module) -> Trace:
    """Record one pass of the model, or of its layers, in evaluation mode. Nothing of the model changes."""
    with unchanged(model):
        return _trace_model(model)


def _trace_model(model: nn.Module) -> Trace:
    trace = _trace_whole(model)
    names = {id(module): name for name, module in model.named_modules()}
    for name, layer in repeated_layers(model).items():
        if name in trace.calls:
            continue
        problem = ""
        for example in layer_examples(layer):
            alone = Trace()
            problem = _record(model, layer, example, alone, names)
            if not problem:
                trace.add(alone)
                break
        trace.problem = trace.problem or problem
    if not trace.calls and not trace.problem:
        trace.problem = "the model has no parameters on a device, or no input can be made for it"
    return trace


def _trace_whole(model: nn.Module) -> Trace:
    """One pass of the whole model; what a model of transformers computes before it fails counts as well."""
    names = {id(module): name for name, module in model.named_modules()}
    known, trace = is_transformers(model), Trace()
    try:
        for example in model_examples(model):
            trace = Trace()
            trace.problem = _record(model, model, example, trace, names)
            if not trace.problem:
                return trace
    except Exception as error:  # a configuration that says other things than most
        trace.problem = f"no example inputs for {type(model).__name__}: {error}"
    return trace if known else Trace()


def _record(
    model: nn.Module, module: nn.Module, example: Arguments, trace: Trace, names: dict[int, str]
) -> str:
    """Run a module of the model on example inputs; why that failed, or nothing."""
    args, kwargs = example
    with _hooked(model, names, trace), torch.enable_grad(), _random_state(model):
        try:
            result = module(*(arg.clone() for arg in args), **kwargs)  # a layer may change its input in place
        except Exception as error:  # the user's model, with inputs that are a guess
            return f"{type(module).__name__} fails on example inputs: {error}"
    trace.outputs += [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    return ""


@contextmanager
def _hooked(model: nn.Module, names: dict[int, str], trace: Trace) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        name = names[id(module)]
        leaves = tree_leaves((args, kwargs))
        graded = tuple(isinstance(t, Tensor) and t.requires_grad for t in leaves)
        nodes = [t.grad_fn for t, own in zip(leaves, graded, strict=True) if own]
        trace.given.extend((len(trace.order), node) for node in nodes)
        if name not in trace.calls:
            trace.entries[name] = nodes
            copies = tree_map(copied, (args, kwargs))
            trace.calls[name] = Call(copies[0], copies[1], graded)
            trace.inputs[name] = [t for t, own in zip(leaves, graded, strict=True) if own]

    def after(module: nn.Module, args: Any, y: Any) -> Any:
        name = names[id(module)]
        if not isinstance(y, Tensor):  # a router that is a subclass of nn.Linear
            return y
        if name in trace.linears or name in trace.repeated:
            trace.linears.pop(name, None)
            trace.repeated.add(name)
            trace.order.append(LinearCall(name, args[0], y))
            return y
        leaf = y.detach().requires_grad_()
        trace.linears[name] = trace.first[name] = LinearCall(name, args[0], leaf)
        trace.order.append(trace.linears[name])
        return leaf.clone()  # a model may change it in place

    def returned(module: nn.Module, _args: Any, result: Any) -> None:
        values = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        trace.results.setdefault(names[id(module)], (values, len(trace.order)))

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules() if is_linear(m)]
    handles += [m.register_forward_hook(returned) for m in model.modules()]
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, training in modes:
            module.training = training


@contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield


def copied(value: Any) -> Any:
    """A copy of an argument, which a forward pass may change (a cache)."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # a cache with tensors of a graph
        return None
