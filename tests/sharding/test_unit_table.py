"""The table of units: every unit in exactly one slot of one rank, whatever moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_axis import UnitAxis, runs
from trimtab.sharding.unit_table import UnitTable

OWNERS = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.lists(st.lists(st.integers(0, ranks - 1), min_size=9, max_size=9), min_size=1, max_size=5),
    )
)


@given(OWNERS)
def test_moves_keep_every_unit_and_disturb_only_what_moves(case: tuple[int, list[list[int]]]) -> None:
    ranks, moves = case
    table = UnitTable.consecutive([9, *[0] * (ranks - 1)])
    for owners in moves:
        new = table.with_owners(np.array(owners))
        assert sorted(np.concatenate(new.slots).tolist()) == list(range(9))
        assert new.owners().tolist() == owners
        for before, after in zip(table.slots, new.slots, strict=True):
            place = {unit: slot for slot, unit in enumerate(before.tolist())}
            for slot, unit in enumerate(after.tolist()):
                # Who was here and stays keeps its slot, unless that slot is gone.
                assert place.get(unit, slot) == slot or place[unit] >= len(after)
        table = new


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.permutations([3, 4, 5]))
def test_counts_move_as_few_units_as_possible(start: list[int], expected: list[int]) -> None:
    table = UnitTable.consecutive([4, 4, 4])
    if sum(start) == 12:
        table = table.with_counts(start)
    new = table.with_counts(expected)
    assert new.counts == tuple(expected)
    fewest = sum(max(0, want - have) for want, have in zip(expected, table.counts, strict=True))
    assert (new.owners() != table.owners()).sum() == fewest


@pytest.mark.parametrize("counts", [[1, 2], [4, 4, 5], [13, -1, 0]])
def test_counts_that_do_not_add_up_are_refused(counts: list[int]) -> None:
    with pytest.raises(TrimtabError, match="does not distribute 12 units over 3 ranks"):
        UnitTable.consecutive([4, 4, 4]).with_counts(counts)


def test_a_unit_is_a_whole_number() -> None:
    with pytest.raises(TrimtabError, match="mlp: units are whole numbers"):
        UnitTable.of("mlp", 2, [[0.0], [1]], 2)  # type: ignore[list-item]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_of_parts_is_cut_into_units(axis: int) -> None:
    """Three parts of two units, 1, 1 and 2 wide, as fused q, k, v are."""
    units = UnitAxis(units=2, axis=axis, parts=(1, 1, 2))
    full = torch.arange(8)[:, None].expand(8, 3)
    full = full if axis == 0 else full.T
    assert units.to_units(full)[:, :, 0].tolist() == [[0, 2, 4, 5], [1, 3, 6, 7]]
    assert units.select(full, torch.tensor([1]))[:, 0].tolist() == [1, 3, 6, 7]
    assert units.boxes(1, 1) == [(1, 1), (3, 1), (6, 2)]


def test_runs_are_neighbors_in_both() -> None:
    assert runs([4, 5, 6, 2, 3, 9]) == [(0, 4, 3), (3, 2, 2), (5, 9, 1)]
    assert runs([]) == []
