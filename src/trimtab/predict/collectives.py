"""What every route of a gradient exchange sends and computes: the project's one place for these formulas.

A route is a sequence of collectives with the codec's work between them. A collective is described by what it takes
from the links: messages, and the bytes through each host's interface. A bucket's time is then a sum of rates (see
`links.Fit`) that belong to the link and not to the number of ranks, so a measurement of two ranks speaks for more.

Notation: W ranks on H hosts; a host has L ranks, and hosts may differ; n bytes of values, p bytes encoded.

| collective                   | waits for              | sent beside these | bytes through a host's interface      |
|------------------------------|------------------------|-------------------|---------------------------------------|
| all-reduce, ring             | 2 (W - 1)              |                   | 2 n (W - 1) / W                       |
| all-reduce, tree (NCCL)      | 2 log2 H + 2 (L - 1)   |                   | 2 n                                   |
| all-gather of n per rank     | W - 1                  |                   | n (W - 1)                             |
| reduce-scatter (NCCL)        | W - 1                  |                   | n (W - 1) / W                         |
| reduce-scatter (Gloo)        | 2 (W - 1)              |                   | 2 n (W - 1) / W                       |
| all-to-all of n per rank     | 1                      | W - 2             | L n (W - L) / (W - 1)                 |
| n per rank to its O owners   | 1                      | O - 1             | L n (W - L) / O; of a spared host L n |
| the sums back to all ranks   | 1                      | W - 2             | the same                              |
| up a binomial tree           | log2 W                 |                   | n log2 H (the root's), or less        |
| down (a broadcast)           | log2 W                 |                   | L n log2 H (the root's), or less      |
| once around a ring           | W - 1                  |                   | n (W - 1) / W                         |
| halving, or doubling         | log2 W (+ 1)           |                   | L n (1 - L / W) (+ L n), or less      |
| shared memory, either way    | 1                      |                   | n (L - 1) / S of a rank (S shards)    |

Assumptions:
- Gloo all-reduces and all-gathers around a ring in rank order, which crosses a host's interface once each way. NCCL
  all-reduces by the faster of ring and tree. Both send an all-to-all's messages directly and all at once. Gloo
  reduce-scatters by an all-reduce, and each rank keeps its part; NCCL goes once around the ring.
- A message that is sent together with others costs `POSTED` of one that is waited for: the work of sending it,
  without the wire's latency.
- An interface sends and receives at the same time, so the larger of the two counts. Ranks of one host share it.
- Switches carry all hosts' interfaces at once, and ranks of one host are consecutive.
- Trees and halves are bounded from above where hosts have not the same power of two of ranks: then the levels that
  stay inside a host are counted as if they left it. (+ ...) is for a W that is no power of two.
- Chunks are whole quantization blocks, so nobody owns less than one; with more ranks than blocks some own nothing.
- Ranks that a route spares own nothing, either. A spared host only sends in the first collective and only receives in
  the second, so that one bucket's first and another's second do not slow each other down on its link.
- Ranks of a host reduce through shared memory at `SHARED_MEMORY` where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from trimtab.cluster import Cluster
from trimtab.cluster.profile import LOCAL, CodecTime
from trimtab.predict.traffic import COLLECTIVES, Collective, Traffic, Way, Work
from trimtab.strict_files import STRICT
from trimtab.wire_format import in_one_gather

if TYPE_CHECKING:
    from trimtab.predict.links import Fit

__all__ = ["COLLECTIVES", "Collective", "Traffic", "Work"]

Method = Literal["all_gather", "scatter_reduce", "ring", "tree", "halving"]
METHODS: tuple[Method, ...] = get_args(Method)

Inside = Literal["shared_memory", "group"]

BLOCK = 1024
"""Values of a quantization block, the least that a rank owns."""


@dataclass(frozen=True, kw_only=True)
class HostClass:
    """Hosts that are alike."""

    ranks: int
    """Ranks on each of them."""

    count: int = 1
    link: str = LOCAL
    """Class of the link to other hosts."""

    spared: bool = False
    """Whether its ranks own nothing (see `Route.spared`)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the ranks of a job are placed on hosts."""

    classes: tuple[HostClass, ...]

    @classmethod
    def of(cls, per_host: Iterable[int]) -> Placement:
        """The placement of hosts with so many ranks each, on equal links."""
        counts: dict[int, int] = {}
        for ranks in per_host:
            counts[ranks] = counts.get(ranks, 0) + 1
        return cls(classes=tuple(HostClass(ranks=ranks, count=count) for ranks, count in counts.items()))

    @classmethod
    def on(cls, cluster: Cluster, route: Route | None = None) -> Placement:
        """The placement of a cluster's ranks; hosts whose ranks the route spares are classes of their own."""
        counts: dict[tuple[int, str, bool], int] = {}
        alone = len(cluster.hosts) == cluster.hosts[0].count == 1
        spared, first = frozenset(route.spared if route else ()), 0
        for host in cluster.hosts:
            ranks = sum(host.devices.values())
            key = ranks, LOCAL if alone or host.link is None else host.link, first in spared
            counts[key] = counts.get(key, 0) + host.count
            first += ranks * host.count
        return cls(
            classes=tuple(
                HostClass(ranks=ranks, count=count, link=link, spared=idle)
                for (ranks, link, idle), count in counts.items()
            )
        )

    @property
    def world(self) -> int:
        return sum(one.ranks * one.count for one in self.classes)

    @property
    def owners(self) -> int:
        """Ranks that are not spared."""
        return sum(one.ranks * one.count for one in self.classes if not one.spared)

    @property
    def hosts(self) -> int:
        return sum(one.count for one in self.classes)

    @property
    def most(self) -> int:
        """Ranks of the host that has most."""
        return max(one.ranks for one in self.classes)

    @property
    def least(self) -> int:
        """Ranks of the host that has fewest: the shards of a bucket in two levels, each with an owner on every host."""
        return min(one.ranks for one in self.classes)

    @property
    def equal(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return self.least == self.most

    @property
    def two_levels(self) -> bool:
        """Whether ranks can reduce inside their hosts first."""
        return self.most > 1

    def leaders(self) -> Placement:
        """One rank of each host: those that exchange the same shard."""
        return Placement(
            classes=tuple(HostClass(ranks=1, count=one.count, link=one.link) for one in self.classes)
        )


def _equal(placement: Placement, nbytes: float) -> tuple[float, ...]:
    return (nbytes,) * len(placement.classes)


def all_reduce(nbytes: float, placement: Placement) -> Traffic:
    """Of `nbytes` on every rank, around a ring."""
    others = placement.world - 1
    sent = 2 * others / placement.world * nbytes
    return Traffic(collective="all_reduce", waits=2 * others, nbytes=_equal(placement, sent))


def tree_all_reduce(nbytes: float, placement: Placement) -> Traffic:
    """Of `nbytes` on every rank, up and down a tree of hosts, as NCCL does."""
    waits = 2 * _log2(placement.hosts) + 2 * (placement.most - 1)
    return Traffic(collective="all_reduce", waits=waits, nbytes=_equal(placement, 2 * nbytes))


def all_gather(nbytes: float, placement: Placement) -> Traffic:
    """Of `nbytes` from each rank."""
    others = placement.world - 1
    return Traffic(collective="all_gather", waits=others, nbytes=_equal(placement, others * nbytes))


def reduce_scatter(nbytes: float, placement: Placement, *, ring: bool) -> Traffic:
    """Of `nbytes` on every rank: once around a `ring`, as NCCL does, or by an all-reduce, as Gloo does."""
    reduced = all_reduce(nbytes, placement)
    if not ring:
        return reduced
    return replace(reduced, waits=reduced.waits // 2, nbytes=tuple(sent / 2 for sent in reduced.nbytes))


def all_to_all(nbytes: float, placement: Placement) -> Traffic:
    """Of `nbytes` that each rank sends to all others together."""
    world = placement.world
    if placement.hosts == 1:
        sent: tuple[float, ...] = (nbytes if world > 1 else 0.0,)
    else:
        sent = tuple(one.ranks * nbytes * (world - one.ranks) / (world - 1) for one in placement.classes)
    return Traffic(collective="all_to_all", waits=min(1, world - 1), beside=max(0, world - 2), nbytes=sent)


def _to_owners(nbytes: float, placement: Placement) -> tuple[Traffic, Traffic]:
    """Of `nbytes` on every rank: each owner's part to it from all, and the sums back to all."""
    world, owners = placement.world, placement.owners
    sent = tuple(
        nbytes / owners * one.ranks * (owners if one.spared else world - one.ranks)
        for one in placement.classes
    )

    def traffic(beside: int, way: Way) -> Traffic:
        ways: tuple[Way, ...] = tuple(way if one.spared else "both" for one in placement.classes)
        return Traffic(collective="all_to_all", waits=1, beside=beside, nbytes=sent, ways=ways)

    return traffic(owners - 1, "out"), traffic(world - 2, "in")


def _point_to_point(waits: int, nbytes: tuple[float, ...]) -> Traffic:
    return Traffic(collective="all_to_all", waits=waits, nbytes=nbytes)


TRAFFIC = {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all}
"""By the collective that is measured."""


@pydantic_dataclass(frozen=True, kw_only=True, config=STRICT)
class Route:
    """How ranks reduce a compressed bucket."""

    method: Method | None = None
    """Among all ranks, or with `inside` among the hosts; None for the default of each bucket's size."""

    inside: Inside | None = None
    """How ranks of a host reduce exactly first; None to reduce flat."""

    spared: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Ranks behind slow links that own no chunk of what is scatter-reduced flat: their links carry each bucket once
    in each direction, and the others' a little more."""

    @property
    def name(self) -> str:
        method = (self.method or "default").replace("_", "-")
        name = f"two levels, {method}" if self.inside else f"flat {method}"
        if not self.spared:
            return name
        few = ", ".join(map(str, self.spared[:4])) + (", ..." if len(self.spared) > 4 else "")
        return f"{name}, {f'rank {few} owns' if len(self.spared) == 1 else f'ranks {few} own'} no chunk"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """One bucket on a route: its collectives, and a rank's work before, between and after them."""

    traffic: tuple[Traffic, ...]
    work: tuple[Work, ...]
    """One more than there are collectives."""

    roundings: int
    """How often a value is rounded before it is in the sum."""

    inside: tuple[Traffic, ...] = ()
    """Inside a host: first of all, and last of all."""

    spared_work: tuple[Work, ...] = ()
    """That of a rank that owns nothing, where it differs."""

    def local_s(
        self,
        codec: CodecTime,
        inside: Mapping[Collective, Fit],
        *,
        feedback: bool = False,
        spared: bool = False,
    ) -> tuple[float, ...]:
        """Seconds of a rank's own work before each collective and after the last, inside its host included."""
        own = self.spared_work if spared and self.spared_work else self.work
        seconds = [work.seconds(codec, feedback=feedback) for work in own]
        for place, traffic in zip((0, -1), self.inside, strict=False):
            seconds[place] += traffic.seconds((inside[traffic.collective],))
        return tuple(seconds)


def stages(route: Route, placement: Placement, numel: int, payload: int, *, block: int = BLOCK) -> Stages:
    """A bucket of `numel` fp32 values, encoded in `payload` bytes, on a route."""
    if route.inside is None:
        return _exchange(route.method, placement, numel, payload, block)
    # On the largest host; ranks beyond the number of shards own nothing there.
    local, shards = placement.most, placement.least
    one_host = Placement.of([local])
    away = 4 * numel * (1.0 if local > shards else (local - 1) / local)
    if route.inside == "shared_memory":
        added = 4 * numel * (local - 1) / shards
        inside = (
            Traffic(collective="all_to_all", waits=1, nbytes=(added,)),
            Traffic(collective="all_gather", waits=1, nbytes=(away,)),
        )
    else:
        inside = all_to_all(away, one_host), all_gather(4 * numel / shards, one_host)
    if placement.hosts == 1:
        return Stages(traffic=(), work=(Work(),), roundings=0, inside=inside)
    # Each rank exchanges a shard of the bucket; together those of a host send what one rank with all of it would.
    between = _exchange(route.method, placement.leaders(), -(-numel // shards), payload, block)
    return Stages(traffic=between.traffic, work=between.work, roundings=between.roundings, inside=inside)


def _exchange(method: Method | None, placement: Placement, numel: int, payload: int, block: int) -> Stages:
    world = placement.world
    if world == 1:
        return Stages(traffic=(), work=(Work(),), roundings=0)
    if method is None:
        method = "all_gather" if in_one_gather(payload, world) else "scatter_reduce"
    if method == "all_gather":
        after = Work(decoded=numel, decodes=1, added=(world - 1) * numel, adds=world - 1)
        return Stages(
            traffic=(all_gather(payload, placement),),
            work=(Work(encoded=numel, encodes=1), after),
            roundings=1,
        )
    if method == "tree":
        levels = _log2(world)
        crossing = _log2(placement.hosts) if _aligned(placement) else levels
        reduced = _point_to_point(levels, _equal(placement, (crossing or levels) * payload))
        # The broadcast starts with the nearest ranks, so all ranks of the root's host send to other hosts.
        broadcast = _point_to_point(
            levels, tuple((crossing or levels) * one.ranks * payload for one in placement.classes)
        )
        # A rank adds its children's payloads when it has all of them, and the longest way up passes through ranks
        # with 0, 1, 2, ... children.
        encodes, adds = levels + 1, levels * (levels + 1) // 2
        up = Work(encoded=encodes * numel, encodes=encodes, decoded=encodes * numel, added=adds * numel)
        return Stages(
            traffic=(reduced, broadcast),
            work=(up, Work(), Work(decoded=numel, decodes=1)),
            roundings=levels + 1,
        )
    if method == "halving":
        return _halving(placement, numel, payload)
    owners = min(world, -(-numel // block))
    part, others = numel / world, world - 1
    row = max(-(-payload // world), -(-payload // max(1, -(-numel // block))))
    gather = all_gather(row, placement)
    after = Work(decoded=others * part, decodes=owners - 1)
    if method == "ring":
        hops = Work(encoded=others * part, encodes=others, decoded=others * part, added=others * part)
        own = Work(encoded=part, encodes=1, decoded=part, added=part)
        around = _point_to_point(others, _equal(placement, payload * others / world))
        return Stages(traffic=(around, gather), work=(hops, own, after), roundings=world)
    if placement.owners < world:
        part = numel / placement.owners
        all_but_own = numel - part
        own = Work(encoded=part, encodes=1, decoded=part, added=others * part)
        return Stages(
            traffic=_to_owners(payload, placement),
            work=(Work(encoded=all_but_own, encodes=1), own, Work(decoded=all_but_own, decodes=1)),
            roundings=2,
            spared_work=(Work(encoded=numel, encodes=1), Work(), Work(decoded=numel, decodes=1)),
        )
    first = Work(encoded=others * part, encodes=1)
    own = Work(encoded=part, encodes=1, decoded=part, added=others * part)
    scatter = all_to_all(payload * others / world, placement)
    return Stages(traffic=(scatter, gather), work=(first, own, after), roundings=2)


def _halving(placement: Placement, numel: int, payload: int) -> Stages:
    """Halves that grow shorter on the way to their owners, and longer on the way back."""
    world = placement.world
    levels = world.bit_length() - 1
    folded = world > 1 << levels  # the ranks beyond a power of two hand everything to a partner first
    part = 1 - 0.5**levels
    waits = levels + folded
    guests = world - (1 << levels)
    sent = tuple(
        payload
        * (one.ranks * (1 - (one.ranks if _aligned(placement) else 1) / 2**levels) + min(one.ranks, guests))
        for one in placement.classes
    )
    if placement.hosts == 1:
        sent = (payload * (part + folded),)
    hop = _point_to_point(waits, sent)
    values = numel * (part + folded)
    there = Work(encoded=values, encodes=waits, added=values, adds=waits)
    own = Work(encoded=numel - numel * part, encodes=1)
    return Stages(
        traffic=(hop, hop),
        work=(there, own, Work(decoded=numel, decodes=1)),
        roundings=waits + 1,
    )


def _aligned(placement: Placement) -> bool:
    """Whether hosts are subtrees: the same power of two of ranks on each."""
    return len({one.ranks for one in placement.classes}) == 1 and placement.most.bit_count() == 1


def _log2(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0
