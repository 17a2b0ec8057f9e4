"""Which precisions each operator was measured in, with all of their times in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.predict.operators.cost_mapper import CostMapper
from trimtab.predict.operators.costs import COSTS_VERSION, CostTable, DeviceCosts, OperatorKey, Times, key_of

if TYPE_CHECKING:
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
        self._tables: dict[tuple[str, int], tuple[CostTable, dict[str, tuple[str, ...]]]] = {}

    def table(self, device: str, samples: int) -> CostTable:
        return self._found(device, samples)[0]

    def precisions(self, device: str, samples: int) -> dict[str, tuple[str, ...]]:
        """By the name that sets an operator; its own precision is left out."""
        return self._found(device, samples)[1]

    def _found(self, device: str, samples: int) -> tuple[CostTable, dict[str, tuple[str, ...]]]:
        key = (device, samples)
        if key not in self._tables:
            self._tables[key] = self._collect(device, samples)
        return self._tables[key]

    def _collect(self, device: str, samples: int) -> tuple[CostTable, dict[str, tuple[str, ...]]]:
        measured, workload = self.operators, self.operators.at(samples)
        times: dict[str, Times] = dict(measured.table(device, samples, {}).devices[device].operators)
        offered: dict[str, tuple[str, ...]] = dict.fromkeys(workload.settings, ())
        for precision in probed(measured.profile, device):
            known: dict[tuple[OperatorKey, ...], bool] = {}
            chosen = {}
            for name, indices in workload.settings.items():
                # Operators with equal keys take equal times: one of them is key for.
                keys = tuple(dict.fromkeys(key_of(workload.operators[i], precision) for i in indices))
                if keys == tuple(dict.fromkeys(key_of(workload.operators[i]) for i in indices)):
                    continue
                if keys not in known:
                    known[keys] = self._is_known(device, samples, name, precision)
                if known[keys]:
                    chosen[name] = precision
                    offered[name] = (*offered[name], precision)
            if chosen:
                times |= measured.table(device, samples, chosen).devices[device].operators
        profile = measured.device(device)
        costs = DeviceCosts(operators=times, casts=profile.casts, estimated=profile.estimated)
        return CostTable(version=COSTS_VERSION, devices={device: costs}), offered

    def _is_known(self, device: str, samples: int, name: str, precision: str) -> bool:
        try:
            self.operators.table(device, samples, {name: precision})
        except TrimtabError:
            return False
        return True

    def mapper(self, device: str, samples: int, kind: DeviceKind) -> CostMapper:
        """One of its own, nothing lowered, in which every precision on offer can be set."""
        return CostMapper(self.operators.at(samples), self.table(device, samples), device, kind=kind)
