"""Chooses the bits of every layer from statistics of its gradient, and gives the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from trimtab.planning.compression.family import ADAMW, FAMILIES, Family, passed_families
from trimtab.planning.compression.guard import PATIENCE, LayerHealth, guard
from trimtab.planning.compression.layer_options import (
    ALL_BITS,
    Assignment,
    LayerOptions,
    total_error,
)
from trimtab.planning.compression.policies import choose_bits
from trimtab.predict.exchange import wire_seconds
from trimtab.wire_format import encoded_bytes

DRIFTED = 1.25
"""Bits are chosen again early when the total error exceeds its budget by this factor."""

MIN_SAVING = 0.02
"""New bits must save at least this fraction of the cost."""

KEPT_LOSSES, KEPT_NORMS = 50, 5
"""How many mean losses, and how many norms, are remembered."""

MOST_LEAST_BITS = 5
"""The most that a layer's strain can raise its fewest bits to."""

SLACK = 1.25
"""The guard acts at this many times the limit that plans keep to, so that the two do not undo each other."""


class LayerStatistics(Protocol):
    """What is known of a layer's gradient when bits are chosen."""

    @property
    def name(self) -> str: ...

    @property
    def numel(self) -> int: ...

    @property
    def norm(self) -> float:
        """Norm of the whole layer's gradient in a typical step."""
        ...

    @property
    def latest(self) -> float:
        """The same in the last step that before_mean sampled; NaN or Inf if it overflowed."""
        ...

    @property
    def owed(self) -> float:
        """Norm of what error feedback holds back."""
        ...

    def relative_errors(
        self, bits: Iterable[int], *, stochastic: bool, block: int, own: bool
    ) -> dict[int, float]:
        """The codec's error over the gradient's norm at each number of bits.

        `own` asks for the error of this rank's own gradient, not that of the running average.
        """
        ...

    def strain(self, block: int) -> float:
        """Bits the layer needs beyond those that normally distributed values would need."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """What stays the same for a run and is saved in its checkpoint."""

    name: str
    """The family's name."""

    gbit_per_s: float
    """Rate of the link; 0 when unknown, and then costs are bytes instead of seconds."""

    fastest: str | None = None
    """The family that the first plan switches to if it suits the optimizer; None keeps the current one."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]


class BitPlanner:
    """The guard and the planning, with the state they keep between looks."""

    def __init__(self, policy: str, settings: PlannerSettings, *, guard: bool) -> None:
        self._policy, self._guard = policy, guard
        self.settings = settings
        self._planned_at: int | None = None
        self._relative: dict[str, dict[int, float]] = {}
        self._floors: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self._norms: dict[str, list[float]] = {}
        self._losses: list[float] = []

    def decide(
        self,
        step: int,
        layers: Sequence[LayerStatistics],
        current: Mapping[str, int],
        *,
        loss: float | None,
        may_plan: bool,
        period: int,
        optimizer: str = ADAMW,
    ) -> dict[str, Any]:
        """The decision to publish: the family, the bits that change, and why. `optimizer` is `SGD` or `ADAMW`."""
        # A layer without a gradient so far (a closed gate, an overflow) cannot be judged: its bits stay.
        sound = [layer for layer in layers if math.isfinite(layer.norm) and layer.norm > 0]
        before = self.settings.name
        if loss is not None:
            self._losses = [*self._losses, loss][-KEPT_LOSSES:]
        due = self._due(step, sound, current, period) if may_plan else ""
        reasons: list[str] = []
        new = dict(current)
        if self._guard:
            for raised in guard(
                [self._health(layer, current[layer.name]) for layer in layers],
                limit=SLACK * self.settings.family.limit,
                losses=self._losses,
            ):
                reasons.append(
                    f"{raised.name} from {current[raised.name]} to {raised.bits} bits: {raised.reason}"
                )
                new[raised.name] = self._floors[raised.name] = raised.bits
                if "loss" in raised.reason:
                    del self._losses[:-PATIENCE]  # give the new bits time to take effect
        settles = bool(due) and self._planned_at is None and self.settings.fastest is not None
        if settles:
            assert self.settings.fastest is not None
            reasons.append(self._settle(self.settings.fastest, optimizer))
        family_changed = self.settings.name != before
        if due:
            self._relative = {layer.name: self._errors(layer, ALL_BITS) for layer in sound}
            self._planned_at = step
            plan, description = self._plan(sound, new, at_any_gain=family_changed)
            new.update(plan)
            if description:
                reasons.insert(0, f"planned {description}; {due}")
        changed = {name: bits for name, bits in new.items() if bits != current[name]}
        return {
            "family": self.settings.name,
            "bits": changed,
            "reasons": reasons if changed or settles else [],
            "planned": bool(due),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "planned_at": self._planned_at,
            "relative": {name: dict(table) for name, table in self._relative.items()},
            "floors": dict(self._floors),
            "broken": dict(self._broken),
            "norms": {name: list(norms) for name, norms in self._norms.items()},
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planned_at = state["planned_at"]
        self._relative = {name: dict(table) for name, table in state["relative"].items()}
        self._floors = dict(state["floors"])
        self._broken = dict(state["broken"])
        self._norms = {name: list(norms) for name, norms in state["norms"].items()}
        self._losses = list(state["losses"])

    def _due(
        self, step: int, layers: Sequence[LayerStatistics], current: Mapping[str, int], period: int
    ) -> str:
        """Why bits should be chosen now; empty when they should not."""
        if not layers:
            return ""
        if self._planned_at is None:
            return "the warm-up is over"
        if step - self._planned_at >= period:
            return f"{period} steps after the last plan"
        known = [layer for layer in layers if layer.name in self._relative]
        family = self.settings.family
        now = total_error(self._relative[x.name][current[x.name]] * _weight(family, x) for x in known)
        allowed = total_error(self._relative[x.name][family.reference] * _weight(family, x) for x in known)
        if now > DRIFTED * allowed:
            return f"the gradients have drifted: the error is {_ratio(now, allowed)} of its budget"
        return ""

    def _settle(self, fastest: str, optimizer: str) -> str:
        """Switch to the family for this optimizer, and say why."""
        if fastest in passed_families(optimizer=optimizer):
            self.settings = replace(self.settings, name=fastest)
            return f"{fastest}: this optimizer takes gradients as they come"
        return (
            f"{self.settings.name}, not {fastest}: this optimizer may scale every value by its own size, so errors "
            f"count against each layer's own gradient; blocks are of {self.settings.family.block} values"
        )

    def _errors(self, layer: LayerStatistics, bits: Sequence[int], *, own: bool = False) -> dict[int, float]:
        family = self.settings.family
        return layer.relative_errors(bits, stochastic=family.stochastic, block=family.block, own=own)

    def _health(self, layer: LayerStatistics, bits: int) -> LayerHealth:
        name = layer.name
        self._broken[name] = 0 if math.isfinite(layer.latest) else self._broken.get(name, 0) + 1
        before = self._norms.get(name, [])
        self._norms[name] = [*before, layer.norm][-KEPT_NORMS:]
        usual = median(before) if before else 0.0
        return LayerHealth(
            name=name,
            bits=bits,
            norm=layer.norm,
            error=self._errors(layer, (bits,), own=True)[bits],
            owed=layer.owed / layer.norm if layer.norm else 0.0,
            growth=layer.norm / usual if usual else 1.0,
            broken=self._broken[name],
        )

    def _plan(
        self, layers: Sequence[LayerStatistics], current: Mapping[str, int], *, at_any_gain: bool = False
    ) -> tuple[dict[str, int], str]:
        """New bits within the budget and what they change; nothing when they would save too little."""
        family = self.settings.family
        options = [self._options(layer) for layer in layers]
        budget = total_error(self._relative[x.name][family.reference] * _weight(family, x) for x in layers)
        assignment = choose_bits(options, budget=budget, policy=self._policy)
        before = self._as_is(layers, current)
        needed = at_any_gain or before.error > budget * (1 + 1e-9)
        if assignment.options == before.options or (
            not needed and assignment.cost > (1 - MIN_SAVING) * before.cost
        ):
            return {}, ""
        numel = sum(layer.numel for layer in layers)
        mean = sum(assignment.options[x.name] * x.numel for x in layers) / numel
        before_mean = sum(current[x.name] * x.numel for x in layers) / numel
        description = (
            f"{mean:.2f} bits a value instead of {before_mean:.2f}, {assignment.cost / before.cost:.2f} of the "
            f"{'time' if self.settings.gbit_per_s else 'bytes'}, at {_ratio(assignment.error, budget)} of the error "
            f"of {family.reference} bits for all"
        )
        return dict(assignment.options), description

    def _options(self, layer: LayerStatistics) -> LayerOptions:
        """The bits the layer may have: what its strain and the guard require, with an error within the limit."""
        table = self._relative[layer.name]
        family = self.settings.family
        least = min(family.least_bits + int(layer.strain(family.block)), MOST_LEAST_BITS)
        floor = max(self._floors.get(layer.name, 0), least)
        allowed = [bits for bits in ALL_BITS if bits >= floor and table[bits] <= family.limit] or [
            ALL_BITS[-1]
        ]
        return LayerOptions(
            name=layer.name,
            numel=layer.numel,
            norm=layer.norm,
            options=tuple(allowed),
            errors=tuple(table[bits] * _weight(family, layer) for bits in allowed),
            costs=tuple(self._cost(layer, bits) for bits in allowed),
        )

    def _as_is(self, layers: Sequence[LayerStatistics], current: Mapping[str, int]) -> Assignment:
        return Assignment(
            options={layer.name: current[layer.name] for layer in layers},
            cost=math.fsum(self._cost(layer, current[layer.name]) for layer in layers),
            error=total_error(
                self._relative[x.name][current[x.name]] * _weight(self.settings.family, x) for x in layers
            ),
            policy="as it is",
            met=True,
        )

    def _cost(self, layer: LayerStatistics, bits: int) -> float:
        nbytes = encoded_bytes(layer.numel, bits, self.settings.family.block)
        rate = self.settings.gbit_per_s
        return wire_seconds(nbytes, rate) if rate else float(nbytes)


def _weight(family: Family, layer: LayerStatistics) -> float:
    """What a layer's relative error is multiplied by before errors are added up."""
    return math.sqrt(layer.numel) if family.relative else layer.norm


def _ratio(part: float, whole: float) -> str:
    """For messages: gradients that the codec sends exactly have no error to compare with."""
    return f"{part / whole:.2f}" if whole else "many times" if part else "1.00"
