"""`trimtab bench scale`: how long planning and simulating take, and what a plan gains, up to ten thousand ranks.

Nothing here is measured on a cluster: the devices are made up, each class somewhat slower than the one before, and the
times of operators follow from their arithmetic and memory traffic. What is measured is the planner itself.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import torch

import trimtab
from trimtab.bench.harness import Result
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.cluster.profile import PROFILE_VERSION, CodecTime, DeviceProfile, Line, OperatorTime, Profile
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.models.gpt import Gpt
from trimtab.planning.make_plan import make_plan
from trimtab.planning.what_if import even, what_ifs
from trimtab.predict.operators.costs import key_of, workload_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.planning.plan import Plan
    from trimtab.workload import Workload

PER_HOST = 8
SAMPLES = 4
"""Of each rank."""

SLOWEST = 0.4
"""Speed of the slowest class of device, relative to the fastest."""

TFLOPS, TERABYTES = 150.0, 1.5
"""What the fastest class reaches in a second."""

LINK_FACTORS = (1.0, 0.9, 0.8, 0.7)
"""Rates of the classes of links, relative to the fastest."""


def scale(
    ranks: Sequence[int],
    classes: int,
    layers: int,
    gbits: Sequence[float],
    progress: Callable[[int, int], None],
) -> Result:
    """Plan and simulate a GPT on clusters of so many ranks, once with links of each rate."""
    if not ranks or not gbits or min(ranks) < 1 or min(gbits) <= 0:
        raise TrimtabError(
            "bench scale: give world sizes as 1000,10000 and rates of links in Gbit/s as 10,100"
        )
    workload = model(layers)
    cases = [(count, gbit) for count in ranks for gbit in gbits]
    rows = []
    for done, (count, gbit) in enumerate(cases):
        rows.append(row(cluster(workload, count, classes, gbit), workload, gbit))
        progress(done + 1, len(cases))
    return Result(
        bench="scale",
        summary={
            "plan_s": max(row["plan_s"] for row in rows),
            "simulate_s": max(row["simulate_s"] for row in rows),
            "mib": max(row["mib"] for row in rows),
            "predicted_over_ddp": max(row["predicted_over_ddp"] for row in rows),
        },
        rows=rows,
    )


def row(on: Cluster, workload: Workload, gbit: float) -> dict[str, Any]:
    """One cluster: times of the commands' own work, and the plan's predicted step over plain DDP's."""
    start = time.perf_counter()
    plan = planned(on, workload)
    plan_s = time.perf_counter() - start
    start = time.perf_counter()
    what_ifs(on, workload, even(on, SAMPLES), bits=4)
    return {
        "ranks": on.world_size,
        "gbit_per_s": gbit,
        "classes": len(on.devices),
        "layers": sum(name.endswith(".qkv") for name in workload.settings),
        "plan_s": plan_s,
        "simulate_s": time.perf_counter() - start,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "predicted_over_ddp": plan.predicted.step_s / plan.predicted.plain_step_s,
        "bits": plan.bits,
        "reason": plan.reasons[-1],
    }


def planned(on: Cluster, workload: Workload) -> Plan:
    """A plan with nothing given: shares, precisions and bits."""
    damages = {name: {"fp8": 1e-5} for name in workload.settings}
    return make_plan(
        on,
        workload,
        damages,
        model="scale",
        trimtab=trimtab.__version__,
        batch_size=SAMPLES * on.world_size,
    )


def model(layers: int) -> Workload:
    """A GPT in bf16; nothing is allocated."""
    with torch.device("meta"):
        gpt = Gpt(width=1024, layers=layers, heads=16, context=512)
    text = torch.zeros(SAMPLES, 513, dtype=torch.int64, device="meta")
    return capture_workload(gpt, (text,), autocast="bf16")


def cluster(workload: Workload, ranks: int, classes: int, gbit: float) -> Cluster:
    """Hosts of eight equal cards; neighbors may have other cards and other links."""
    hosts = -(-ranks // PER_HOST)
    classes = min(classes, hosts)
    speeds = [1.0 - (1.0 - SLOWEST) * index / max(1, classes - 1) for index in range(classes)]
    names = [f"card{index}" for index in range(classes)]
    counts = [hosts // classes + (index < hosts % classes) for index in range(classes)]
    links = {
        f"link{index}": Link(gbit_per_s=gbit * factor, latency_us=20.0)
        for index, factor in enumerate(LINK_FACTORS)
    }
    return Cluster(
        version=1,
        devices={name: Device(kind="cuda", speed=speed) for name, speed in zip(names, speeds, strict=True)},
        links=links,
        hosts=tuple(
            Host(
                name=f"host{index}",
                devices={name: PER_HOST},
                link=f"link{index % len(LINK_FACTORS)}",
                count=count,
            )
            for index, (name, count) in enumerate(zip(names, counts, strict=True))
        ),
        profile=Profile(
            version=PROFILE_VERSION,
            trimtab=trimtab.__version__,
            torch=torch.__version__,
            devices={name: _device(workload, speed) for name, speed in zip(names, speeds, strict=True)},
        ),
    )


def _device(workload: Workload, speed: float) -> DeviceProfile:
    sizes = (SAMPLES // 2, 2 * SAMPLES)
    operators = {}
    for size in sizes:
        for operator in workload.at_batch(size).operators:
            moved = (operator.bytes_read + operator.bytes_written) / (TERABYTES * 1e12 * speed)
            keys = [(key_of(operator), 1.0)]
            if operator.setting is not None and operator.kind == "linear":
                keys.append((key_of(operator, "fp8"), 0.6))
            for key, part in keys:
                rate = TFLOPS * 1e12 * speed / part
                operators[str(key)] = OperatorTime(
                    forward_s=max(operator.flops / rate, moved) + 5e-6,
                    backward_s=max(operator.backward_flops / rate, 2 * moved) + 5e-6,
                )
    codec = CodecTime(
        encode=Line(a=6e-12 / speed, c=2e-5),
        decode=Line(a=5e-12 / speed, c=2e-5),
        add=Line(a=8e-12 / speed, c=2e-5),
    )
    line = Line(a=4e-12 / speed, c=5e-6)
    pairs = [(a, b) for a in ("fp32", "bf16", "fp8") for b in ("fp32", "bf16", "fp8") if a != b]
    return DeviceProfile(
        called="made up",
        operators=operators,
        casts={f"{a}>{b}": line for a, b in pairs},
        codec={"4": codec, "8": codec},
        batches={workload_key(workload): sizes},
        optimiser=Line(a=3e-11 / speed, c=1e-4),
    )
