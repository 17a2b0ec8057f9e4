"""`gradient_damage`: what each operator of a model does to the gradient in each lower precision, in five ways."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import TrimtabError
from trimtab.measure.damage.calibrate import calibrate, length_of, moved_by
from trimtab.measure.damage.dry_run import Trial
from trimtab.measure.damage.recorder import Watch
from trimtab.measure.damage.rounding import of_weight
from trimtab.precision.operators import operators
from trimtab.precision.setting import set_operators
from trimtab.precision_names import OPERATOR_PRECISIONS, PRECISIONS
from trimtab.predict.damage import Damage, TensorStatistics, bidirectional, damage_of
from trimtab.random_bits import absorb, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn

    from trimtab.measure.damage.recorder import Seen
    from trimtab.precision_names import OperatorKind

    Indicator = Callable[[Trial, Sequence[str]], Damage]

DRAWS = 4
"""Of stochastic rounding, that the measured damage is the mean of."""

CURVATURE_PROBES = 4


def gradient_damage(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    precisions: Sequence[str],
    indicator: str = "variance",
    seed: int = 0,
) -> Damage:
    """How much lowering each operator hurts: E‖ĝ − g‖² / ‖g‖² of the gradient of all parameters.

    The model comes back as it was: parameters, gradients, buffers, precision, mode, hooks and random numbers.

    Args:
        model: as it will be trained; its mode counts, and dropout drops the same in every pass.
        batches: a few, each as the model is called with it: a tuple of arguments, a dict of keywords, a tensor.
            They may lie on another device.
        loss: makes the scalar loss of what the model returns; not needed if that is, or has as `.loss`, a loss.
        precisions: names, those that no device offers for a kind of operator are left out for it. Those that
            this device lacks are no hindrance, save for "measured".
        indicator: "variance" computes it from two passes a batch. "measured" lowers one operator after the other
            and is as expensive as that sounds. "depth", "curvature" and "random" only rank operators.
        seed: of all that is random.

    Returns:
        By operator and precision. 0 for the precision the operator has now, and for operators that the loss does
        not depend on; infinite where a precision's range is exceeded.

    Raises:
        TrimtabError: no loss, no finite gradient, a name that is not known.
    """
    for name in precisions:
        if name not in PRECISIONS:
            raise TrimtabError(f"damage: there is no precision {name!r}; there are {', '.join(PRECISIONS)}")
    if indicator not in INDICATORS:
        raise TrimtabError(f"damage: there is no indicator {indicator!r}; choose {', '.join(INDICATORS)}")
    with Trial(model, batches, loss, seed) as trial:
        found = INDICATORS[indicator](trial, precisions)
        kinds: dict[str, OperatorKind] = dict.fromkeys(found, "attention")
        kinds |= operators(trial.model)
        own = {name: ("fp32", trial.own_precision(name)) for name in kinds}
    return {
        name: {
            p: 0.0 if p in own[name] else found.get(name, {}).get(p, 0.0)
            for p in precisions
            if p in OPERATOR_PRECISIONS[kind]
        }
        for name, kind in kinds.items()
    }


class Change(NamedTuple):
    """What lowering one operator did, over batches and draws."""

    gradient: float
    """Mean of ‖change‖² / ‖gradient‖²."""

    loss: float
    """Mean size of the loss's change."""


def measure(trial: Trial, precisions: Sequence[str], draws: int = DRAWS) -> dict[str, dict[str, Change]]:
    """The truth: every operator lowered by itself with `trimtab.set_precision`, on the same batches."""
    plain = [trial.gradient(batch) for batch in range(len(trial.batches))]
    sizes = [_squared(gradient) for _, gradient in plain]
    usable = [batch for batch, size in enumerate(sizes) if 0 < size < math.inf and plain[batch][0].isfinite()]
    if not usable:
        raise TrimtabError(
            "damage: the gradient of every batch is zero or not finite; nothing can be told from it"
        )
    changes: dict[str, dict[str, Change]] = {}
    for name, kind in {seen.name: seen.kind for seen in _calls(trial)}.items():
        own = ("fp32", trial.own_precision(name))
        for precision in (p for p in precisions if p in OPERATOR_PRECISIONS[kind] and p not in own):
            found = []
            for draw in range(draws if precision in ("int8", "fp8") else 1):
                set_operators(trial.model, {name: precision}, seed=absorb(trial.seed, draw))
                for batch in usable:
                    loss, gradient = trial.gradient(batch)
                    error = _squared({n: g - plain[batch][1][n] for n, g in gradient.items()}) / sizes[batch]
                    found.append((error, abs(float(loss - plain[batch][0]))))
            set_operators(trial.model, {})
            means = (sum(parts) / len(found) for parts in zip(*found, strict=True))
            change = Change(*(value if math.isfinite(value) else math.inf for value in means))
            changes.setdefault(name, {})[precision] = change
    return changes


