"""A measured cluster that was never measured: small figures that can be worked out by hand."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from tests.measure.capture.models import MODELS, batch_for

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
from trimtab.predict.operators.costs import key_of, workload_key

if TYPE_CHECKING:
    from trimtab.workload import Workload

BATCHES = (2, 6)
FAST, SLOW = "fast", "slow"


@cache
def workload() -> Workload:
    """A GPT of the benches, on no device."""
    with torch.device("meta"):
        model = MODELS["gpt"]()
    return capture_workload(model, batch_for("gpt", 2))


def device_profile(slower: float = 1.0, *, called: str = "device") -> DeviceProfile:
    """Every operator takes a millisecond a sample forward and two backward; int8 half of that."""
    operators = {}
    for size in BATCHES:
        for operator in workload().at_batch(size).operators:
            times = [(key_of(operator), 1.0)]
            if operator.kind == "linear":
                times.append((key_of(operator, "int8"), 0.5))
            for key, part in times:
                seconds = 1e-3 * size * slower * part
                operators[str(key)] = OperatorTime(forward_s=seconds, backward_s=2 * seconds)
    line = Line(a=1e-9, c=1e-6)
    return DeviceProfile(
        called=called,
        operators=operators,
        casts={"fp32>int8": Line(a=1e-9, c=0.0)},
        codec={"4": CodecTime(encode=line, decode=line, add=line)},
        batches={workload_key(workload()): BATCHES},
        optimiser=Line(a=1e-9, c=0.0),
    )


def profile(slower: float = 2.0) -> Profile:
    link = {
        name: CollectiveTime(per_message_s=1e-4, per_byte_s=8e-9, drag={FAST: 0.1, SLOW: 0.2})
        for name in ("all_reduce", "all_gather", "all_to_all")
    }
    return Profile(
        version=PROFILE_VERSION,
        trimtab=trimtab.__version__,
        torch=torch.__version__,
        devices={FAST: device_profile(), SLOW: device_profile(slower)},
        links={"lan": link, LOCAL: link},
    )


def cluster(*, link: str | None = "lan") -> Cluster:
    """A host with a fast device and one with a slow one."""
    return Cluster(
        version=1,
        devices={
            FAST: Device(kind="cpu", speed=1.0, price_per_hour=1.0),
            SLOW: Device(kind="cpu", speed=0.5, price_per_hour=0.5),
        },
        links={"lan": Link(gbit_per_s=1.0)},
        hosts=(
            Host(name="a", devices={FAST: 1}, link=link),
            Host(name="b", devices={SLOW: 1}, link=link),
        ),
        profile=profile(),
    )
