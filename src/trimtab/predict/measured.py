"""What every operator of a workload takes on a device, from a profile, at any batch size.

Times are known at the batch sizes that were measured; between and beyond two of them they are taken to be
linear in the number of samples, operator by operator.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.predict.costs import OperatorKey, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.cluster.profile import DeviceProfile, Profile
    from trimtab.workload import Operator, Workload


class Measured:
    """The times of one model's operators. Asking twice costs nothing."""

    def __init__(self, workload: Workload, profile: Profile) -> None:
        self.workload, self.profile = workload, profile
        self._sized: dict[int, Workload] = {workload.batch_size: workload}
        self._keys: dict[tuple[int, str | None, int], OperatorKey] = {}
        self._times: dict[tuple[str, int, str | None, int], tuple[float, float]] = {}

    def device(self, name: str) -> DeviceProfile:
        found = self.profile.devices.get(name)
        if found is None:
            raise TrimtabError(
                f"device class {name!r} was not measured, and no datasheet is known for it; run `trimtab probe` on one "
                f"and merge its file, or give the class a `model` of the catalogue. Measured: "
                f"{', '.join(self.profile.devices) or 'none'}"
            )
        return found

    def at(self, samples: int) -> Workload:
        """The workload for another number of samples."""
        if samples not in self._sized:
            self._sized[samples] = self.workload.at_batch(samples)
        return self._sized[samples]

    def times(self, device: str, index: int, precision: str | None, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of an operator; `precision` None for what nobody set.

        Raises:
            TrimtabError: naming the operator that was not measured.
        """
        key = (device, index, precision, samples)
        if key not in self._times:
            self._times[key] = self._find(device, index, precision, samples)
        return self._times[key]

    def step(
        self, device: str, precisions: Mapping[str, str], samples: int, *, naive: bool = False
    ) -> tuple[list[float], list[float]]:
        """(forward, backward) seconds of all operators, with some set to a precision by their names.

        `naive` leaves out what a changed operator does beside its products: the casts of its operands.
        """
        forward, backward = [], []
        for operator in self.workload.operators:
            precision = precisions.get(operator.setting) if operator.setting is not None else None
            f, b = self.times(device, operator.index, precision, samples)
            if naive and precision is not None:
                f, b = self._without_casts(
                    device, self.at(samples).operators[operator.index], precision, f, b
                )
            forward.append(f)
            backward.append(b)
        return forward, backward

    def _find(self, device: str, index: int, precision: str | None, samples: int) -> tuple[float, float]:
        profile = self.device(device)
        exact = profile.operators.get(str(self._key(index, precision, samples)))
        if exact is not None:
            return exact.forward_s, exact.backward_s
        known = []
        for size in sorted(profile.batches.get(self.workload.model, ())):
            found = profile.operators.get(str(self._key(index, precision, size)))
            if found is not None:
                known.append((size, found))
        if len(known) < 2:
            raise self._missing(device, index, precision, samples, [size for size, _ in known])
        place = min(max(1, bisect_left([size for size, _ in known], samples)), len(known) - 1)
        (low, a), (high, b) = known[place - 1], known[place]
        part = (samples - low) / (high - low)
        return (
            max(0.0, a.forward_s + part * (b.forward_s - a.forward_s)),
            max(0.0, a.backward_s + part * (b.backward_s - a.backward_s)),
        )

    def _key(self, index: int, precision: str | None, samples: int) -> OperatorKey:
        key = (index, precision, samples)
        if key not in self._keys:
            self._keys[key] = key_of(self.at(samples).operators[index], precision)
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

    def _without_casts(
        self, device: str, operator: Operator, precision: str, forward: float, backward: float
    ) -> tuple[float, float]:
        casts = self.device(device).casts
        line = casts.get(f"{operator.dtype}>{precision.split('/')[0]}")
        if line is None or not operator.parameter_tensors:
            return forward, backward
        x, w = operator.input_tensors[0].numel, operator.parameter_tensors[0].numel
        y = operator.outputs[0].numel
        before = line.seconds(x) + line.seconds(w)
        after = 2 * line.seconds(y) + line.seconds(w)
        return max(0.1 * forward, forward - before), max(0.1 * backward, backward - after)
