"""The allocator: its traps, its constraints, and how near it comes to the best there is."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from tests.planning.precision.exhaustive import exhaustive
from tests.planning.precision.option_cases import between, options, parts, random_options

from trimtab.errors import TrimtabError
from trimtab.planning.precision.allocate import TOLERANCE, allocate
from trimtab.planning.precision.exact import exact, grade
from trimtab.planning.precision.options import AdditiveJob, Options, damage_of, ladder, seconds_of
from trimtab.planning.precision.starting_point import Lowerable, fastest
from trimtab.precision_names import OWN


def role(of: Options, **keywords: Any) -> Lowerable:
    damages = {name: {o.precision: o.damage for o in several} for name, several in of.items()}
    return Lowerable(damages=damages, **keywords)


class Watched(AdditiveJob):
    """Records what is done to it."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.log: list[tuple[str, str]] = []

    def change(self, role: str, operator: str, precision: str) -> tuple[str, str, str]:
        self.log.append((operator, precision))
        return super().change(role, operator, precision)

    def step_s(self) -> float:
        self.log.append(("step", ""))
        return super().step_s()

    @property
    def trials(self) -> list[tuple[str, str]]:
        """Changes after which the step was asked for, from when the pace was known."""
        later = self.log[self.log.index(("step", "")) :]
        pairs = pairwise(later)
        return [before for before, after in pairs if after[0] == "step" != before[0]]


THREE = options(
    # Raising `steep` one step gains most: 9, against 8 of `flat`, although `flat` is the more damaging as it is.
    steep={OWN: (3.0, 0.0), "bf16": (2.0, 1.0), "int8": (1.0, 10.0)},
    flat={OWN: (3.0, 0.0), "bf16": (2.0, 12.0), "int8": (1.0, 20.0)},
)


def test_the_operator_that_gains_most_at_its_next_step_is_raised_first() -> None:
    pace = Watched({"slow": THREE}, least_s=3.0)
    allocate(pace, {"slow": role(THREE)}, others_s=3.0)
    assert pace.trials[:3] == [("steep", "bf16"), ("flat", "bf16"), ("steep", OWN)]
    assert pace.chosen["slow"] == {"steep": "bf16", "flat": "int8"}


def test_a_gain_is_against_the_next_higher_precision_not_the_own() -> None:
    # There is time for one step. To its own, `wide` would gain 10; its next step gains only 1, that of `near` 5.
    of = options(
        wide={OWN: (9.0, 0.0), "bf16": (2.0, 9.0), "int8": (1.0, 10.0)},
        near={OWN: (2.0, 0.0), "int8": (1.0, 5.0)},
    )
    pace = AdditiveJob({"slow": of}, least_s=3.0)
    found = allocate(pace, {"slow": role(of)}, others_s=3.0)
    assert found.chosen["slow"] == {"wide": "int8", "near": OWN}


def test_a_rejected_trial_leaves_nothing_behind() -> None:
    pace = Watched({"slow": THREE}, least_s=3.0)
    found = allocate(pace, {"slow": role(THREE)}, others_s=3.0)
    assert any(precision == OWN for _, precision in pace.log), "nothing was rejected"
    assert pace.chosen == found.chosen
    assert pace.compute_s("slow") == seconds_of(THREE, found.chosen["slow"]) == 3.0


def test_the_gap_to_the_fast_ranks_is_counted_once() -> None:
    # Fastest 2 s, others 3 s: there is one second to give back, not two.
    of = options(**{f"o{i}": {OWN: (1.0, 0.0), "int8": (0.5, 1.0 + i)} for i in range(4)})
    pace = AdditiveJob({"slow": of}, least_s=3.0)
    found = allocate(pace, {"slow": role(of)}, others_s=3.0)
    assert found.pace_s == 3.0
    assert list(found.chosen["slow"].values()).count(OWN) == 2
    assert pace.compute_s("slow") == 3.0
    # The others have waited anyway: their time is no bound where the step is longer by more than it.
    exposed = AdditiveJob({"slow": of}, least_s=3.0, exposed_s=0.25)
    assert allocate(exposed, {"slow": role(of)}, others_s=3.0).step_s == 3.25


def test_ranks_that_cannot_keep_pace_stay_at_their_fastest() -> None:
    of = options(a={OWN: (4.0, 0.0), "int8": (2.0, 1.0)}, b={OWN: (4.0, 0.0), "int8": (2.0, 1.0)})
    found = allocate(AdditiveJob({"slow": of}, least_s=1.0), {"slow": role(of)}, others_s=1.0)
    assert set(found.chosen["slow"].values()) == {"int8"}
    assert found.damage == found.start_damage == 2.0
    assert found.recovered == 0


