"""How a model's gradient responds to rounding in its operators: calibrated in a few passes, updated in training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

MOST_SMALL = 16 << 20
"""Bytes of recorded calls that are never too many."""


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
    without autocast. A large model repeats them, with some of its operators each time: what is recorded of a few
    operators takes less memory than the optimizer and the activations of a training step.

    Raises:
        TrimtabError: the gradient of no batch is finite.
    """
    parts: dict[Key, list[torch.Tensor]] = defaultdict(list)
    length = step_length(dry_run)
    limit = _least_limit(dry_run)
    for batch in range(len(dry_run.batches)):
        left: frozenset[str] | None = None
        while left is None or left:
            left, limit = _calibrate_some(dry_run, batch, left, limit, length, precisions, probes, parts)
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


def _calibrate_some(
    dry_run: DryRun,
    batch: int,
    only: frozenset[str] | None,
    limit: float,
    length: float,
    precisions: Sequence[str],
    probes: int,
    parts: dict[Key, list[torch.Tensor]],
) -> tuple[frozenset[str], float]:
    """Add to `parts` what can be recorded within the limit; returns what is left of `only`, and a better limit."""
    before = _recorded(dry_run, batch, None, only=only, limit=limit)
    if not 0 < before.squared < math.inf:
        return frozenset(), limit
    # Divided by the gradient's size, by way of a power of two that changes no rounding.
    scale = math.ldexp(1.0, -math.frexp(math.sqrt(before.squared))[1])
    for probe in range(probes):
        moved = random_step(dry_run, stream(dry_run.seed, batch, probe, 1), length)
        after = _recorded(dry_run, batch, moved, only=before.recorded)
        del moved
        if math.isfinite(after.squared):
            for key, sums in _contributions(before, after, scale, length, precisions):
                parts[key].append(sums.double() / sums.new_tensor([before.squared * scale * scale, 1, 1]))
    left = (frozenset(before.names) if only is None else only) - before.recorded
    return left, _least_limit(dry_run) + before.total_bytes / 8


def squared_norm(gradient: Mapping[str, torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())


@dataclass(frozen=True)
class _Pass:
    """One forward and backward pass."""

    squared: float
    """The gradient's squared norm (NaN if the loss is)."""

    calls: list[OperatorCall]
    """Recorded calls that the gradient passed through."""

    names: list[str]
    """Of all calls."""

    recorded: frozenset[str]
    """Operators of which all calls were recorded."""

    total_bytes: int
    """Of all calls, if they were recorded."""


def _recorded(
    dry_run: DryRun,
    batch: int,
    moved: Mapping[str, torch.Tensor] | None,
    *,
    only: Collection[str] | None,
    limit: float = math.inf,
) -> _Pass:
    # Small differences matter here, so fp32 must be fp32.
    with (
        Recorder(dry_run.model, every=True, only=only, limit=limit) as recorder,
        tf32_products(False),
        torch.autocast(dry_run.device.type, enabled=False),
    ):
        loss, gradient = dry_run.gradient(batch, moved=moved, leaves=recorder.leaves)
    return _Pass(
        squared_norm(gradient) + 0.0 * float(loss),
        recorder.finished,
        recorder.names,
        frozenset(recorder.recorded),
        recorder.total_bytes,
    )


def _least_limit(dry_run: DryRun) -> float:
    """Bytes to record in one pass at least: of the size of an optimizer's state, and not worth a pass of their own."""
    return max(MOST_SMALL, 2 * sum(p.numel() * p.element_size() for p in dry_run.parameters.values()))


def _applicable(call: CallMatrices, precisions: Sequence[str]) -> list[str]:
    return [name for name in precisions if name in OPERATOR_PRECISIONS[call.kind] and name != "fp32"]


def _contributions(
    before: _Pass, after: _Pass, scale: float, length: float, precisions: Sequence[str]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """By source: squared error of the gradient, squared error of the source, and the source's squared norm."""
    names = [call.name for call in before.calls]
    if before.names != after.names or names != [call.name for call in after.calls]:
        raise TrimtabError(
            "damage: the model makes other calls when its weights move a little: its control flow depends on values. "
            "Use indicator='measured'"
        )
    for name in dict.fromkeys(names):
        # One operator after the other: its matrices are many times what was recorded of it.
        calls = [as_matrices(call, scale) for call in before.calls if call.name == name]
        moved = [as_matrices(call, scale) for call in after.calls if call.name == name]
        call_responses = [responses(a, b, length) for a, b in zip(calls, moved, strict=True)]
        del moved
        # A weight is rounded the same way in every call: one error, to which all calls respond.
        for source in ("w", "b"):
            own = [response[source] for response in call_responses if source in response]
            if own:
                call_responses[0][source] = torch.stack(own).sum(0) if len(own) > 1 else own[0]
        totals: dict[Key, torch.Tensor] = {}
        for call, response in zip(calls, call_responses, strict=True):
            for precision in _applicable(call, precisions):
                for source, rounded, error in errors(call, precision):
                    key = name, precision, source
                    if source in ("w", "b") and key in totals:
                        continue
                    hurt = (error * response[source].square()).sum()
                    sums = torch.stack([hurt, error.sum(), call.tensors[rounded].square().sum()])
                    totals[key] = totals[key] + sums if key in totals else sums
        yield from totals.items()


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
