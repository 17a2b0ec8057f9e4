"""How a loss was reduced over its batch, read from its autograd graph.

Gradients of uneven batches may be weighted by samples only if the loss is a mean over them, and not at all if it is a
sum. The graph shows which: from the loss inward there are operations on scalars, then those that reduced a tensor to
one. What is not known, or makes samples of a batch depend on each other, is named, and the batch shares stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch

_MEAN, _SUM = 1, 2
"""Reductions as ATen numbers them."""

_LEAF = "torch::autograd::AccumulateGrad"
_SCALARS = {
    *("AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "MulBackward1", "DivBackward0"),
    *("DivBackward1", "ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "AliasBackward0", "_DDPSinkBackward"),
}
"""Operations between scalars, and views of them."""

_OF_WEIGHTS = {
    *(_LEAF, "TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"),
    *("ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0", "SliceBackward0", "CatBackward0"),
    *("MulBackward0", "MulBackward1", "AddBackward0", "DivBackward0", "PowBackward0", "AbsBackward0"),
    *("WeightNormInterfaceBackward0", "LinalgVectorNormBackward0", "NormBackward0", "SumBackward0"),
}
"""What weights go through between their parameter and their use."""

_PRODUCTS = {"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"}
_REDUCING = (
    "MeanBackward",
    "SumBackward",
    "VarBackward",
    "StdBackward",
    "VarMeanBackward",
    "StdMeanBackward",
)

_COMPARING = {"CdistBackward0", "EuclideanDistBackward0", "PdistBackward0"}
_SEARCHED = 50_000
"""Nodes of a graph that are looked at."""


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """What a loss is, as far as its batch is concerned: means or sums."""

    means: tuple[int, ...] = ()
    """For each term that is a mean: over how many samples, tokens, pixels or the like."""

    divisors: tuple[int, ...] = ()
    """For each term that is a sum: the whole number that it is divided by."""

    factors: tuple[float, ...] = ()
    """For each of these terms: the number that it is multiplied by, as far as Python has it."""

    counted: tuple[tuple[torch.Tensor, int], ...] = ()
    """For means over targets of which some may be ignored: how many are not, and how many there are."""

    problem: str | None = None
    """Why gradients of uneven batches cannot be averaged exactly."""


def loss_form(loss: torch.Tensor) -> LossForm:
    """Read the form of a loss before its backward pass."""
    if loss.numel() != 1:
        return LossForm(problem=f"the backward pass starts from a tensor of shape {tuple(loss.shape)}")
    form = _reductions(loss.grad_fn)
    if form.problem is None and bool(form.means) == bool(form.divisors):
        kind = "partly a mean and partly a sum" if form.means else "not reduced from a batch"
        return LossForm(problem=f"the loss is {kind}")
    return form


def grows_with_samples(form: LossForm, equal: LossForm, ratio: float) -> bool | None:
    """Whether a loss with `ratio` times the samples that the loss `equal` had is a sum over them, or else a mean.

    A mean may be written as a sum times 1/n, and a sum as a mean times n. None if neither explains the numbers.
    """

    def scales(of: LossForm) -> list[float]:
        divisors = of.divisors or (1,) * len(of.factors)
        return [factor / divisor for factor, divisor in zip(of.factors, divisors, strict=True)]

    now, before = scales(form), scales(equal)
    if bool(form.divisors) != bool(equal.divisors) or len(now) != len(before) or 0 in before:
        return None
    growth = {round(a / b * (ratio if form.divisors else 1.0), 9) for a, b in zip(now, before, strict=True)}
    if growth == {round(ratio, 9)}:
        return True
    # A factor of a mean may change from step to step, as in a warm-up.
    return False if growth == {1.0} or form.means else None


def compares_samples(loss: torch.Tensor) -> str | None:
    """What makes samples of a batch depend on each other, as in contrastive losses, if something is seen."""
    for node in _nodes(loss.grad_fn):
        name = node.name()
        product = name in ("MmBackward0", "AddmmBackward0")
        if name == "BmmBackward0":
            product = getattr(node, "_saved_self", None) is not None and len(node._saved_self) == 1
        operands = [before for before, _ in node.next_functions][-2:]
        if name in _COMPARING or (product and not any(map(_is_weight, operands))):
            return "the loss compares samples of a batch with each other (in-batch negatives)"
        if name.startswith("NllLoss") and _counts_up(node._saved_self, node._saved_target):
            return "every sample of a batch is a class of its own (in-batch negatives)"
    return None


def _reductions(node: Any) -> LossForm:
    """The form of a scalar that this operation computed."""
    if node is None or _is_weight(node):
        return LossForm()  # a constant or a penalty on weights: the same on all ranks
    name = node.name()
    count = prod(getattr(node, "_saved_self_sym_sizes", ()))
    inputs = [before for before, _ in node.next_functions if before is not None]
    if name.startswith("MeanBackward") and count > 1:
        if any(before.name() in ("StackBackward0", "CatBackward0") for before in inputs):
            return LossForm(problem="the loss is a mean of terms that were stacked")
        return LossForm(means=(count,), factors=(1.0,), problem=_reduced_before(node))
    if name.startswith("SumBackward") and count > 1:
        return LossForm(divisors=(1,), factors=(1.0,), problem=_reduced_before(node))
    if hasattr(node, "_saved_reduction"):
        return _torch_loss(node)
    if name not in _SCALARS and not name.startswith(("MeanBackward", "SumBackward")):
        return LossForm(problem=f"how the loss was reduced is not known ({name})")
    terms = [_reductions(before) for before in inputs]
    problem = next((term.problem for term in terms if term.problem is not None), None)
    if (
        problem is None
        and name.startswith(("Mul", "Div"))
        and sum(bool(t.means or t.divisors) for t in terms) > 1
    ):
        problem = "the loss is a product or quotient of two reductions"
    divisors = tuple(divisor for term in terms for divisor in term.divisors)
    if divisors and name.startswith("DivBackward"):
        by = _whole_number(getattr(node, "_saved_other", None))
        if by is None:
            problem = "the loss is a sum that is divided by another tensor, as means over tokens are"
        divisors = tuple(divisor * (by or 1) for divisor in divisors)
    return LossForm(
        means=tuple(mean for term in terms for mean in term.means),
        divisors=divisors,
        factors=tuple(by * _factor(node) for term in terms for by in term.factors),
        counted=tuple(pair for term in terms for pair in term.counted),
        problem=problem,
    )


def _torch_loss(node: Any) -> LossForm:
    """A loss of torch.nn.functional with a `reduction`."""
    name, classes = node.name(), node.name().startswith("NllLoss")
    count = (node._saved_target if classes else node._saved_self).numel()
    if node._saved_reduction == _SUM:
        return LossForm(divisors=(1,), factors=(1.0,))
    if node._saved_reduction != _MEAN:
        return LossForm(problem=f"the loss is not reduced ({name})")
    if classes and node._saved_weight is not None:
        return LossForm(problem="the loss is a mean weighted by class")
    counted = ((node._saved_total_weight, count),) if classes else ()
    return LossForm(means=(count,), factors=(1.0,), counted=counted)


def _reduced_before(node: Any) -> str | None:
    """Whether what is reduced to a loss has been reduced over its first axis already, up to the nearest weights."""
    seen, todo = {node}, [node]
    while todo and len(seen) < _SEARCHED:
        nearest = todo.pop()
        for before, _ in nearest.next_functions:
            if before is None or before in seen or before.name() == _LEAF:
                continue
            name = before.name()
            if any(inner is not None and inner.name() == _LEAF for inner, _ in before.next_functions):
                continue
            if name in _PRODUCTS:
                continue
            if name.startswith(_REDUCING) and _over_first_axis(before):
                return f"the loss is reduced over its batch in two places ({name})"
            seen.add(before)
            todo.append(before)
    return None


def _over_first_axis(node: Any) -> bool:
    """Whether an operation reduces axis 0, or all axes; a saved axis is unsigned."""
    axes = getattr(node, "_saved_dim", None)
    if axes is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    rank = len(sizes) if sizes is not None else getattr(node, "_saved_self", torch.empty(1)).dim()
    first = {0, -rank % (1 << 64)}
    return not set(axes if isinstance(axes, list | tuple) else (axes,)).isdisjoint(first)


def _factor(node: Any) -> float:
    """What an operation multiplies by, if that is a number of Python: torch keeps these as doubles or long integers.

    Not that of a GradScaler, a tensor whose value has nothing to do with samples.
    """
    name = node.name()
    if not name.startswith("MulBackward"):
        return 1.0
    for value in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(value, int | float):
            return float(value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.dim():
            continue
        if value.dtype in (torch.float64, torch.int64) and not value.requires_grad:
            return float(value)
    return 1.0


def _whole_number(value: Any) -> int | None:
    """The number that something was divided by; None if it is on a GPU, where reading it would block the host."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    return int(value) if isinstance(value, int | float) and value > 0 and value == int(value) else None


def _nodes(root: Any) -> Iterator[Any]:
    seen, todo = {root}, [root]
    while todo and len(seen) < _SEARCHED:
        node = todo.pop()
        if node is None:
            continue
        yield node
        new = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(new)
        todo += new


def _is_weight(node: Any) -> bool:
    """Whether a value comes from parameters alone."""
    if node is None:
        return True  # without a gradient: an input or a constant
    inner = [before.name() for before in islice(_nodes(node), 64)]
    return len(inner) < 64 and _LEAF in inner and _OF_WEIGHTS.issuperset(inner)


def _counts_up(scores: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the targets of n samples with n classes are 0, 1, 2, ...: each sample against all others."""
    if targets.dim() != 1 or len(targets) < 2 or scores.shape[-1] < len(targets):
        return False
    return bool((targets[1:] - targets[:-1] == 1).all())
