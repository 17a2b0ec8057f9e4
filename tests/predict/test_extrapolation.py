"""Batches far from those that were probed are named, with sizes that would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.predict.profiles import FAST, SLOW, profile, workload

from trimtab.predict.extrapolation import nearby, out_of_reach
from trimtab.predict.operators.costs import workload_key


@pytest.mark.parametrize(("samples", "far"), [(1, False), (6, False), (12, False), (13, True), (100, True)])
def test_twice_the_largest_is_the_end(samples: int, far: bool) -> None:
    said = out_of_reach(profile(), workload(), [(FAST, 4), (SLOW, samples), (SLOW, samples)])
    assert (said is not None) == far
    if said is not None:
        assert said.startswith(f"{SLOW} has {samples} samples and was probed at 2, 6: "), "once"


def test_half_the_smallest_is_the_end() -> None:
    given = profile()
    sizes = {workload_key(workload()): (8, 16)}
    for device in given.devices.values():
        device.batches.update(sizes)
    assert out_of_reach(given, workload(), [(FAST, 4)]) is None
    said = out_of_reach(given, workload(), [(FAST, 4), (SLOW, 3)])
    assert said is not None
    assert f"{SLOW} has 3 samples" in said
    assert FAST not in said


def test_nothing_is_said_of_what_was_not_probed_at_all() -> None:
    assert (
        out_of_reach(profile(), replace(workload(), model="another"), [(FAST, 400), ("unknown", 400)]) is None
    )


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([32], (16, 32, 48)),
        ([32, 32], (16, 32, 48)),
        ([50, 14], (14, 32, 50)),
        ([40, 24], (12, 32, 52)),
        ([1], (1, 2)),
        ([1, 2], (1, 2)),
    ],
)
def test_sizes_around_the_job_are_suggested(samples: list[int], expected: tuple[int, ...]) -> None:
    assert nearby(samples) == expected
