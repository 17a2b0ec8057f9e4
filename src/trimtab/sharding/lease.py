"""Lease migration: temporarily, a rank computes some units that another rank owns.

In every training step the units' weights are sent to the borrower and their gradients are sent back; parameters,
optimizer state, clipping and checkpoints stay with the owner. Evaluation ignores leases. The steps, the same on every
rank:

1. Forward, entering a block: wait for its leased weights, which were requested on entering the previous block, and
   request those of the next block (one all-to-all per block, overlapped with this block's products).
2. Compute the block with the units kept and borrowed.
3. Backward, after the all-reduce of the gradient of the block's input: send the gradients of borrowed units back (one
   all-to-all, overlapped with the products of the previous block).
4. At the end of the backward pass, wait for them and add them to the owners' gradients. Where gradients are needed
   earlier (data parallelism, hooks on parameters), wait in step 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.unit_block import UnitBlock, grown, sharded_model

_LOST = (
    "lease: a rank was lost while units were leased; every unit is still with its owner. "
    "Stop this job and resume it from its last checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Units that one rank computes for another, in consecutive slots of the owner."""

    owner: int
    borrower: int
    start: int
    count: int


def loans(owned: Sequence[int], computed: Sequence[int]) -> list[Loan]:
    """The loans with which each rank computes that many units: owners lend their last slots, in rank order."""
    free = [
        (rank, slot) for rank, count in enumerate(owned) for slot in range(min(count, computed[rank]), count)
    ]
    result, begin = [], 0
    for rank, count in enumerate(computed):
        end = begin + max(0, count - owned[rank])
        while begin < end:
            owner, start = free[begin]
            lent = sum(1 for other, _ in free[begin:end] if other == owner)
            result.append(Loan(owner=owner, borrower=rank, start=start, count=lent))
            begin += lent
    return result


def lease(model: nn.Module, counts: Mapping[str, Sequence[int]]) -> None:
    """Let each rank compute that many units of the named blocks, from the next training pass on. Exact.

    Every rank calls it, with the same counts, between a step and the next forward pass. Other blocks do not change.
    Counts equal to the owned units end a block's lease; `end_leases` ends all.
    """
    sharded = sharded_model(model, "lease")
    sharded.check()
    new_loans = {}
    for name, computed in counts.items():
        block = sharded.block(name, "lease")
        owned = block.table.counts
        if block.vocabulary:
            raise TrimtabError(f"lease: {name} cannot be leased; use move")
        if len(computed) != len(owned) or sum(computed) != block.units or min(computed) < 0:
            raise TrimtabError(
                f"lease: {list(computed)} does not distribute the {block.units} units of {name} over {len(owned)} "
                f"ranks; give one non-negative number per rank, with sum {block.units}"
            )
        if len({tensor.parameter.dtype for tensor in block.tensors}) > 1:
            raise TrimtabError(
                f"lease: the parameters of {name} have different dtypes; convert them to one, or use move"
            )
        new_loans[name] = loans(owned, computed)
    sharded.group.require_agreement(
        repr(sorted(new_loans.items())).encode(),
        sharded.device,
        differs="lease: rank {rank} has other counts than rank 0; call lease on every rank with the same counts",
        lost=_LOST,
    )
    hooked = any(getattr(t.parameter, "_post_accumulate_grad_hooks", None) for _, t in sharded.tensors())
    sharded.leases = Leases(early=hooked or dist.get_world_size() > sharded.group.size)
    for name, block_loans in new_loans.items():
        block = sharded.blocks[name]
        block.lease = BlockLease(block=block, loans=block_loans) if block_loans else None


def end_leases(model: nn.Module) -> None:
    """Let every rank compute its own units again. Every rank calls it, between two steps."""
    for block in sharded_model(model, "end_leases").blocks.values():
        block.lease = None


def leased(model: nn.Module) -> dict[str, list[int]]:
    """The number of units each rank computes in training, for each block with a lease."""
    blocks = sharded_model(model, "leased").blocks.values()
    return {block.name: block.lease.counts for block in blocks if block.lease is not None}


