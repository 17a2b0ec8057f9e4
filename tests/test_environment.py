"""Lines of the log stay short, however many ranks there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.environment import MOST_LISTED, listed_by_rank


def test_few_ranks_are_listed() -> None:
    assert listed_by_rank((11, 5)) == "11/5"
    assert listed_by_rank([784.4, 1483.6]) == "784/1484"


def test_of_many_ranks_the_extremes_are() -> None:
    assert listed_by_rank([8] * 32 + [12] * 31 + [3]) == "3 to 12"


@given(st.lists(st.integers(0, 99_999), min_size=1, max_size=10_000))
def test_it_is_short(values: list[int]) -> None:
    assert len(listed_by_rank(values)) <= MOST_LISTED
