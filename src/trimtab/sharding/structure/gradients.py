"""Compare the gradients of a split block with those of the unsplit one.

A block is a sum over units in its backward pass too only if whatever its units share is summed over the ranks, and
nothing else is. The block is computed as each of two ranks would, one after the other in this process, in training
mode. Where ranks would sum a gradient it counts twice (`TensorGroup.simulated`), so that the mean over both ranks of
every gradient must be that of the unsplit block: half of it is missing if a rank's part was not summed, and what was
summed although every rank had all of it counts double. Gradients of units must be equal as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trimtab.sharding.dropout.keyed import probabilities
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.structure.trace import Call, copied
from trimtab.sharding.unit_block import UnitBlock
from trimtab.sharding.unit_table import UnitTable

TOLERANCE = 1e-4
"""Relative difference: far above rounding, and far below that of wrong heads; the root of eps in low precision."""

_SMALL = 0.1
"""A gradient smaller than this part of the largest one is compared with that: it may be zero but for rounding."""

Shard = Callable[[nn.Module, UnitTable, TensorGroup], UnitBlock]


def gradient_problem(
    parent: nn.Module, out: str, bias: Tensor | None, table: UnitTable, call: Call, shard: Shard
) -> str:
    """How training differs from the unsplit module's: outputs, gradients, buffers. Empty if it does not.

    Args:
        out: name of the projection whose outputs are summed; empty if they are the module's own output.
        bias: is added to the sum.
        shard: splits a copy of the module for one of two ranks.
    """
    whole = _trainable(parent)
    training = True
    expected = _pass(whole, out, call, None, training)
    if isinstance(expected, Exception):  # some modules want more while they train
        whole, training = _trainable(parent), False
        expected = _pass(whole, out, call, None, training)
    if isinstance(expected, Exception):
        return ""
    ranks = []
    for rank in range(2):
        trial = _trainable(parent)
        group = TensorGroup(process_group=None, rank=rank, size=1, simulated=2)  # type: ignore[arg-type]
        block = shard(trial, table, group)
        result = _pass(trial, out, call, expected.summed, training)
        if isinstance(result, Exception):
            return f"with some of its units it fails in training: {result}"
        ranks.append((trial, block, result))
    problem = _buffer_problem(whole, [trial for trial, _, _ in ranks])
    if problem:
        return problem
    added = 0 if bias is None else bias
    partials = [result.summed for _, _, result in ranks]
    if [len(each) for each in partials] != [len(expected.summed)] * 2 or not all(
        first.shape == second.shape == total.shape and close(first + second - added, total)
        for first, second, total in zip(*partials, expected.summed, strict=True)
    ):
        return "in training the sum over its units is not its output, or it draws random numbers of its own"
    heads = ranks[0][1].heads_per_unit  # attention may also take the number of a dropout module
    if expected.dropped and not any(
        probabilities(module) or (heads and isinstance(module, nn.Dropout)) for module in parent.modules()
    ):
        return "it calls dropout with a probability that is no attribute with 'drop' in its name"
    used = _common_outputs(expected, [result for _, _, result in ranks])
    try:
        wanted, arriving = _gradients(whole, expected, used, None)
    except RuntimeError:  # something in it has no backward pass, or no output needs one
        return ""
    summed: dict[str, Tensor] = {}
    largest = max((_size(g) for g in wanted.values()), default=0.0)
    for trial, block, result in ranks:
        units = {id(tensor.parameter): tensor for tensor in block.tensors}
        names = {name: units.get(id(p)) for name, p in trial.named_parameters()}
        for name, gradient in _gradients(trial, result, used, arriving)[0].items():
            tensor = names.get(name)
            if tensor is None:
                summed[name] = gradient + summed.get(name, 0)
            else:
                own = torch.tensor(block.owned, dtype=torch.long, device=gradient.device)
                rows = tensor.axis.select(wanted[name], own)
                if not _near(gradient[: rows.shape[0]], rows, largest):
                    return f"with some of its units the gradient of {name} is not that of these units"
    for name, gradient in summed.items():
        if not _near(gradient / 2, wanted[name], largest):
            return (
                f"the gradient of {name} would be wrong: it is used both by the units and elsewhere, or passes by "
                "the block's projections"
            )
    return ""


def _trainable(parent: nn.Module) -> nn.Module:
    """A copy, since training changes buffers, of which every parameter has a gradient."""
    own = copy.deepcopy(parent)
    for parameter in own.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return own


@dataclass
class _Pass:
    inputs: dict[str, Tensor]
    outputs: list[Tensor]
    summed: list[Tensor]
    """The outputs of every call of the last projection."""
    dropped: bool
    """Whether functional dropout was called."""


def _pass(
    module: nn.Module, out: str, call: Call, totals: list[Tensor] | None, training: bool
) -> _Pass | Exception:
    """One pass with a graph; `totals`, if they are given, replace what the last projection returns."""
    seen: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        seen.append(first)
        value = first if totals is None else totals[len(seen) - 1].detach().requires_grad_()
        value = value.clone()  # what follows may change it in place
        return (value, *rest) if isinstance(output, tuple) else value

    leaves, spec = tree_flatten((call.args, call.kwargs))
    inputs: dict[str, Tensor] = {}
    given = []
    for index, (leaf, graded) in enumerate(zip(leaves, call.graded or (False,) * len(leaves), strict=True)):
        value = copied(leaf)
        if graded:
            inputs[f"argument {index}"] = value.requires_grad_()
            value = value.clone()  # it may be changed in place
        given.append(value)
    args, kwargs = tree_unflatten(given, spec)
    dropout = _WithoutDropout()
    handle = (module.get_submodule(out) if out else module).register_forward_hook(hook)
    try:
        module.train(training)
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.eval()
        with _seeded(module), torch.enable_grad(), plain_layers(), dropout:
            outputs = module(*args, **kwargs)
    except Exception as error:
        return error
    finally:
        handle.remove()
    return _Pass(inputs, [v for v in tree_leaves(outputs) if isinstance(v, Tensor)], seen, dropout.called)


@contextmanager
def plain_layers() -> Iterator[None]:
    """Let torch's transformer layers call their projections: in evaluation they may compute all in one kernel."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _seeded(module: nn.Module) -> Iterator[None]:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(0)
        yield