@dataclass(kw_only=True, eq=False)
class BlockLease:
    """The loans of one block, from the view of one rank."""

    block: UnitBlock
    loans: list[Loan]
    units: list[int] = field(default_factory=list)
    """The units that this rank computes: those kept, then those borrowed."""

    _requested: tuple[dist.Work, Tensor] | None = None
    _borrowed: list[Tensor] | None = None
    """The borrowed rows of each parameter, kept for recomputation in the backward pass."""

    def __post_init__(self) -> None:
        rank, table = self.block.group.rank, self.block.table
        self.lent = [loan for loan in self.loans if loan.owner == rank]
        self.taken = [loan for loan in self.loans if loan.borrower == rank]
        self.kept = self.block.count - sum(loan.count for loan in self.lent)
        self.units = [int(unit) for unit in table.slots[rank][: self.kept]]
        for loan in self.taken:
            self.units += [
                int(unit) for unit in table.slots[loan.owner][loan.start : loan.start + loan.count]
            ]
        tensors = self.block.tensors
        self._row_sizes = [tensor.by_unit(tensor.parameter.data).shape[1] for tensor in tensors]
        self.out = _split(self.lent, "borrower", self.block.group.size, sum(self._row_sizes))
        self.into = _split(self.taken, "owner", self.block.group.size, sum(self._row_sizes))

    @property
    def counts(self) -> list[int]:
        counts = list(self.block.table.counts)
        for loan in self.loans:
            counts[loan.owner] -= loan.count
            counts[loan.borrower] += loan.count
        return counts

    def fetch(self) -> None:
        """Wait for the borrowed rows of the pass that begins."""
        self._borrowed = self._fetch()

    def rows(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of each parameter the kept rows, then the borrowed ones."""
        assert self._borrowed is not None
        full = []
        for tensor, parameter, rows in zip(self.block.tensors, parameters, self._borrowed, strict=True):
            kept = parameter[: self.kept * tensor.axis.width]
            full.append(torch.cat([kept, rows.reshape(-1, *parameter.shape[1:])]))
        return full

    def gradients(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Tensor | None]:
        """The gradients of the kept rows; those of borrowed rows start on their way to the owners."""
        own: list[Tensor | None] = []
        full = []
        units = len(self.units)
        for tensor, (shape, dtype), gradient in zip(self.block.tensors, parameters, gradients, strict=True):
            if gradient is None:
                gradient = tensor.parameter.new_zeros((units * tensor.axis.width, *shape[1:]))
            full.append(gradient.contiguous().to(dtype))
            kept = self.kept * tensor.axis.width
            own.append(grown(full[-1][:kept], shape[0]) if tensor.parameter.requires_grad else None)
        if any(tensor.parameter.requires_grad for tensor in self.block.tensors):
            work, received = self.return_gradients(full)
            leases = self.block.sharded.leases
            assert leases is not None
            if leases.early:
                _wait(work, self.block.group)
                self.add(received, own)
                self.forget()
            else:
                leases.expect(self, work, received)
        return own

    def request(self) -> None:
        """Start to send the lent rows and to receive the borrowed ones."""
        with torch.no_grad():
            sent = self._packed([t.parameter.data for t in self.block.tensors], self.lent)
            received = sent.new_empty(sum(self.into))
        self._requested = (_exchange(received, sent, self.into, self.out, self.block.group), received)

    def _fetch(self) -> list[Tensor]:
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and self._borrowed is not None:
            return self._borrowed
        if self._requested is None:
            self.request()
        assert self._requested is not None
        work, received = self._requested
        self._requested = None
        _wait(work, self.block.group)
        if not recomputing:
            following = _next_lease(self.block)
            if following is not None:
                following.forget()
                following.request()
        self._borrowed = self._unpacked(received, self.taken)
        return self._borrowed

    def forget(self) -> None:
        """Drop fetched and requested rows: a step has ended, and weights change."""
        self._borrowed = None
        if self._requested is not None:
            _wait(self._requested[0], self.block.group)
            self._requested = None

    def return_gradients(self, gradients: list[Tensor]) -> tuple[dist.Work, Tensor]:
        """Start to send the gradients of borrowed units to their owners; their rows follow the kept ones."""
        sent = self._packed(gradients, self.taken, after=self.kept)
        received = sent.new_empty(sum(self.out))
        return _exchange(received, sent, self.out, self.into, self.block.group), received

    def add(self, received: Tensor, to: list[Tensor | None]) -> None:
        """Add the received gradients of lent units to those of this rank's parameters."""
        for gradient, tensor, rows in zip(
            to, self.block.tensors, self._unpacked(received, self.lent), strict=True
        ):
            if not self.lent or not tensor.parameter.requires_grad:
                continue
            if gradient is None:
                raise TrimtabError(
                    f"lease: {tensor.name} has no .grad; use loss.backward(), or end the leases"
                )
            by_unit, begin = tensor.by_unit(gradient), 0
            for loan in self.lent:
                by_unit[loan.start : loan.start + loan.count] += rows[begin : begin + loan.count]
                begin += loan.count

    def _packed(self, stored: Sequence[Tensor], which: list[Loan], after: int | None = None) -> Tensor:
        """All values, loan by loan and parameter by parameter. With `after`, loans are consecutive from that row on."""
        pieces, begin = [], after or 0
        for loan in which:
            start = loan.start if after is None else begin
            for tensor, values in zip(self.block.tensors, stored, strict=True):
                pieces.append(tensor.by_unit(values)[start : start + loan.count].flatten())
            begin += loan.count
        return torch.cat(pieces) if pieces else stored[0].new_empty(0)

    def _unpacked(self, received: Tensor, which: list[Loan]) -> list[Tensor]:
        """For each parameter the rows of all loans, by unit."""
        pieces: list[list[Tensor]] = [[] for _ in self._row_sizes]
        sizes = [loan.count * row for loan in which for row in self._row_sizes]
        for index, piece in enumerate(received.split(sizes) if sizes else ()):
            row = self._row_sizes[index % len(self._row_sizes)]
            pieces[index % len(self._row_sizes)].append(piece.view(-1, row))
        return [
            torch.cat(parts) if parts else received.new_empty(0, row)
            for parts, row in zip(pieces, self._row_sizes, strict=True)
        ]


@dataclass(kw_only=True, eq=False)
class Leases:
    """The gradients of a model's leased units that are in flight to their owners."""

    early: bool = False
    """Whether gradients are needed before the backward pass ends, so that each block must wait for its own."""

    _in_flight: list[tuple[BlockLease, dist.Work, Tensor]] = field(default_factory=list)

    def expect(self, lease: BlockLease, work: dist.Work, received: Tensor) -> None:
        if not self._in_flight:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        self._in_flight.append((lease, work, received))

    @torch.no_grad()
    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for lease, work, received in in_flight:
            _wait(work, lease.block.group)
            lease.add(received, [tensor.parameter.grad for tensor in lease.block.tensors])
            lease.forget()


def _split(which: list[Loan], end: str, size: int, unit: int) -> list[int]:
    """The number of values to or from each rank."""
    return [sum(loan.count for loan in which if getattr(loan, end) == rank) * unit for rank in range(size)]


def _next_lease(block: UnitBlock) -> BlockLease | None:
    """The lease of the next block that has one."""
    blocks = list(block.sharded.blocks.values())
    following = (other.lease for other in blocks[blocks.index(block) + 1 :])
    return next((lease for lease in following if lease is not None), None)


def _exchange(
    received: Tensor, sent: Tensor, into: list[int], out: list[int], group: TensorGroup
) -> dist.Work:
    try:
        work: dist.Work | None = dist.all_to_all_single(
            received, sent, into, out, group=group.process_group, async_op=True
        )
    except RuntimeError as error:
        raise TrimtabError(_LOST) from error
    assert work is not None
    return work


def _wait(work: dist.Work, group: TensorGroup) -> None:
    with group.timed():
        try:
            work.wait()
        except RuntimeError as error:
            raise TrimtabError(_LOST) from error
