"""Lease migration: temporarily, a rank computes some units that another rank owns.

Parameters, optimizer state, clipping and checkpoints stay with the owner. Evaluation ignores leases. The steps, the
same on every rank:

1. After an optimizer step: send the leased weights to their borrowers, all blocks in few messages (`MESSAGES`), while
   the script goes on. Without an optimizer step, as in gradient accumulation, nothing is sent. Where there
   is a second process group (`TensorGroup.aside`), it travels there: all-reduces would otherwise queue behind it.
2. Forward, entering a block: wait for its message.
3. Compute the block with the units kept and borrowed; their outputs are part of the block's own all-reduce.
4. Backward, after the all-reduce of the gradient of the block's input: send the gradients of borrowed units back (one
   all-to-all, overlapped with the products of the previous block).
5. At the end of the backward pass, wait for them and add them to the owners' gradients. Where gradients are needed
   earlier (data parallelism, hooks on parameters), wait in step 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trimtab.errors import TrimtabError
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.unit_block import UnitBlock, grown, sharded_model

MESSAGES = 4
"""All leased weights travel in at most so many messages, the first blocks' first."""

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
    for name, block_loans in new_loans.items():
        block = sharded.blocks[name]
        block.lease = BlockLease(block=block, loans=block_loans) if block_loans else None
    every = [block.lease for block in sharded.blocks.values() if block.lease is not None]
    sharded.leases = Leases(every, early=hooked or dist.get_world_size() > sharded.group.size)
    sharded.leases.send()


def end_leases(model: nn.Module) -> None:
    """Let every rank compute its own units again. Every rank calls it, between two steps."""
    sharded = sharded_model(model, "end_leases")
    sharded.leases = None
    for block in sharded.blocks.values():
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

    _sent: tuple[int, ...] = ()
    """The state of the weights (`_state`) when they were last sent."""

    _borrowed: list[Tensor] | None = None
    """The borrowed rows of each parameter, until the weights change."""

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
        self.unit_size = sum(self._row_sizes)
        self.out = _split(self.lent, "borrower", self.block.group.size, self.unit_size)
        self.into = _split(self.taken, "owner", self.block.group.size, self.unit_size)

    @property
    def counts(self) -> list[int]:
        counts = list(self.block.table.counts)
        for loan in self.loans:
            counts[loan.owner] -= loan.count
            counts[loan.borrower] += loan.count
        return counts

    def fetch(self) -> None:
        """Have the borrowed rows of the pass that begins."""
        leases = self.block.sharded.leases
        assert leases is not None
        if not leases.recomputing and self._sent != self.state(leases.steps):
            leases.start(self)
        if self._borrowed is None:
            leases.finish(self)

    def state(self, steps: int) -> tuple[int, ...]:
        """Changes with the weights: after an optimizer step, and when they are written to by other means."""
        return (steps, *(tensor.parameter._version for tensor in self.block.tensors))

    def sends(self, steps: int, to: int) -> Tensor:
        """The rows lent to one rank, packed; from here on they count as sent."""
        self._sent, self._borrowed = self.state(steps), None
        stored = [tensor.parameter.data for tensor in self.block.tensors]
        return self._packed(stored, [loan for loan in self.lent if loan.borrower == to])

    def receive(self, packed: Tensor) -> None:
        """The borrowed rows have arrived, packed by owner."""
        self._borrowed = self._unpacked(packed, self.taken)

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
            else:
                leases.expect(self, work, received)
        return own

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


class Leases:
    """The weights and gradients of a model's leased units that are under way."""

    def __init__(self, leases: list[BlockLease], *, early: bool) -> None:
        self.early = early
        """Whether gradients are needed before the backward pass ends, so that each block must wait for its own."""
        self.steps = 0
        """Optimizer steps of leased parameters so far."""
        self._messages = _messages(leases)
        self._under_way: dict[int, tuple[list[BlockLease], dist.Work, Tensor]] = {}
        """Weights, by index of the message: whose they are, and where they arrive."""
        self._in_flight: list[tuple[BlockLease, dist.Work, Tensor]] = []
        """Gradients."""
        alive = weakref.ref(self)

        def stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            own = alive()
            if own is not None:
                own._stepped(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove).atexit = False

    @property
    def recomputing(self) -> bool:
        """Whether activations are computed once more, inside a backward pass: with the weights of the first time."""
        return torch._C._current_graph_task_id() != -1

    def send(self) -> None:
        """Start to send all weights."""
        for message in self._messages:
            if message:
                self.start(message[0])

    @torch.no_grad()
    def start(self, lease: BlockLease) -> None:
        """Start to send the weights of the message that this lease is in."""
        index = next(i for i, message in enumerate(self._messages) if lease in message)
        group = lease.block.group
        before = self._under_way.pop(index, None)
        if before is not None:  # nobody needed it, and the weights have changed
            _wait(before[1], group)
        leases = [each for each in self._messages[index] if each.block.lease is each]
        sent = torch.cat([each.sends(self.steps, rank) for rank in range(group.size) for each in leases])
        into = [sum(sizes) for sizes in zip(*(each.into for each in leases), strict=True)]
        out = [sum(sizes) for sizes in zip(*(each.out for each in leases), strict=True)]
        received = sent.new_empty(sum(into))
        self._under_way[index] = (leases, _exchange(received, sent, into, out, group), received)

    def finish(self, lease: BlockLease) -> None:
        """Wait for the weights of the message that this lease is in."""
        index = next(i for i, (leases, *_) in self._under_way.items() if lease in leases)
        leases, work, received = self._under_way.pop(index)
        _wait(work, lease.block.group)
        pieces: list[list[Tensor]] = [[] for _ in leases]
        sizes = [each.into[rank] for rank in range(lease.block.group.size) for each in leases]
        for place, piece in enumerate(received.split(sizes)):
            pieces[place % len(leases)].append(piece)
        for each, parts in zip(leases, pieces, strict=True):
            each.receive(torch.cat(parts))

    def _stepped(self, optimizer: Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        live = [each for message in self._messages for each in message if each.block.lease is each]
        trained = [t.parameter for each in live for t in each.block.tensors if t.parameter.requires_grad]
        updated = [id(parameter) in held for parameter in trained]
        if any(updated):
            self.steps += 1
        if all(updated):  # with several optimizers, the weights are sent when they are needed
            for message in self._messages:
                first = next((each for each in message if each in live), None)
                if first is not None:
                    self.start(first)

    def expect(self, lease: BlockLease, work: dist.Work, received: Tensor) -> None:
        """Gradients are on their way to this rank."""
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


def _messages(leases: list[BlockLease]) -> list[list[BlockLease]]:
    """The leases in the order of their blocks, in messages of about equal size and of one dtype."""
    sizes = [sum(loan.count for loan in lease.loans) * lease.unit_size for lease in leases]
    messages: dict[tuple[int, torch.dtype], list[BlockLease]] = {}
    before = 0
    for lease, size in zip(leases, sizes, strict=True):
        place = (MESSAGES * before // sum(sizes), lease.block.tensors[0].parameter.dtype)
        messages.setdefault(place, []).append(lease)
        before += size
    return list(messages.values())


def _split(which: list[Loan], end: str, size: int, unit: int) -> list[int]:
    """The number of values to or from each rank."""
    return [sum(loan.count for loan in which if getattr(loan, end) == rank) * unit for rank in range(size)]


def _exchange(
    received: Tensor, sent: Tensor, into: list[int], out: list[int], group: TensorGroup
) -> dist.Work:
    try:
        work: dist.Work | None = dist.all_to_all_single(
            received, sent, into, out, group=group.side, async_op=True
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
