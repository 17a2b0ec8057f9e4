"""Probing inside the job of `trimtab bench hybrid`: both ranks at once, every precision and size in turn.

A machine that slows down for a while then slows all of them, and medians over rounds leave out what was seldom.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.bench.predict_models import Task as Probed
from trimtab.bench.predict_trainers import PROBE, Trainers
from trimtab.cluster.profile import (
    LOCAL,
    PROFILE_VERSION,
    CodecTime,
    CollectiveTime,
    DeviceProfile,
    Line,
    OperatorTime,
    Profile,
)
from trimtab.predict.links import Placement
from trimtab.predict.settings import matched
from trimtab.runtime.probe_casts import cast_lines
from trimtab.runtime.probe_codec import CodecProbe
from trimtab.runtime.probe_links import LinkProbe, link_times, own_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from trimtab.runtime.probe_steps import StepTimes
    from trimtab.workload import Workload

ROUNDS = 4
"""Timed steps of each kind, after one that is not."""


class Probe:
    """What a job's two ranks, their link and the codec do. Every rank calls the same in the same order."""

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], tuple[Any, ...]],
        workload: Workload,
        device: torch.device,
        *,
        each: int,
        precisions: Sequence[str],
        bits: Sequence[int],
    ) -> None:
        """`each` is the samples of a rank when both have the same; half of that, and half more, are timed too."""
        self._trainers = Trainers(Probed(model=model, batch=batch, unit=1), device)
        self._workload, self._device, self._bits = workload, device, tuple(bits)
        self._sizes = tuple(dict.fromkeys((max(1, each // 2), each, 2 * each - max(1, each // 2))))
        # Plain steps last: they know best what nobody set.
        self._settings: list[tuple[str | None, dict[str, str]]] = [
            (low, matched(workload, {"*": low})) for low in precisions
        ]
        self._settings.append((None, {}))

    def profile(self, names: Sequence[str], link: str | None) -> Profile:
        """Of device classes by rank, joined by a link class (None for whatever there is). Collective."""
        self._trainers.make(PROBE)
        taken: dict[tuple[str | None, int], list[StepTimes]] = {}
        for round_ in range(1 + ROUNDS):
            for low, chosen in self._settings:
                for place in range(len(self._sizes)):
                    # While this rank has a share of the job's batch, the other has the rest.
                    size = self._sizes[place if dist.get_rank() == 0 else -1 - place]
                    step = self._trainers.timed(self._workload, size, chosen)
                    if round_:
                        taken.setdefault((low, size), []).append(step)
        every: list[Any] = [None] * len(names)
        dist.all_gather_object(every, self._own(names[dist.get_rank()], taken))
        return Profile(
            version=PROFILE_VERSION,
            trimtab=trimtab.__version__,
            torch=torch.__version__,
            devices=dict(zip(names, every, strict=True)),
            links={link or LOCAL: self._links(names)},
        )

    def close(self) -> None:
        """Let go of the model; nothing is probed after this."""
        self._trainers.close()

    def _own(self, name: str, taken: dict[tuple[str | None, int], list[StepTimes]]) -> DeviceProfile:
        from trimtab.runtime.probe_steps import operator_times

        chosen = dict(self._settings)
        operators: dict[str, OperatorTime] = {}
        for (low, size), steps in taken.items():
            operators |= operator_times(self._workload.at_batch(size), steps, chosen[low])
        elements = sum(p.tensor.numel for p in self._workload.parameters if p.trainable)
        update = median(step.optimiser for steps in taken.values() for step in steps)
        own = "bf16" if self._device.type == "cuda" else "fp32"
        casts = [f"{a}>{low}" for low in chosen if low for a in dict.fromkeys((own, "fp32")) if a != low]
        return DeviceProfile(
            called=name,
            operators=operators,
            casts=cast_lines(self._device, tuple(casts)),
            codec={str(bits): self._codec(bits) for bits in self._bits},
            batches={self._workload.model: tuple(sorted(self._sizes))},
            optimiser=Line(a=update / elements, c=0.0),
        )

    def _codec(self, bits: int) -> CodecTime:
        probe = CodecProbe(bits, self._device)
        for _ in range(2):
            probe.round()
        return probe.times()

    def _links(self, names: Sequence[str]) -> dict[str, CollectiveTime]:
        rows = own_rows(self._workload, self._bits)
        trial = LinkProbe(
            Placement(per_host=(1,) * len(names)), self._device, rows=rows, collectives=tuple(rows)
        )
        for _ in range(4):
            trial.round()
        return link_times(trial, names)
