"""Fragments: every parameter in exactly one, in order, of about equal size; turns spread over a round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.local.fragments import split, turns


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 50))
def test_every_parameter_is_in_one_fragment_in_order(sizes: list[int], count: int) -> None:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    fragments = split(named, count)
    assert [name for fragment in fragments for name in fragment] == list(named)
    assert 1 <= len(fragments) <= count
    assert all(fragments)


def test_fragments_are_of_about_equal_size() -> None:
    fragments = split({f"p{i}": 10 for i in range(12)}, 4)
    assert [len(fragment) for fragment in fragments] == [3, 3, 3, 3]
    assert split({"a": 1, "b": 1, "large": 100}, 2) == (("a", "b"), ("large",))


@given(st.integers(1, 200), st.integers(1, 200))
def test_turns_are_different_steps_of_a_round(every: int, count: int) -> None:
    if count <= every:
        steps = turns(every, count)
        assert len(set(steps)) == count
        assert steps[-1] == every
        assert min(steps) >= 1
        gaps = [after - before for before, after in zip((0, *steps), steps, strict=False)]
        assert min(gaps) >= every // count, "a delay of every // count ends before the next fragment is sent"
