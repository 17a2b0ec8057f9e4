"""Rounds of local steps with unequal numbers of steps: all batches have the same size, a faster rank gets more of them.

A round has as many samples as `every` global batches. Each rank takes its part of them in batches of an even share,
and all meet at the round's end, in the exchange of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.control.running_local_steps import begin_rounds, running_local_steps
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.control.shares.loader import FOLLOW_SPEEDS, Loader
from trimtab.control.shares.sampler import Cut, ShareSampler
from trimtab.control.shares.windows import ShareWindows
from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import share_batch


@dataclass(frozen=True, kw_only=True)
class RoundCut(Cut):
    """The place of one of this rank's batches in its round."""

    steps: tuple[int, ...]
    """Steps of the round for each rank."""

    whole: bool
    """False for the last round of an epoch, if it is shorter."""

    place: int
    """This rank's steps of the round before it."""

    ends_at: int
    """Samples of the epoch after this round."""

    ends: bool
    """Whether it is this rank's last step of the round."""


class RoundSampler(ShareSampler):
    """Gives a data loader this rank's batches of every round. Its shares are steps of a round."""

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        rank: int,
        speeds: Sequence[float],
        every: Callable[[], int],
        **options: Any,
    ) -> None:
        """
        Args:
            batch_size: of all ranks together, if each takes one step.
            speeds: of the ranks, to start from.
            every: the length of a round, asked for when it is cut; the same on all ranks.
        """
        self._own, self._every, self._speeds = batch_size // len(speeds), every, tuple(speeds)
        even = [self._own] * len(speeds)
        super().__init__(length, batch_size=batch_size, rank=rank, shares=even, drop_last=True, **options)

    def __len__(self) -> int:
        """This rank's batches in an epoch, if speeds do not change."""
        return sum(self._divided(steps)[self._rank] for _, steps, _ in self._rounds(0))

    def __iter__(self) -> Iterator[list[int]]:
        self.issued.clear()
        epoch, order = self.epoch, self._order()
        for start, together, whole in self._rounds(self.consumed):
            if self._later is not None and (epoch, start) >= self._later[0]:
                self._speeds, self._later = self._later[1], None
            steps = self._divided(together)
            count = steps[self._rank]
            first = start + sum(steps[: self._rank]) * self._own
            for place in range(count):
                cut = RoundCut(
                    epoch=epoch,
                    start=start,
                    total=self.batch_size,
                    shares=self._shares,
                    own=self._own,
                    last=True,
                    steps=steps,
                    whole=whole,
                    place=place,
                    ends_at=start + together * self._own,
                    ends=place == count - 1,
                )
                self.issued.append(cut)
                yield order[first : first + self._own]
                first += self._own

    def _rounds(self, start: int) -> Iterator[tuple[int, int, bool]]:
        """Each round's first sample, the steps of all ranks together, and whether it is whole.

        At the end of an epoch samples that are too few for a step of every rank are left out.
        """
        ranks = len(self._speeds)
        while (left := (self.length - start) // self._own) >= ranks:
            steps = min(left, ranks * self._every())
            yield start, steps, steps == ranks * self._every()
            start += steps * self._own

    def _divided(self, steps: int, speeds: Sequence[float] | None = None) -> tuple[int, ...]:
        return share_batch(steps, [1 / speed for speed in speeds or self._speeds])

    @property
    def shares(self) -> tuple[int, ...]:
        """Steps of each rank in a whole round, as of the next round to be cut."""
        speeds = self._speeds if self._later is None else self._later[1]
        return self._divided(len(speeds) * self._every(), speeds)

    def change(self, shares: Sequence[int], *, after_steps: int = 0) -> None:
        """Divide rounds in this proportion, this many rounds after the next one; all ranks must make the same call."""
        assert self._later is None, "the previous change has not taken effect"
        at = self.consumed + after_steps * self.batch_size * self._every()
        self._later = (self.epoch, at), tuple(shares)

    @property
    def at_end(self) -> bool:
        return self.length - self.consumed < self.batch_size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, on any number of ranks; proportions are kept if they still fit."""
        super().load_state_dict({**state, "batch_size": None})
        if len(state["shares"]) == len(self._speeds):
            self._speeds = tuple(state["shares"])


def round_length() -> int:
    """Steps of a round of the local steps that run here; 1 without any, and until they are chosen."""
    local = running_local_steps()
    return 1 if local is None or local.worker is None else local.worker.settings.every


class _Unlimited(BatchCapacity):
    """All batches have the same size: memory does not limit the number of steps."""

    def samples(self) -> int:
        return -1


class RoundLoader(Loader):
    """A `Loader` whose ranks take unequal numbers of steps; `round_ends` says where they meet."""

    def __init__(self, data: Any, sampler: RoundSampler, **options: Any) -> None:
        """Collective; options as for `Loader`."""
        super().__init__(data, sampler, **options)
        rule = replace(self._adjust or FOLLOW_SPEEDS, window=1)  # a round is long enough
        self._windows = ShareWindows(rule, _Unlimited(None), group=self._group)
        self._round: RoundCut | None = None

    @property
    def round_ends(self) -> bool:
        """Whether this rank's round ends with the current batch: only there may the ranks meet."""
        return self._round is None or self._round.ends

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint between two rounds; the same on every rank."""
        if self._cut is not None and not self.round_ends:
            raise TrimtabError(
                'loader: with uneven="steps" the ranks are at different places inside a round; save at its end: '
                "if data.round_ends: ..."
            )
        return super().state_dict()

    def _present(self, batch: Any, cut: Cut, counted: int | None) -> Any:
        assert isinstance(cut, RoundCut)
        consumed = self.sampler.consumed
        super()._present(batch, cut, counted)
        self.sampler.consumed = cut.ends_at if cut.ends else consumed
        self._round = cut
        if cut.place == 0:
            begin_rounds(cut.steps[self._rank])
        return batch

    def _between_steps(self) -> None:
        """At the end of a round, record it, and perhaps change how the next ones are divided."""
        self._require_weighed()
        cut, self._cut = self._cut, None
        if self._adjust is None or not isinstance(cut, RoundCut) or not cut.ends or self._clock is None:
            return
        usable = cut.whole and cut.steps == self.shares and max(cut.steps) > 1
        new = self._windows.end_step(self._clock, self.shares, usable=usable)
        if new is not None:
            self._change_shares(new)