def test_what_gains_no_time_is_never_lowered() -> None:
    of = options(slower={OWN: (1.0, 0.0), "bf16": (3.0, 1.0)}, faster={OWN: (2.0, 0.0), "int8": (1.0, 1.0)})
    found = allocate(AdditiveJob({"slow": of}), {"slow": role(of)})
    assert found.chosen["slow"] == {"slower": OWN, "faster": "int8"}


def test_a_slow_middle_precision_does_not_hide_a_fast_high_one() -> None:
    # On this processor bf16 is slower than fp32. A step up to it would be rejected, and fp32 never tried.
    of = options(a={OWN: (2.0, 0.0), "bf16": (6.0, 0.5), "int8": (1.0, 1.0)})
    found = allocate(AdditiveJob({"slow": of}, least_s=2.0), {"slow": role(of)}, others_s=2.0)
    assert found.chosen["slow"] == {"a": OWN}
    assert [o.precision for o in ladder(of["a"], memory=False)] == ["int8", OWN]


def test_damage_of_many_ranks_counts_for_each() -> None:
    of = options(a={OWN: (2.0, 0.0), "int8": (1.0, 1.0)})
    worse = options(a={OWN: (2.0, 0.0), "int8": (1.0, 3.0)})
    pace = Watched({"one": worse, "many": of})
    found = allocate(pace, {"one": role(worse), "many": role(of, ranks=4)})
    assert found.damage == 7.0


def test_more_than_two_roles_keep_one_pace() -> None:
    of = {
        name: options(**{f"o{i}": {OWN: (size, 0.0), "int8": (size / 2, 1.0)} for i in range(4)})
        for name, size in (("a", 1.0), ("b", 1.5), ("c", 2.0))
    }
    pace = AdditiveJob(of, least_s=2.0)
    found = allocate(pace, {name: role(own) for name, own in of.items()}, others_s=2.0)
    assert found.step_s <= found.pace_s * (1 + TOLERANCE) == pytest.approx(4.0 * (1 + TOLERANCE))
    lowered = {name: sum(p != OWN for p in own.values()) for name, own in found.chosen.items()}
    assert lowered == {"a": 0, "b": 3, "c": 4}


# Memory


def test_memory_is_never_exceeded_whatever_the_time() -> None:
    of = options(
        a={OWN: (1.0, 0.0, 100), "int8": (0.5, 1.0, 25)}, b={OWN: (1.0, 0.0, 100), "int8": (0.5, 3.0, 25)}
    )
    pace = AdditiveJob({"small": of}, base_bytes={"small": 50}, least_s=9.0)
    found = allocate(pace, {"small": role(of, memory_bytes=180)}, others_s=9.0)
    assert found.chosen["small"] == {"a": "int8", "b": OWN}
    assert pace.peak("small") == 175


def test_what_is_fast_but_large_gives_way_to_what_fits() -> None:
    of = options(a={OWN: (3.0, 0.0, 100), "fp8": (1.0, 1.0, 90), "int8": (2.0, 1.0, 20)})
    pace = AdditiveJob({"small": of})
    found = allocate(pace, {"small": role(of, memory_bytes=50)})
    assert found.chosen["small"] == {"a": "int8"}


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    mib = 1 << 20
    of = options(a={OWN: (1.0, 0.0, 100 * mib), "int8": (0.5, 1.0, 25 * mib)})
    pace = AdditiveJob({"small": of}, base_bytes={"small": 40 * mib})
    with pytest.raises(TrimtabError, match=r"small: a step needs 0\.0635 GiB .* 15\.00 MiB are missing"):
        allocate(pace, {"small": role(of, memory_bytes=50 * mib)})


# Blocks


def test_alike_operators_are_searched_once_and_get_the_same_start() -> None:
    block = {"qkv": {OWN: (3.0, 0.0), "int8": (1.0, 1.0)}, "out": {OWN: (1.0, 0.0), "int8": (2.0, 1.0)}}
    of = options(**{f"{name}{i}": by for i in range(6) for name, by in block.items()})
    alike = tuple(tuple(f"{name}{i}" for i in range(6)) for name in block)
    pace = Watched({"slow": of})
    start = fastest(pace, "slow", role(of, alike=alike))
    assert start == {name: "int8" if name.startswith("qkv") else OWN for name in of}
    tried = {operator for operator, precision in pace.log if operator.startswith("out")}
    assert tried == {"out0"}


