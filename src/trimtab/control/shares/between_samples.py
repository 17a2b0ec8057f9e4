"""What makes the samples of a batch depend on each other, read from the autograd graph of a loss.

Such a loss is another one with another batch, so its gradient cannot be put together from uneven batches. The first
axis is taken for that of the samples where its size says so. What is seen wrongly here costs speed, not correctness:
batches then stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.control.shares.loss_form import (
    LEAF,
    SCALARS,
    UNREADABLE,
    is_weight,
    loss_form,
    nodes_of,
)

_COMPARING = {"CdistBackward0", "EuclideanDistBackward0", "PdistBackward0"}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Maximum", "Minimum"}
_PRODUCTS = {"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0"}
_STATISTICS = {"Mean", "Sum", "Var", "Std", "VarMean", "StdMean"}
_ALONG_AN_AXIS = {
    *("Softmax", "LogSoftmax", "Logsumexp", "Prod", "Norm", "LinalgVectorNorm"),
    *("Cumsum", "Cumprod", "Cummax", "Cummin", "Logcumsumexp"),
    *("Roll", "Flip", "Sort", "Topk", "Gather"),
    *("Amax", "Amin", "Max", "Min", "Median"),
}
"""Operations whose results depend on all values along an axis, or change places along it."""

_NEGATIVES = "the loss compares samples of a batch with each other (in-batch negatives)"
_NORMALIZED = "the weights of samples are normalized by those of their batch"
_DIVIDED = "the weights of samples may be divided by their number"
_ALIKE = 1e-4
"""Weights whose sum or mean is so close to 1 were divided by it."""

_CENTERED = 1e-5
"""Values whose mean is so small a part of their size had it subtracted."""

_UNIT = 2e-6
"""Values whose standard deviation is so close to 1 were divided by it."""

_LOOKED_AT = 1 << 22
"""Constants of more values are no weights of samples, and copies of them would take memory."""

_FEW = 4
"""The classes of fewer samples may count up by chance."""

_MOST_STANDARDIZED = 1 << 16
"""The mean of more values may be as close to 0 by chance."""


def compares_samples(loss: torch.Tensor, samples: int) -> str | None:
    """What makes the samples of a batch depend on each other, as in contrastive losses, if something is seen."""
    try:
        return _problem_of_graph(loss, samples)
    except RuntimeError:  # torch's, for shapes of nested tensors
        return UNREADABLE


def _problem_of_graph(loss: torch.Tensor, samples: int) -> str | None:
    reductions = _reductions_to(loss.grad_fn)
    near = _up_to_weights(reductions)
    picked: dict[Any, set[int]] = {}
    for node in nodes_of(loss.grad_fn):
        name = node.name()
        product = name in ("MmBackward0", "AddmmBackward0")
        if name == "BmmBackward0":
            product = getattr(node, "_saved_self", None) is not None and len(node._saved_self) == 1
        operands = [before for before, _ in node.next_functions][-2:]
        if name in _COMPARING or (product and not any(map(is_weight, operands))):
            return _NEGATIVES
        if name.startswith("NllLoss") and _counts_up(node._saved_self, node._saved_target):
            return "every sample of a batch is a class of its own (in-batch negatives)"
        if samples < 2:
            continue
        kind = name.partition("Backward")[0]
        if _pairs_samples(node, kind, samples):
            return _NEGATIVES
        if (places := _places_of(node, kind, samples)) and not _of_weights(node):
            picked.setdefault(node.next_functions[0], set()).update(places)
        if kind.startswith("BinaryCrossEntropy") and _are_normalized(node._saved_weight, samples, near=True):
            return _NORMALIZED
        if kind in ("Mean", "Sum") and _weights_are_normalized(node.next_functions[0][0], samples, near=True):
            return _NORMALIZED
        if node in reductions and kind == "Sum" and _are_divided(node.next_functions[0][0], samples):
            return _DIVIDED
        if node in near and _weights_are_normalized(node, samples, near=False):
            return _NORMALIZED
        if is_standardized(getattr(node, "_saved_target", None), samples):
            return "the targets of samples are standardized by those of their batch"
        if (
            node not in reductions
            and _mixes(node, kind, samples, near=node in near)
            and not _of_weights(node)
        ):
            return f"samples of a batch depend on each other ({name} along the batch)"
    if any(len(places) < samples for places in picked.values()):
        return "the loss uses one of the samples of a batch by itself"
    form = loss_form(loss)
    if picked and len(form.means) + len(form.divisors) >= samples:
        return "the loss has a term for each sample of a batch"
    return None


def problem_of_gradient(outputs: Sequence[torch.Tensor]) -> str | None:
    """Why a script needs equal batches that takes these tensors' gradients to use them in its loss.

    The gradient of a mean over the batch by one sample has the batch size in it, that of a sum has not.
    """
    if all(output.numel() > 1 or is_weight(output.grad_fn) for output in outputs):
        return None
    form = loss_form(outputs[0])
    if len(outputs) == 1 and form.problem is None and not form.means and set(form.divisors) <= {1}:
        return None
    return "the script takes gradients of a mean over its batch (torch.autograd.grad)"


def _reductions_to(root: Any) -> set[Any]:
    """The operations that reduced values of samples to the scalars a loss is made of."""
    found, seen, todo = set(), {root}, [root]
    while todo:
        node = todo.pop()
        name = node.name()
        single = torch.Size(getattr(node, "_saved_self_sym_sizes", (1,))).numel() == 1
        if name in SCALARS or (single and name.startswith(("MeanBackward", "SumBackward"))):
            new = [before for before, _ in node.next_functions if before is not None and before not in seen]
            seen.update(new)
            todo += new
        else:
            found.add(node)
    return found


def _up_to_weights(reductions: set[Any]) -> set[Any]:
    """The operations between these and the nearest weights: what they reduce is a batch, whatever its shape."""
    found, todo = set(reductions), list(reductions)
    while todo:
        for before, _ in todo.pop().next_functions:
            if before is None or before in found or before.name() == LEAF or before.name() in _PRODUCTS:
                continue
            if not any(inner is not None and inner.name() == LEAF for inner, _ in before.next_functions):
                found.add(before)
                todo.append(before)
    return found - reductions


def _mixes(node: Any, kind: str, samples: int, *, near: bool) -> bool:
    """Whether an operation computes something from several samples, or puts them in another order."""
    shape = _shape_before(node)
    if kind in _STATISTICS or kind in _ALONG_AN_AXIS:
        reduces = near and kind in _STATISTICS
        if reduces and _has_samples_second(shape, samples):  # as recurrent models have them, after the time
            return _along_axis(1, node, len(shape))
        return _has_samples_first(shape, samples, anyway=reduces) and _along_axis(0, node, len(shape))
    if not _has_samples_first(shape, samples):
        return False
    if shape[0] == samples:  # experts take tokens in an order of their own, and put them back
        if kind in ("Slice", "Split"):
            part = _shape(node)
            return _along_axis(0, node, len(shape)) and len(part) > 0 and part[0] != samples
        if kind == "Index":
            return _changes_places(node._saved_indices[0], samples)
        if kind == "IndexSelect":
            return _along_axis(0, node, len(shape)) and _changes_places(node._saved_index, samples)
    return kind in ("NativeBatchNorm", "CudnnBatchNorm") and bool(node._saved_training)


def _has_samples_first(shape: Sequence[int], samples: int, *, anyway: bool = False) -> bool:
    """Whether the first axis is that of the samples, or of all their tokens; sequences may come first too.

    Args:
        anyway: if nothing else is known of it.
    """
    if not shape or _has_samples_second(shape, samples):
        return False
    of_tokens = len(shape) <= 2 and shape[0] % samples == 0
    return shape[0] == samples or (shape[0] > 1 and (of_tokens or anyway))


def _has_samples_second(shape: Sequence[int], samples: int) -> bool:
    return len(shape) > 1 and shape[0] != samples == shape[1]


def _along_axis(axis: int, node: Any, rank: int) -> bool:
    """Whether an operation goes along this axis, or along all axes; a saved axis is unsigned."""
    axes = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    if axes is None or axes == ():
        return True
    return not set(axes if isinstance(axes, list | tuple) else (axes,)).isdisjoint(
        {axis, (axis - rank) % (1 << 64)}
    )


def _shape(node: Any, place: int = 0) -> tuple[int, ...]:
    """Of what an operation has computed, as far as that is known."""
    outputs = getattr(node, "_input_metadata", ())
    return tuple(outputs[place].shape) if place < len(outputs) else ()


def _shape_before(node: Any) -> tuple[int, ...]:
    """Of what an operation was computed from."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(sizes)
    before, place = next(((b, p) for b, p in node.next_functions if b is not None), (None, 0))
    return () if before is None else _shape(before, place)


