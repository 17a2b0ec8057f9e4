"""The batches of a script's own DataLoader, cut by batch shares.

A step's global batch is what the ranks' own samplers give them for this step, joined in the order of the ranks. Each
rank takes its part of it, so a step holds the same samples as in the plain job, and only who computes them changes.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

BESIDE = "a step also takes batches of a loader that is not divided among ranks"
BY_TURNS = "the script takes its steps from several loaders by turns"

_TURNS = 3
"""Times that a script goes to another loader before the last one is known."""

Steps = Callable[[], Iterator[Sequence[list[int]]]]
"""An epoch from its start: for every step each rank's samples, as the plain job has them."""


@dataclass(frozen=True, kw_only=True)
class CutBatch:
    """What is known about one batch of this rank."""

    own: int
    """Its samples."""

    weight: float
    """W · n / N: what its gradient counts for, so that the average over the ranks is that of the global batch."""

    shares: tuple[int, ...] | None
    """Samples of the step for each rank; None for a smaller step, the last of an epoch, which is never cut."""

    def weigh(self, *, summed: bool, team: Sequence[int] | None) -> float:
        """What the gradient of its loss counts for; a loss that is a sum weighs samples alike by itself.

        Args:
            team: the ranks that average their gradients, if not all do (local steps): they get the mean over their
                own samples, and what each team counts for is decided where teams agree.
        """
        if team is None or self.shares is None:
            return 1.0 if summed else self.weight
        own = sum(self.shares) / len(self.shares) if summed else self.own
        return len(team) * own / sum(self.shares[rank] for rank in team)


class LeftAlone:
    """A loader whose batches are not cut, and why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class CutLoader:
    """The batch sampler of a loader that is cut by shares; equal ones until `change` is called."""

    def __init__(
        self,
        steps: Steps,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        in_training: Callable[[], bool],
        ahead: bool = False,
    ) -> None:
        """
        Args:
            in_training: False when an epoch begins while the model is in evaluation mode; its batches are not cut.
            ahead: batches are taken from the loader before they are used.
        """
        self._in_training = in_training
        self.batch_size, self.rank, self.world_size, self.ahead = batch_size, rank, world_size, ahead
        self.steps = steps
        self.drawn = 0
        """Batches whose samples are fixed, over all epochs; some are still to be loaded."""
        self.waiting: deque[CutBatch] = deque(maxlen=1024)
        """Batches that the script has, and whose backward pass has not begun."""
        self.ended = False
        """Whether all batches of the epoch were taken from the loader."""
        self._passed: deque[CutBatch] = deque(maxlen=0)
        """The last ones that were taken for those of a backward pass, as many as seemed to be skipped at first."""
        self._shares: tuple[int, ...] | None = None
        self._later: tuple[int, tuple[int, ...] | None] | None = None

    def __iter__(self) -> CutEpoch:
        epoch = CutEpoch(self, training=torch.is_grad_enabled() and self._in_training())
        if epoch.training:
            self._restart()
        return epoch

    def begin_late(self, epoch: CutEpoch) -> None:
        """An epoch that began in evaluation mode trains: its batches wait, and those not yet drawn may be cut.

        They are equal until `change` is called.
        """
        self._restart()
        self._shares = self._later = None
        self.waiting.extend(epoch.delivered)
        self.ended = epoch.ended
        epoch.delivered.clear()
        epoch.training = True

    def _restart(self) -> None:
        self.waiting.clear()
        self._passed = deque(maxlen=0)
        self.ended = False

    @property
    def ready(self) -> bool:
        """Whether the script uses a batch that has had no backward pass, and not only one that was read ahead."""
        return len(self.waiting) > int(self.ahead and not self.ended)

    def skip_to_newest(self) -> None:
        """Take the batches before it for skipped, as in a job that resumes inside an epoch."""
        skipped = [self.waiting.popleft() for _ in range(len(self.waiting) - 1)]
        self._passed = deque(skipped, maxlen=len(skipped))

    def take(self, matches: Callable[[CutBatch], bool]) -> tuple[CutBatch, bool]:
        """The oldest waiting batch that a backward pass can be of, and whether there is one.

        Those before it were skipped. A script that reads ahead looks like one that has skipped batches, until the
        sizes of its batches change and the passed ones match instead.
        """
        place = next((index for index, batch in enumerate(self.waiting) if matches(batch)), None)
        if place is None and self._passed and matches(self._passed[0]):
            self.waiting.extendleft(reversed(self._passed))
            self._passed, place = deque(maxlen=0), 0
        for _ in range(place or 0):
            self.waiting.popleft()
        batch = self.waiting.popleft()
        self._passed.append(batch)
        return batch, place is not None

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a whole step, as of the next batch that is drawn after pending changes."""
        shares = self._shares if self._later is None else self._later[1]
        return shares or (self.batch_size,) * self.world_size

    def change(self, shares: Sequence[int] | None, *, at: int) -> None:
        """Cut by these shares (None: as the plain job) from drawn batch `at` on; all ranks make the same call."""
        assert at >= self.drawn
        assert shares is None or sum(shares) == self.batch_size * self.world_size
        self._later = at, None if shares is None else tuple(shares)

    def cut(self, batches: Sequence[list[int]]) -> tuple[list[int], CutBatch]:
        """This rank's samples of a step. A smaller step, the last of an epoch, stays as the plain job has it."""
        if self._later is not None and self.drawn >= self._later[0]:
            self._shares, self._later = self._later[1], None
        shares = self._shares or (self.batch_size,) * self.world_size
        whole = all(len(batch) == self.batch_size for batch in batches)
        if self._shares is None or not whole:
            own = batches[self.rank]
            return own, CutBatch(own=len(own), weight=1.0, shares=shares if whole else None)
        first, count = sum(shares[: self.rank]), shares[self.rank]
        own = list(itertools.islice(itertools.chain(*batches), first, first + count))
        return own, CutBatch(own=count, weight=count / self.batch_size, shares=shares)


