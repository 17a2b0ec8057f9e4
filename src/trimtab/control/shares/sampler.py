"""Which samples each rank takes: uneven parts of the same global batches, whatever the number of ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What one batch of this rank is in the step it belongs to."""

    epoch: int
    start: int
    """Samples of the epoch before this step."""

    total: int
    """Samples of the step, on all ranks and over all accumulated batches."""

    shares: tuple[int, ...]
    """Samples of the step for each rank."""

    own: int
    """Samples in this batch; 0 when it holds one only so that this rank takes part, and counts for nothing."""

    last: bool
    """Whether it is the step's last on this rank: the one after which gradients are averaged."""


class ShareSampler(Sampler[list[int]]):
    """Gives a data loader, as its `batch_sampler`, this rank's part of every global batch.

    An epoch is one order of all samples, a function of (seed, epoch) alone, cut into global batches; each
    is divided among the ranks by their shares. So every sample is seen exactly once, and a step holds the
    same samples on any number of ranks.

    The data loader must take batches in order; each leaves a `Cut` in `issued`.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        rank: int,
        shares: Sequence[int],
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        """`batch_size` is that of a step: of all ranks, and of all `accumulate` batches of each together."""
        assert sum(shares) == batch_size
        if length < 1 or (drop_last and length < batch_size):
            raise TrimtabError(
                f"loader: {length} samples give no step of {batch_size}; take more data, a smaller batch_size, "
                "or leave drop_last out"
            )
        self.length, self.batch_size, self.accumulate, self.seed = length, batch_size, accumulate, seed
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that went into finished steps, on all ranks."""
        self.issued: deque[Cut] = deque()
        self.shuffle, self.drop_last = shuffle, drop_last
        self._rank = rank
        self._shares = tuple(shares)
        self._later: tuple[tuple[int, int], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return -(-self._end // self.batch_size) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from where the epoch stands to its end."""
        self.issued.clear()
        epoch, order = self.epoch, self._order()
        for start in range(self.consumed, self._end, self.batch_size):
            total = min(self.batch_size, self._end - start)
            if self._later is not None and (epoch, start) >= self._later[0]:
                self._shares, self._later = self._later[1], None
            shares = self._shares if total == self.batch_size else shrink(total, self._shares)
            first = start + sum(shares[: self._rank])
            sizes = even_parts(shares[self._rank], self.accumulate)
            for place, own in enumerate(sizes):
                cut = Cut(
                    epoch=epoch,
                    start=start,
                    total=total,
                    shares=shares,
                    own=own,
                    last=place == self.accumulate - 1,
                )
                self.issued.append(cut)
                yield order[first : first + own] or order[start : start + 1]
                first += own

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a whole step for each rank, as they will be in the next step that is cut."""
        return self._shares if self._later is None else self._later[1]

    @property
    def changing(self) -> bool:
        """Whether other shares are on their way, and no step has been cut by them yet."""
        return self._later is not None

    def change(self, shares: Sequence[int], *, after_steps: int = 0) -> None:
        """Other shares, from so many steps after the one that comes next; all ranks must say the same."""
        assert sum(shares) == self.batch_size
        assert len(shares) == len(self._shares)
        assert self._later is None, "the change before has not taken effect"
        self._later = (self.epoch, self.consumed + after_steps * self.batch_size), tuple(shares)

    def finish_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "length": self.length,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "shares": list(self.shares),
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks; shares are kept if they still fit."""
        if state.get("version") != STATE_VERSION:
            raise TrimtabError(
                f"loader: the state has version {state.get('version')!r}; this trimtab reads {STATE_VERSION}"
            )
        if state["length"] != self.length:
            raise TrimtabError(
                f"loader: the state is of a dataset of {state['length']} samples, and this one has {self.length}; "
                "resume with the data the run began with, or start a new epoch without loading the state"
            )
        self.seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]
        self._later = None
        if self.consumed >= self._end:
            self.finish_epoch()
        if len(state["shares"]) == len(self._shares) and state["batch_size"] == self.batch_size:
            self._shares = tuple(state["shares"])

    @property
    def _end(self) -> int:
        return self.length // self.batch_size * self.batch_size if self.drop_last else self.length

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        # Seed 1 of epoch 2 must not repeat seed 2 of epoch 1; and torch's generator looks at 32 bits only.
        key = blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


def even_parts(count: int, parts: int) -> list[int]:
    """`count` as a sum of `parts` numbers that differ by at most one, the larger first."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]
