"""Find the hosts whose links are slower than the others': what a collective of all hosts takes does not show which."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from trimtab.measure.timing import meet, synchronize

SLOWER = 2.0
"""A host's link is of a slower class when it is slower than the fastest of a class by this factor."""

TRIAL_BYTES = 1 << 21
TRIALS = 3

MOST_PARTNERS = 4
"""A host is as fast as with the best of so many others: one of them may be slow itself."""


def link_classes(
    hosts: Sequence[Hashable], device: torch.device, name: str
) -> tuple[list[str], dict[str, float]]:
    """The link class of every host, and how many times slower each class is than the fastest. Collective.

    Args:
        hosts: the host of every rank.
        name: of the fastest class; the others are named after it.
    """
    distinct = list(dict.fromkeys(hosts))
    if len(distinct) < 3:  # one pair of hosts has one rate
        return [name] * len(distinct), {name: 1.0}
    return classified(_rates([hosts.index(host) for host in distinct], device), name)


def classified(rates: Sequence[float], name: str) -> tuple[list[str], dict[str, float]]:
    """The class of every rate, and how many times slower each class is than the fastest."""
    fastest = max(rates)
    first = fastest
    classes: dict[str, list[float]] = {name: []}
    of: dict[int, str] = {}
    for index in sorted(range(len(rates)), key=lambda i: -rates[i]):
        if rates[index] * SLOWER < first:
            first = rates[index]
            classes[f"{name}-{len(classes) + 1}"] = []
        of[index] = list(classes)[-1]
        classes[of[index]].append(rates[index])
    slowness = {title: 1.0 if title == name else fastest / max(own) for title, own in classes.items()}
    return [of[index] for index in range(len(rates))], slowness


def _rates(leaders: Sequence[int], device: torch.device) -> list[float]:
    """Bytes a second that each host exchanges, in both directions, with the best of its partners."""
    own, rank = 0.0, dist.get_rank()
    for pairs in rounds(len(leaders))[:MOST_PARTNERS]:
        partners = {leaders[a]: leaders[b] for a, b in pairs} | {leaders[b]: leaders[a] for a, b in pairs}
        for _ in range(TRIALS):
            meet(device)
            if rank in partners:
                own = max(own, TRIAL_BYTES / _exchange_s(partners[rank], device))
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [everyone[leader] for leader in leaders]


def _exchange_s(partner: int, device: torch.device) -> float:
    sent, received = (torch.zeros(TRIAL_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    synchronize(device)
    start = time.perf_counter()
    operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    synchronize(device)
    return time.perf_counter() - start


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of so many hosts once, in rounds of pairs that do not meet."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    result = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return result
