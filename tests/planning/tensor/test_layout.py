"""Layouts: against every possible one where there are few ranks, within memory, and only where they pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.planning import damages, planned
from tests.predict.profiles import FAST, SLOW, cluster, profile, workload

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.cluster.profile import LOCAL
from trimtab.errors import TrimtabError
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan_search import PlanSearch
from trimtab.planning.tensor.layout import Layout, LayoutSearch
from trimtab.planning.tensor.plan_layout import no_groups, with_layout, worthwhile_bits
from trimtab.predict.operators.measured import Measured
from trimtab.predict.tensor import TensorJob

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

GRID = 8
"""The oracle's shares are multiples of 1 / this."""


def ranks_on_hosts(*names: str, per_byte: float = 8e-9, memory: float | None = None) -> Cluster:
    """A host for each rank, with links of this rate."""
    given = profile(3.0)
    links = {
        link: {name: replace(time, per_byte_s=per_byte, per_message_s=1e-5) for name, time in kinds.items()}
        for link, kinds in given.links.items()
    }
    return replace(
        cluster(),
        devices={name: Device(kind="cpu", speed=1.0, memory_gib=memory) for name in (FAST, SLOW)},
        hosts=tuple(Host(name=f"h{i}", devices={name: 1}, link="lan") for i, name in enumerate(names)),
        profile=replace(given, links=links),
    )


def search_on(on: Cluster, total: int, limit: int | None = None) -> LayoutSearch:
    assert on.profile is not None
    job = TensorJob(Measured(workload(), on.profile), on)
    return LayoutSearch(job=job, total=total, limits={FAST: limit, SLOW: limit})


def largest(search: LayoutSearch, layout: Layout) -> int:
    """The most memory that a rank of the first group needs."""
    setting = layout.setting
    return max(
        search.peak(FAST, own, setting.samples[0], len(setting.groups), None) for own in setting.counts
    )


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    return [s for s in product(range(1, total + 1), repeat=parts) if sum(s) == total]


def oracle(search: LayoutSearch, size: int) -> float:
    """The shortest step over all orders of ranks, all shares on the grid and all ways to share the batch."""
    world = len(search.job.ranks)
    best = float("inf")
    seen = set()
    for order in permutations(range(world)):
        groups = tuple(tuple(sorted(order[i : i + size])) for i in range(0, world, size))
        kind = tuple(search.job.kind(group, 0) for group in groups)
        if kind in seen:
            continue
        seen.add(kind)
        for shares in splits(GRID, size):
            for samples in splits(search.total, len(groups)):
                layout = search.at(groups, [share / GRID for share in shares], samples, None)
                best = min(best, layout.step.step_s if not layout.over else float("inf"))
    return best


@pytest.mark.parametrize(
    ("names", "size", "total"),
    [
        ((FAST, SLOW), 2, 4),
        ((FAST, SLOW, FAST), 3, 2),
        ((FAST, SLOW, FAST, SLOW), 2, 5),
        ((FAST, FAST, FAST, SLOW), 2, 5),
    ],
)
@pytest.mark.parametrize("per_byte", [0.0, 2e-7])
def test_nothing_on_the_grid_is_faster(
    names: tuple[str, ...], size: int, total: int, per_byte: float
) -> None:
    search = search_on(ranks_on_hosts(*names, per_byte=per_byte), total)
    best = search.best(size)
    assert best is not None
    assert best.step.step_s <= 1.01 * oracle(search, size)


def test_units_follow_speed_within_a_group_and_samples_between_groups() -> None:
    best = search_on(ranks_on_hosts(FAST, FAST, SLOW, SLOW, per_byte=0.0), 8).best(2)
    assert best is not None
    devices = [[FAST if rank < 2 else SLOW for rank in group] for group in best.setting.groups]
    if devices[0] == devices[1]:
        assert best.shares[0] > 0.6
        assert best.setting.samples == (4, 4)
    else:
        assert best.shares == (0.5, 0.5)
        assert best.setting.samples[0] > best.setting.samples[1]


