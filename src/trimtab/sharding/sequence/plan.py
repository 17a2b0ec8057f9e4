"""Find out how a layer can work on some places of the sequence, and verify it before the model is converted.

The layer runs once on the activations of a trace, and every input and output inside it is recorded. Then it runs as
each of two ranks would, on its own places only, one after the other in this process: where it gathers, it gets what
was recorded, after its own part was compared with it. Its output must be the own places of what was recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.errors import TrimtabError
from trimtab.sharding.find_units import FoundBlock, projections_of
from trimtab.sharding.sequence.exchange import AXIS
from trimtab.sharding.structure.example import repeated_layers
from trimtab.sharding.structure.gradients import close
from trimtab.sharding.structure.trace import Call, copied, trace_model
from trimtab.sharding.unit_kinds import Experts, TorchAttention


@dataclass
class LayerPlan:
    """Where a layer gathers and divides its activations. Names are relative to the layer."""

    first: str
    """Name of the layer's first argument."""

    gathered: dict[str, frozenset[int | str]] = field(default_factory=dict)
    """Modules whose arguments are gathered: the positions and names of these arguments."""

    whole: set[str] = field(default_factory=set)
    """Those of them that compute all places on every rank."""

    projections: set[str] = field(default_factory=set)
    """Projections of units whose input is gathered."""

    blocks: list[str] = field(default_factory=list)
    """The blocks whose output is reduce-scattered."""

    shared: list[str] = field(default_factory=list)
    """Parameters whose gradients are summed over the ranks."""


def plan_layers(model: nn.Module, blocks: Sequence[FoundBlock]) -> dict[str, LayerPlan]:
    """How each layer with units works on divided activations, by name; raises if one cannot."""
    trace = trace_model(model)
    plans = {}
    for name, layer in repeated_layers(model).items():
        inside = [each for each in blocks if (name and each.path.startswith(f"{name}.")) or each.path == name]
        if not inside:
            continue
        problem = "the model has no list of layers" if not name else trace.problem or "it is not called"
        call = trace.calls.get(name) if name else None
        plan: LayerPlan | str = problem
        if call is not None:
            plan = _plan(layer, name, inside, call)
        if isinstance(plan, str):
            raise TrimtabError(
                f"tensor_parallel: sequence=True: {name or 'the model'} ({type(layer).__name__}) cannot work on parts "
                f"of the sequence: {plan}; leave sequence out"
            )
        plans[name] = plan
    return plans


def _plan(layer: nn.Module, name: str, blocks: list[FoundBlock], call: Call) -> LayerPlan | str:
    with _settled(layer):
        try:
            record = _Record(layer, call)
        except Exception as error:
            return f"it fails on example inputs: {error}"
        if record.problem:
            return record.problem
        problem = ""
        for divided in (True, False):  # False: every block computes all places on every rank
            trial = _Trial(layer, name, blocks, record, divided)
            problem = problem or trial.problem
            if not trial.problem:
                return trial.plan
    return problem


