"""The curve of time against damage."""

from __future__ import annotations

from trimtab.planning.precision.damage_curve import BUDGETS, budgets, pareto


def test_budgets_reach_from_none_to_the_largest_damage() -> None:
    tried = budgets(2.0)
    assert len(tried) == BUDGETS + 1
    assert min(tried) == 0.0
    assert max(tried) == 2.0
    assert budgets(0.0) == ()


def test_only_undominated_points_stay_and_the_plan_is_one_of_them() -> None:
    own = (1.0, 0.5)
    curve = pareto(own, [(2.0, 0.0), (1.5, 0.2), (1.6, 0.3), (0.5, 3.0), (0.9, 0.4)])
    assert curve == ((2.0, 0.0), (1.5, 0.2), (1.0, 0.5), (0.5, 3.0))