class CutEpoch:
    """The batches of one pass over a loader; `issued` has what is known of those that are being loaded."""

    def __init__(self, source: CutLoader, *, training: bool) -> None:
        self.source, self.training = source, training
        self.issued: deque[CutBatch] = deque()
        self.delivered: deque[CutBatch] = deque(maxlen=1024)
        """Batches that the script got, as long as it does not train on them."""
        self.ended = False
        """Whether all batches were taken from the loader."""
        self._steps: Iterator[Sequence[list[int]]] | None = None

    def __iter__(self) -> CutEpoch:
        return self

    def __next__(self) -> list[int]:
        if self._steps is None:  # not before the first batch: samplers draw their random numbers then
            self._steps = self.source.steps()
        batches = next(self._steps)
        if self.training:
            own, batch = self.source.cut(batches)
        else:
            own = batches[self.source.rank]
            batch = CutBatch(own=len(own), weight=1.0, shares=None)
        self.source.drawn += 1
        self.issued.append(batch)
        return own


def cut_loader(loader: DataLoader[Any], in_training: Callable[[], bool]) -> CutLoader | LeftAlone:
    """How the batches of a loader can be cut among all ranks, or why they cannot."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return LeftAlone("an IterableDataset has its own order of samples")
    if batches is None:
        return LeftAlone("the loader has no batches (batch_size=None)")
    if not loader.in_order:
        return LeftAlone("the loader returns batches out of order (in_order=False)")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name = type(batches).__name__
    if type(batches) is BatchSampler:
        sampler = batches.sampler
        if not isinstance(sampler, DistributedSampler):
            return LeftAlone(
                f"its sampler is a {type(sampler).__name__}, which does not divide samples among ranks"
            )
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            return LeftAlone(f"its sampler is a {type(sampler).__name__}, which has its own order of samples")
        if (sampler.num_replicas, sampler.rank) != (world_size, rank):
            return LeftAlone(
                f"its sampler divides samples among {sampler.num_replicas} ranks, not {world_size}"
            )
        return CutLoader(
            lambda: _distributed_steps(sampler, batches),
            batch_size=batches.batch_size,
            rank=rank,
            world_size=world_size,
            in_training=in_training,
        )
    shard, skipped = batches, 0
    if name == "SkipBatchSampler":  # Accelerate's, for a job that resumes inside an epoch
        skipped, shard = batches.skip_batches, batches.batch_sampler  # type: ignore[attr-defined]
    if type(shard).__name__ != "BatchSamplerShard":
        return LeftAlone(f"its batches come from a {name}, which is not known")
    of_shard: Any = shard
    if type(of_shard.batch_sampler) is not BatchSampler or not (of_shard.even_batches or of_shard.drop_last):
        return LeftAlone("Accelerate does not give the ranks equal batches of it (even_batches=False)")
    if (of_shard.num_processes, of_shard.process_index) != (world_size, rank):
        return LeftAlone(f"Accelerate divides its samples among {of_shard.num_processes} ranks")
    return CutLoader(
        lambda: itertools.islice(_accelerate_steps(of_shard), skipped, None),
        batch_size=of_shard.batch_size // (world_size if of_shard.split_batches else 1),
        rank=rank,
        world_size=world_size,
        in_training=in_training,
        ahead=True,
    )


def waiting_beside(source: CutLoader, loaders: Iterable[CutLoader | LeftAlone]) -> list[CutLoader]:
    """Other loaders of which the script has batches that had no backward pass."""
    cut = (other for other in loaders if isinstance(other, CutLoader))
    return [other for other in cut if other is not source and other.waiting]


def several_loaders(source: CutLoader, loaders: Iterable[CutLoader | LeftAlone]) -> str:
    """Why batches are not cut where a step takes them from several loaders."""
    sizes = sorted({loader.batch_size for loader in (source, *waiting_beside(source, loaders))})
    return f"a step takes batches from several loaders, of {' and '.join(map(str, sizes))} samples"


class StepLoaders:
    """Counts batches of loaders that are left alone, and how often the loader changes."""

    def __init__(self) -> None:
        self._beside = 0
        self._steps = 0
        """Steps one after another that had a batch of such a loader."""
        self._turns = 0

    def deliver_beside(self) -> None:
        """The script gets a batch of a loader that is left alone."""
        self._beside += 1

    def begin_step(self) -> str | None:
        """A batch of the loader that may be cut is used; why it must not be. An evaluation in between is none."""
        self._steps = self._steps + 1 if self._beside else 0
        self._beside = 0
        return BESIDE if self._steps > 1 else None

    def go_to_another(self, *, known: bool) -> bool:
        """Another loader comes, after enough batches of the last one if it is `known`; whether they take turns."""
        if self._turns < _TURNS:
            self._turns = 0 if known else self._turns + 1
        return self._turns >= _TURNS


def _distributed_steps(
    sampler: DistributedSampler[Any], batches: BatchSampler
) -> Iterator[Sequence[list[int]]]:
    """The ranks' batches of a DistributedSampler, which gives rank r every W-th sample from the r-th on."""
    whole = copy.copy(sampler)
    whole.rank, whole.num_replicas, whole.num_samples = 0, 1, sampler.total_size
    order, world_size, size = list(whole), sampler.num_replicas, batches.batch_size
    for start in range(0, sampler.num_samples, size):
        stop = min(start + size, sampler.num_samples)
        if stop - start < size and batches.drop_last:
            return
        yield [
            order[start * world_size + rank : stop * world_size : world_size] for rank in range(world_size)
        ]


def _accelerate_steps(shard: Any) -> Iterator[Sequence[list[int]]]:
    """The ranks' batches of Accelerate's BatchSamplerShard: all read one pass over the batch sampler inside it."""
    shards = []
    for rank, batches in enumerate(itertools.tee(iter(shard.batch_sampler), shard.num_processes)):
        own = copy.copy(shard)
        own.process_index, own.batch_sampler = rank, _Replayed(shard.batch_sampler, batches)
        shards.append(iter(own))
    return zip(*shards, strict=True)


class _Replayed:
    """A batch sampler that shares its one pass with others. Each gets copies: Accelerate extends batches in place."""

    def __init__(self, sampler: BatchSampler, batches: Iterator[list[int]]) -> None:
        self._sampler, self._batches = sampler, batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
