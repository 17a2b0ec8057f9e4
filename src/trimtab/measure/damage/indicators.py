"""`gradient_damage`: how much each lower precision of each operator changes the gradient, by five indicators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.measure.damage.calibrate import NO_GRADIENT, calibrate, random_step, squared_norm, step_length
from trimtab.measure.damage.dry_run import DryRun
from trimtab.measure.damage.recorder import OperatorCall, Recorder
from trimtab.measure.damage.rounding import of_weight
from trimtab.precision.operators import operators
from trimtab.precision.setting import set_operators
from trimtab.precision_names import NOT_ON_GPUS, OPERATOR_PRECISIONS, PRECISIONS, OperatorKind
from trimtab.predict.damage import Damage, TensorStatistics, bidirectional, damage_of
from trimtab.random_bits import absorb, stream

Indicator = Callable[[DryRun, Sequence[str]], Damage]

DRAWS = 4
"""Draws of stochastic rounding that the measured damage averages."""

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

    The model is left as it was: parameters, gradients, buffers, precision, mode, hooks and random state.

    Args:
        model: as it will be trained, in its mode; dropout drops the same values in every pass.
        batches: a few, each as the model is called with it: a tuple of arguments, a dict of keywords, a tensor.
            They may be on another device.
        loss: computes the scalar loss from the model's output; not needed if the output is a loss or has `.loss`.
        precisions: names. Precisions that no device offers for a kind of operator are skipped for it. This device
            need not offer them, except for "measured".
        indicator: "variance" computes the damage from two passes per batch. "measured" lowers one operator after
            the other, which is expensive. "depth", "curvature" and "random" only rank operators.
        seed: seed of everything random.

    Returns:
        Damage by operator and precision: 0 for the operator's current precision and for operators that the loss
        does not depend on; infinite if a precision's range is exceeded.

    Raises:
        TrimtabError: there is no loss, no finite gradient, or a name is unknown.
    """
    for name in precisions:
        if name not in PRECISIONS:
            raise TrimtabError(f"damage: there is no precision {name!r}; there are {', '.join(PRECISIONS)}")
    if indicator not in INDICATORS:
        raise TrimtabError(f"damage: there is no indicator {indicator!r}; choose {', '.join(INDICATORS)}")
    with DryRun(model, batches, loss, seed) as dry_run:
        damage = INDICATORS[indicator](dry_run, precisions)
        kinds: dict[str, OperatorKind] = dict.fromkeys(damage, "attention")
        kinds |= operators(dry_run.model)
        own = {name: ("fp32", dry_run.own_precision(name)) for name in kinds}
    return {
        name: {
            p: 0.0 if p in own[name] else damage.get(name, {}).get(p, 0.0)
            for p in precisions
            if p in OPERATOR_PRECISIONS[kind]
        }
        for name, kind in kinds.items()
    }


class Change(NamedTuple):
    """The effect of lowering one operator, over batches and draws."""

    gradient: float
    """Mean of ‖change‖² / ‖gradient‖²."""

    loss: float
    """Mean absolute change of the loss."""


def measure(dry_run: DryRun, precisions: Sequence[str], draws: int = DRAWS) -> dict[str, dict[str, Change]]:
    """The measured effect of lowering each operator alone with `trimtab.set_precision`, on the same batches."""
    plain = [dry_run.gradient(batch) for batch in range(len(dry_run.batches))]
    sizes = [squared_norm(gradient) for _, gradient in plain]
    usable = [batch for batch, size in enumerate(sizes) if 0 < size < math.inf and plain[batch][0].isfinite()]
    if not usable:
        raise TrimtabError(NO_GRADIENT)
    changes: dict[str, dict[str, Change]] = {}
    for name, kind in {call.name: call.kind for call in _calls(dry_run)}.items():
        own = ("fp32", dry_run.own_precision(name))
        for precision in (p for p in precisions if p in OPERATOR_PRECISIONS[kind] and p not in own):
            if precision in NOT_ON_GPUS.get(kind, ()) and dry_run.device.type == "cuda":
                # It cannot be tried here, and a plan must not choose what nobody has measured.
                changes.setdefault(name, {})[precision] = Change(math.inf, math.inf)
                continue
            effects = []
            for draw in range(draws if precision in ("int8", "fp8") else 1):
                set_operators(dry_run.model, {name: precision}, seed=absorb(dry_run.seed, draw))
                for batch in usable:
                    loss, gradient = dry_run.gradient(batch)
                    error = (
                        squared_norm({n: g - plain[batch][1][n] for n, g in gradient.items()}) / sizes[batch]
                    )
                    effects.append((error, abs(float(loss - plain[batch][0]))))
            set_operators(dry_run.model, {})
            means = (sum(parts) / len(effects) for parts in zip(*effects, strict=True))
            change = Change(*(value if math.isfinite(value) else math.inf for value in means))
            changes.setdefault(name, {})[precision] = change
    return changes