def _measured(trial: Trial, precisions: Sequence[str]) -> Damage:
    return {
        name: {precision: change.gradient for precision, change in by.items()}
        for name, by in measure(trial, precisions).items()
    }


def _variance(trial: Trial, precisions: Sequence[str]) -> Damage:
    return damage_of(calibrate(trial, precisions))


def _depth(trial: Trial, precisions: Sequence[str]) -> Damage:
    """The usual formula: noise of the operands, weighted by how much of the model lies ahead and behind.

    Its γ turns squares of activations into squares of gradients: the ratio of both, over all operators. (With 1 it
    would rank by the size of activations alone, and far worse.)
    """
    totals: Damage = {}
    for batch in range(len(trial.batches)):
        calls = _calls(trial, batch)
        gradients = [_statistics(call.result_grad) for call in calls if call.result_grad is not None]
        sizes = sum(_statistics(call.result).squared for call in calls)
        gamma = sum(g.squared for g in gradients) / sizes if sizes else 0.0
        for depth, (call, gradient) in enumerate(zip(calls, gradients, strict=True)):
            if call.kind == "embedding":  # nothing is multiplied: the rows are the values
                weight, value = (
                    TensorStatistics(squared=1.0, amax=0.0, numel=0, exponent=0),
                    _statistics(call.result),
                )
            else:
                operands = call.operands if call.weight is None else [*call.operands, call.weight]
                value, weight = (_statistics(tensor) for tensor in operands[:2])
            by = totals.setdefault(call.name, {})
            for precision in (p for p in precisions if p in OPERATOR_PRECISIONS[call.kind] and p != "fp32"):
                hurt = bidirectional(
                    weight, value, gradient, precision, depth=depth + 1, deepest=len(calls), gamma=gamma
                )
                by[precision] = by.get(precision, 0.0) + hurt / len(trial.batches)
    return totals


def _curvature(trial: Trial, precisions: Sequence[str]) -> Damage:
    """What the loss is expected to gain: half the mean of the weight's second derivatives (Hutchinson's estimate of
    their trace, over their number) times ‖Q(w) − w‖².

    Products of activations have no weight, so it takes them for harmless.
    """
    length = length_of(trial)
    traces: dict[int, float] = {}
    for batch in range(len(trial.batches)):
        _, here = trial.gradient(batch)
        for probe in range(CURVATURE_PROBES):
            moved = moved_by(trial, stream(trial.seed, batch, probe, 2), length)
            _, there = trial.gradient(batch, moved=moved)
            for name, parameter in trial.parameters.items():
                turned = ((there[name] - here[name]).float() * (moved[name] - parameter.detach())).sum()
                traces[id(parameter)] = traces.get(id(parameter), 0.0) + float(turned) / length**2
    totals: Damage = {seen.name: {} for seen in _calls(trial)}
    for name, kind in operators(trial.model).items():
        module: Any = trial.model.get_submodule(name)
        trace = abs(traces.get(id(module.weight), 0.0)) / CURVATURE_PROBES / len(trial.batches)
        weight = module.weight.detach()
        totals[name] = {
            precision: 0.5 * trace * float(of_weight(weight, precision).mean())
            for precision in precisions
            if precision in OPERATOR_PRECISIONS[kind] and precision != "fp32"
        }
    return totals


def _random(trial: Trial, precisions: Sequence[str]) -> Damage:
    generator = random.Random(trial.seed)
    names = dict.fromkeys(seen.name for seen in _calls(trial))
    return {name: {precision: generator.random() for precision in precisions} for name in names}


INDICATORS: dict[str, Indicator] = {
    "variance": _variance,
    "depth": _depth,
    "curvature": _curvature,
    "random": _random,
    "measured": _measured,
}
"""Ways to damage, each from a `Trial` and the names of precisions."""


def _calls(trial: Trial, batch: int = 0) -> list[Seen]:
    """The operator calls that the gradient of a batch comes through."""
    with Watch(trial.model, every=True) as watch:
        trial.gradient(batch, leaves=watch.leaves)
    return [seen for seen in watch.calls if seen.result_grad is not None]


def _squared(gradient: Mapping[str, torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())


def _statistics(tensor: torch.Tensor) -> TensorStatistics:
    values = tensor.detach().double()
    squared = float(values.square().sum())
    size = math.sqrt(squared / max(1, values.numel()))
    return TensorStatistics(
        squared=squared,
        amax=float(values.abs().amax()) if values.numel() else 0.0,
        numel=values.numel(),
        exponent=math.frexp(size)[1] - 1 if size else -1074,
    )
