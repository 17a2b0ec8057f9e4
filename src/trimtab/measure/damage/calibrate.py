"""How a model's gradient responds to roundings in its operators: found in a few passes, followed while training."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trimtab.errors import TrimtabError
from trimtab.measure.damage.dry_run import Trial
from trimtab.measure.damage.noise_sources import Shaped, errors, responses, shaped
from trimtab.measure.damage.recorder import Seen, Watch
from trimtab.precision.products import tf32_products
from trimtab.precision_names import OPERATOR_PRECISIONS
from trimtab.predict.damage import Damage, Source, Sources, damage_of
from trimtab.random_bits import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    Key = tuple[str, str, str]
    """Operator, precision, source."""

MOVE = 3e-3
"""How far each parameter moves, over the root mean square of all matrices: about what rounding does. Much less,
and the corners of ReLUs would count for more than roundings find of them."""


class Refresh:
    """Damage that follows a model while it trains.

    Gains are found once, by `calibrate`. Errors are looked at again in any step that is run inside ``with
    refresh.step():``, which costs hooks and some arithmetic for that one step and nothing for the others. Ranks
    do not talk: each one follows its own batches.

    Args:
        model: as it is trained; DDP around it does not matter, and operators may be lowered already.
        batches: as `gradient_damage` takes them, as `loss`, `precisions` and `seed`.
        memory: the weight of what was known before against a new step.
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
            raise TrimtabError(f"Refresh: memory is at least 0 and less than 1; got {memory}")
        with Trial(model, batches, loss, seed) as trial:
            self.sources = calibrate(trial, precisions)
            self._model = trial.model
        self._precisions = tuple(precisions)
        self._memory = memory

    @property
    def damage(self) -> Damage:
        """As of the last step that was looked at."""
        return damage_of(self.sources)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look at the forward and backward passes that run inside; leave the optimiser's step outside or inside."""
        with Watch(self._model) as watch:
            yield
        sums: dict[Key, torch.Tensor] = {}
        for seen in _finished(watch.calls):
            call = shaped(seen)
            for precision in _applicable(call, self._precisions):
                for source, rounded, error in errors(call, precision):
                    pair = torch.stack([error.sum(), call.tensors[rounded].square().sum()]).double()
                    key = call.name, precision, source
                    sums[key] = sums[key] + pair if key in sums else pair
        for (name, precision, source), pair in sums.items():
            old = self.sources.get(name, {}).get(precision, {}).get(source)
            error, size = pair.tolist()
            # What a lowered operator gives is rounded already: its error there can no longer be seen.
            if old is None or not error > 0 or not math.isfinite(error / size):
                continue
            new = self._memory * old.error + (1 - self._memory) * error / size
            self.sources[name][precision][source] = replace(old, error=new)


def calibrate(trial: Trial, precisions: Sequence[str], *, probes: int = 1) -> Sources:
    """Errors and gains of every operator that is called.

    Of each batch: one pass where the parameters are, and `probes` where they are after small random steps, all
    without autocast.

    Raises:
        TrimtabError: the gradient of no batch is finite.
    """
    parts: dict[Key, list[torch.Tensor]] = defaultdict(list)
    length = length_of(trial)
    for batch in range(len(trial.batches)):
        squared, before = _watched(trial, batch, None)
        if not 0 < squared < math.inf:
            continue
        # Divided by the gradient's size, by way of a power of two that changes no rounding.
        scale = math.ldexp(1.0, -math.frexp(math.sqrt(squared))[1])
        here = [shaped(seen, scale) for seen in before]
        for probe in range(probes):
            moved = moved_by(trial, stream(trial.seed, batch, probe, 1), length)
            other, after = _watched(trial, batch, moved)
            if not math.isfinite(other):
                continue
            there = [shaped(seen, scale) for seen in after]
            for key, sums in _contributions(here, there, length, precisions).items():
                parts[key].append(sums.double() / sums.new_tensor([squared * scale * scale, 1, 1]))
    if not parts:
        raise TrimtabError(
            "damage: the gradient of every batch is zero or not finite; nothing can be told from it"
        )
    sources: Sources = {}
    for (name, precision, source), found in parts.items():
        hurt, error, size = torch.stack(found).mean(0).tolist()
        sources.setdefault(name, {}).setdefault(precision, {})[source] = _source(hurt, error, size)
    return sources


