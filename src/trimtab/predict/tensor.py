"""Time and memory of a step of a tensor-parallel job, with any shares of the units, and of data x tensor jobs.

The ranks of a tensor group hold one copy of the model together: each computes its units of every block and all of
what is replicated. They meet twice in each block: after its last projection in forward, to sum its output, and after
its first ones in backward, to sum the gradient of its input. Both are all-reduces of one activation (samples x
sequence x width in its own type). Nothing overlaps with the first; during the second the gradients of the block's
weights are computed. `predict.tensor_stream` has the formulas: between two meetings the slowest rank sets the pace.
With several groups, the ranks in the same place of each exchange the gradients of their shard as DDP does, while
backward goes on.

Assumptions:
- An operator of a block takes time in proportion to the rank's units (`share_time`); all else is computed by
  everyone. A rank's optimizer takes time in proportion to the parameters it holds.
- Only projections of blocks are lowered (`projections`), on any rank by itself: their results are summed, so all
  ranks go on with the same values. What every rank of a group computes alike keeps the model's precision. A lowered
  projection hands on the type of its input, because ranks sum values of one type.
- Where tensor groups and DDP use the same links, an all-reduce of activations and a bucket that are sent at the same
  time get half of the rate each.
- The buckets are those of the rank with the most parameters; ranks of one host send theirs through one interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from trimtab.cluster import Cluster, Host
from trimtab.cluster.profile import LOCAL
from trimtab.errors import TrimtabError
from trimtab.predict.collectives import Placement
from trimtab.predict.links import SHARED_MEMORY, JobLinks
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.build import compressed_buckets, plain_buckets, plain_transfer
from trimtab.predict.replay.inputs import Transfer
from trimtab.predict.replayed_job import needed_bytes
from trimtab.predict.share_time import ShareTime
from trimtab.predict.step import codec_time, job_links, measured_rates
from trimtab.predict.step_setting import StepSetting
from trimtab.predict.tensor_stream import GroupStream, backward_stream, forward_stream, run_streams
from trimtab.workload import Workload
from trimtab.workload.units import sharded, shares_of

Counts = Mapping[str, int]
"""Units of a rank, by block."""

Precisions = Mapping[str, str]
"""Lowered projections of a rank, by name."""

_NOTHING: tuple[Precisions, ...] = ({},) * 64

FEW_GROUPS = 4
"""Of more kinds of groups only the slowest are simulated."""


@dataclass(frozen=True, kw_only=True)
class TensorSetting:
    """What the ranks of a tensor-parallel job do."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks that hold one copy of the model together."""

    counts: tuple[Counts, ...]
    """Units of each place in a group: the same in all groups, because DDP reduces what is in the same place."""

    samples: tuple[int, ...]
    """Samples of a step, by group."""

    bits: int | None = None
    """Bits of the gradients that groups exchange; None for the backend's own all-reduce."""

    precisions: tuple[tuple[Precisions, ...], ...] = ()
    """Of each rank of each group; empty if nothing is lowered."""

    def of_group(self, index: int) -> tuple[Precisions, ...]:
        """The precisions of a group's ranks."""
        return self.precisions[index] if self.precisions else _NOTHING[: len(self.groups[index])]


@dataclass(frozen=True, kw_only=True)
class TensorStep:
    """The predicted step."""

    step_s: float
    compute_s: tuple[tuple[float, ...], ...]
    """Of each rank of each group, without waiting: forward, backward and optimizer."""

    all_reduce_s: float
    """What the slowest group spends in all-reduces of activations."""

    exchange_s: float
    """What the exchange of gradients adds to the step."""


