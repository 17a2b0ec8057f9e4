"""Costs of moves and leases are corrected by what they turned out to be, alike on every rank."""

from __future__ import annotations

import pytest

from trimtab.control.tensor.seen_costs import SeenCosts
from trimtab.planning.tensor.balance import Balance
from trimtab.planning.tensor.rebalance import Costs, Decision, Rank, decide
from trimtab.predict.migration import LeaseCost, MigrationCost

COSTS = Costs(own=MigrationCost(fixed=0.0, slope=1.0), lease=LeaseCost(fixed=0.0, one_way=0.1))
RANKS = [Rank(blocks=1.0, rest=0.0, share=0.5), Rank(blocks=4.0, rest=0.0, share=0.5)]


def lease() -> Decision:
    found = decide(RANKS, Costs(own=None, lease=COSTS.lease), Balance(), steps=10)
    assert found.mode == "lease"
    assert found.lent > 0
    return found


def numbers(*waited: float, moved: float = 0.0) -> list[list[float]]:
    """What each rank sends; only the last two count here."""
    return [[1.0, 1.0, 1.0, 0.0, moved, each] for each in waited]


def test_before_anything_was_measured_predictions_stand() -> None:
    seen = SeenCosts()
    assert not seen.learn(numbers(0.1, 2.0))
    assert seen.corrected(COSTS) == COSTS


def test_a_lease_that_costs_more_than_predicted_is_reported_and_corrected() -> None:
    seen, decision = SeenCosts(), lease()
    seen.learn(numbers(3.0, 0.2))  # the first rank waits for the second
    seen.applied(decision, 0.0)
    assert seen.learn(numbers(0.2 + 3 * decision.lent, 0.5 + 3 * decision.lent))
    corrected = seen.corrected(COSTS).lease
    assert corrected is not None
    assert corrected.ratio == pytest.approx(3)
    assert not seen.learn(numbers(9.0, 9.0)), "only the first window tells"


def test_a_later_lease_is_compared_with_the_uncorrected_prediction() -> None:
    seen, decision = SeenCosts(), lease()
    cost = 2 * decision.lent
    for _ in range(3):
        seen.learn(numbers(0.2, 0.2))
        seen.applied(decision, 0.0)
        seen.learn(numbers(0.2 + cost, 1.0))
        costs = seen.corrected(COSTS)
        assert costs.lease is not None
        assert costs.lease.ratio == pytest.approx(2)
        decision = decide(RANKS, Costs(own=None, lease=costs.lease), Balance(), steps=10)


def test_a_lease_never_looks_free() -> None:
    seen = SeenCosts()
    seen.learn(numbers(0.2, 0.2))
    seen.applied(lease(), 0.0)
    assert not seen.learn(numbers(0.1, 0.1))
    corrected = seen.corrected(COSTS).lease
    assert corrected is not None
    assert corrected.ratio == 0.5


def test_moves_are_corrected_by_the_slowest_rank() -> None:
    seen = SeenCosts()
    found = decide(RANKS, Costs(own=COSTS.own, lease=None), Balance(), steps=100)
    assert found.mode == "own"
    seen.applied(found, 2 * found.once)
    assert seen.move_ratio == pytest.approx(2)
    seen.learn(numbers(0.1, 0.1, moved=3.0))
    corrected = seen.corrected(COSTS).own
    assert corrected is not None
    assert corrected.slope == pytest.approx(3)


def test_a_lease_known_to_cost_more_than_it_saves_is_not_chosen() -> None:
    seen, decision = SeenCosts(), lease()
    seen.learn(numbers(0.0, 0.0))
    seen.applied(decision, 0.0)
    seen.learn(numbers(90 * decision.lent, 90 * decision.lent))
    costs = Costs(own=None, lease=seen.corrected(COSTS).lease)
    assert decide(RANKS, costs, Balance(), steps=10).mode == "home"


def test_the_first_step_of_a_lease_says_little_about_the_others() -> None:
    """With windows of a step: what is sent when a lease begins cannot be sent ahead."""
    seen, decision = SeenCosts(window=1), lease()
    seen.learn(numbers(0.2, 0.2))
    seen.applied(decision, 0.0)
    assert not seen.learn(numbers(0.2 + 5 * decision.lent, 0.2 + 5 * decision.lent))
    assert seen.corrected(COSTS) == COSTS
    seen.learn(numbers(0.2 + decision.lent / 2, 0.2 + decision.lent))
    corrected = seen.corrected(COSTS).lease
    assert corrected is not None
    assert corrected.ratio == pytest.approx(0.5)


def test_what_even_ranks_wait_for_each_other_is_no_cost_of_a_lease() -> None:
    """After a move they wait as well, though nothing is lent: only the rest of what a lease adds counts."""
    seen, decision = SeenCosts(), lease()
    seen.learn(numbers(3.0, 0.2))
    seen.applied(decision, 0.0)
    seen.learn(numbers(0.2 + 3 * decision.lent, 0.2 + 3 * decision.lent))
    moved = decide(RANKS, Costs(own=COSTS.own, lease=None), Balance(), steps=100)
    seen.learn(numbers(3.0, 0.2))
    seen.applied(moved, moved.once)
    assert not seen.learn(numbers(0.2 + 2 * decision.lent, 0.3 + 2 * decision.lent, moved=1.0))
    corrected = seen.corrected(COSTS).lease
    assert corrected is not None
    assert corrected.ratio == pytest.approx(1)


def test_a_choice_between_a_lease_and_a_move_follows_it() -> None:
    """In a burst a move there and back costs more than the lease, if waiting is not charged to the lease alone."""
    transfers = LeaseCost(fixed=0.0, one_way=0.2, exposed=0.2, messages=4, blocks=4)
    costs = Costs(own=MigrationCost(fixed=0.0, slope=3.0), lease=transfers)

    def chosen(seen: SeenCosts) -> str:
        return decide(RANKS, seen.corrected(costs), Balance(), steps=6).mode

    seen = SeenCosts()
    assert chosen(seen) == "lease"
    first = decide(RANKS, costs, Balance(), steps=6)
    seen.learn(numbers(3.0, 0.2))
    seen.applied(first, 0.0)
    seen.learn(numbers(0.2 + 30 * first.lent, 3.0))
    assert chosen(seen) == "own"
    seen.learn(numbers(3.0, 0.2, moved=1.0))
    seen.applied(decide(RANKS, seen.corrected(costs), Balance(), steps=6), 0.9)
    seen.learn(numbers(0.2 + 29.5 * first.lent, 3.0, moved=1.0))
    assert chosen(seen) == "lease"
