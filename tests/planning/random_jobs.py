"""Random small jobs to plan for, and all plans of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn

import trimtab
from trimtab.cluster import Cluster, Device, Host, Link
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
from trimtab.measure.capture.capture import capture_workload
from trimtab.planning.compression.route import routes_to_try
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan_search import PlanSearch
from trimtab.planning.roles import layout
from trimtab.predict.operators.costs import key_of, workload_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planning.plan import Plan
    from trimtab.planning.plan_search import JobCandidate
    from trimtab.predict.step_setting import StepSetting
    from trimtab.workload import Workload

BATCHES = (1, 4)


class Net(nn.Module):
    """Two layers that can be lowered, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 128), nn.Linear(128, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return y


@cache
def workload() -> Workload:
    with torch.device("meta"):
        return capture_workload(Net(), torch.randn(2, 96, device="meta"))


@dataclass(frozen=True, kw_only=True)
class RandomJob:
    cluster: Cluster
    damages: dict[str, dict[str, float]]
    total: int
    budget: float

    def plan(self, **keywords: Any) -> Plan:
        settings: dict[str, Any] = {"budget": self.budget, **keywords}
        return make_plan(
            self.cluster, workload(), self.damages, model="m", trimtab="0", batch_size=self.total, **settings
        )

    def search(self) -> PlanSearch:
        return PlanSearch(self.cluster, workload(), self.damages, self.total)


def all_jobs(job: RandomJob, search: PlanSearch) -> Iterator[JobCandidate]:
    """Every choice of shares, precisions, bits and route; ranks of a class with equal shares do the same."""
    compressed = search.setting(4)
    routes = routes_to_try(search.cluster, search.profile, workload(), compressed)
    for setting in (search.uncompressed, *(replace(compressed, route=route) for route in routes)):
        for samples in _shares(search.devices, job.total):
            yield from all_precisions(job, search, samples, setting)


def all_precisions(
    job: RandomJob, search: PlanSearch, samples: dict[str, tuple[int, ...]], setting: StepSetting
) -> Iterator[JobCandidate]:
    """Every choice of precisions with these shares."""
    names = list(job.damages)
    choices = [
        dict(zip(names, chosen, strict=True)) for chosen in product(("own", "int8"), repeat=len(names))
    ]
    roles = layout(search.devices, samples)
    for several in product(choices, repeat=len(roles.devices)):
        chosen = dict(zip(roles.devices, several, strict=True))
        candidate = search.candidate(roles, chosen, 0.0, setting)
        yield replace(candidate, damage=search.damage_of(candidate))


def _shares(devices: list[str], total: int) -> list[dict[str, tuple[int, ...]]]:
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], None] = {}
    for parts in product(range(1, total), repeat=len(devices)):
        if sum(parts) == total:
            own: dict[str, tuple[int, ...]] = {}
            for device, part in zip(devices, parts, strict=True):
                own[device] = tuple(sorted((*own.get(device, ()), part), reverse=True))
            found[tuple(own.items())] = None
    return [dict(shares) for shares in found]


@st.composite
def jobs(draw: st.DrawFn, most_ranks: int = 3, most_samples: int = 6) -> RandomJob:
    """One or two classes of devices on hosts of one rank, or four ranks on two hosts."""
    counts = draw(
        st.sampled_from([c for c in ((1, 1), (2, 0), (2, 1), (1, 2), (2, 2)) if sum(c) <= most_ranks])
    )
    classes = [name for name, count in zip("ab", counts, strict=True) if count]
    per_host = draw(st.sampled_from((1, 2))) if counts == (2, 2) else 1
    slower = draw(st.floats(1.0, 4.0))
    operator_s = 10 ** draw(st.floats(-5.0, -2.0))
    low = [draw(st.floats(0.3, 1.2)) for _ in range(2)]
    codec = Line(a=10 ** draw(st.floats(-11, -8)), c=1e-6)
    link = {
        name: CollectiveTime(
            per_message_s=10 ** draw(st.floats(-5, -3)),
            per_byte_s=10 ** draw(st.floats(-10, -7)),
            drag=dict.fromkeys(classes, draw(st.floats(0, 0.3))),
        )
        for name in ("all_reduce", "all_gather", "all_to_all")
    }
    names = list(workload().settings)
    fixed = draw(st.floats(0.0, 1.0))
    return RandomJob(
        cluster=Cluster(
            version=1,
            devices={name: Device(kind="cpu", speed=1.0) for name in classes},
            links={"lan": Link(gbit_per_s=1.0)},
            hosts=tuple(
                Host(name=f"h{name}", devices={name: per_host}, link="lan", count=count // per_host)
                for name, count in zip("ab", counts, strict=True)
                if count
            ),
            profile=Profile(
                version=PROFILE_VERSION,
                trimtab=trimtab.__version__,
                torch=torch.__version__,
                devices={
                    name: _device(operator_s * (slower if name == "b" else 1.0), low, fixed, codec)
                    for name in classes
                },
                links={"lan": link, LOCAL: link},
            ),
        ),
        damages={name: {"int8": 10 ** draw(st.floats(-4, -1))} for name in names},
        total=draw(st.integers(sum(counts), most_samples)),
        budget=draw(st.sampled_from((0.0, 0.01))),
    )


def _device(seconds: float, low: list[float], fixed: float, codec: Line) -> DeviceProfile:
    """An operator takes so long for each sample, and `fixed` of that for any number of them."""
    operators = {}
    for size in BATCHES:
        products = 0
        for operator in workload().at_batch(size).operators:
            own = seconds * (size + fixed)
            times = [(key_of(operator), own)]
            if operator.kind == "linear":
                times.append((key_of(operator, "int8"), own * low[products]))
                products += 1
            for key, taken in times:
                operators[str(key)] = OperatorTime(forward_s=taken, backward_s=2 * taken)
    return DeviceProfile(
        called="device",
        operators=operators,
        casts={"fp32>int8": Line(a=1e-12, c=0.0)},
        codec={"4": CodecTime(encode=codec, decode=codec, add=codec)},
        batches={workload_key(workload()): BATCHES},
        optimiser=Line(a=1e-10, c=0.0),
    )