class TensorJob:
    """Predicts the steps of one model on one cluster."""

    def __init__(self, measured: Measured, cluster: Cluster) -> None:
        """`cluster` has its profile, estimates included."""
        assert cluster.profile is not None
        if not measured.workload.units:
            raise TrimtabError(
                f"{measured.workload.model}: no blocks are known that tensor parallelism could divide"
            )
        self.measured, self.cluster = measured, cluster
        self.ranks = list(cluster.ranks())
        self._links = {name: host.link for name, host in cluster.machines()}
        self._sharded: dict[tuple[tuple[str, int], ...], Workload] = {}
        self._groups: dict[object, GroupStream] = {}
        self._between: dict[object, tuple[Placement, JobLinks]] = {}

    def step(self, setting: TensorSetting) -> TensorStep:
        """Predict one step.

        Raises:
            TrimtabError: naming the operator, codec or link that was not measured.
        """
        largest = max(setting.counts, key=lambda own: _elements(self._of(own)))
        workload = self._of(largest)
        exchanging = len(setting.groups) > 1
        kinds: dict[object, GroupStream] = {}
        of_group = []
        frozen: dict[int, object] = {}  # groups that are alike have the same object
        for index, (ranks, samples) in enumerate(zip(setting.groups, setting.samples, strict=True)):
            low = setting.of_group(index)
            key = self.kind(ranks, samples), frozen.setdefault(id(low), _frozen(low))
            kinds[key] = self._group(ranks, samples, setting.counts, low, workload if exchanging else None)
            of_group.append(kinds[key])
        # Nobody waits for the faster ones.
        groups = sorted(kinds.values(), key=lambda group: -group.stream_s)[:FEW_GROUPS]
        buckets, drag, contended = self._exchange(setting, workload) if exchanging else ([], 0.0, False)
        ends, exchanged = run_streams([group.stream for group in groups], buckets, drag, contended)
        step_s = max(
            max(end, exchanged) + max(group.optimizer_s) for end, group in zip(ends, groups, strict=True)
        )
        alone = max(end + max(group.optimizer_s) for end, group in zip(ends, groups, strict=True))
        return TensorStep(
            step_s=step_s,
            compute_s=tuple(
                tuple(a + b for a, b in zip(group.compute_s, group.optimizer_s, strict=True))
                for group in of_group
            ),
            all_reduce_s=max(group.all_reduce_s for group in groups),
            exchange_s=step_s - alone,
        )

    def share_times(self, devices: Sequence[str], samples: int) -> tuple[ShareTime, ...]:
        """For each device, its time as a function of its share of all units."""
        times = []
        for device in devices:
            mapper = self.measured.mapper(device, self.cluster.devices[device].kind, samples)
            inside = shares_of(
                self.measured.workload, {s.name: s.units for s in self.measured.workload.units}
            )
            own = [f + b for f, b in zip(mapper.forward_s, mapper.backward_s, strict=True)]
            units = fsum(own[index] for index in inside)
            none = self._of({s.name: 0 for s in self.measured.workload.units})
            update = [self._optimizer_s(device, _elements(w)) for w in (self.measured.workload, none)]
            times.append(ShareTime(fsum(own) - units + update[1], units + update[0] - update[1]))
        return tuple(times)

    def projections(self) -> dict[str, str]:
        """The operators that a rank of a group may lower, with their blocks: all of their calls are projections."""
        calls = {i: span.name for span in self.measured.workload.units for i in (*span.into, span.out)}
        found = {}
        for name, indices in self.measured.workload.settings.items():
            blocks = {calls.get(i) for i in indices}
            block = blocks.pop()
            if block is not None and not blocks:
                found[name] = block
        return found

    def memory(
        self,
        device: str,
        counts: Counts,
        samples: int,
        groups: int,
        bits: int | None = None,
        precisions: Precisions | None = None,
    ) -> int:
        """Bytes that a rank needs."""
        workload = self._of(counts).at_batch(samples)
        kind = self.cluster.devices[device].kind
        return needed_bytes(workload, dict(precisions or {}), kind, groups, StepSetting(bits=bits), "input")

    def operator_s(
        self, device: str, samples: int, precisions: Precisions | None = None
    ) -> tuple[list[float], list[float]]:
        """Forward and backward of every operator with all units on one rank."""
        mapper = self.measured.mapper(
            device, self.cluster.devices[device].kind, samples, precisions, hands_on=False
        )
        return mapper.forward_s, mapper.backward_s

    def _of(self, counts: Counts) -> Workload:
        key = tuple(counts.items())
        if key not in self._sharded:
            self._sharded[key] = sharded(self.measured.workload, counts)
        return self._sharded[key]

    def _optimizer_s(self, device: str, elements: int) -> float:
        line = self.measured.device(device).optimiser
        if line is None:
            raise TrimtabError(
                f"the optimizer step was not measured on device class {device!r}; run `trimtab probe` there"
            )
        return line.seconds(elements)

    def kind(self, ranks: Sequence[int], samples: int) -> object:
        """Groups with the same are alike."""
        hosts: dict[str, int] = {}
        members = [self.ranks[rank] for rank in ranks]
        return samples, tuple(
            (rank.device, hosts.setdefault(rank.host, len(hosts)), self._links[rank.host]) for rank in members
        )

    def link_of(self, rank: int) -> str:
        """The class of the link of a rank's host; empty if it has none."""
        return self._links[self.ranks[rank].host] or ""

    def _group(
        self,
        ranks: Sequence[int],
        samples: int,
        counts: Sequence[Counts],
        low: Sequence[Precisions],
        reduced: Workload | None,
    ) -> GroupStream:
        """The stream of a group; `reduced` is the workload whose buckets it fills."""
        units = tuple(tuple(own.items()) for own in counts)
        key = self.kind(ranks, samples), units, _frozen(low), reduced is not None
        if key not in self._groups:
            self._groups[key] = self._built(ranks, samples, counts, low, reduced)
        return self._groups[key]

    def _built(
        self,
        ranks: Sequence[int],
        samples: int,
        counts: Sequence[Counts],
        low: Sequence[Precisions],
        reduced: Workload | None,
    ) -> GroupStream:
        whole = self.measured.at(samples)
        passes = []
        for rank, own, precisions in zip(ranks, counts, low, strict=True):
            part = shares_of(whole, own)
            passes.append(
                tuple(
                    [seconds * part.get(i, 1.0) for i, seconds in enumerate(times)]
                    for times in self.operator_s(self.ranks[rank].device, samples, precisions)
                )
            )
        ready: dict[int, tuple[int, ...]] = {}
        for index, bucket in enumerate(reduced.buckets if reduced is not None else ()):
            ready[max(bucket.ready, 0)] = (*ready.get(max(bucket.ready, 0), ()), index)
        summed: dict[int, Transfer] = {}
        summed_back: dict[int, Transfer] = {}
        if len(ranks) > 1:
            placement, links = self._links_of(ranks)
            sums: dict[int, Transfer] = {}  # repeated blocks have like ones
            for span in whole.units:
                out, into = whole.operators[span.out], whole.operators[min(span.into)]
                for index, nbytes, found in (
                    (span.out, out.outputs[0].nbytes, summed),
                    (min(span.into), into.input_tensors[0].nbytes, summed_back),
                ):
                    if nbytes not in sums:
                        sums[nbytes] = plain_transfer(nbytes, placement, links, awaited=True)
                    found[index] = sums[nbytes]
        stream = [
            *forward_stream([forward_s for forward_s, _ in passes], summed),
            *backward_stream(
                [backward_s for _, backward_s in passes],
                summed_back,
                {min(span.into): (*span.into, span.out) for span in whole.units},
                ready,
            ),
        ]
        return GroupStream(
            stream=tuple(stream),
            compute_s=tuple(fsum(forward_s) + fsum(backward_s) for forward_s, backward_s in passes),
            optimizer_s=tuple(
                self._optimizer_s(self.ranks[rank].device, _elements(self._of(own)))
                for rank, own in zip(ranks, counts, strict=True)
            ),
        )

    def _exchange(
        self, setting: TensorSetting, workload: Workload
    ) -> tuple[list[tuple[float, float]], float, bool]:
        """Latency and flow of each bucket, the part of a device that it uses, and whether groups use the same links.

        The ranks in one place of all groups exchange what they hold; the slowest place counts.
        """
        heaviest: dict[int, int] = {}  # of the places whose ranks are on like hosts, the one that holds most
        for place, counts in enumerate(setting.counts):
            placement, _ = self._links_of([group[place] for group in setting.groups])
            most = heaviest.setdefault(id(placement), place)
            if _elements(self._of(counts)) > _elements(self._of(setting.counts[most])):
                heaviest[id(placement)] = place
        every = [self._exchange_of(setting, workload, place) for place in heaviest.values()]
        times, drag, one_host = max(every, key=lambda found: fsum(map(fsum, found[0])))
        spread = any(len({self.ranks[rank].host for rank in group}) > 1 for group in setting.groups)
        return times, drag, spread or one_host

    def _exchange_of(
        self, setting: TensorSetting, workload: Workload, place: int
    ) -> tuple[list[tuple[float, float]], float, bool]:
        """As `_exchange`, of the ranks in one place; and whether they are all on one host."""
        peers = [group[place] for group in setting.groups]
        placement, links = self._links_of(peers)
        part = self._beside(setting, place, placement.hosts == 1) / _elements(workload)
        if setting.bits is None:
            buckets = plain_buckets(workload, placement, links)
            local: Sequence[tuple[float, ...]] = [(0.0,)] * len(buckets)
        else:
            profile = self.measured.profile
            codecs = [codec_time(profile, self.ranks[rank].device, setting.bits) for rank in peers]
            slowest = max(codecs, key=lambda codec: codec.encode.a)
            sent = StepSetting(bits=setting.bits)
            buckets, (local,) = compressed_buckets(
                workload, placement, links, sent, [{setting.bits: slowest}]
            )
        times = [
            (
                fsum(t.latency_s for t in bucket.transfers) + fsum(own),
                fsum(t.seconds for t in bucket.transfers) * part,
            )
            for bucket, own in zip(buckets, local, strict=True)
        ]
        drag = max((max(t.drag, default=0.0) for b in buckets for t in b.transfers), default=0.0)
        return times, drag, placement.hosts == 1

    def _beside(self, setting: TensorSetting, place: int, one_host: bool) -> int:
        """Elements that pass the interface of a host beside each other: its ranks of one group exchange at once."""
        held = [_elements(self._of(counts)) for counts in setting.counts]
        if one_host:
            return held[place]
        hosts = ([self.ranks[rank].host for rank in group] for group in setting.groups)
        alike = {tuple(host == own[place] for host in own) for own in hosts}
        return max(sum(n for n, same in zip(held, with_place, strict=True) if same) for with_place in alike)

    def _links_of(self, ranks: Sequence[int]) -> tuple[Placement, JobLinks]:
        alike: dict[tuple[tuple[tuple[str, int], ...], str | None], int] = {}
        by_host: dict[str, dict[str, int]] = {}
        for rank in ranks:
            own = by_host.setdefault(self.ranks[rank].host, {})
            own[self.ranks[rank].device] = own.get(self.ranks[rank].device, 0) + 1
        for host, devices in by_host.items():
            kind = tuple(sorted(devices.items())), self._links[host]
            alike[kind] = alike.get(kind, 0) + 1
        key = tuple(alike.items())
        if key not in self._between:
            profile = self.measured.profile
            hosts = tuple(
                Host(name=f"h{i}", devices=dict(devices), link=link, count=count)
                for i, ((devices, link), count) in enumerate(alike.items())
            )
            part = replace(self.cluster, hosts=hosts)
            placement = Placement.on(part)
            local = measured_rates(profile, LOCAL)
            if placement.hosts == 1 and len(self._links) > 1 and "all_reduce" not in local:
                # Of several hosts only what their ranks exchange inside is measured, and no all-reduce.
                links = JobLinks.uniform(local.get("all_gather", SHARED_MEMORY))
            else:
                links = job_links(part, profile)
            self._between[key] = placement, links
        return self._between[key]


def _elements(workload: Workload) -> int:
    known = workload.__dict__.get("_elements")  # asked for often, and a workload does not change
    if known is None:
        known = workload.__dict__["_elements"] = sum(
            p.tensor.numel for p in workload.parameters if p.trainable
        )
    return int(known)


def _frozen(several: Sequence[Precisions]) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(tuple(sorted(own.items())) for own in several)
