"""Sum values that lie on other ranks in each replica of a model: units of a tensor-parallel model, divided differently.

A run of consecutive values is held by one rank of every replica. One of these ranks, the run's reducer, adds them up;
each replica reduces about as much as the others. As in scatter-reduce-allgather, every value is encoded twice, and a
rank sends 2 (D - 1) / D of its values among D replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.codec.contract import Kernels
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.packing import RAW, Packing
from trimtab.collectives.duplex import all_to_all
from trimtab.collectives.layout import Piece
from trimtab.collectives.reduction import carried
from trimtab.random_bits import OWN, REDUCED, stream


@dataclass(frozen=True, kw_only=True)
class SharedRun(Piece):
    """Consecutive values of a parameter, at `offset` of this rank's buffer, and the ranks that hold them."""

    members: tuple[int, ...]
    """The ranks that hold these values, one of each replica, in the same order on all of them."""

    reducer: int
    """The member that adds them up."""

    @property
    def key(self) -> str:
        """Names the run in error feedback."""
        return f"{self.name}:{self.first_block}"


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How runs with bits are encoded; those without travel as they are."""

    kernels: Kernels
    seed: int
    stochastic: bool
    feedback: ErrorFeedback | None = None


class ScatteredReduction:
    """Sums every run over its members. All ranks of the group take part, also those without any run.

    Every rank lists its runs in one order: for two ranks, the runs that both hold are in the same order on both.
    """

    def __init__(
        self,
        runs: Sequence[SharedRun],
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup],
        coding: Coding | None = None,
    ) -> None:
        """`coding` is None for types that the codec does not support; then all values travel as they are."""
        self._groups, self._coding = groups, coding
        self._rank, world = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        outgoing: defaultdict[int, list[SharedRun]] = defaultdict(list)
        incoming: defaultdict[int, list[SharedRun]] = defaultdict(list)
        for run in runs:
            if run.reducer != self._rank:
                outgoing[run.reducer].append(run)
            else:
                for member in run.members:
                    incoming[member].append(run)
        kept = incoming.pop(self._rank, [])
        packed = _Values if coding is None else _Codes
        self._out = packed([run for peer in range(world) for run in outgoing[peer]], dtype, coding)
        self._into = [packed(incoming[peer], dtype, coding) for peer in range(world)]
        self._back = packed([run for peer in range(world) for run in incoming[peer]], dtype, coding)
        self._kept = packed(kept, dtype, coding)
        self._out_sizes = [packed(outgoing[peer], dtype, coding).size for peer in range(world)]
        self._in_sizes = [each.size for each in self._into]
        self._own = self._out.buffer(device)  # what this rank sends at first, and its sums later
        self._others = self._back.buffer(device)  # what it receives as reducer, and the sums that it returns
        self._decoded = self._kept.buffer(device)
        self._coded = [run for run in runs if run.bits != RAW]

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. all-to-all: send each run to its reducer.
        2. add what arrived to my own exact values, and keep what their encoding decodes to; all-to-all back.
        3. decode the sums of the other reducers.
        """
        feedback = None if self._coding is None else self._coding.feedback
        seed = 0 if self._coding is None else self._coding.seed
        if scale != 1.0:
            flat.mul_(scale)
        target = None
        if feedback is not None:
            for run in self._coded:
                feedback.restore(run.key, flat[run.span])
            target = flat.clone()
        self._out.encode(flat, self._own, stream(seed, step, self._rank, OWN))
        if target is not None:  # what the reducers receive; the last step overwrites it
            self._out.decode(self._own, flat)
        yield all_to_all(self._others, self._own, self._in_sizes, self._out_sizes, self._groups[0])
        for runs, payload in zip(self._into, self._others.split(self._in_sizes), strict=True):
            runs.decode(payload, flat, add=True)
        if target is not None:
            carried(target)
            for run in self._kept.runs:
                target[run.span] = flat[run.span]
        second = stream(seed, step, self._rank, REDUCED)
        self._back.encode(flat, self._others, second)
        if self._coding is not None:  # all members keep the same bits
            self._kept.encode(flat, self._decoded, second)
            self._kept.decode(self._decoded, flat)
        if feedback is not None and target is not None:
            for run in self._coded:
                feedback.keep(run.key, target[run.span], flat[run.span])
        yield all_to_all(self._own, self._others, self._out_sizes, self._in_sizes, self._groups[1])
        self._out.decode(self._own, flat)


class _Values:
    """Runs one after another, as they are."""

    def __init__(self, runs: Sequence[SharedRun], dtype: torch.dtype, _coding: Coding | None) -> None:
        self.runs, self._dtype = runs, dtype
        self.size = sum(run.numel for run in runs)

    def buffer(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size, dtype=self._dtype, device=device)

    def encode(self, flat: torch.Tensor, out: torch.Tensor, _stream: int) -> None:
        if self.runs:
            torch.cat([flat[run.span] for run in self.runs], out=out)

    def decode(self, payload: torch.Tensor, flat: torch.Tensor, *, add: bool = False) -> None:
        start = 0
        for run in self.runs:
            values, part = payload[start : start + run.numel], flat[run.span]
            part.add_(values) if add else part.copy_(values)
            start += run.numel


class _Codes:
    """Runs one after another, encoded; sizes are in bytes."""

    def __init__(self, runs: Sequence[SharedRun], dtype: torch.dtype, coding: Coding | None) -> None:
        assert coding is not None
        self.runs, self._coding = runs, coding
        self._packing = Packing(segments=tuple(runs), dtype=dtype)
        self.size = self._packing.nbytes

    def buffer(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.uint8, device=device)

    def encode(self, flat: torch.Tensor, out: torch.Tensor, stream: int) -> None:
        if self.size:
            coding = self._coding
            coding.kernels.encode(flat, self._packing, out, stream=stream, stochastic=coding.stochastic)

    def decode(self, payload: torch.Tensor, flat: torch.Tensor, *, add: bool = False) -> None:
        if self.size:
            self._coding.kernels.decode(payload, self._packing, flat, add=add)
