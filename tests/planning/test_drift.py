"""When another plan is due: wrong predictions never call for one, changes that last do, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.plans.plan_cases import net, plan_for

from trimtab.errors import TrimtabError
from trimtab.planning.drift import Drift, Follow, ratios

FACTORS = st.floats(0.05, 20)


@given(FACTORS, FACTORS, st.lists(st.floats(0.2, 5), min_size=1, max_size=12))
def test_a_prediction_wrong_by_a_factor_and_a_machine_that_breathes_call_for_nothing(
    fast: float, slow: float, breath: list[float]
) -> None:
    """Each role's prediction is wrong by a factor of its own, and all ranks get slower and faster together."""
    drift = Drift(Follow())
    for both in (1.0, 1.0, *breath):
        assert drift.look({"fast": fast * both, "slow": slow * both}) is None


@given(FACTORS, FACTORS, st.floats(1.3, 10))
def test_a_role_that_stays_slower_calls_once_and_then_that_is_how_it_is(
    fast: float, slow: float, factor: float
) -> None:
    rules = Follow()
    drift = Drift(rules)
    for _ in range(rules.calibrate):
        assert drift.look({"fast": fast, "slow": slow}) is None
    found = [drift.look({"fast": fast, "slow": slow * factor}) for _ in range(10)]
    assert [of is not None for of in found] == [False, True] + [False] * 8
    assert found[1] == pytest.approx({"fast": 1.0, "slow": factor})


def test_one_bad_look_is_no_change() -> None:
    drift = Drift(Follow())
    for slow in (1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0):
        assert drift.look({"fast": 1.0, "slow": slow}) is None


def test_a_plan_of_one_role_has_no_pace_to_change() -> None:
    drift = Drift(Follow())
    assert [drift.look({"all": times}) for times in (1.0, 1.0, 5.0, 5.0, 5.0)] == [None] * 5


def test_times_are_compared_for_the_samples_there_were() -> None:
    """The plan says 7 ms for 5 and for 3 samples; a rank with more of them may take longer."""
    plan = plan_for(net(), ranks=(("fast", 1), ("slow", 3)))
    found = ratios(plan, [7e-3, 7e-3, 14e-3, 99.0], [5, 3, 6, 3])
    assert found == pytest.approx({"fast": 1.0, "slow": 1.0}), "the median over the role's ranks"


@pytest.mark.parametrize("rules", [{"look": 1}, {"calibrate": 0}, {"patience": 0}, {"threshold": 1.0}])
def test_rules_that_make_no_sense_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(TrimtabError, match="look is at least 2"):
        Follow(**rules)  # type: ignore[arg-type]
