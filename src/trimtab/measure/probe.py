"""Probe the devices and links of a job: the result is a cluster with its profile."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.cluster import Cluster, Device, Host, Link, Profile, load_cluster
from trimtab.cluster.profile import LOCAL, ProbedModel, check_profile, merge_profiles
from trimtab.environment import DEVICE_CLASS, logger
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.damage.indicators import gradient_damage
from trimtab.measure.device import Task, alone, cache_of, called
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.interfaces import link_classes
from trimtab.measure.job import Probed, probe_job
from trimtab.measure.out_of_memory import allocations_fail_on_time, is_out_of_memory
from trimtab.measure.products import refuse_wrong_products, usual_precisions
from trimtab.measure.timing import meet, seconds_per_call
from trimtab.models.data import calibration, filled
from trimtab.models.spec import NAMES, load_model
from trimtab.precision.products import DTYPES
from trimtab.predict.collectives import Placement
from trimtab.predict.damage import Damage
from trimtab.workload import StoredWorkload, Workload

ALIKE = 0.15
"""Devices with the same name whose speeds differ by less than this fraction are one class."""

LINK = "link"
"""The name of the class of the link between the probed hosts, or of the fastest where they differ."""

UNKNOWN = Link(gbit_per_s=1000.0)
"""A link that is not measured yet, or too fast to be measured."""

BATCHES = (2, 4, 6)
"""Default samples per rank; `trimtab plan` warns if its job needs to extrapolate far."""

INDICATOR = "variance"
"""How probing estimates damages: in the units of the damage that a plan allows."""

SPEED_SIDE = {"cpu": 384, "cuda": 4096}


def require_sizes(batches: Sequence[int], bits: Sequence[int]) -> None:
    """Refuse batches that do not show how times grow, and bits that the codec does not have."""
    if len(set(batches)) < 2:
        raise TrimtabError(
            f"probe: batches {list(batches)}: at least two sizes are needed, to see how times grow"
        )
    if not all(1 <= each <= 8 for each in bits):
        raise TrimtabError(f"probe: bits {list(bits)}: gradients are sent in 1 to 8 bits a value")


def probe(
    model: str = "gpt",
    *,
    device: str = "cpu",
    batches: Sequence[int] = BATCHES,
    precisions: Sequence[str] | None = None,
    bits: Sequence[int] = (4, 8),
    autocast: str | None = None,
    seconds: float = 120.0,
    fresh: bool = False,
    damage: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Cluster:
    """Measure the devices of this job and the link between them.

    One process measures one device. Under torchrun (or `trimtab emulate`) the ranks measure their devices in lockstep,
    and all of them the link between them; every rank gets the whole cluster.

    Args:
        model: the model whose operators are timed in real training steps; see `trimtab.models.spec.load_model`.
        batches: samples per rank; at least two sizes show how times grow. Best are 0.5, 1 and 1.5 times an equal
            share of the global batch.
        precisions: to time besides the model's own; by default all that may pay off on the device.
        bits: bits of the codec.
        autocast: "bf16" or "fp16"; the model's own precision.
        seconds: no new measurement of a device starts after this time on any rank; a warning lists what is missing,
            and the next run continues there.
        fresh: ignore cached measurements.
        damage: also measure what each of the precisions does to the gradient, so that they can be planned where
            neither the model's code nor its data is.
    """
    on = torch.device(device)
    require_sizes(batches, bits)
    cache_of(on).require_writable()
    inside = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if inside:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    made = alone()
    try:
        spec = load_model(model, on, samples=min(batches))
        if model in NAMES:
            spec = replace(spec, batch=filled(spec, 0))
        task = Task(
            spec=spec,
            batches=tuple(sorted(set(batches))),
            precisions=usual_precisions(on, autocast) if precisions is None else tuple(precisions),
            bits=tuple(bits),
            autocast=autocast,
            seconds=seconds,
        )
        refuse_wrong_products(on)
        with allocations_fail_on_time(on):
            return _measure(task, on, fresh, damage, progress)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrimtabError(
            f"probe: rank {dist.get_rank()} ran out of memory, and not only in a step; use a smaller model, "
            "smaller batches (--batch), or fewer ranks per device"
        ) from None
    finally:
        if inside or made:
            dist.destroy_process_group()


def _measure(
    task: Task, device: torch.device, fresh: bool, damage: bool, progress: Callable[[int, int], None]
) -> Cluster:
    world = dist.get_world_size()
    # Ranks of one machine may differ, so each keeps what it measured for itself.
    cache = cache_of(device, f"rank-{dist.get_rank()}-of-{world}" if world > 1 else "")
    if not fresh:
        cache.load()
    cluster, probed = measure_cluster(task, device, cache=cache, progress=progress)
    if probed.left and dist.get_rank() == 0:
        logger().warning(
            "after %g seconds %d measurements are unfinished, the first is %r: raise --seconds%s",
            task.seconds,
            len(probed.left),
            probed.left[0],
            ", or run the same command again to continue" if cache.keep else "",
        )
    model = ProbedModel(
        fingerprint=fingerprint(task.spec.model),
        workloads={device.type: StoredWorkload.of(probed.workload)},  # type: ignore[dict-item]  # cpu or cuda
        indicator=INDICATOR if damage else None,
        damages=measure_damages(task, device, probed.workload, calibration(task.spec)) if damage else {},
    )
    return replace(cluster, profile=replace(probed.profile, models={task.spec.name: model}))


def measure_cluster(
    task: Task,
    device: torch.device,
    *,
    cache: ProbeCache | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Cluster, Probed]:
    """The cluster of this job with its measurements, but without the model's. Collective.

    Args:
        cache: earlier measurements of this rank; without it nothing is cached.
    """
    world = dist.get_world_size()
    everyone: list[Any] = [None] * world
    mine = _here(), called(device), _speed(device, quick=task.quick), os.environ.get(DEVICE_CLASS)
    dist.all_gather_object(everyone, mine)
    hosts = [host for host, _, _, _ in everyone]
    classes, of_rank = classify([(name, rate, given) for _, name, rate, given in everyone], device.type)
    several = len(set(hosts)) > 1
    links: Sequence[str | None] = (None,)
    slowness: dict[str, float] | None = None
    if several:
        links, slowness = link_classes(hosts, device, LINK)
    described = _hosts(hosts, of_rank, links)
    cluster = Cluster(
        version=1, devices=classes, links=dict.fromkeys(slowness or (), UNKNOWN), hosts=described
    )
    probed = probe_job(
        task,
        device,
        of_rank,
        Placement.on(cluster),
        LINK if several else LOCAL,
        slowness=slowness,
        cache=cache,
        progress=progress,
    )
    rates = {name: _link(probed.profile, name) for name in cluster.links}
    return replace(cluster, links=rates, profile=probed.profile), probed


def measure_damages(task: Task, device: torch.device, workload: Workload, batches: Sequence[Any]) -> Damage:
    """The damage of every precision of the task, measured by rank 0 for all. Collective."""
    if not workload.settings:
        return {}  # no operator has a precision to choose
    measured: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            measured[0] = _own_damages(task, device, workload, batches)
        except Exception as error:
            measured[0] = error
    dist.broadcast_object_list(measured, device=device if device.type == "cuda" else None)
    if isinstance(measured[0], Exception):
        raise measured[0]
    damages: Damage = measured[0]
    return damages


def _own_damages(task: Task, device: torch.device, workload: Workload, batches: Sequence[Any]) -> Damage:
    dtype = DTYPES[task.autocast] if task.autocast else None
    with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
        damages = gradient_damage(
            task.spec.model, batches, task.spec.loss_of, precisions=task.precisions, indicator=INDICATOR
        )
    # A precision whose range is exceeded is never chosen, like one without a damage.
    return {
        name: {precision: value for precision, value in by.items() if isfinite(value)}
        for name, by in damages.items()
        if name in workload.settings
    }


def _link(profile: Profile, name: str) -> Link:
    whole = profile.links[name]["all_reduce"]
    rate = 8 / whole.per_byte_s / 1e9 if whole.per_byte_s else UNKNOWN.gbit_per_s
    return Link(gbit_per_s=rate, latency_us=whole.per_message_s * 1e6)


def classify(
    ranks: Sequence[tuple[str, float, str | None]], kind: str
) -> tuple[dict[str, Device], list[str]]:
    """Classes of devices with the same name and about the same speed, and the class of every rank.

    Args:
        ranks: of each its device's name and speed, and its class in the user's cluster file, where that is known.
    """
    fastest = max(rate for _, rate, _ in ranks)
    classes: dict[str, tuple[str, Device]] = {}
    of_rank: list[str] = []
    for name, rate, given in ranks:
        base = given or re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:24] or kind
        same = [
            title
            for title, (known, device) in classes.items()
            if known == base
            and device.model == name
            and abs(device.speed - rate / fastest) <= ALIKE * device.speed
        ]
        if not same:
            title = base if base not in classes else f"{base}-{len(classes) + 1}"
            of_kind: Any = kind
            classes[title] = base, Device(kind=of_kind, speed=round(rate / fastest, 3), model=name)
            same = [title]
        of_rank.append(same[0])
    return {title: device for title, (_, device) in classes.items()}, of_rank


def _here() -> str:
    """This host's name; torchrun's nodes count as hosts, even if one machine runs several."""
    node = os.environ.get("GROUP_RANK", "0") if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else ""
    return f"{socket.gethostname()[:24]}{'-' if node else ''}{node}"


def _hosts(hosts: Sequence[str], of_rank: Sequence[str], links: Sequence[str | None]) -> tuple[Host, ...]:
    counted: dict[str, dict[str, int]] = {}
    for host, device in zip(hosts, of_rank, strict=True):
        devices = counted.setdefault(host, {})
        devices[device] = devices.get(device, 0) + 1
    return tuple(
        Host(name=_name(host, index), devices=devices, link=links[index])
        for index, (host, devices) in enumerate(counted.items())
    )


def _name(host: str, index: int) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", host).strip("-")[:32] or f"host-{index}"


def _speed(device: torch.device, *, quick: bool) -> float:
    """Matrix products per second, over long enough that a CPU quota counts in full."""
    side = SPEED_SIDE[device.type]
    matrix = torch.randn(side, side, dtype=torch.float32, device=device)
    meet(device)
    at_least_s = 0.2 if quick else 0.5
    return 1 / seconds_per_call(
        lambda: matrix @ matrix, device, at_least_s=at_least_s, gpu_calls=64, warmup=3
    )


def merge_files(paths: Sequence[Path]) -> Cluster:
    """Merge several probed files into one cluster: all their hosts, classes, links and measurements.

    Raises:
        TrimtabError: the files are from different versions, or classes with the same name differ.
    """
    clusters = [load_cluster(path) for path in paths]
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}
    hosts: list[Host] = []
    profiles: list[Profile] = []
    for path, cluster in zip(paths, clusters, strict=True):
        if cluster.profile is None:
            raise TrimtabError(f"{path}: has no measurements; make it with `trimtab probe --out {path}`")
        try:
            check_profile(cluster.profile, trimtab=trimtab.__version__)
        except TrimtabError as error:
            raise TrimtabError(f"{path}: {error}") from None
        for name, device in cluster.devices.items():
            if name in devices and devices[name].model != device.model:
                raise TrimtabError(
                    f"{path}: device class {name!r} is {device.model!r}, in an earlier file "
                    f"{devices[name].model!r}; rename one"
                )
            devices[name] = device
        links |= cluster.links
        taken = {host.name for host in hosts}
        hosts += [host for host in cluster.hosts if host.name not in taken]
        profiles.append(cluster.profile)
    return Cluster(
        version=1, devices=devices, links=links, hosts=tuple(hosts), profile=merge_profiles(profiles)
    )
