"""Times a running job between two of its steps: a copy of its model, on all ranks in lockstep."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.cluster import Cluster
from trimtab.control.autopilot.lightning_step import copy_of
from trimtab.control.autopilot.observed_step import JobSpec, ObservedStep
from trimtab.control.compression.bucket_caps import bucket_caps_mb
from trimtab.control.compression.ddp import compresses
from trimtab.measure.device import Task
from trimtab.measure.out_of_memory import Agreement
from trimtab.measure.probe import measure_cluster, measure_damages
from trimtab.measure.products import usual_precisions
from trimtab.planning.make_plan import TRIED
from trimtab.precision.setting import set_operators
from trimtab.predict.damage import Damage
from trimtab.run_settings import own_steps
from trimtab.workload import Workload
from trimtab.workload.buckets import ddp_buckets

MOST_STEPS, LEAST_S, MOST_S = 10.0, 8.0, 45.0
"""Operators are timed for at most so many steps' time, within these seconds: 3 % of 500 steps with all the rest. Where
steps are short it is a larger part: the first kernels of a GPU are compiled meanwhile."""

COMMUNICATES = (
    "the model exchanges tensors with other ranks in its forward pass, so one rank cannot run it alone"
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the job after its ranks were timed."""

    cluster: Cluster
    workload: Workload
    damages: Damage
    samples: tuple[int, ...]
    """Of each rank in the observed step."""

    seconds: float
    """That all this took."""

    @property
    def codec(self) -> bool:
        """Whether there was time for the codec on every device."""
        profile = self.cluster.profile
        return profile is not None and all(device.codec for device in profile.devices.values())


def agree_on_step(
    observed: ObservedStep | None, problem: Exception | None, device: torch.device
) -> tuple[ObservedStep, tuple[int, ...]]:
    """The observed step, that of rank 0 where the ranks' batches have different shapes; and their samples. Collective.

    Args:
        problem: why this rank has not observed it.
    """

    def described() -> tuple[Any, int, str | None]:
        if problem is not None:
            raise problem
        if observed is None:
            raise RuntimeError("no forward pass of the module was seen")
        return observed.shapes, observed.samples, observed.autocast

    everyone = _gather(together(described, device))
    assert observed is not None
    if len({autocast for _, _, autocast in everyone}) > 1:
        raise RuntimeError("ranks run under different autocasts")
    samples = tuple(count for _, count, _ in everyone)
    if all(shapes == everyone[0][0] for shapes, _, _ in everyone):
        return observed, samples

    def packed() -> bytes | None:
        if dist.get_rank() != 0:
            return None
        observed.to(torch.device("cpu"))
        return pickle.dumps(observed)

    shared: list[Any] = [together(packed, device)]
    dist.broadcast_object_list(shared, device=device if device.type == "cuda" else None)

    def unpacked() -> ObservedStep:
        step: ObservedStep = pickle.loads(shared[0])
        step.to(device)
        return step

    return together(unpacked, device), samples


def measure_job(
    ddp: DistributedDataParallel,
    step: ObservedStep,
    samples: tuple[int, ...],
    *,
    precise: bool,
    step_s: float,
) -> Measured:
    """Time a copy of the model on all ranks in lockstep. Collective: what fails on one rank fails on all.

    Args:
        precise: also in lower precisions, with what they do to the gradient.
        step_s: seconds of a step of the job.
    """
    start = time.perf_counter()
    device = next(ddp.parameters()).device
    with own_steps(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        task = together(lambda: _task(ddp, step, min(samples), precise, step_s, device), device)
        cluster, probed = measure_cluster(task, device)
        unfinished = {unit.rpartition(" ")[2] for units in _gather(probed.left) for unit in units}
        if "plain" in unfinished:
            raise RuntimeError(f"a step takes too long to time it within {task.seconds:.0f} s")
        names = _gather(tuple(p for p in task.precisions if p not in unfinished))
        precisions = tuple(dict.fromkeys(name for own in names for name in own))
        damages: Damage = {}
        if precisions:
            task = replace(task, precisions=precisions)
            # With fewer samples damage looks larger, never smaller.
            few = task.spec.batch_of(max(1, step.samples // 4))
            damages = measure_damages(task, device, probed.workload, [few])
        del task
    gc.collect()
    workload = probed.workload
    if (caps := bucket_caps_mb(ddp)) is not None:
        workload = replace(workload, buckets=ddp_buckets(workload.parameters, workload.operators, caps))
    return Measured(
        cluster=cluster,
        workload=workload,
        damages=damages,
        samples=samples,
        seconds=time.perf_counter() - start,
    )


def together(work: Callable[[], T], device: torch.device) -> T:
    """What local work gives, if it succeeds on every rank; otherwise every rank raises. Collective."""
    with Agreement(device).attempt():
        return work()


def _task(
    ddp: DistributedDataParallel,
    step: ObservedStep,
    least: int,
    precise: bool,
    step_s: float,
    device: torch.device,
) -> Task:
    try:
        model = copy_of(ddp.module)
        set_operators(model, {})
    except Exception as error:
        raise RuntimeError(f"the model cannot be copied: {error}") from error
    return Task(
        spec=JobSpec(name=type(model).__name__, model=model, batch=step.batch, step=step),
        batches=(max(1, least // 4), max(2, 3 * least // 4)),
        precisions=usual_precisions(device, step.autocast) if precise else (),
        bits=TRIED if compresses(ddp) else (),
        autocast=step.autocast,
        seconds=min(MOST_S, max(LEAST_S, MOST_STEPS * step_s)),
        quick=True,
    )


def collectives_begun() -> int:
    """How many this process has begun so far, but for those in trimtab's own groups."""
    begun, names = 0, dist.distributed_c10d._world.pg_names
    group: Any
    for group, name in names.items():
        if not name.startswith("trimtab"):
            with suppress(RuntimeError):  # a backend that does not count
                begun += group._get_sequence_number_for_group()
    return begun


def _gather(own: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank
