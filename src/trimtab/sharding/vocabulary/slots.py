"""Where a rank has the entries of a divided vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.sharding.unit_block import UnitBlock
from trimtab.sharding.unit_table import UnitTable


class Slots:
    """Where this rank has each entry of the vocabulary."""

    def __init__(self, block: UnitBlock) -> None:
        self.block = block
        self._table: UnitTable | None = None
        self._slots = self.owned = torch.empty(0, dtype=torch.int64)
        """`owned`: the entries of this rank, by slot."""

    def of(self, entries: Tensor) -> Tensor:
        """The slot of each entry on this rank; -1 if it is on another."""
        if self._table is not self.block.table or self._slots.device != entries.device:
            self._table = self.block.table
            self.owned = torch.tensor(self.block.owned, dtype=torch.int64, device=entries.device)
            self._slots = torch.full((self.block.units,), -1, device=entries.device)
            self._slots[self.owned] = torch.arange(len(self.owned), device=entries.device)
        return self._slots[entries]
