"""Plans mention local steps where these would be much faster, with what they are expected to do to the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.planning import planned, uneven

from trimtab.cluster import Cluster
from trimtab.planning.local_offer import OFFERED, covered
from trimtab.planning.local_steps import penalty
from trimtab.planning.plan import load_plan, save_plan
from trimtab.predict.replay.timeline import Span


def narrow(times: float) -> Cluster:
    """Links that take so many times as long for a byte."""
    given = uneven(1.0)
    assert given.profile is not None
    links = {
        "lan": {
            name: replace(time, per_byte_s=time.per_byte_s * times)
            for name, time in given.profile.links["lan"].items()
        }
    }
    return replace(given, profile=replace(given.profile, links=links))


def test_over_a_slow_link_the_plan_says_what_local_steps_would_do(tmp_path: Path) -> None:
    plan = planned(narrow(30_000))
    rounds = plan.local_steps
    assert rounds is not None
    assert rounds.workers == 2
    assert rounds.every > 1
    assert plan.predicted.step_s >= OFFERED * rounds.step_s
    assert rounds.penalty == pytest.approx(penalty(2, rounds.every))
    words = [reason for reason in plan.reasons if "--local-steps" in reason]
    assert len(words) == 1
    assert f"every {rounds.every} steps" in words[0]
    assert f"the loss is expected to be {rounds.penalty:.1%} higher" in words[0]
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert replace(plan, local_steps=None).hash == plan.hash, "it is advice: ranks need not agree on it"


def test_the_penalty_that_is_allowed_limits_the_rounds() -> None:
    rounds = [planned(narrow(30_000), max_penalty=limit).local_steps for limit in (1e-3, 2e-3, 0.02)]
    lengths = [2 if own is None else own.every for own in rounds]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    for limit, own in zip((1e-3, 2e-3, 0.02), rounds, strict=True):
        assert own is None or own.penalty <= limit or own.every == 2


def test_where_every_step_is_fast_enough_they_are_not_mentioned() -> None:
    plan = planned(uneven(1.0))
    assert plan.local_steps is None
    assert not any("--local-steps" in reason for reason in plan.reasons)


def test_time_in_which_some_span_runs() -> None:
    spans = [
        Span(role=None, lane="wire", phase="wire", name="x", start=start, end=end)
        for start, end in ((3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (1.2, 1.4))
    ]
    assert covered(spans) == pytest.approx(3.5)
    assert covered([]) == 0
