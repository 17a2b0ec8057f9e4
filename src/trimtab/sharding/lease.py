"""Lease-migration: for a while some units are computed by another rank than the one that owns them.

In every training step their weights go out and their gradients come back; parameters, optimizer state,
clipping and checkpoints know only the owner. Evaluation uses no lease. The steps, the same on every rank:

1. Forward, entering a block: its leased weights, asked for when the block before was entered, are waited
   for; those of the next block are asked for (one all-to-all each, beside this block's products).
2. The block is computed with what the rank kept and what it borrowed.
3. Backward, once the gradient of the block's input is added up: the gradients of borrowed units are on
   their way home (one all-to-all, beside the products of the block before).
4. When the backward pass ends, they are waited for and added to the owners' gradients. Where something
   takes gradients earlier (data parallelism, hooks of parameters), they are waited for in 3.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_block import device_of, sharded_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from trimtab.sharding.group import TensorGroup
    from trimtab.sharding.unit_block import ShardedModel, UnitBlock

_LOST = (
    "lease: a rank was lost while units were leased; every unit is still with its owner. "
    "End this job and resume it from its last checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Units that one rank computes for another: consecutive slots of the owner."""

    owner: int
    borrower: int
    start: int
    count: int


def loans(owned: Sequence[int], computed: Sequence[int]) -> list[Loan]:
    """Who computes what for whom, so that each rank computes so many: owners lend their last slots, in turn."""
    free = [
        (rank, slot) for rank, count in enumerate(owned) for slot in range(min(count, computed[rank]), count)
    ]
    found, begin = [], 0
    for rank, count in enumerate(computed):
        end = begin + max(0, count - owned[rank])
        while begin < end:
            owner, start = free[begin]
            many = sum(1 for other, _ in free[begin:end] if other == owner)
            found.append(Loan(owner=owner, borrower=rank, start=start, count=many))
            begin += many
    return found


def lease(model: nn.Module, counts: Mapping[str, Sequence[int]]) -> None:
    """Let each rank compute so many units of the blocks named, from the next training pass on; exact.

    Every rank calls it, with the same counts, between a step and the next forward pass. Blocks not named stay as
    they are; the counts of what is owned end a block's lease, and `end_leases` ends all.
    """
    sharded = sharded_model(model, "lease")
    sharded.check()
    wanted = {}
    for name, asked in counts.items():
        block = sharded.blocks.get(name)
        if block is None:
            raise TrimtabError(f"lease: there is no block {name!r}; there are {', '.join(sharded.blocks)}")
        owned = block.table.counts
        if len(asked) != len(owned) or sum(asked) != block.units or min(asked) < 0:
            raise TrimtabError(
                f"lease: {list(asked)} does not share the {block.units} units of {name} among {len(owned)} ranks; "
                "give each rank a number of at least 0 that together make up all units"
            )
        if len({tensor.parameter.dtype for tensor in block.tensors}) > 1:
            raise TrimtabError(
                f"lease: the parameters of {name} have several types; give them one, or use move"
            )
        wanted[name] = loans(owned, asked)
    _agree(sharded, wanted)
    hooked = any(getattr(t.parameter, "_post_accumulate_grad_hooks", None) for _, t in sharded.tensors())
    sharded.leases = Leases(early=hooked or dist.get_world_size() > sharded.group.size)
    for name, found in wanted.items():
        block = sharded.blocks[name]
        block.lease = BlockLease(block=block, loans=found) if found else None


def end_leases(model: nn.Module) -> None:
    """Let every rank compute its own units again; call it on every rank, between two steps."""
    for block in sharded_model(model, "end_leases").blocks.values():
        block.lease = None


def leased(model: nn.Module) -> dict[str, list[int]]:
    """How many units each rank computes in training, for each block with a lease."""
    blocks = sharded_model(model, "leased").blocks.values()
    return {block.name: block.lease.counts for block in blocks if block.lease is not None}


