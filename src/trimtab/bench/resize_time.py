"""What leaving half out saves of a rank's own time in its blocks: both forms, beside the even run and itself again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.bench.harness import AA, interleave
from trimtab.bench.ranks import run_on_ranks, slices, two_hosts
from trimtab.bench.tp import SIZES, Trainer
from trimtab.runtime.resize import set_resize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATIO = 0.5
FORMS: dict[str, str | None] = {"even": None, "even" + AA: None, "unit": "unit", "column": "column"}


def resize_time(
    device: str, repeats: int, progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Rows of two equal ranks, the second leaving half out: milliseconds of its blocks in a step, and over even's.

    With no work outside the products, nothing to gather and no rounding, `over_even` would be one half.
    """
    from trimtab.emulate import Emulation

    cluster = slices(2) if device == "cuda" else two_hosts(None)
    with Emulation(cluster) as emulation:
        spec = {"device": device, "repeats": repeats, **SIZES[device]}
        rows: list[dict[str, Any]] = run_on_ranks(emulation, on_rank, spec, progress=progress)
    return rows


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """The second rank's rows, on both."""
    torch.set_num_threads(1)
    trainers = {name: Trainer(spec, None) for name in FORMS}
    for name, form in FORMS.items():
        if form is not None and dist.get_rank() == 1:
            chosen: Any = form
            set_resize(trainers[name].model, RATIO, form=chosen)

    def blocks(trainer: Trainer) -> float:
        trainer.step()
        return trainer.segments[-1][1].blocks

    cases = {name: (lambda trainer=trainer: blocks(trainer)) for name, trainer in trainers.items()}
    timings = interleave(cases, warmup=2, repeats=spec["repeats"], progress=report)
    rows = [
        {"form": name, "blocks_ms": timing.median_ms, "over_even": timing.ratio(timings["even"])}
        for name, timing in timings.items()
    ]
    told: list[Any] = [rows]
    dist.broadcast_object_list(told, src=1)
    found: list[dict[str, Any]] = told[0]
    return found