def _source(hurt: float, error: float, size: float) -> Source:
    if not (math.isfinite(hurt) and math.isfinite(error)):
        return Source(error=math.inf, gain=1.0)  # beyond the precision's range
    relative = error / size if size else 0.0
    return Source(error=relative, gain=hurt / relative if relative else 0.0)


def _watched(trial: Trial, batch: int, moved: Mapping[str, torch.Tensor] | None) -> tuple[float, list[Seen]]:
    """The gradient's squared length (NaN where the loss is), and the calls that it came through."""
    # Small differences are wanted, so fp32 is to be fp32.
    with (
        Watch(trial.model, every=True) as watch,
        tf32_products(False),
        torch.autocast(trial.device.type, enabled=False),
    ):
        loss, gradient = trial.gradient(batch, moved=moved, leaves=watch.leaves)
    squared = sum(float(g.double().square().sum()) for g in gradient.values())
    return squared + 0.0 * float(loss), _finished(watch.calls)


def _finished(calls: Sequence[Seen]) -> list[Seen]:
    """Those that a gradient came back to."""
    return [seen for seen in calls if seen.result_grad is not None]


def _applicable(call: Shaped, precisions: Sequence[str]) -> list[str]:
    return [name for name in precisions if name in OPERATOR_PRECISIONS[call.kind] and name != "fp32"]


def _contributions(
    before: Sequence[Shaped], after: Sequence[Shaped], length: float, precisions: Sequence[str]
) -> dict[Key, torch.Tensor]:
    """By source: squared error of the gradient, squared error of the source, and its squared size."""
    if [call.name for call in before] != [call.name for call in after]:
        raise TrimtabError(
            "damage: the model makes other calls when its weights move a little: it chooses its way by the values. "
            "Use indicator='measured'"
        )
    answers = [responses(a, b, length) for a, b in zip(before, after, strict=True)]
    together: dict[tuple[str, str], torch.Tensor] = {}
    for call, answer in zip(before, answers, strict=True):
        for source in ("w", "b"):
            if source in answer:
                own = together.get((call.name, source))
                together[call.name, source] = answer[source] if own is None else own + answer[source]
    found: dict[Key, torch.Tensor] = {}
    for call, answer in zip(before, answers, strict=True):
        for precision in _applicable(call, precisions):
            for source, rounded, error in errors(call, precision):
                key = call.name, precision, source
                # A weight is rounded alike in every call: one error, to which all of them respond together.
                response = together.get((call.name, source))
                if response is not None and key in found:
                    continue
                response = answer[source] if response is None else response
                hurt = (error * response.square()).sum()
                sums = torch.stack([hurt, error.sum(), call.tensors[rounded].square().sum()])
                found[key] = found[key] + sums if key in found else sums
    return found


def moved_by(trial: Trial, seed: int, length: float) -> dict[str, torch.Tensor]:
    """Every parameter a step up or down, at random."""
    generator = torch.Generator(trial.device).manual_seed(seed & 0x7FFFFFFF)
    moved = {}
    for name, parameter in trial.parameters.items():
        up = torch.randint(0, 2, parameter.shape, generator=generator, device=trial.device)
        moved[name] = parameter.detach() + (length * (2 * up - 1)).to(parameter)
    return moved


def length_of(trial: Trial) -> float:
    """Of such a step, for each parameter."""
    matrices = [p for p in trial.parameters.values() if p.dim() > 1] or list(trial.parameters.values())
    squared = sum(float(p.detach().double().square().sum()) for p in matrices)
    size = math.sqrt(squared / max(1, sum(p.numel() for p in matrices))) or 1.0
    # In a half type a step must be seen beside the parameter.
    return size * max(MOVE, *(16 * torch.finfo(p.dtype).eps for p in matrices))