def _places_of(node: Any, kind: str, samples: int) -> set[int]:
    """Which samples of a batch an operation takes out of it, one by one."""
    if kind not in ("Select", "Unbind"):
        return set()
    shape = _shape_before(node)
    if not _has_samples_first(shape, samples) or shape[0] != samples or not _along_axis(0, node, len(shape)):
        return set()
    if kind == "Unbind":
        return set(range(samples))
    index = node._saved_index  # unsigned, as axes are
    return {(index - (1 << 64) if index >> 63 else index) % samples}


def _of_weights(node: Any) -> bool:
    return all(is_weight(before) for before, _ in node.next_functions if before is not None)


def _pairs_samples(node: Any, kind: str, samples: int) -> bool:
    """Whether an operation combines each sample with all others: one operand has them along another axis."""
    whole = _shape(node)
    if len(whole) < 2 or whole[0] != samples:
        return False
    for before, place in node.next_functions:
        if before is None or not (own := _shape(before, place)):
            continue
        padded = (1,) * (len(whole) - len(own)) + own
        if kind in _ELEMENTWISE:
            meets = padded[0] == 1 and samples in padded[1:]
        else:
            meets = len(own) == len(whole) and own[:2] == (1, samples) and whole[1] == samples
        if meets and not is_weight(before):
            return True
    return False


