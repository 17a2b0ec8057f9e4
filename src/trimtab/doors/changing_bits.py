"""Bits of parameters that change between steps: what adaptive bits need of DDP's and FSDP2's compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trimtab.codec import Block, Codec, ErrorFeedback
from trimtab.codec.packing import RAW
from trimtab.collectives import Piece
from trimtab.errors import TrimtabError


class Watcher(Protocol):
    """Observes every step of a compression, on its communication threads, and may change bits between steps."""

    def begin(self, step: int) -> None:
        """Called before the first bucket of a step is encoded, when all earlier steps are reduced.

        The last chance to call `set_bits(..., at_step=step)`.
        """

    def local(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Called with each bucket's values on this rank, before they are encoded; must not change them."""

    def reduced(self, step: int, pieces: Sequence[Piece], flat: torch.Tensor) -> None:
        """Called with each bucket's average over the ranks, before DDP gets it; must not change it."""


class ChangingBits:
    """The codec and bits of every parameter, and the changes that are agreed on for later steps."""

    codec: Codec
    step: int
    seed: int
    device: torch.device
    feedback: ErrorFeedback | None = None
    pieces: dict[str, tuple[int, int, int]]
    """Per parameter name its numel, bits (0: uncompressed) and block."""

    fixed: set[str]
    """The names of parameters that an override matches."""

    watcher: Watcher | None = None
    """Set before the first step, on every rank or on none."""

    def __init__(self) -> None:
        self._begun = -1
        self._changes: dict[int, dict[str, int]] = {}

    @property
    def carries_error(self) -> bool:
        """Whether what one step rounds away is added to the next."""
        return self.feedback is not None

    @property
    def parameter_ids(self) -> frozenset[int]:
        """The ids of the parameters that are reduced here."""
        raise NotImplementedError

    def local_numel(self, name: str) -> int:
        """Values of a parameter that this rank sees reduced."""
        return self.pieces[name][0]

    def set_bits(self, bits: Mapping[str, int], *, at_step: int) -> None:
        """From step `at_step` on, send these parameters in so many bits; the others do not change.

        Every rank makes the same call before its step `at_step` begins. Residuals and random streams
        continue as before.
        """
        if not isinstance(self.codec, Block):
            raise TrimtabError(f"set_bits: {self.codec} has no bits; only Block has")
        for name, value in bits.items():
            if name not in self.pieces:
                raise TrimtabError(f"set_bits: there is no parameter {name!r}")
            if self.pieces[name][1] == RAW:
                raise TrimtabError(f"set_bits: {name} travels uncompressed; its bits cannot change")
            if not 1 <= value <= 8:
                raise TrimtabError(f"set_bits: {name}: bits must be 1 to 8, got {value}")
        if at_step <= self._begun:
            raise TrimtabError(
                f"set_bits: step {at_step} has begun; at_step must be later than {self._begun}"
            )
        self._changes[at_step] = {**self._changes.get(at_step, {}), **bits}

    def switch_codec(self, codec: Block, *, error_feedback: bool) -> None:
        """Change rounding, block and error feedback; every rank calls it between the same two steps.

        Every parameter keeps its bits, and those with an override keep their block.
        """
        assert isinstance(self.codec, Block), "only block codecs can be switched"
        self.codec = codec
        for name, (numel, bits, _) in self.pieces.items():
            if bits != RAW and name not in self.fixed:
                self.pieces[name] = numel, bits, codec.block

    def _start(self, step: int) -> bool:
        """Let the watcher decide and apply the changes that are due; returns whether there were any."""
        if self.watcher is not None:
            self.watcher.begin(step)
        self._begun = step
        due = sorted(at for at in list(self._changes) if at <= step)
        for at_step in due:
            for name, bits in self._changes.pop(at_step).items():
                numel, _, block = self.pieces[name]
                self.pieces[name] = numel, bits, block
        return bool(due)

    def _load_bits(self, bits: Mapping[str, int], changes: Mapping[int, Mapping[str, int]]) -> None:
        """Continue with the bits of a checkpoint."""
        self._changes = {step: dict(change) for step, change in changes.items()}
        for name, (numel, before, block) in self.pieces.items():
            if before != RAW:
                self.pieces[name] = numel, bits.get(name, before), block

    def _saved_bits(self) -> dict[str, object]:
        return {
            "bits": {name: bits for name, (_, bits, _) in self.pieces.items() if bits != RAW},
            "changes": {step: dict(bits) for step, bits in self._changes.items()},
        }