# Near the best


@settings(max_examples=60, deadline=None)
@given(random_options(most=14), parts)
def test_damage_is_within_two_percent_of_the_least(of: Options, part: float) -> None:
    assert grade(of, pace_s=between(of, part)).gap <= 0.02


def test_two_that_fit_together_are_better_than_the_one_that_both_orders_take() -> None:
    of = options(
        one={OWN: (6.0, 0.0), "int8": (0.0, 6.1)},
        two={OWN: (5.0, 0.0), "int8": (0.0, 5.0)},
        three={OWN: (5.0, 0.0), "int8": (0.0, 5.0)},
    )
    assert grade(of, pace_s=10.0).gap == 0.0
    found = allocate(AdditiveJob({"r": of}, least_s=10.0), {"r": role(of)}, others_s=10.0)
    assert found.chosen["r"] == {"one": "int8", "two": OWN, "three": OWN}


@settings(max_examples=25, deadline=None)
@given(random_options(most=6, memory=True), parts)
def test_exact_and_exhaustive_agree(of: Options, part: float) -> None:
    seconds = between(of, part) * (1 + 1e-9)
    found = exact(of, seconds=seconds)
    assert found is not None
    assert seconds_of(of, found) <= seconds * (1 + 1e-9)
    least = exhaustive(AdditiveJob({"r": of}), {"r": role(of)}, limit_s=seconds)
    assert least is not None
    assert damage_of(of, found) >= damage_of(of, least["r"]) * (1 - 1e-9)
    # The solver tells no times apart that differ by a hundred-thousandth of the longest.
    longest = max(o.seconds for several in of.values() for o in several)
    near = exhaustive(AdditiveJob({"r": of}), {"r": role(of)}, limit_s=seconds - 2e-5 * longest)
    if near is not None:
        assert damage_of(of, found) <= damage_of(of, near["r"]) * (1 + 1e-6) + 1e-12


@settings(max_examples=40, deadline=None)
@given(random_options(most=10, memory=True), parts, parts)
def test_under_a_memory_limit_it_fits_and_is_as_near(of: Options, part: float, of_memory: float) -> None:
    least = sum(min(o.memory for o in several) for several in of.values())
    most = sum(max(o.memory for o in several) for several in of.values())
    limit = int(least + of_memory * (most - least))
    pace = AdditiveJob({"r": of}, least_s=between(of, part))
    found = allocate(pace, {"r": role(of, memory_bytes=limit)}, others_s=between(of, part))
    assert pace.peak("r") <= limit
    assert pace.step_s() <= found.pace_s * (1 + TOLERANCE)
    best = exact(of, seconds=found.pace_s * (1 + TOLERANCE), memory=limit)
    if best is not None:
        assert found.damage <= damage_of(of, best) * 1.02 + 1e-12


def test_without_scipy_the_exact_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(TrimtabError, match=r"pip install 'trimtab\[exact\]'"):
        exact(THREE, seconds=9.0)


def test_no_clock_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def ticking() -> float:
        raise AssertionError("a plan that follows the clock differs between machines")

    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, ticking)
    pace = AdditiveJob({"slow": THREE}, least_s=3.0)
    found = allocate(pace, {"slow": role(THREE)}, others_s=3.0)
    monkeypatch.undo()
    assert found.damage == 21.0


@pytest.mark.parametrize(
    ("others_s", "ahead", "steep"), [(3.0, 0.0, "bf16"), (3.0, 0.1, "int8"), (3.4, 0.1, "bf16")]
)
def test_lowered_ranks_are_done_a_little_before_the_others(others_s: float, ahead: float, steep: str) -> None:
    """Raising `steep` makes 3.0 seconds."""
    pace = AdditiveJob({"slow": THREE}, least_s=others_s)
    found = allocate(pace, {"slow": role(THREE)}, others_s=others_s, ahead=ahead)
    assert found.chosen["slow"] == {"steep": steep, "flat": "int8"}


def test_ranks_that_cannot_be_before_the_others_are_as_fast_as_they_go() -> None:
    found = allocate(AdditiveJob({"slow": THREE}), {"slow": role(THREE)}, others_s=1.0, ahead=0.1)
    assert found.recovered == 0
    assert found.step_s == 2.0