def _changes_places(index: Any, samples: int) -> bool:
    """Whether an index takes as many samples as there are, but not each at its own place."""
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or index.shape != (samples,):
        return False
    return not torch.equal(index, torch.arange(samples, device=index.device))


def _weights_are_normalized(product: Any, samples: int, *, near: bool) -> bool:
    """Whether something was multiplied by weights that add up to 1, to their number or to 0, or the largest is 1.

    Args:
        near: the product is reduced at once, so that a mask in it is one of samples, and no dropout.
    """
    if product is None or not product.name().startswith("MulBackward"):
        return False
    for weights in (getattr(product, "_saved_other", None), getattr(product, "_saved_self", None)):
        if _are_normalized(weights, samples, near=near):
            return True
    return False


def _are_divided(product: Any, samples: int) -> bool:
    """Whether something was multiplied by weights of at most one over the samples: its sum may be a mean."""
    if product is None or not product.name().startswith("MulBackward"):
        return False
    for weights in (getattr(product, "_saved_other", None), getattr(product, "_saved_self", None)):
        rows = _rows_of(weights, samples)
        if rows is not None and 0 < float(rows.abs().max()) <= (1 + _ALIKE) / samples:
            return True
    return False


def _are_normalized(weights: Any, samples: int, *, near: bool) -> bool:
    if is_standardized(weights, samples):  # as advantages are
        return True
    if (rows := _rows_of(weights, samples)) is None:
        return False
    values = rows.flatten()
    kept = values[values != 0]
    if not len(kept) or bool((values == values[0]).all()) or bool((kept == 1).all()):
        return False  # constants and masks
    if not near and bool((kept == kept[0]).all()):
        return False
    # What is normalized in each sample by itself is so in all of them.
    by_row = rows.shape[1] > 1 and bool((rows.mean(1) - 1).abs().max() < _ALIKE)
    total = float(values.sum())
    if not by_row and min(abs(total - 1), abs(total / len(values) - 1)) < _ALIKE:
        return True
    return near and len(values) == samples and float(values.max()) == 1


def is_standardized(values: Any, samples: int) -> bool:
    """Whether their batch's mean was subtracted from these constants, or they were divided by its deviation."""
    if (rows := _rows_of(values, samples)) is None or len(rows) < 2 or rows.numel() > _MOST_STANDARDIZED:
        return False
    if bool((rows == rows.round()).all()):
        return False  # classes and signs may add up to 0 by chance
    size = float(rows.abs().mean())
    if not size or (rows.shape[1] > 1 and float(rows.mean(1).abs().max()) < _ALIKE * size):
        return False  # in each sample by itself
    return abs(float(rows.mean())) < _CENTERED * size or _has_unit_deviation(rows)


def _has_unit_deviation(rows: torch.Tensor) -> bool:
    return any(abs(float(rows.std(correction=lost)) - 1) < _UNIT for lost in (0, 1))


def has_standardized_columns(values: torch.Tensor, samples: int | None) -> bool:
    """Whether the mean over the batch was subtracted from each column of a model's input."""
    if not samples or (rows := _rows_of(values, samples)) is None or len(rows) < 2:
        return False
    means, sizes = rows.mean(0).abs(), rows.abs().mean(0)
    used = sizes > 0
    whole = bool((rows == rows.round()).all())
    return not whole and bool(used.any()) and bool((means[used] < _CENTERED * sizes[used]).all())


def _rows_of(values: Any, samples: int) -> torch.Tensor | None:
    """Constants as a matrix with a row for each sample; None if they are none, or too many to be looked at."""
    if not isinstance(values, torch.Tensor) or values.requires_grad or not values.is_floating_point():
        return None
    if values.layout != torch.strided or values.is_nested or values.numel() > _LOOKED_AT:
        return None  # sparse matrices and lists of tensors of unlike lengths have no rows of equal size
    if not values.dim() or not len(values) or len(values) % samples:
        return None
    return values.detach().reshape(len(values), -1).double()


def _counts_up(scores: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the targets of n samples with n classes are 0, 1, 2, ...: each sample against all others."""
    if targets.dim() != 1 or len(targets) < _FEW or scores.shape[-1] < len(targets):
        return False
    return bool((targets[1:] - targets[:-1] == 1).all())
