"""Mappers of lowered operators are made once, and are those that changing operator by operator gives."""

from __future__ import annotations

from tests.predict.profiles import SLOW, profile, workload

from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions


def test_a_mapper_with_precisions_is_one_that_was_changed() -> None:
    measured = MeasuredPrecisions(Measured(workload(), profile()))
    chosen = {name: "int8" for name, several in measured.precisions(SLOW, 3).items() if several}
    assert chosen
    changed = measured.mapper(SLOW, 3, "cpu")
    for name, precision in chosen.items():
        changed.change(name, precision)
    for _ in range(2):
        lowered = measured.mapper(SLOW, 3, "cpu", chosen)
        assert (lowered.forward_s, lowered.backward_s) == (changed.forward_s, changed.backward_s)
        assert lowered.precisions == changed.precisions
        lowered.change(next(iter(chosen)), None)  # a copy: what is changed in it stays there
    assert measured.mapper(SLOW, 3, "cpu").precisions == {}


def test_a_copy_knows_its_original_until_it_changes() -> None:
    measured = MeasuredPrecisions(Measured(workload(), profile()))
    first, second = measured.mapper(SLOW, 2, "cpu"), measured.mapper(SLOW, 2, "cpu")
    assert first.original is second.original is not None
    name = next(name for name, several in measured.precisions(SLOW, 2).items() if several)
    first.undo(first.change(name, "int8"))
    assert first.original is None
    assert second.original is not None
