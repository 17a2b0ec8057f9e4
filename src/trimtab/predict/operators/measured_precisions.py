"""Which precisions each operator was measured in, with all of their times in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.predict.operators.cost_mapper import CostMapper
from trimtab.predict.operators.costs import DeviceCosts, OperatorKey, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.cluster.profile import Profile
    from trimtab.predict.operators.low_precision import DeviceKind
    from trimtab.predict.operators.measured import Measured

ADJUSTABLE = ("linear", "conv", "attention", "matmul", "embedding")


def probed(profile: Profile, device: str) -> tuple[str, ...]:
    """The precisions in which some operator was measured on a device class."""
    found: dict[str, None] = {}
    for text in profile.devices[device].operators:
        key = OperatorKey.parse(text)
        if key.kind in ADJUSTABLE:
            found[key.precision] = None
    return tuple(sorted(found))


class MeasuredPrecisions:
    """The precisions that every operator was measured in, and all of their times in one table."""

    def __init__(self, operators: Measured) -> None:
        self.operators = operators
        self._mappers: dict[object, CostMapper] = {}
        self._known: dict[tuple[str, int], tuple[DeviceCosts, dict[str, tuple[str, ...]]]] = {}

    def precisions(self, device: str, samples: int) -> dict[str, tuple[str, ...]]:
        """By the name that sets an operator; its own precision is left out."""
        return self._at(device, samples)[1]

    def mapper(
        self, device: str, samples: int, kind: DeviceKind, precisions: Mapping[str, str] | None = None
    ) -> CostMapper:
        """A new mapper with these precisions (by name), in which every measured precision can be set."""
        lowered = tuple((precisions or {}).items())
        key = (device, samples, kind, lowered)
        if key not in self._mappers:
            if lowered:
                own = self.mapper(device, samples, kind)
                for name, precision in lowered:
                    own.change(name, precision)
                self._mappers[key] = own.copy()  # nothing is undone in it
            else:
                costs = self._at(device, samples)[0]
                self._mappers[key] = CostMapper(self.operators.at(samples), costs, kind=kind)
        return self._mappers[key].copy()

    def _at(self, device: str, samples: int) -> tuple[DeviceCosts, dict[str, tuple[str, ...]]]:
        key = (device, samples)
        if key not in self._known:
            self._known[key] = self._collect(device, samples)
        return self._known[key]

    def _collect(self, device: str, samples: int) -> tuple[DeviceCosts, dict[str, tuple[str, ...]]]:
        measured, workload = self.operators, self.operators.at(samples)
        times = dict(measured.costs(device, samples, {}).operators)
        offered: dict[str, tuple[str, ...]] = dict.fromkeys(workload.settings, ())
        for precision in probed(measured.profile, device):
            known: dict[tuple[OperatorKey, ...], bool] = {}
            chosen = {}
            for name, indices in workload.settings.items():
                # Operators with equal keys take equal times, so one of each is looked up.
                keys = tuple(dict.fromkeys(key_of(workload.operators[i], precision) for i in indices))
                if keys == tuple(dict.fromkeys(key_of(workload.operators[i]) for i in indices)):
                    continue
                if keys not in known:
                    known[keys] = self._is_known(device, samples, name, precision)
                if known[keys]:
                    chosen[name] = precision
                    offered[name] = (*offered[name], precision)
            if chosen:
                times |= measured.costs(device, samples, chosen).operators
        return DeviceCosts(device=device, operators=times, casts=measured.device(device).casts), offered

    def _is_known(self, device: str, samples: int, name: str, precision: str) -> bool:
        try:
            for index in self.operators.workload.settings[name]:
                self.operators.time_of(device, index, precision, samples)
        except TrimtabError:
            return False
        return True
