"""The sampler: every sample once, in the same steps on any number of ranks, also after a resume."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control.shares.sampler import ShareSampler
from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import share_batch

if TYPE_CHECKING:
    from collections.abc import Sequence


def samplers(length: int, batch_size: int, speeds: Sequence[float], **settings: Any) -> list[ShareSampler]:
    shares = share_batch(batch_size, [1 / speed for speed in speeds], least=0)
    return [
        ShareSampler(length, batch_size=batch_size, rank=rank, shares=shares, **settings)
        for rank in range(len(speeds))
    ]


def epoch_of(group: list[ShareSampler]) -> list[list[int]]:
    """The samples of each step over all ranks and batches, without what only fills in; in order of ranks."""
    steps: dict[int, list[int]] = {}
    for sampler in group:
        for indices in sampler:
            cut = sampler.issued.popleft()
            own = steps.setdefault(cut.start, [])
            own += indices[: cut.own]
            assert indices, "a rank without samples has something to take part with"
            if cut.last:
                sampler.consumed = cut.start + cut.total
        sampler.finish_epoch()
    return [steps[start] for start in sorted(steps)]


SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 120), st.integers(1, 40), SPEEDS, SPEEDS, st.integers(1, 3), st.integers(0, 3))
def test_the_same_steps_on_any_number_of_ranks(
    length: int, batch_size: int, some: list[float], others: list[float], accumulate: int, seed: int
) -> None:
    first = samplers(length, batch_size, some, accumulate=accumulate, seed=seed)
    second = samplers(length, batch_size, others, seed=seed)
    for epoch in range(2):
        steps = epoch_of(first)
        assert len({len(sampler) for sampler in first}) == 1
        assert len(first[0]) == len(steps) * accumulate
        assert sorted(chain.from_iterable(steps)) == list(range(length)), f"epoch {epoch}"
        assert all(len(step) == batch_size for step in steps[:-1])
        assert [sorted(step) for step in epoch_of(second)] == [sorted(step) for step in steps]


def test_orders_differ_by_epoch_and_seed() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        group = samplers(50, 50, [1.0], seed=seed)
        return [tuple(epoch_of(group)[0]) for _ in range(3)]

    seen = [order for seed in (0, 1, 2, 2**32, 2**40) for order in orders(seed)]
    assert len(set(seen)) == len(seen)
    assert orders(1) == orders(1)
    (plain,) = samplers(6, 4, [1.0], shuffle=False)
    assert epoch_of([plain]) == [[0, 1, 2, 3], [4, 5]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 90), st.integers(1, 30), SPEEDS, SPEEDS, st.data())
def test_resumes_on_another_number_of_ranks(
    length: int, batch_size: int, before: list[float], after: list[float], data: st.DataObject
) -> None:
    full = samplers(length, batch_size, [1.0])
    whole = [sorted(step) for step in epoch_of(full) + epoch_of(full)]
    per_epoch = len(whole) // 2
    done = data.draw(st.integers(1, per_epoch))
    (leaver, *_) = samplers(length, batch_size, before)
    taking = iter(leaver)
    for _ in range(done):
        next(taking)
        cut = leaver.issued.popleft()
        leaver.consumed = cut.start + cut.total
    group = samplers(length, batch_size, after)
    for sampler in group:
        sampler.load_state_dict(leaver.state_dict())
    rest = epoch_of(group)
    if done < per_epoch:
        rest += epoch_of(group)
    assert [sorted(step) for step in rest] == whole[done:]


def test_a_change_reaches_all_ranks_in_the_same_step_however_far_they_are() -> None:
    group = samplers(80, 8, [1.0, 1.0])
    taken: list[list[tuple[int, ...]]] = []
    for far, sampler in enumerate(group):
        takes = iter(sampler)
        for _ in range(far + 2):  # rank 1 prefetched one more
            next(takes)
        sampler.consumed = 8
        sampler.change((6, 2), after_steps=3)
        assert sampler.shares == (6, 2)
        list(takes)
        taken.append([cut.shares for cut in sampler.issued])
    assert taken[0] == taken[1] == [(4, 4)] * 4 + [(6, 2)] * 6


def test_a_change_decided_too_late_for_an_epoch_holds_in_the_next() -> None:
    sampler, _ = samplers(24, 8, [1.0, 1.0])
    sampler.consumed = 16
    sampler.change((7, 1), after_steps=4)
    for shares in ((4, 4), (7, 1)):
        list(sampler)
        assert {cut.shares for cut in sampler.issued} == {shares}
        sampler.finish_epoch()


def test_keeps_learnt_shares_only_where_they_fit() -> None:
    first, _ = samplers(100, 10, [1.0, 0.25])
    same, _ = samplers(100, 10, [1.0, 1.0])
    same.load_state_dict(first.state_dict())
    assert same.shares == (8, 2)
    other = samplers(100, 10, [1.0, 1.0, 1.0])[0]
    other.load_state_dict(first.state_dict())
    assert other.shares == (4, 3, 3)


def test_refuses_states_of_other_data() -> None:
    (sampler,) = samplers(10, 2, [1.0])
    state = sampler.state_dict()
    with pytest.raises(TrimtabError, match=r"dataset of 10 samples, and this one has 12"):
        samplers(12, 2, [1.0])[0].load_state_dict(state)
    with pytest.raises(TrimtabError, match="found 7, expected 1"):
        sampler.load_state_dict({**state, "version": 7})


def test_drop_last_leaves_out_only_what_fills_no_step() -> None:
    group = samplers(23, 5, [1.0, 0.5], drop_last=True)
    steps = epoch_of(group)
    assert [len(step) for step in steps] == [5] * 4
    assert len(set(chain.from_iterable(steps))) == 20
    with pytest.raises(TrimtabError, match="no drop_last"):
        samplers(4, 5, [1.0], drop_last=True)
