"""How long does predicting take? One replay of GPT-2 small on 8 ranks, and one change of precision.

    python benchmarks/studies/predict_speed.py

Prints milliseconds of CPU time. Only the time of predicting is of interest, so the operators' times are made up.
Needs `transformers`.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

import trimtab
from trimtab.bench.harness import Result
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.cluster.profile import PROFILE_VERSION, CodecTime, DeviceProfile, Line, OperatorTime, Profile
from trimtab.measure.capture.capture import workload_of
from trimtab.predict.operators.costs import key_of
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.replay.replay import replay
from trimtab.predict.step import JobSetting, RankSetting, build_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.workload import Workload

KINDS = ("fast", "slow")
REPEATS = 30


def speed() -> dict[str, float]:
    """Milliseconds of CPU time."""
    workload = workload_of("gpt2", samples=4)
    profile = made_up_profile(workload)
    cluster = Cluster(
        version=1,
        devices={name: Device(kind="cuda", speed=1.0) for name in KINDS},
        links={"lan": Link(gbit_per_s=25.0)},
        hosts=tuple(Host(name=name, devices={name: 4}, link="lan") for name in KINDS),
        profile=profile,
    )
    setting = JobSetting(bits=4, ranks={name: RankSetting(samples=4, precisions={}) for name in KINDS})
    measured = Measured(workload, profile)
    roles, buckets = build_step(measured, cluster, setting)
    names = [name for name, (first, *_) in workload.settings.items() if _linear(workload, first)]
    mapper = MeasuredPrecisions(measured).mapper("slow", 4, "cuda")
    for name in names:
        mapper.change(name, "int8")
    turn = iter(range(10**9))

    def change() -> None:
        mapper.undo(mapper.change(names[next(turn) % len(names)], None))

    return {
        "replay_ms": _milliseconds(lambda: replay(roles, buckets)),
        "recost_ms": _milliseconds(change) / 2,  # there and back
    }


def made_up_profile(workload: Workload) -> Profile:
    """A profile of every operator of a workload as it is, and of its linear layers in int8."""
    operators = {}
    for operator in workload.operators:
        for precision in (None, "int8") if _linear(workload, operator.index) else (None,):
            seconds = 1e-5 + 1e-14 * operator.flops
            operators[str(key_of(operator, precision))] = OperatorTime(
                forward_s=seconds, backward_s=2 * seconds
            )
    line = Line(a=1e-12, c=1e-5)
    device = DeviceProfile(
        called="made up",
        operators=operators,
        codec={"4": CodecTime(encode=line, decode=line, add=line)},
        optimiser=Line(a=1e-11, c=0.0),
    )
    return Profile(
        version=PROFILE_VERSION,
        trimtab=trimtab.__version__,
        torch=torch.__version__,
        devices=dict.fromkeys(KINDS, device),
    )


def _linear(workload: Workload, index: int) -> bool:
    return workload.operators[index].kind == "linear"


def _milliseconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return median(seconds) * 1e3


if __name__ == "__main__":
    print(Result(bench="predict_speed", summary=dict(speed()), rows=[]).to_json())
