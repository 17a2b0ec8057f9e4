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

DIVISOR_VARIES = "the loss is a sum over the batch, divided by a number that varies, as means over tokens are"
OTHER_DIVISOR = "the loss is a sum over the batch that is divided by something else than its samples"
UNREADABLE = "the graph of the loss has shapes that cannot be read (nested tensors)"

_MEAN, _SUM = 1, 2
"""Reductions as ATen numbers them."""

LEAF = "torch::autograd::AccumulateGrad"
SCALARS = {
    *("AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "MulBackward1", "DivBackward0"),
    *("DivBackward1", "ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "AliasBackward0", "_DDPSinkBackward"),
}
"""Operations between scalars, and views of them."""

_OF_WEIGHTS = {
    *(LEAF, "TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"),
    *("ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0", "SliceBackward0", "CatBackward0"),
    *("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0", "SelectBackward0", "ExpandBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsafeViewBackward0"),
    *("MulBackward0", "MulBackward1", "AddBackward0", "DivBackward0", "PowBackward0", "AbsBackward0"),
    *("WeightNormInterfaceBackward0", "LinalgVectorNormBackward0", "NormBackward0", "SumBackward0"),
    *(
        "MeanBackward0",
        "MeanBackward1",
        "SumBackward1",
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "SubBackward0",
    ),
    *("SoftmaxBackward0", "LogSoftmaxBackward0", "MvBackward0", "DotBackward0", "VdotBackward0"),
    *("ExpBackward0", "NegBackward0", "LogBackward0", "SigmoidBackward0", "SoftplusBackward0"),
}
"""What weights go through between their parameter and their use."""

_SMOOTHING = ("DivBackward0", "SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1")
"""From the second term of a smoothed loss to the logarithms of the probabilities."""

_TOP = 16
"""Operations that tell kinds of losses apart."""

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

    scales: tuple[torch.Tensor, ...] = ()
    """What scalars on the way to the loss were multiplied with or divided by, as far as torch keeps it."""

    hidden: tuple[torch.Tensor, ...] = ()
    """What it was multiplied by that is not among the factors: tensors on a GPU, or in single precision."""

    counted: tuple[tuple[torch.Tensor, int], ...] = ()
    """For means over targets of which some may be ignored: how many are not, and how many there are."""

    problem: str | None = None
    """Why gradients of uneven batches cannot be averaged exactly."""

    def numbers(self) -> tuple[Any, ...]:
        """What must be the same on every rank if the loss is to weigh the samples of all ranks alike."""
        return self.means, self.divisors, self.factors, tuple(float(value) for value in self.scales)


def loss_form(loss: torch.Tensor) -> LossForm:
    """Read the form of a loss before its backward pass."""
    if loss.numel() != 1:
        return LossForm(problem=f"the backward pass starts from a tensor of shape {tuple(loss.shape)}")
    try:
        form = _reductions(loss.grad_fn, loss.output_nr)
    except RuntimeError:  # torch's, for shapes of nested tensors
        return LossForm(problem=UNREADABLE)
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
    if bool(form.divisors) != bool(equal.divisors) or len(now) != len(before):
        return None
    # A term that is switched off, as at the beginning of annealing, tells nothing.
    pairs = [(a, b) for a, b in zip(now, before, strict=True) if a and b]
    growth = {round(a / b * (ratio if form.divisors else 1.0), 9) for a, b in pairs}
    if growth == {round(ratio, 9)}:
        return True
    # A factor of a mean may change from step to step, as in a warm-up.
    return False if growth == {1.0} or form.means else None


def _reductions(node: Any, place: int = 0) -> LossForm:
    """The form of a scalar that this operation computed, as its only result or at this place among them."""
    if node is None or is_weight(node):
        return LossForm()  # a constant or a penalty on weights: the same on all ranks
    name = node.name()
    if name == "_DDPSinkBackward":  # has all results of the model, and passes each on
        return _reductions(*node.next_functions[place])
    count = prod(getattr(node, "_saved_self_sym_sizes", ()))
    inputs = [before for before, _ in node.next_functions if before is not None]
    if name.startswith("MeanBackward") and count > 1:
        if any(before.name() in ("StackBackward0", "CatBackward0") for before in inputs):
            return LossForm(problem="the loss is a mean of terms that were stacked")
        return LossForm(means=(count,), factors=(1.0,))
    if name.startswith("SumBackward") and count > 1:
        return LossForm(divisors=(1,), factors=(1.0,))
    if hasattr(node, "_saved_reduction"):
        return _torch_loss(node)
    if (smoothed := _smoothed_loss(node)) is not None:
        return _torch_loss(smoothed)
    if name not in SCALARS and not name.startswith(("MeanBackward", "SumBackward")):
        return LossForm(problem=f"how the loss was reduced is not known ({name})")
    terms = [_reductions(before, at) for before, at in node.next_functions if before is not None]
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
        scales=(*_scales(node), *(scale for term in terms for scale in term.scales)),
        hidden=(*_hidden(node), *(value for term in terms for value in term.hidden)),
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
    # Weights of the positive examples are often found from those of the batch, and then differ between ranks.
    positive = getattr(node, "_saved_pos_weight", None)
    scales = () if positive is None else (positive.detach().double().sum(),)
    return LossForm(means=(count,), factors=(1.0,), counted=counted, scales=scales)


def _smoothed_loss(node: Any) -> Any:
    """The loss in a `cross_entropy` with `label_smoothing`; its other term has the same mean over the same targets."""
    if node.name() != "AddBackward0" or len(node.next_functions) != 2:
        return None
    loss, other = (_behind(before, "MulBackward1") for before, _ in node.next_functions)
    if loss is None or not loss.name().startswith("NllLoss"):
        return None
    for name in _SMOOTHING:
        other = _behind(other, name)
    return loss if other is not None and other is loss.next_functions[0][0] else None


def _behind(node: Any, name: str) -> Any:
    """What an operation of this name was applied to; None if it is another one."""
    return node.next_functions[0][0] if node is not None and node.name() == name else None


def _factor(node: Any) -> float:
    """What an operation multiplies by, if that is a number of Python: torch keeps these as doubles or long integers.

    Not that of a GradScaler, a tensor whose value has nothing to do with samples.
    """
    name = node.name()
    if not name.startswith("MulBackward"):
        return 1.0
    for value in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and _is_number(value)):
            return float(value)
    return 1.0


def _is_number(value: torch.Tensor) -> bool:
    """Whether a tensor is a number that Python had, which can be read without waiting for a GPU."""
    plain = value.device.type == "cpu" and not value.dim() and not value.requires_grad
    return plain and value.dtype in (torch.float64, torch.int64)


def _hidden(node: Any) -> Iterator[torch.Tensor]:
    if node.name().startswith("MulBackward"):
        yield from (value for value in _scales(node) if not _is_number(value))


def _scales(node: Any) -> Iterator[torch.Tensor]:
    if node.name().startswith(("MulBackward", "DivBackward")):
        for value in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
                yield value.detach()


def _whole_number(value: Any) -> int | None:
    """The number that something was divided by; None if it is on a GPU, where reading it would block the host."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    return int(value) if isinstance(value, int | float) and value > 0 and value == int(value) else None


def nodes_of(root: Any) -> Iterator[Any]:
    """The operations of a graph, from its root on."""
    seen, todo = {root}, [root]
    while todo and len(seen) < _SEARCHED:
        node = todo.pop()
        if node is None:
            continue
        yield node
        new = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(new)
        todo += new


def top_of(loss: torch.Tensor) -> tuple[str, ...]:
    """The operations next to a loss, by which one kind of loss is told from another."""
    return tuple(node.name() for node in islice(nodes_of(loss.grad_fn), _TOP))


def is_weight(node: Any) -> bool:
    """Whether a value comes from parameters alone."""
    if node is None:
        return True  # without a gradient: an input or a constant
    inner = [before.name() for before in islice(nodes_of(node), 64)]
    return len(inner) < 64 and LEAF in inner and _OF_WEIGHTS.issuperset(inner)