class _WithoutDropout(TorchFunctionMode):
    """Dropout is keyed by unit elsewhere (`trimtab.sharding.dropout`); here it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            given = kwargs.pop("dropout_p", 0.0)
            if len(args) > 4:
                given, args = args[4], (*args[:4], 0.0, *args[5:])
            self.called = self.called or given > 0
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        self.called = self.called or (training and p > 0)
        return x


def _common_outputs(expected: _Pass, ranks: Sequence[_Pass]) -> list[int]:
    """The outputs that are the same on every rank; others are the part of a rank's heads, or have no gradient."""
    return [
        index
        for index, value in enumerate(expected.outputs)
        if value.requires_grad
        and all(index < len(r.outputs) and r.outputs[index].shape == value.shape for r in ranks)
    ]


def _gradients(
    module: nn.Module, result: _Pass, used: Sequence[int], arriving: Sequence[Tensor] | None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Of some random combination of the outputs, by the name of the parameter or argument.

    Args:
        arriving: the gradients of the sums over units, which are cut from the graph here; None in the unsplit module,
            whose own are returned.
    """
    total = torch.zeros((), dtype=torch.float64)
    for index in used:
        value = result.outputs[index]
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(index)).to(value)
        total = total.to(value.device) + (value * weights).sum()
    for part, gradient in zip(result.summed, arriving or (), strict=False):
        total = total + (part * gradient).sum()
    leaves = {**result.inputs, **dict(module.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    sums = [] if arriving is not None else [part for part in result.summed if part.requires_grad]
    found = torch.autograd.grad(total, [*leaves.values(), *sums], allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=False)
    }
    of_sums = iter(found[len(leaves) :])
    full = [next(of_sums) if part.requires_grad else None for part in result.summed if arriving is None]
    return gradients, [
        torch.zeros_like(part) if g is None else g for part, g in zip(result.summed, full, strict=False)
    ]


def _buffer_problem(whole: nn.Module, trials: Sequence[nn.Module]) -> str:
    """Whether a training pass sets a buffer to other values with some of the units."""
    expected = dict(whole.named_buffers())
    for trial in trials:
        for name, value in trial.named_buffers():
            other = expected.get(name)
            same = other is None or (
                value.shape == other.shape and torch.allclose(value, other, 1e-3, 1e-6, equal_nan=True)
            )
            if not same:
                return f"training sets its buffer {name} to something else with some of its units"
    return ""


def _size(x: Tensor) -> float:
    x = x.double().nan_to_num(0.0, 0.0, 0.0)
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def close(value: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two results of the same computation are equal up to rounding."""
    if not expected.is_floating_point():
        return torch.equal(value, expected)
    tolerance = max(tolerance, torch.finfo(expected.dtype).eps ** 0.5)
    value, expected = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (value, expected))
    return bool((value - expected).norm() <= tolerance * expected.norm().clamp_min(1e-30))


def _near(value: Tensor, expected: Tensor, largest: float) -> bool:
    if not value.numel() and not expected.numel():
        return True
    tolerance: float = max(TOLERANCE, torch.finfo(expected.dtype).eps ** 0.5)
    return _size(value - expected) <= tolerance * max(_size(expected), _SMALL * largest, 1e-30)
