"""Plans compared with plain DDP, with every single technique, and with all plans that there are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from tests.planning.random_jobs import RandomJob, all_jobs, all_precisions, jobs

from trimtab.planning.plan_search import GAIN
from trimtab.planning.roles import even

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
EXACT = 1 + 1e-9


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(jobs(most_ranks=4, most_samples=12))
def test_no_plan_is_slower_than_plain_ddp_or_one_technique_alone(job: RandomJob) -> None:
    plan, search = job.plan(), job.search()
    step, plain = plan.predicted.step_s, search.plain()
    assert step <= plain.step_s * EXACT
    assert plan.predicted.plain_step_s == plain.step_s
    assert step <= search.free(search.uncompressed, 0.0).step_s * EXACT, "shares"
    assert plan.predicted.damage <= job.budget * EXACT
    # What does damage is chosen only where it gains so much.
    compressed = search.even(search.setting(4))
    assert step <= GAIN * compressed.step_s * EXACT, "bits and route"
    evenly = all_precisions(job, search, even(search.devices, job.total), search.uncompressed)
    fastest = min(one.step_s for one in evenly if one.damage <= job.budget)
    assert step <= GAIN * fastest * EXACT, "precision"


@settings(max_examples=10, deadline=None, suppress_health_check=QUIET)
@given(jobs(most_ranks=4))
def test_nor_with_fixed_shares(job: RandomJob) -> None:
    search = job.search()
    job = replace(job, total=2 * len(search.devices))
    search = job.search()
    plan = job.plan(batch="fixed")
    assert len(set(plan.shares)) == 1
    assert plan.predicted.step_s <= search.plain().step_s * EXACT
    assert plan.predicted.step_s <= GAIN * search.even(search.setting(4)).step_s * EXACT
    assert plan.predicted.step_s <= GAIN * search.fixed(search.uncompressed).step_s * EXACT


@settings(max_examples=12, deadline=None, suppress_health_check=QUIET)
@given(jobs())
def test_plans_are_about_the_best_there_are(job: RandomJob) -> None:
    best = min(one.step_s for one in all_jobs(job, job.search()) if one.damage <= job.budget)
    assert job.plan().predicted.step_s <= GAIN**2 * best * EXACT
