"""How a model's gradient responds to rounding in its operators: calibrated in a few passes, updated in training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.measure.damage.dry_run import DryRun
from trimtab.measure.damage.noise_sources import CallMatrices, as_matrices, errors, responses
from trimtab.measure.damage.recorder import OperatorCall, Recorder
from trimtab.precision.products import tf32_products
from trimtab.precision_names import OPERATOR_PRECISIONS
from trimtab.predict.damage import Damage, Source, Sources, damage_of
from trimtab.random_bits import stream

Key = tuple[str, str, str]
"""Operator, precision, source."""

NO_GRADIENT = "damage: the gradient of every batch is zero or not finite, so nothing can be measured"
MOVE = 3e-3
"""How far each parameter moves, relative to the root mean square of all matrices: about as far as rounding moves it.
With much smaller steps the corners of ReLUs would weigh more than they do under rounding."""


class Refresh:
    """The damage of each precision, updated while the model trains.

    Gains are measured once, by `calibrate`. Errors are measured again in any step that runs inside ``with
    refresh.step():``, which costs hooks and some arithmetic in that step and nothing in others. Ranks do not
    communicate: each one measures its own batches.

    Args:
        model: the model that is trained, with or without DDP; operators may already be in lower precision.
        batches: as for `gradient_damage`, like `loss`, `precisions` and `seed`.
        memory: weight of earlier errors against those of a new step.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        precisions: Sequence[str],
        seed: int = 0,
        memory: float = 0.8,
    ) -> None:
        if not 0 <= memory < 1:
            raise TrimtabError(f"Refresh: memory must be at least 0 and less than 1; got {memory}")
        with DryRun(model, batches, loss, seed) as dry_run:
            self.sources = calibrate(dry_run, precisions)
            self._model = dry_run.model
        self._precisions = tuple(precisions)
        self._memory = memory

    @property
    def damage(self) -> Damage:
        """As of the last measured step."""
        return damage_of(self.sources)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the forward and backward passes that run inside; the optimizer may step inside or outside."""
        with Recorder(self._model) as recorder:
            yield
        sums: dict[Key, torch.Tensor] = {}
        for recorded in recorder.finished:
            call = as_matrices(recorded)
            for precision in _applicable(call, self._precisions):
                for source, rounded, error in errors(call, precision):
                    pair = torch.stack([error.sum(), call.tensors[rounded].square().sum()]).double()
                    key = call.name, precision, source
                    sums[key] = sums[key] + pair if key in sums else pair
        for (name, precision, source), pair in sums.items():
            old = self.sources.get(name, {}).get(precision, {}).get(source)
            error, size = pair.tolist()
            # The result of a lowered operator is already rounded: its error can no longer be measured.
            if old is None or not error > 0 or not math.isfinite(error / size):
                continue
            new = self._memory * old.error + (1 - self._memory) * error / size
            self.sources[name][precision][source] = replace(old, error=new)


def calibrate(dry_run: DryRun, precisions: Sequence[str], *, probes: int = 1) -> Sources:
    """Errors and gains of every operator that is called.

    For each batch it runs one pass at the current parameters and `probes` passes after small random steps, all
    without autocast.

    Raises:
        TrimtabError: the gradient of no batch is finite.
    """
    parts: dict[Key, list[torch.Tensor]] = defaultdict(list)
    length = step_length(dry_run)
    for batch in range(len(dry_run.batches)):
        squared, before = _recorded(dry_run, batch, None)
        if not 0 < squared < math.inf:
            continue
        # Divided by the gradient's size, by way of a power of two that changes no rounding.
        scale = math.ldexp(1.0, -math.frexp(math.sqrt(squared))[1])
        here = [as_matrices(call, scale) for call in before]
        for probe in range(probes):
            moved = random_step(dry_run, stream(dry_run.seed, batch, probe, 1), length)
            other, after = _recorded(dry_run, batch, moved)
            if not math.isfinite(other):
                continue
            there = [as_matrices(call, scale) for call in after]
            for key, sums in _contributions(here, there, length, precisions).items():
                parts[key].append(sums.double() / sums.new_tensor([squared * scale * scale, 1, 1]))
    if not parts:
        raise TrimtabError(NO_GRADIENT)
    sources: Sources = {}
    for (name, precision, source), sums_by_pass in parts.items():
        hurt, error, size = torch.stack(sums_by_pass).mean(0).tolist()
        relative = error / size if size else 0.0
        found = Source(error=relative, gain=hurt / relative if relative else 0.0)
        if not (math.isfinite(hurt) and math.isfinite(error)):
            found = Source(error=math.inf, gain=1.0)  # beyond the precision's range
        sources.setdefault(name, {}).setdefault(precision, {})[source] = found
    return sources


def squared_norm(gradient: Mapping[str, torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())


def _recorded(
    dry_run: DryRun, batch: int, moved: Mapping[str, torch.Tensor] | None
) -> tuple[float, list[OperatorCall]]:
    """The gradient's squared norm (NaN if the loss is), and the calls that it passed through."""
    # Small differences matter here, so fp32 must be fp32.
    with (
        Recorder(dry_run.model, every=True) as recorder,
        tf32_products(False),
        torch.autocast(dry_run.device.type, enabled=False),
    ):
        loss, gradient = dry_run.gradient(batch, moved=moved, leaves=recorder.leaves)
    return squared_norm(gradient) + 0.0 * float(loss), recorder.finished