def test_many_ranks_form_groups_inside_hosts() -> None:
    many = replace(
        ranks_on_hosts(FAST),
        hosts=(
            Host(name="a", devices={FAST: 4}, link="lan", count=8),
            Host(name="b", devices={SLOW: 4}, link="lan", count=8),
        ),
    )
    search = search_on(many, 128)
    best = search.best(4)
    assert best is not None
    hosts = [{search.job.ranks[rank].host for rank in group} for group in best.setting.groups]
    assert all(len(names) == 1 for names in hosts)
    assert sum(best.setting.samples) == 128


def with_hosts(hosts: Sequence[Host]) -> LayoutSearch:
    """These hosts, on links of three rates."""
    probed = profile(3.0)
    rates = {"lan": 3e-8, "far": 1e-6, LOCAL: 1e-9}
    links = {
        link: {n: replace(t, per_byte_s=rate, per_message_s=1e-5) for n, t in probed.links["lan"].items()}
        for link, rate in rates.items()
    }
    on = replace(
        cluster(),
        links={name: Link(gbit_per_s=1.0) for name in ("lan", "far")},
        hosts=tuple(hosts),
        profile=replace(probed, links=links),
    )
    return search_on(on, 2 * on.world_size)


def by_hosts(search: LayoutSearch) -> dict[str, tuple[int, ...]]:
    """Groups of two inside hosts, and one of the ranks that are alone on theirs."""
    own: dict[str, list[int]] = {}
    for rank in search.job.ranks:
        name = f"{rank.host} {rank.local_rank // 2}"
        own.setdefault(name if not rank.host.startswith("alone") else "alone", []).append(rank.rank)
    return {name: tuple(ranks) for name, ranks in own.items()}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from((2, 4)), st.sampled_from((FAST, SLOW)), st.sampled_from(("lan", "far"))),
        min_size=3,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_the_same_groups_take_the_same_time_in_any_order_of_hosts(
    described: list[tuple[int, str, str]], random: Random
) -> None:
    hosts = [
        Host(name=f"h{index}", devices={device: count}, link=link)
        for index, (count, device, link) in enumerate(described)
    ]
    hosts += [Host(name=f"alone{index}", devices={FAST: 1}, link="lan") for index in range(2)]
    steps = []
    for order in (hosts, random.sample(hosts, len(hosts))):
        search = with_hosts(order)
        groups = by_hosts(search)
        layout = search.at(tuple(groups.values()), (0.5, 0.5), [4] * len(groups), None)
        steps.append(layout.step.step_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_what_the_ranks_in_any_place_exchange_counts() -> None:
    """Those in the second place are behind slow links, however little the first ones leave them."""
    near = [Host(name=f"n{index}", devices={FAST: 1}, link="lan") for index in range(2)]
    far = [Host(name=f"f{index}", devices={FAST: 1}, link="far") for index in range(2)]
    exchanged = []
    for hosts in ([*near, *far], [*far, *near]):
        search = with_hosts(hosts)
        exchanged.append(search.at(((0, 2), (1, 3)), (0.6, 0.4), (4, 4), None).step.exchange_s)
    too = [replace(host, link="lan") for host in far]
    least = with_hosts([*near, *too]).at(((0, 2), (1, 3)), (0.6, 0.4), (4, 4), None).step.exchange_s
    assert min(exchanged) > 4 * least


@pytest.mark.parametrize("order", [(3, 3, 2, 2), (2, 3, 2, 3)])
def test_hosts_with_a_rank_too_many_form_groups_inside_as_far_as_possible(order: tuple[int, ...]) -> None:
    hosts = [Host(name=f"h{i}", devices={SLOW: count}, link="far") for i, count in enumerate(order)]
    search = with_hosts(hosts)
    apart = [
        sum(len({search.job.ranks[rank].host for rank in group}) > 1 for group in groups)
        for groups in search.groupings(2)
    ]
    assert min(apart) == 1


def test_a_layout_that_does_not_fit_is_not_returned() -> None:
    on = ranks_on_hosts(FAST, SLOW)
    roomy = search_on(on, 4)
    best = roomy.best(2)
    assert best is not None
    tight = largest(roomy, best) - 1
    squeezed = search_on(on, 4, tight).best(2)
    assert squeezed is not None
    assert largest(roomy, squeezed) <= tight
    assert squeezed.step.step_s >= best.step.step_s
    assert search_on(on, 4, 1000).best(2) is None


def test_a_copy_on_every_rank_unless_groups_gain() -> None:
    on = ranks_on_hosts(FAST, SLOW, per_byte=1e-6)
    plan = planned(on, 4, budget=0.0)
    assert plan.tensor_groups == ()
    assert any("in groups of 2 ranks a step would take" in reason for reason in plan.reasons)
    assert planned(on, 4, budget=0.0, layout="data").reasons != plan.reasons


def test_what_is_asked_for_is_planned_with_roles_by_place() -> None:
    plan = planned(ranks_on_hosts(FAST, SLOW, FAST, SLOW), 8, layout=2, bits=None)
    assert plan.tensor_size == 2
    assert plan.batch_size == 8
    for group in plan.tensor_groups:
        shares = [plan.roles[plan.role_of(rank)].tensor_share for rank in group]
        assert sum(shares) == pytest.approx(1)
    assert "2 ranks hold a copy of the model together, as asked for" in plan.reasons[0]
    with pytest.raises(TrimtabError, match="possible sizes: 2, 4"):
        planned(ranks_on_hosts(FAST, SLOW, FAST, SLOW), 8, layout=3)


def test_memory_demands_groups() -> None:
    search = search_on(ranks_on_hosts(FAST, SLOW), 2)
    limit = 1.05 * largest(search, search.at(((0, 1),), (0.5, 0.5), (2,), None)) / 2**30
    plan = planned(ranks_on_hosts(FAST, SLOW, memory=limit), 2, budget=0.0)
    assert plan.tensor_size == 2
    assert "a copy on every rank does not fit" in plan.reasons[0]
    assert all(role.peak_bytes <= limit * 2**30 for role in plan.roles.values())


def test_a_layout_says_what_each_of_its_parts_is_worth() -> None:
    on = ranks_on_hosts(FAST, SLOW, per_byte=0.0)
    search = PlanSearch(on, workload(), {}, 2)
    copies = planned(on, 2, budget=0.0, bits=None, layout="data")
    slow = replace(copies, predicted=replace(copies.predicted, step_s=50.0, alone={"shares": 60.0}))
    plan = with_layout(search, lambda: slow, "auto", model="m", trimtab="0", batch="free", bits=(None,))
    step_s, alone, without = plan.predicted.step_s, plan.predicted.alone, plan.predicted.without
    assert plan.tensor_size == 2
    assert without.keys() == {"layout", "units"}
    assert (without["layout"], alone["shares"]) == (50.0, 60.0)
    assert alone["layout"] == without["units"] > step_s
    worth = [reason for reason in plan.reasons if reason.startswith("units are divided as")]
    assert "without it the step is" in worth[0]


def test_without_known_units_every_rank_has_a_copy() -> None:
    on, unknown = ranks_on_hosts(FAST, SLOW), replace(workload(), units=())

    def plan(layout: str | int) -> tuple[str, ...]:
        return make_plan(
            on,
            unknown,
            damages(),
            model="m",
            trimtab="0",
            batch_size=4,
            layout=layout,  # type: ignore[arg-type]
        ).reasons

    assert any("no blocks of Gpt are known" in reason for reason in plan("auto"))
    with pytest.raises(TrimtabError, match="plan with --layout data"):
        plan(2)


def test_groups_that_would_gain_little_are_not_called_slower() -> None:
    assert "would take 801 ms, not 2% less than the 811 ms without, 6.27 ms" in no_groups(
        0.811, 2, 0.801, 6.27e-3
    )
    assert "would take 900 ms or more, 6.27 ms" in no_groups(0.811, 2, 0.9, 6.27e-3, " or more")


def test_groups_exchange_gradients_in_few_bits_only_where_that_gains() -> None:
    def bits(per_byte: float) -> int | None:
        search = search_on(ranks_on_hosts(FAST, SLOW, FAST, SLOW, per_byte=per_byte), 8)
        four = search.at(((0, 1), (2, 3)), (0.5, 0.5), (4, 4), 4)
        return worthwhile_bits(search, four, (None, 4)).setting.bits

    assert bits(0.0) is None
    assert bits(1.0) == 4
