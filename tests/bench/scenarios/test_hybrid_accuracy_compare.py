"""Damage is told from chance: planted gaps are found, and chance is called worse no more often than is said."""

from __future__ import annotations

import random

import pytest

from trimtab.bench.scenarios.hybrid_accuracy.compare import LEVEL, Gap, diverged, gap_to, t_quantile

SEEDS, AGAIN = 5, 3


class Bench:
    """Final losses as training makes them: seeds differ a lot, and chance moves the runs of some of them only."""

    def __init__(self, source: random.Random, *, chaotic: float = 0.4, again: float = 1.0) -> None:
        self._source = source
        self.levels = [source.gauss(1.5, 0.1) for _ in range(SEEDS)]
        self.scales = [0.02 if source.random() < chaotic else 0.0005 for _ in range(SEEDS)]
        self.exact = {"fp32": self.runs()}
        self.exact |= {f"again {i}": self.runs(scale=again) for i in range(AGAIN)}

    def runs(self, worse: float = 0.0, scale: float = 1.0) -> list[float]:
        pairs = zip(self.levels, self.scales, strict=True)
        return [self._source.gauss(level + worse, scale * own) for level, own in pairs]

    def gap(self, worse: float = 0.0) -> Gap:
        return gap_to(self.exact, self.runs(worse))


@pytest.mark.parametrize("chaotic", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("again", [0.1, 1.0])
def test_chance_is_called_worse_no_more_often_than_is_said(chaotic: float, again: float) -> None:
    """Also where the A/A rows move ten times less than the method does, so that they alone would understate chance."""
    source, trials = random.Random(0), 2000
    false = sum(Bench(source, chaotic=chaotic, again=again).gap().low > 0 for _ in range(trials))
    # Four standard errors of such a count above what is said.
    assert false <= trials * LEVEL + 4 * (trials * LEVEL) ** 0.5


@pytest.mark.parametrize(("chaotic", "worse"), [(0.0, 0.003), (0.4, 0.1), (1.0, 0.1)])
def test_a_planted_gap_is_found(chaotic: float, worse: float) -> None:
    source, trials = random.Random(0), 400
    gaps = [Bench(source, chaotic=chaotic).gap(worse) for _ in range(trials)]
    assert sum(gap.low > 0 for gap in gaps) > 0.9 * trials
    assert sum(gap.low < worse < gap.high for gap in gaps) > 0.97 * trials


def test_a_few_gaps_that_agree_prove_nothing_where_those_of_fp32_do_not() -> None:
    exact = {"fp32": [1.0, 1.2, 1.1], "again 1": [1.04, 1.16, 1.12], "again 2": [0.96, 1.23, 1.08]}
    centers = [sum(runs) / 3 for runs in zip(*exact.values(), strict=True)]
    assert gap_to(exact, [center + 0.01 for center in centers]).low < 0 < 0.01 < 0.5
    assert gap_to(exact, [center + 0.5 for center in centers]).low > 0


def test_an_a_a_row_is_compared_with_the_others() -> None:
    exact = {"fp32": [1.0, 2.0], "again": [1.1, 2.3]}
    assert gap_to(exact, exact["again"], "again").mean == pytest.approx(0.2)
    assert gap_to(exact, exact["fp32"], "fp32").mean == pytest.approx(-0.2)


def test_one_diverged_run_is_counted_however_the_others_end() -> None:
    untrained, exact = [2.0] * 4, [1.0] * 4
    assert diverged([1.4, 0.9, 1.0, 1.1], untrained, exact) == 0
    assert diverged([1.6, 0.9, 1.0, 100.0], untrained, exact) == 2


@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [(1, 0.005, 63.657), (4, 0.005, 4.604), (4, 0.025, 2.776), (15, 0.005, 2.947), (9, 0.01, 2.821)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, level: float, expected: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(expected, rel=2e-4)