@dataclass(kw_only=True, eq=False)
class BlockLease:
    """The loans of one block, as one rank sees them."""

    block: UnitBlock
    loans: list[Loan]
    working: dict[int, Tensor] = field(default_factory=dict)
    """By parameter, the rows to compute with; empty outside a pass."""

    units: list[int] = field(default_factory=list)
    """The units that this rank computes: what it kept, then what it borrowed."""

    _asked: tuple[dist.Work, Tensor] | None = None
    _borrowed: list[Tensor] | None = None
    """What came for this pass, for each parameter; kept for a repetition in the backward pass."""

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
        self.rows = [tensor.by_unit(tensor.parameter.data).shape[1] for tensor in tensors]
        self.out = _split(self.lent, "borrower", self.block.group.size, sum(self.rows))
        self.into = _split(self.taken, "owner", self.block.group.size, sum(self.rows))

    @property
    def counts(self) -> list[int]:
        counts = list(self.block.table.counts)
        for loan in self.loans:
            counts[loan.owner] -= loan.count
            counts[loan.borrower] += loan.count
        return counts

    def enter(self, x: Tensor) -> Tensor:
        """The block's input; from here on `working` holds what to compute with."""
        borrowed = self._fetch()
        parameters = [tensor.parameter for tensor in self.block.tensors]
        entered, *full = _Leased.apply(self, x, borrowed, *parameters)  # type: ignore[no-untyped-call]
        self.working = {id(p): rows for p, rows in zip(parameters, full, strict=True)}
        return entered  # type: ignore[no-any-return]

    def ask(self) -> None:
        """Start sending out what was lent and receiving what was borrowed."""
        with torch.no_grad():
            sent = self._packed([t.parameter.data for t in self.block.tensors], self.lent)
            received = sent.new_empty(sum(self.into))
        self._asked = (_exchange(received, sent, self.into, self.out, self.block.group), received)

    def _fetch(self) -> list[Tensor]:
        repeated = torch._C._current_graph_task_id() != -1
        if repeated and self._borrowed is not None:
            return self._borrowed
        if self._asked is None:
            self.ask()
        assert self._asked is not None
        work, received = self._asked
        self._asked = None
        _waited(work, self.block.group)
        if not repeated:
            following = _next_lease(self.block)
            if following is not None:
                following.forget()
                following.ask()
        self._borrowed = self._unpacked(received, self.taken)
        return self._borrowed

    def forget(self) -> None:
        """Drop what was fetched or asked for: a step has ended, and weights change."""
        self._borrowed = None
        if self._asked is not None:
            _waited(self._asked[0], self.block.group)
            self._asked = None

    def give_back(self, gradients: list[Tensor]) -> tuple[dist.Work, Tensor]:
        """Start sending borrowed units' gradients home; their rows follow the kept ones."""
        sent = self._packed(gradients, self.taken, after=self.kept)
        received = sent.new_empty(sum(self.out))
        return _exchange(received, sent, self.out, self.into, self.block.group), received

    def add(self, received: Tensor, to: list[Tensor | None]) -> None:
        """Add the gradients that came home to those of the owner's parameters."""
        for gradient, tensor, rows in zip(
            to, self.block.tensors, self._unpacked(received, self.lent), strict=True
        ):
            if not self.lent or not tensor.parameter.requires_grad:
                continue
            if gradient is None:
                raise TrimtabError(
                    f"lease: the gradient of {tensor.name} was not kept; use loss.backward(), or end the leases"
                )
            by_unit, begin = tensor.by_unit(gradient), 0
            for loan in self.lent:
                by_unit[loan.start : loan.start + loan.count] += rows[begin : begin + loan.count]
                begin += loan.count

    def _packed(self, stored: Sequence[Tensor], which: list[Loan], after: int | None = None) -> Tensor:
        """One run of values: loan by loan, parameter by parameter. `after`: loans lie one after another from there."""
        pieces, begin = [], after or 0
        for loan in which:
            start = loan.start if after is None else begin
            for tensor, values in zip(self.block.tensors, stored, strict=True):
                pieces.append(tensor.by_unit(values)[start : start + loan.count].flatten())
            begin += loan.count
        return torch.cat(pieces) if pieces else stored[0].new_empty(0)

    def _unpacked(self, received: Tensor, which: list[Loan]) -> list[Tensor]:
        """For each parameter the rows of all loans, by unit."""
        found: list[list[Tensor]] = [[] for _ in self.rows]
        sizes = [loan.count * row for loan in which for row in self.rows]
        for index, piece in enumerate(received.split(sizes) if sizes else ()):
            row = self.rows[index % len(self.rows)]
            found[index % len(self.rows)].append(piece.view(-1, row))
        return [
            torch.cat(parts) if parts else received.new_empty(0, row)
            for parts, row in zip(found, self.rows, strict=True)
        ]


