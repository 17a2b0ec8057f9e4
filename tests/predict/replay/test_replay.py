"""The replayer against steps that can be worked out by hand, and what must hold of any step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Transfer
from trimtab.predict.replay.replay import _fair, replay
from trimtab.predict.traffic import Way


def role(
    name: str = "a",
    forward: float = 1.0,
    backward: tuple[float, ...] = (1.0, 1.0),
    optimizer: float = 0.5,
    local: tuple[tuple[float, ...], ...] = (),
) -> RoleWork:
    """One forward segment, and a backward segment for each bucket."""
    stream = [ComputeSegment(name="f", seconds=forward, phase="forward")]
    stream += [
        ComputeSegment(name=f"b{i}", seconds=s, phase="backward", buckets=(i,))
        for i, s in enumerate(backward)
    ]
    return RoleWork(name=name, segments=tuple(stream), optimizer_s=optimizer, local=local)


def buckets(*seconds: float, latency: float = 0.0, drag: tuple[float, ...] = ()) -> list[BucketTransfers]:
    return [
        BucketTransfers(name=f"bucket {i}", transfers=(Transfer(latency_s=latency, seconds=s, drag=drag),))
        for i, s in enumerate(seconds)
    ]


def test_a_transfer_hides_behind_backward() -> None:
    done = replay([role()], buckets(0.9, 0.25))
    assert done.step_s == pytest.approx(1 + 2 + 0.25 + 0.5)
    assert done.roles[0].wait_s == pytest.approx(0.25)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    done = replay([role()], buckets(2.0, 1.0))
    assert done.step_s == pytest.approx(2 + 2 + 1 + 0.5)


def test_what_is_only_sent_does_not_slow_down_what_is_only_received() -> None:
    def both_stages(first: Way, second: Way) -> float:
        transfers = (
            Transfer(latency_s=0.0, seconds=1.0, way=first),
            Transfer(latency_s=0.0, seconds=1.0, way=second),
        )
        ready = role(forward=0.0, backward=(0.0,) * 4, optimizer=0.0)
        return replay(
            [ready], [BucketTransfers(name=f"bucket {i}", transfers=transfers) for i in range(4)]
        ).step_s

    assert both_stages("out", "in") == pytest.approx(5)
    assert both_stages("both", "both") == both_stages("out", "out") == pytest.approx(8)
    assert both_stages("out", "both") == pytest.approx(8)


def test_a_segment_waits_for_the_bucket_it_needs() -> None:
    stream = (
        ComputeSegment(name="launch", seconds=0.0, phase="forward", buckets=(0,)),
        ComputeSegment(name="beside", seconds=1.0, phase="forward"),
        ComputeSegment(name="after", seconds=2.0, phase="forward", waits=(0,)),
        ComputeSegment(name="last", seconds=1.0, phase="backward", buckets=(1,)),
    )
    roles = [RoleWork(name="a", segments=stream), RoleWork(name="b", segments=stream)]
    done = replay(roles, buckets(1.5, 0.25))
    assert done.step_s == pytest.approx(1.5 + 2 + 1 + 0.25)
    assert [time.wait_s for time in done.roles] == pytest.approx([0.75, 0.75])
    assert sum(done.breakdown().values()) == pytest.approx(done.step_s)
    # What has arrived already is not waited for, and many roles wait as few do.
    assert replay(roles, buckets(0.5, 0.25)).step_s == pytest.approx(4.25)
    many = [RoleWork(name=str(index), segments=stream) for index in range(9)]
    assert replay(many, buckets(1.5, 0.25)).step_s == pytest.approx(done.step_s)
    # The slower one in each stretch counts, although one of them is slower in their sum at every moment.
    times = [(5.0, 1.0)] + [(2.0, 3.0)] * 8
    unlike = [
        RoleWork(
            name=str(index),
            segments=tuple(replace(s, seconds=t) for s, t in zip(stream, (0.0, *pair, 0.0), strict=True)),
        )
        for index, pair in enumerate(times)
    ]
    assert replay(unlike, buckets(5.0, 0.25)).step_s == pytest.approx(5 + 3 + 0.25)


def test_a_bucket_starts_when_the_last_rank_is_ready() -> None:
    fast, slow = role("fast"), role("slow", forward=3.0)
    done = replay([fast, slow], buckets(0.5, 0.5))
    assert done.step_s == pytest.approx(3 + 2 + 0.5 + 0.5)
    assert done.roles[0].wait_s == pytest.approx(2.5)
    assert done.roles[1].wait_s == pytest.approx(0.5)
    assert done.roles[done.critical_role()].name == "slow"


def test_latency_comes_before_the_bytes_and_overlaps_nothing_of_its_own_bucket() -> None:
    done = replay([role()], buckets(0.1, 0.2, latency=0.05))
    assert done.step_s == pytest.approx(3 + 0.25 + 0.5)


def test_messages_take_longer_while_a_rank_computes() -> None:
    def step_s(roles: int, latency: float, busy: float) -> float:
        transfer = Transfer(latency_s=latency, busy_latency_s=busy, seconds=0.2)
        sent = [BucketTransfers(name=f"bucket {i}", transfers=(transfer,)) for i in range(2)]
        return replay([role(str(i)) for i in range(roles)], sent).step_s

    # The first bucket's message is under way when the second half of backward ends: half of its 2 s are done, the rest
    # takes half of the 0.5 s of an idle rank. The second bucket's finds the ranks idle.
    expected = 1 + 2 + (0.25 + 0.2) + (0.5 + 0.2) + 0.5
    assert step_s(1, 0.5, 2.0) == pytest.approx(expected)
    assert step_s(9, 0.5, 2.0) == pytest.approx(expected), "also where roles and buckets are joined"
    assert step_s(1, 0.5, 0.0) == pytest.approx(step_s(1, 0.5, 0.5)), "never shorter than on idle ranks"


def test_what_a_transfer_takes_of_the_device_slows_backward_down() -> None:
    done = replay([role(backward=(1.0, 2.0))], buckets(1.0, 0.0, drag=(0.25,)))
    # One second of transfer took a quarter of a second of computing away.
    assert done.step_s == pytest.approx(1 + 1 + 2.25 + 0.5)


def test_a_transfer_that_needs_more_of_a_device_than_there_is_goes_slower() -> None:
    done = replay([role(backward=(1.0, 2.0))], buckets(1.0, 0.0, drag=(1.0,)))
    # Both get half: the transfer takes two seconds, in which backward does one, and then the other.
    assert done.step_s == pytest.approx(1 + 1 + 3 + 0.5)


def test_codec_stages_share_the_device_and_overlap_across_buckets() -> None:
    local = ((0.5, 0.0), (0.5, 0.25))
    done = replay([role(backward=(1.0, 1.0), local=local)], buckets(0.1, 0.1))
    # Encoding the first bucket beside the second half of backward costs that half a second.
    assert done.step_s == pytest.approx(1 + 1 + 1.5 + 0.5 + 0.1 + 0.25 + 0.5)


def test_two_stages_of_transfer_share_the_wire() -> None:
    two = (Transfer(latency_s=0.0, seconds=1.0), Transfer(latency_s=0.0, seconds=1.0))
    done = replay([role(backward=(0.5, 0.5))], [BucketTransfers(name=n, transfers=two) for n in "xy"])
    # 1.5: first leaves. 2.5: it enters its second stage beside the other's first, each at half the rate, both
    # until 4.5. Then the other's second stage, alone, until 5.5.
    assert done.step_s == pytest.approx(5.5 + 0.5)


def test_buckets_with_one_and_two_transfers_mix() -> None:
    one, two = Transfer(latency_s=0.0, seconds=0.1), Transfer(latency_s=0.0, seconds=0.1)
    mixed = [
        BucketTransfers(name="a", transfers=(one, two)),
        BucketTransfers(name="b", transfers=(one,)),
        BucketTransfers(name="c", transfers=(one, two)),
    ]
    done = replay([role(backward=(1.0, 1.0, 1.0))], mixed)
    assert done.step_s == pytest.approx(1 + 3 + 0.2 + 0.5)


def test_a_device_never_runs_ahead_of_its_host() -> None:
    slow_host = [ComputeSegment(name="f", seconds=0.1, phase="forward", launch_s=0.3) for _ in range(10)]
    done = replay([RoleWork(name="a", segments=tuple(slow_host))], [])
    assert done.step_s == pytest.approx(10 * 0.3 + 0.1)


def test_the_critical_path_reaches_from_the_beginning_to_the_end_without_a_gap() -> None:
    done = replay([role("fast"), role("slow", forward=2.0)], buckets(0.5, 0.7, latency=0.1))
    path = done.critical_path()
    assert path[0].start == 0
    assert path[-1].end == done.step_s
    for one, following in itertools.pairwise(path):
        assert one.end == pytest.approx(following.start)
    assert sum(done.breakdown().values()) == pytest.approx(done.step_s)


def test_nothing_to_do_takes_no_time() -> None:
    done = replay([RoleWork(name="a", segments=())], [])
    assert done.step_s == 0
    assert done.critical_path()[-1].phase == "optimizer"


def test_a_bucket_that_no_segment_fills_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="fills buckets"):
        replay([role(backward=(1.0,))], buckets(0.1, 0.1))


@given(st.lists(st.floats(0, 3), min_size=1, max_size=6))
def test_shares_are_fair(demands: list[float]) -> None:
    given_ = _fair(demands)
    assert sum(given_) <= 1 + 1e-9
    assert all(part <= demand + 1e-12 for part, demand in zip(given_, demands, strict=True))
    unmet = [part for part, demand in zip(given_, demands, strict=True) if part < demand - 1e-9]
    assert not unmet or min(unmet) >= max(given_) - 1e-9
    assert not unmet or sum(given_) == pytest.approx(1)


times = st.floats(0.001, 2)


@settings(max_examples=60)
@given(
    work=st.lists(st.tuples(times, times, times, times), min_size=1, max_size=3),
    wire=st.lists(times, min_size=2, max_size=2),
    drag=st.floats(0, 0.9),
)
def test_a_step_is_bounded_by_its_parts(
    work: list[tuple[float, float, float, float]], wire: list[float], drag: float
) -> None:
    roles = [role(f"r{i}", w[0], (w[1], w[2]), w[3], ((0.1, 0.1), (0.1, 0.1))) for i, w in enumerate(work)]
    done = replay(roles, buckets(*wire, latency=0.01, drag=(drag,) * len(roles)))
    own = [sum(w) for w in work]
    assert done.step_s >= max(own)
    assert done.step_s >= sum(wire)
    everything = sum(own) + sum(wire) * (1 + drag * len(roles)) * 2 + 0.8 * len(roles) + 0.02
    assert done.step_s <= everything * 2
    assert sum(done.breakdown().values()) == pytest.approx(done.step_s)
    for time in done.roles:
        assert time.wait_s >= 0
        assert time.compute_s >= time.own_s - 1e-9


def test_ranks_that_are_alike_cost_nothing_more() -> None:
    few, many = role(), role()
    one = replay([few], buckets(0.3, 0.3))
    thousand = replay(
        [RoleWork(name="a", segments=many.segments, optimizer_s=0.5, ranks=4000)], buckets(0.3, 0.3)
    )
    assert thousand.step_s == one.step_s
    assert len(thousand.spans) == len(one.spans)
