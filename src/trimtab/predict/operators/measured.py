"""Times of every operator of a workload on a device at any batch size, from a profile.

Times are known at the measured batch sizes; between and beyond them they are assumed to be linear in the number
of samples, operator by operator.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.cluster.profile import OperatorTime
from trimtab.errors import TrimtabError
from trimtab.predict.operators.cost_mapper import CostMapper
from trimtab.predict.operators.costs import DeviceCosts, OperatorKey, key_of, workload_key
from trimtab.predict.operators.precision_graph import results_of
from trimtab.predict.precision_patterns import matched
from trimtab.workload.buckets import ddp_buckets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.cluster.profile import DeviceProfile, Profile
    from trimtab.predict.operators.low_precision import DeviceKind
    from trimtab.predict.operators.precision_graph import Results
    from trimtab.workload import Workload

FOLLOWED = "bf16"
"""The type in which lowered operators hand on their results; what follows them may have been measured in it."""


class Measured:
    """The times of one model's operators; lookups are cached."""

    def __init__(self, workload: Workload, profile: Profile) -> None:
        self.workload, self.profile = workload, profile
        self._sized: dict[int, Workload] = {workload.batch_size: workload}
        self._bucketed: dict[float | None, Workload] = {None: workload}
        self._keys: dict[tuple[int, str | None, int, str | None], OperatorKey] = {}
        self._firsts: dict[int, list[int]] = {}
        self._mappers: dict[object, tuple[DeviceProfile, CostMapper]] = {}

    def on(self, profile: Profile) -> Measured:
        """The same model on another profile; what does not depend on the profile is shared."""
        other = Measured(self.workload, profile)
        other._sized, other._keys, other._mappers = self._sized, self._keys, self._mappers
        other._bucketed, other._firsts = self._bucketed, self._firsts
        return other

    def bucketed(self, cap_mb: float | None) -> Workload:
        """The workload with the buckets of another `bucket_cap_mb`; with its own for None."""
        if cap_mb not in self._bucketed:
            buckets = ddp_buckets(self.workload.parameters, self.workload.operators, cap_mb)
            self._bucketed[cap_mb] = replace(self.workload, buckets=buckets, bucket_cap_mb=cap_mb)
        return self._bucketed[cap_mb]

    def device(self, name: str) -> DeviceProfile:
        found = self.profile.devices.get(name)
        if found is None:
            raise TrimtabError(
                f"device class {name!r} was not measured, and no datasheet is known for it; run `trimtab probe` on one "
                f"and merge its file, or give the class a `model` of the catalog. Measured: "
                f"{', '.join(self.profile.devices) or 'none'}"
            )
        return found

    def results(self, device: str) -> Results | None:
        """What lowered operators hand on there, as far as it was measured."""
        profile = self.profile.devices.get(device)
        return None if profile is None else results_of(self.workload, profile.casts)

    def at(self, samples: int) -> Workload:
        """The workload for another number of samples."""
        if samples not in self._sized:
            self._sized[samples] = self.workload.at_batch(samples)
        return self._sized[samples]

    def mapper(
        self,
        device: str,
        kind: DeviceKind,
        samples: int,
        precisions: Mapping[str, str] | None = None,
        *,
        naive: bool = False,
        hands_on: bool = True,
    ) -> CostMapper:
        """The times of all operators, with some precisions set by pattern.

        Args:
            hands_on: whether lowered operators hand on bf16 where the device does that; else the type of their input.

        Raises:
            TrimtabError: naming the operator that was not measured.
        """
        chosen = matched(self.workload, precisions) if precisions else {}
        hands_on = hands_on or not chosen
        key = (id(self.device(device)), kind, samples, tuple(sorted(chosen.items())), naive, hands_on)
        if key not in self._mappers:
            costs = self.costs(device, samples, chosen)
            mapper = CostMapper(
                self.at(samples),
                costs,
                kind=kind,
                precisions=chosen,
                results=None if hands_on else "input",
                probed=results_of(self.workload, costs.casts),
                naive=naive,
            )
            self._mappers[key] = self.device(device), mapper  # the profile stays alive, and with it its id
        return self._mappers[key][1]

    def costs(self, device: str, samples: int, precisions: Mapping[str, str]) -> DeviceCosts:
        """Costs of every operator in its precision of `precisions` (by name), or in its own."""
        profile, alike = self.device(device), self._alike(samples)
        operators: dict[str, OperatorTime] = {}
        seen: set[tuple[int, bool, str | None]] = set()
        for operator in self.workload.operators:
            precision = None if operator.setting is None else precisions.get(operator.setting)
            kind = alike[operator.index], operator.setting is None, precision
            if kind in seen:
                continue
            seen.add(kind)
            key = str(self._key(operator.index, precision, samples))
            if key not in operators:
                operators[key] = self.time_of(device, operator.index, precision, samples)
            if precisions and operator.setting is None:
                times = self._interpolated(device, operator.index, None, samples, FOLLOWED)[0]
                if times is not None:
                    operators[str(self._key(operator.index, None, samples, FOLLOWED))] = times
        return DeviceCosts(device=device, operators=operators, casts=profile.casts)

    def _alike(self, samples: int) -> list[int]:
        """For every operator, the first one with the same key: of repeated layers one is looked up."""
        if samples not in self._firsts:
            first: dict[OperatorKey, int] = {}
            self._firsts[samples] = [
                first.setdefault(key_of(operator), operator.index) for operator in self.at(samples).operators
            ]
        return self._firsts[samples]

    def time_of(self, device: str, index: int, precision: str | None, samples: int) -> OperatorTime:
        """The time of one operator; raises TrimtabError if it was not measured."""
        times, known = self._interpolated(device, index, precision, samples)
        if times is None:
            raise self._missing(device, index, precision, samples, known)
        return times

    def _interpolated(
        self, device: str, index: int, precision: str | None, samples: int, dtype: str | None = None
    ) -> tuple[OperatorTime | None, list[int]]:
        """The time of one operator, with values in `dtype`, and the batch sizes at which it was measured."""
        profile = self.device(device)
        exact = profile.operators.get(str(self._key(index, precision, samples, dtype)))
        if exact is not None:
            return exact, [samples]
        known = []
        for size in sorted(profile.batches.get(workload_key(self.workload), ())):
            found = profile.operators.get(str(self._key(index, precision, size, dtype)))
            if found is not None:
                known.append((size, found))
        if len(known) < 2:
            return None, [size for size, _ in known]
        place = min(max(1, bisect_left([size for size, _ in known], samples)), len(known) - 1)
        (low, a), (high, b) = known[place - 1], known[place]
        part = (samples - low) / (high - low)
        times = OperatorTime(
            forward_s=max(0.0, a.forward_s + part * (b.forward_s - a.forward_s)),
            backward_s=max(0.0, a.backward_s + part * (b.backward_s - a.backward_s)),
        )
        return times, [size for size, _ in known]

    def _key(self, index: int, precision: str | None, samples: int, dtype: str | None = None) -> OperatorKey:
        key = (index, precision, samples, dtype)
        if key not in self._keys:
            self._keys[key] = key_of(self.at(samples).operators[index], precision, dtype)
        return self._keys[key]

    def _missing(
        self, device: str, index: int, precision: str | None, samples: int, known: list[int]
    ) -> TrimtabError:
        operator = self.workload.operators[index]
        key = self._key(index, precision, samples)
        only = f" (only at a batch of {known[0]}: two sizes tell how it grows)" if known else ""
        return TrimtabError(
            f"{operator.name}: {key.kind} ({key.shape}) in {key.precision} was not measured on device class "
            f"{device!r}{only}; run `trimtab probe` there with this model, this precision and batch {samples}"
        )
