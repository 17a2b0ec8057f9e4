"""Which samples each rank gets: uneven parts of the same global batches, for any number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch.utils.data import Sampler

from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import shrink

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The place of one of this rank's batches in its step."""

    epoch: int
    start: int
    """Samples of the epoch before this step."""

    total: int
    """Samples of the step, on all ranks and over all accumulated batches."""

    shares: tuple[int, ...]
    """Samples of the step for each rank."""

    own: int
    """Samples in this batch; 0 if it has one sample of weight 0, only so that this rank takes part in collectives."""

    last: bool
    """Whether it is the step's last batch on this rank, after which gradients are averaged."""


class ShareSampler(Sampler[list[int]]):
    """Gives a data loader, as its `batch_sampler`, this rank's part of every global batch.

    An epoch is a permutation of all samples, a function of (seed, epoch) alone, cut into global batches; each
    is divided among the ranks by their shares. So every sample is used exactly once, and a step has the
    same samples on any number of ranks.

    The data loader must take batches in order; each appends a `Cut` to `issued`.
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
        """`batch_size` is that of a step: over all ranks and all `accumulate` batches of each."""
        assert sum(shares) == batch_size
        if length < 1 or (drop_last and length < batch_size):
            raise TrimtabError(
                f"loader: {length} samples are too few for a step of {batch_size}; use more data, a smaller "
                "batch_size, or no drop_last"
            )
        self.length, self.batch_size, self.accumulate, self.seed = length, batch_size, accumulate, seed
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch in finished steps, over all ranks."""
        self.issued: deque[Cut] = deque()
        self.shuffle, self.drop_last = shuffle, drop_last
        self._rank = rank
        self._shares = tuple(shares)
        self._later: tuple[tuple[int, int], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        """This rank's batches in a whole epoch."""
        return -(-self._end // self.batch_size) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from the current position to the end of the epoch."""
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
        """Samples of each rank in a whole step, as of the next step to be cut."""
        return self._shares if self._later is None else self._later[1]

    @property
    def changing(self) -> bool:
        """Whether a change of shares is pending: no step has been cut by them yet."""
        return self._later is not None

    def change(self, shares: Sequence[int], *, after_steps: int = 0) -> None:
        """Change the shares, this many steps after the next one; all ranks must make the same call."""
        assert sum(shares) == self.batch_size
        assert len(shares) == len(self._shares)
        assert self._later is None, "the previous change has not taken effect"
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
        """Resume from `state_dict`, on any number of ranks; shares are kept if they still fit."""
        if not isinstance(state, Mapping):
            raise TrimtabError(f"loader: expected what state_dict() returned, got {type(state).__name__}")
        if state.get("version") != STATE_VERSION:
            raise TrimtabError(
                f"loader: version mismatch of the state: found {state.get('version')!r}, expected {STATE_VERSION}"
            )
        if state["length"] != self.length:
            raise TrimtabError(
                f"loader: the state is for a dataset of {state['length']} samples, and this one has {self.length}; "
                "resume with the same data, or start a new epoch without loading the state"
            )
        self.seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]
        self._later = None
        if self.at_end:
            self.finish_epoch()
        if len(state["shares"]) == len(self._shares) and state["batch_size"] == self.batch_size:
            self._shares = tuple(state["shares"])

    @property
    def at_end(self) -> bool:
        """Whether all samples of the epoch went into finished steps."""
        return self.consumed >= self._end

    @property
    def _end(self) -> int:
        return self.length // self.batch_size * self.batch_size if self.drop_last else self.length

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        # Seed 1 of epoch 2 must not repeat seed 2 of epoch 1, and torch's generator uses only 32 bits.
        key = blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


def even_parts(count: int, parts: int) -> list[int]:
    """`count` as a sum of `parts` numbers that differ by at most one, the larger first."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]