class _Record:
    """What the whole layer computes."""

    def __init__(self, layer: nn.Module, call: Call) -> None:
        self.inputs: dict[str, tuple[Any, Any]] = {}
        self.whole: dict[str, tuple[Any, Any]] = {}
        self.outputs: dict[str, Tensor] = {}
        self.call = call
        self.first = next(iter(inspect.signature(layer.forward).parameters), "")
        self.problem = ""
        handles: list[Any] = []
        for name, module in layer.named_modules():

            def before(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in self.inputs:
                    self.inputs[name] = args, kwargs
                    self.whole[name] = tree_map(_cloned, (args, kwargs))  # a layer may change them in place

            def after(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                value = first_of(output)
                if isinstance(value, Tensor):
                    self.outputs.setdefault(name, value.clone())

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        try:
            args, kwargs = tree_map(copied, (call.args, call.kwargs))
            hidden = args[0] if args else kwargs.get(self.first)
            self.hidden = _cloned(hidden)
            layer(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        output = self.outputs.get("")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[AXIS] < 2:
            self.problem = "its first argument is not activations of (samples, places, width)"
        elif output is None or output.shape != hidden.shape:
            self.problem = "its first output is not activations like its first argument"

    def part(self, whole: Tensor, own: slice) -> Tensor:
        """Some places of activations, also of those without an axis for samples."""
        samples, places = self.hidden.shape[:2]
        if whole.ndim == 2 and len(whole) == samples * places:
            by_sample: Tensor = whole.unflatten(0, (samples, places))
            return by_sample[:, own].flatten(0, 1).clone()
        return whole[:, own].clone() if whole.ndim == 3 else whole

    def input_is_that_of(self, module: str, outer: str) -> bool:
        """Whether a module gets an argument of the module around it as it is."""
        args, kwargs = self.inputs.get(module, ((), {}))
        first = next(iter([*args, *kwargs.values()]), None)
        return any(first is value for value in tree_leaves(self.inputs.get(outer, ())))

    def like_hidden(self, module: str) -> bool:
        """Whether a module maps activations to activations."""
        args, kwargs = self.inputs.get(module, ((), {}))
        x, y = next(iter([*args, *kwargs.values()]), None), self.outputs.get(module)
        shape = self.hidden.shape
        return isinstance(x, Tensor) and y is not None and x.shape == shape == y.shape


class _Trial:
    """Runs a layer on the places of two ranks, one after the other."""

    def __init__(
        self, layer: nn.Module, name: str, blocks: list[FoundBlock], record: _Record, divided: bool
    ) -> None:
        self.plan = LayerPlan(record.first)
        self.problem = ""
        self._layer, self._record, self._local = layer, record, True
        self._units: set[str] = set()
        """Parameters of units."""
        self._before: dict[str, bool] = {}
        """Modules in front of which activations are gathered; whether as inputs of a block's projections."""
        self._after: set[str] = set()
        """Modules whose output is divided."""
        for each in blocks:
            self._place(each, name, divided)
        if self.problem:
            return
        places = record.hidden.shape[AXIS]
        first = max(1, 2 * places // 3)
        in_whole: set[str] = set()
        for own in (slice(0, first), slice(first, places)):
            try:
                used = self._run(own)
            except Exception as error:
                self.problem = str(error) or type(error).__name__
                return
            in_whole |= used
        self.plan.shared += [
            path
            for path, _ in layer.named_parameters()
            if path not in self._units
            and path not in in_whole
            and path not in self.plan.shared
            and not any(path.startswith(f"{whole}.") for whole in self.plan.whole)
        ]

    def _place(self, each: FoundBlock, layer: str, divided: bool) -> None:
        """Choose where a block's input is gathered and its output is divided."""
        parent = each.path[len(layer) :].strip(".")
        record = self._record
        linears = [f"{parent}.{path}".strip(".") for path in projections_of(each.parent, each.kind)]
        if divided and not isinstance(each.kind, (TorchAttention, Experts)):
            *ins, out = linears
            holder = _common([path.rpartition(".")[0] for path in ins])
            if holder and all(record.input_is_that_of(path, holder) for path in ins):
                self._before[holder] = False
                self.plan.gathered[holder] = frozenset()
            else:
                self._before |= dict.fromkeys(ins, True)
            self._after.add(out)
            self.plan.blocks.append(each.name)
            self._units |= {f"{path}.{kind}" for path in linears for kind in ("weight", "bias")}
            if getattr(self._layer.get_submodule(out), "bias", None) is not None:
                self.plan.shared.append(f"{out}.bias")  # added to the own places
            return
        around = parent
        while around and not record.like_hidden(around):
            around = around.rpartition(".")[0]
        if not around:
            self.problem = f"{each.name} has no module of its own between the residuals"
            return
        self._before[around] = False
        self._after.add(around)
        self.plan.gathered[around] = frozenset()
        self.plan.whole.add(around)

    def _run(self, own: slice) -> set[str]:
        """Run on these places; gives the parameters used with whole activations."""
        record, layer = self._record, self._layer
        self._local = True
        handles: list[Any] = []
        for name, projection in self._before.items():

            def before(
                _module: nn.Module, args: Any, kwargs: Any, name: str = name, projection: bool = projection
            ) -> Any:
                return self._gathered(name, own, args, kwargs, projection)

            handles.append(layer.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True))
        for name in self._after:

            def after(_module: nn.Module, _args: Any, output: Any, name: str = name) -> Any:
                whole = first_of(output)
                if not close(whole, record.outputs[name]):
                    raise ValueError(
                        f"{name} has another output when it is computed with parts of the sequence"
                    )
                self._local = True
                part = record.part(whole, own)
                return type(output)([part, *output[1:]]) if isinstance(output, (tuple, list)) else part

            handles.append(layer.get_submodule(name).register_forward_hook(after))
        args, kwargs = tree_map(copied, (record.call.args, record.call.kwargs))
        part = record.part(record.hidden, own)
        args, kwargs = ((part, *args[1:]), kwargs) if args else (args, {**kwargs, record.first: part})
        uses = _Uses(layer, self)
        try:
            with uses:
                output = first_of(layer(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
        expected = record.part(record.outputs[""], own)
        if not isinstance(output, Tensor) or output.shape != expected.shape or not close(output, expected):
            raise ValueError("its output for a part of the sequence depends on the rest")
        mixed = (uses.local & uses.whole) - self._units
        if mixed:
            raise ValueError(
                f"{', '.join(sorted(mixed))} is used both with parts and with all of the sequence"
            )
        return uses.whole

    def _gathered(self, name: str, own: slice, args: Any, kwargs: Any, projection: bool) -> Any:
        """The arguments with recorded ones for those that are divided."""
        whole_args, whole_kwargs = self._record.whole[name]
        keys: set[int | str] = set()

        def whole(key: int | str, value: Any, recorded: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape == recorded.shape:
                return value
            part = self._record.part(recorded, own)
            if value.shape != part.shape or not close(value, part):
                raise ValueError(f"{name} does not get a part of the sequence when the layer does")
            keys.add(key)
            return recorded.clone()

        args = tuple(whole(i, a, b) for i, (a, b) in enumerate(zip(args, whole_args, strict=True)))
        kwargs = {key: whole(key, value, whole_kwargs[key]) for key, value in kwargs.items()}
        if not projection:
            self.plan.gathered[name] |= keys
            self._local = False
        elif keys:
            self.plan.projections.add(name)
            self._local = False
        return args, kwargs

    @property
    def local(self) -> bool:
        return self._local


class _Uses(TorchFunctionMode):
    """Records which parameters of a layer are used with parts of the sequence, and which with all of it."""

    def __init__(self, layer: nn.Module, trial: _Trial) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in layer.named_parameters()}
        self._trial = trial
        self.local: set[str] = set()
        self.whole: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if not attribute:  # reading a shape or dtype is no use
            names = {self._names[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self._names}
            (self.local if self._trial.local else self.whole).update(names)
        return func(*args, **(kwargs or {}))


def first_of(output: Any) -> Any:
    """The activations among a module's outputs."""
    return output[0] if isinstance(output, (tuple, list)) else output


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _common(paths: list[str]) -> str:
    """The innermost module around all of these."""
    parts = [path.split(".") if path else [] for path in paths]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


@contextmanager
def _settled(layer: nn.Module) -> Iterator[None]:
    """Evaluation mode, and a graph, so that torch's layers use no fused kernel."""
    modes = [(module, module.training) for module in layer.modules()]
    try:
        layer.eval()
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