class _Leased(torch.autograd.Function):
    """A block's input and its parameters' rows, kept and borrowed; backward the collectives of the block."""

    @staticmethod
    def forward(
        ctx: Any, lease: BlockLease, x: Tensor, borrowed: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.lease = lease
        ctx.shapes = [parameter.shape for parameter in parameters]
        if lease.block.group.clock is not None:
            lease.block.group.clock.compute_starts()
        full = []
        for tensor, parameter, rows in zip(lease.block.tensors, parameters, borrowed, strict=True):
            kept = parameter[: lease.kept * tensor.axis.width]
            full.append(torch.cat([kept, rows.reshape(-1, *parameter.shape[1:])]))
        return x.view_as(x), *full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        lease: BlockLease = ctx.lease
        group, tensors = lease.block.group, lease.block.tensors
        if group.clock is not None:
            group.clock.compute_ends()
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        if ctx.needs_input_grad[1]:
            group.all_reduce(total)
        full = [gradient.contiguous() for gradient in gradients[1:]]
        own: list[Tensor | None] = []
        for tensor, shape, gradient in zip(tensors, ctx.shapes, full, strict=True):
            whole = gradient.new_zeros(shape)
            kept = lease.kept * tensor.axis.width
            whole[:kept] = gradient[:kept]
            own.append(whole)
        if any(ctx.needs_input_grad[3:]):
            work, received = lease.give_back(full)
            leases = lease.block.sharded.leases
            assert leases is not None
            if leases.early:
                _waited(work, group)
                lease.add(received, own)
                lease.forget()
            else:
                leases.expect(lease, work, received)
        return None, total, None, *own


@dataclass(kw_only=True, eq=False)
class Leases:
    """The gradients of a model's leased units that are on their way home."""

    early: bool = False
    """Whether gradients are taken before the backward pass ends, so that each block must wait for its own."""

    _expected: list[tuple[BlockLease, dist.Work, Tensor]] = field(default_factory=list)

    def expect(self, lease: BlockLease, work: dist.Work, received: Tensor) -> None:
        if not self._expected:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        self._expected.append((lease, work, received))

    @torch.no_grad()
    def _finish(self) -> None:
        expected, self._expected = self._expected, []
        for lease, work, received in expected:
            _waited(work, lease.block.group)
            lease.add(received, [tensor.parameter.grad for tensor in lease.block.tensors])
            lease.forget()


def _split(which: list[Loan], end: str, size: int, unit: int) -> list[int]:
    """Values to or from each rank."""
    return [sum(loan.count for loan in which if getattr(loan, end) == rank) * unit for rank in range(size)]


def _next_lease(block: UnitBlock) -> BlockLease | None:
    """The lease of the next block that has one."""
    after = False
    for other in block.sharded.blocks.values():
        if after and other.lease is not None:
            return other.lease
        after = after or other is block
    return None


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


def _waited(work: dist.Work, group: TensorGroup) -> None:
    with nullcontext() if group.clock is None else group.clock.collective():
        try:
            work.wait()
        except RuntimeError as error:
            raise TrimtabError(_LOST) from error


def _agree(sharded: ShardedModel, wanted: Mapping[str, list[Loan]]) -> None:
    """Refuse on every rank when ranks were asked for different leases."""
    if sharded.group.size == 1:
        return
    digest = hashlib.sha256(repr(sorted(wanted.items())).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device_of(sharded))
    every = [torch.empty_like(mine) for _ in range(sharded.group.size)]
    try:
        dist.all_gather(every, mine, group=sharded.group.process_group)
    except RuntimeError as error:
        raise TrimtabError(_LOST) from error
    for rank, theirs in enumerate(every):
        if not torch.equal(theirs, every[0]):
            raise TrimtabError(
                f"lease: rank {rank} was given other counts than rank 0; call lease on every rank with the same"
            )