def _applicable(call: CallMatrices, precisions: Sequence[str]) -> list[str]:
    return [name for name in precisions if name in OPERATOR_PRECISIONS[call.kind] and name != "fp32"]


def _contributions(
    before: Sequence[CallMatrices], after: Sequence[CallMatrices], length: float, precisions: Sequence[str]
) -> dict[Key, torch.Tensor]:
    """By source: squared error of the gradient, squared error of the source, and the source's squared norm."""
    if [call.name for call in before] != [call.name for call in after]:
        raise TrimtabError(
            "damage: the model makes other calls when its weights move a little: its control flow depends on values. "
            "Use indicator='measured'"
        )
    call_responses = [responses(a, b, length) for a, b in zip(before, after, strict=True)]
    shared: dict[tuple[str, str], torch.Tensor] = {}
    for call, own_responses in zip(before, call_responses, strict=True):
        for source in own_responses.keys() & {"w", "b"}:
            own = shared.get((call.name, source), torch.zeros_like(own_responses[source]))
            shared[call.name, source] = own + own_responses[source]
    totals: dict[Key, torch.Tensor] = {}
    for call, own_responses in zip(before, call_responses, strict=True):
        for precision in _applicable(call, precisions):
            for source, rounded, error in errors(call, precision):
                key = call.name, precision, source
                # A weight is rounded the same way in every call: one error, to which all calls respond.
                response = shared.get((call.name, source))
                if response is not None and key in totals:
                    continue
                response = own_responses[source] if response is None else response
                hurt = (error * response.square()).sum()
                sums = torch.stack([hurt, error.sum(), call.tensors[rounded].square().sum()])
                totals[key] = totals[key] + sums if key in totals else sums
    return totals


def random_step(dry_run: DryRun, seed: int, length: float) -> dict[str, torch.Tensor]:
    """Every parameter moved up or down at random."""
    generator = torch.Generator(dry_run.device).manual_seed(seed & 0x7FFFFFFF)
    moved = {}
    for name, parameter in dry_run.parameters.items():
        up = torch.randint(0, 2, parameter.shape, generator=generator, device=dry_run.device)
        moved[name] = parameter.detach() + (length * (2 * up - 1)).to(parameter)
    return moved


def step_length(dry_run: DryRun) -> float:
    """How far `random_step` moves each parameter."""
    matrices = [p for p in dry_run.parameters.values() if p.dim() > 1] or list(dry_run.parameters.values())
    squared = sum(float(p.detach().double().square().sum()) for p in matrices)
    size = math.sqrt(squared / max(1, sum(p.numel() for p in matrices))) or 1.0
    # In a half type the step must be large enough to change the parameter.
    return size * max(MOVE, *(16 * torch.finfo(p.dtype).eps for p in matrices))