def _measured(dry_run: DryRun, precisions: Sequence[str]) -> Damage:
    return {
        name: {precision: change.gradient for precision, change in by.items()}
        for name, by in measure(dry_run, precisions).items()
    }


def _variance(dry_run: DryRun, precisions: Sequence[str]) -> Damage:
    return damage_of(calibrate(dry_run, precisions))


def _depth(dry_run: DryRun, precisions: Sequence[str]) -> Damage:
    """The formula of QSync: noise of the operands, weighted by the depth of the operator.

    γ converts squared activations to squared gradients: their ratio over all operators. (With 1 it would rank by
    the size of activations alone, and much worse.)
    """
    totals: Damage = {}
    for batch in range(len(dry_run.batches)):
        calls = _calls(dry_run, batch)
        gradients = [_statistics(call.result_grad) for call in calls if call.result_grad is not None]
        sizes = sum(_statistics(call.result).squared for call in calls)
        gamma = sum(g.squared for g in gradients) / sizes if sizes else 0.0
        for depth, (call, gradient) in enumerate(zip(calls, gradients, strict=True)):
            if call.kind == "embedding":  # nothing is multiplied: the rows are the values
                weight = TensorStatistics(squared=1.0, amax=0.0, numel=0, exponent=0)
                value = _statistics(call.result)
            else:
                operands = call.operands if call.weight is None else [*call.operands, call.weight]
                value, weight = (_statistics(tensor) for tensor in operands[:2])
            by = totals.setdefault(call.name, {})
            for precision in (p for p in precisions if p in OPERATOR_PRECISIONS[call.kind] and p != "fp32"):
                hurt = bidirectional(
                    weight, value, gradient, precision, depth=depth + 1, deepest=len(calls), gamma=gamma
                )
                by[precision] = by.get(precision, 0.0) + hurt / len(dry_run.batches)
    return totals


def _curvature(dry_run: DryRun, precisions: Sequence[str]) -> Damage:
    """The expected increase of the loss: half the mean second derivative of the weight (Hutchinson's estimate of the
    Hessian's trace, divided by its size) times ‖Q(w) − w‖².

    Products of activations have no weight, so their damage is taken as 0.
    """
    length = step_length(dry_run)
    traces: dict[int, float] = {}
    for batch in range(len(dry_run.batches)):
        _, here = dry_run.gradient(batch)
        for probe in range(CURVATURE_PROBES):
            moved = random_step(dry_run, stream(dry_run.seed, batch, probe, 2), length)
            _, there = dry_run.gradient(batch, moved=moved)
            for name, parameter in dry_run.parameters.items():
                turned = ((there[name] - here[name]).float() * (moved[name] - parameter.detach())).sum()
                traces[id(parameter)] = traces.get(id(parameter), 0.0) + float(turned) / length**2
    totals: Damage = {call.name: {} for call in _calls(dry_run)}
    for name, kind in operators(dry_run.model).items():
        module: Any = dry_run.model.get_submodule(name)
        trace = abs(traces.get(id(module.weight), 0.0)) / CURVATURE_PROBES / len(dry_run.batches)
        weight = module.weight.detach()
        totals[name] = {
            precision: 0.5 * trace * float(of_weight(weight, precision).mean())
            for precision in precisions
            if precision in OPERATOR_PRECISIONS[kind] and precision != "fp32"
        }
    return totals


def _random(dry_run: DryRun, precisions: Sequence[str]) -> Damage:
    generator = random.Random(dry_run.seed)
    names = dict.fromkeys(call.name for call in _calls(dry_run))
    return {name: {precision: generator.random() for precision in precisions} for name in names}


INDICATORS: dict[str, Indicator] = {
    "variance": _variance,
    "depth": _depth,
    "curvature": _curvature,
    "random": _random,
    "measured": _measured,
}
"""Each computes the damage from a `DryRun` and the names of precisions."""


def _calls(dry_run: DryRun, batch: int = 0) -> list[OperatorCall]:
    """The operator calls that the gradient of a batch passes through."""
    with Recorder(dry_run.model, every=True) as recorder:
        dry_run.gradient(batch, leaves=recorder.leaves)
    return recorder.finished


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
