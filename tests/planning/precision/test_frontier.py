"""All best trades of seconds and damage at once."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from tests.planning.precision.option_cases import between, options, parts, random_options

from trimtab.planning.precision.frontier import Frontier, within_both
from trimtab.planning.precision.options import Options, damage_of, memory_of, seconds_of
from trimtab.precision_names import OWN


@settings(max_examples=40, deadline=None)
@given(random_options(most=6), parts)
def test_no_choice_within_the_time_does_less_damage(of: Options, part: float) -> None:
    seconds = between(of, part) * (1 + 1e-9)
    frontier = Frontier(of)
    place = frontier.place(seconds)
    assert place is not None
    found = frontier.chosen(place)
    assert seconds_of(of, found) <= seconds * (1 + 1e-9)
    assert damage_of(of, found) == pytest.approx(float(frontier.cost[place]))
    every = (
        dict(zip(of, choice, strict=True))
        for choice in product(*([o.precision for o in several] for several in of.values()))
    )
    least = min(damage_of(of, one) for one in every if seconds_of(of, one) <= seconds)
    assert damage_of(of, found) <= least * (1 + 1e-9) + 1e-15


@settings(max_examples=20, deadline=None)
@given(random_options(most=12), parts)
def test_thinning_keeps_what_is_found_feasible_and_near(of: Options, part: float) -> None:
    seconds = between(of, part)
    thin, full = Frontier(of, resolution=50), Frontier(of, resolution=10**6)
    place, best = thin.place(seconds), full.place(seconds)
    assert place is not None
    assert best is not None
    assert seconds_of(of, thin.chosen(place)) <= seconds * (1 + 1e-9)
    assert thin.cost[place] >= full.cost[best] - 1e-15
    assert thin.seconds[0] == pytest.approx(full.seconds[0])


def test_nothing_is_within_too_short_a_time() -> None:
    of = options(a={OWN: (2.0, 0.0), "int8": (1.0, 1.0)})
    frontier = Frontier(of)
    assert frontier.place(0.9) is None
    assert frontier.place(1.0) == 0
    assert frontier.chosen(0) == {"a": "int8"}


def test_bytes_that_count_are_saved() -> None:
    of = options(a={OWN: (1.0, 0.0, 100), "int8": (1.5, 1.0, 10)})
    free, dear = Frontier(of), Frontier(of, price_of_memory=1.0)
    place, other = free.place(9.0), dear.place(9.0)
    assert place is not None
    assert other is not None
    assert free.chosen(place) == {"a": OWN}
    assert memory_of(of, dear.chosen(other)) == 10


@settings(max_examples=30, deadline=None)
@given(random_options(most=5, memory=True), parts, parts)
def test_under_two_limits_no_choice_does_less_damage(of: Options, part: float, of_memory: float) -> None:
    seconds = between(of, part) * (1 + 1e-9)
    every = [
        dict(zip(of, choice, strict=True))
        for choice in product(*([o.precision for o in several] for several in of.values()))
    ]
    sizes = [memory_of(of, one) for one in every]
    memory = int(min(sizes) + of_memory * (max(sizes) - min(sizes)))
    possible = [one for one in every if seconds_of(of, one) <= seconds and memory_of(of, one) <= memory]
    found = within_both(of, seconds=seconds, memory=memory)
    if not possible:
        assert found is None
        return
    assert found is not None
    assert seconds_of(of, found) <= seconds * (1 + 1e-9)
    assert memory_of(of, found) <= memory
    assert damage_of(of, found) <= min(damage_of(of, one) for one in possible) * 1.02 + 1e-12


def test_no_operators_take_no_time() -> None:
    frontier = Frontier({})
    assert frontier.place(0.0) == 0
    assert frontier.chosen(0) == {}
    assert within_both({}, seconds=0.0, memory=0) == {}
