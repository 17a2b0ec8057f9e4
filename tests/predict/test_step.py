"""A step from a profile: shares, precisions, bits and links, and everything that can be missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, device_profile, profile, workload

from trimtab.cluster import Cluster, Device, Host
from trimtab.cluster.profile import LOCAL, Line
from trimtab.errors import TrimtabError
from trimtab.predict.operators.estimate import estimated, rates, with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.build import idle_seconds
from trimtab.predict.replay.inputs import BucketTransfers, Transfer
from trimtab.predict.replay.replay import replay
from trimtab.predict.replay.timeline import bottleneck
from trimtab.predict.replay.trace import save_trace
from trimtab.predict.step import (
    JobSetting,
    RankSetting,
    build_step,
    codec_time,
    predict_memory,
    predict_step,
)

if TYPE_CHECKING:
    from pathlib import Path


def setting(
    fast: int = 2, slow: int = 2, precisions: dict[str, str] | None = None, bits: int | None = None
) -> JobSetting:
    return JobSetting(
        bits=bits,
        ranks={
            FAST: RankSetting(samples=fast, precisions={}),
            SLOW: RankSetting(samples=slow, precisions=precisions or {}),
        },
    )


def test_times_between_two_measured_batches_are_linear() -> None:
    measured = Measured(workload(), profile())
    for samples in (2, 3, 4, 6, 8):
        mapper = measured.mapper(FAST, "cpu", samples)
        assert mapper.forward_s == pytest.approx([1e-3 * samples] * len(mapper.forward_s))
        assert mapper.backward_s == pytest.approx([2e-3 * samples] * len(mapper.backward_s))


def test_smaller_shares_and_lower_precision_make_the_slow_rank_faster() -> None:
    measured = Measured(workload(), profile())
    even = predict_step(measured, cluster(), setting(3, 3))
    shared = predict_step(measured, cluster(), setting(4, 2))
    low = predict_step(measured, cluster(), setting(3, 3, {"*": "int8"}))
    assert shared.step_s < even.step_s
    assert low.step_s < even.step_s
    assert even.roles[even.critical_role()].name == SLOW
    assert even.roles[0].wait_s > even.roles[1].wait_s


def test_fewer_bits_pay_on_a_slow_link() -> None:
    measured = Measured(workload(), profile())
    slow_link = replace(
        profile(),
        links={
            "lan": {
                name: replace(time, per_byte_s=time.per_byte_s * 1000)
                for name, time in profile().links["lan"].items()
            }
        },
    )
    measured = Measured(workload(), slow_link)
    plain = predict_step(measured, cluster(), setting())
    packed = predict_step(measured, cluster(), setting(bits=4))
    assert packed.step_s < 0.5 * plain.step_s
    assert bottleneck(plain).startswith("the link")


def test_naive_leaves_out_casts() -> None:
    measured = Measured(workload(), profile())
    low = setting(2, 6, {"*": "int8"})
    true = predict_step(measured, cluster(), low)
    naive = predict_step(measured, cluster(), low, naive=True)
    assert naive.step_s < true.step_s
    untouched = setting(2, 6)
    assert (
        predict_step(measured, cluster(), untouched, naive=True).step_s
        == predict_step(measured, cluster(), untouched).step_s
    )


def test_one_rank_has_nobody_to_wait_for() -> None:
    alone = replace(cluster(), hosts=cluster().hosts[:1])
    done = predict_step(Measured(workload(), profile()), alone, setting())
    assert done.roles[0].wait_s == 0
    assert {span.lane for span in done.spans} == {"compute"}


def test_a_thousand_hosts_are_a_few_roles() -> None:
    many = replace(
        cluster(),
        hosts=(
            Host(name="a", devices={FAST: 8}, link="lan", count=500),
            Host(name="b", devices={SLOW: 2}, link="lan", count=100),
        ),
    )
    done = predict_step(Measured(workload(), profile()), many, setting(bits=4))
    assert [(role.name, role.ranks) for role in done.roles] == [(FAST, 4000), (SLOW, 200)]


def test_memory_goes_with_shares() -> None:
    found = predict_memory(Measured(workload(), profile()), cluster(), setting(6, 2))
    assert found[FAST].activations > found[SLOW].activations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, c: (replace(s, bits=3), c), "not measured at 3 bits.*probe --bits 3"),
        (
            lambda s, c: (setting(2, 2, {"*.qkv": "bf16"}), c),
            "in bf16 was not measured on device class 'slow'",
        ),
        (lambda s, c: (setting(2, 2, {"nothing.*": "int8"}), c), "matches no operator"),
        (lambda s, c: (JobSetting(ranks={FAST: s.ranks[FAST]}), c), "has no entry for device class 'slow'"),
    ],
)
def test_what_is_missing_is_named(change, words: str) -> None:  # type: ignore[no-untyped-def]
    how, where = change(setting(), cluster())
    with pytest.raises(TrimtabError, match=words):
        predict_step(Measured(workload(), profile()), where, how)


def test_missing_links_are_named() -> None:
    unlinked = cluster(link=None)
    without = replace(profile(), links={"lan": profile().links["lan"]})
    with pytest.raises(TrimtabError, match=r"hosts without a `link`.*trimtab probe"):
        predict_step(Measured(workload(), without), unlinked, setting())
    assert LOCAL in profile().links
    predict_step(Measured(workload(), profile()), unlinked, setting())


def test_a_link_that_was_not_measured_goes_by_its_rate() -> None:
    without = replace(profile(), links={})
    done = predict_step(Measured(workload(), without), cluster(), setting())
    assert any(span.lane == "wire" for span in done.spans)


def test_one_measured_batch_does_not_tell_how_times_grow() -> None:
    known = device_profile()
    small = {k: v for k, v in known.operators.items() if v.forward_s < 4e-3}
    once = replace(profile(), devices={FAST: replace(known, operators=small), SLOW: known})
    with pytest.raises(TrimtabError, match="only at a batch of 2: two sizes tell how it grows"):
        predict_step(Measured(workload(), once), cluster(), setting(4, 4))


def test_absent_devices_are_estimated_and_marked() -> None:
    with_t4 = replace(cluster(), devices={**cluster().devices, "T4": Device(kind="cuda", speed=1.0)})
    found = with_estimates(with_t4, profile())
    assert found.devices["T4"].estimated
    assert not found.devices[FAST].estimated
    assert found.devices["T4"].called == "T4"
    ours, theirs = rates(found.devices[FAST])["fp32"], rates(found.devices["T4"])["fp32"]
    assert theirs == pytest.approx(0.7 * 8.1e12)
    assert ours != theirs


def test_a_device_nobody_knows_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"'mystery' was not measured.*not in the catalog"):
        estimated("mystery", Device(kind="cuda", speed=1.0, model="Abacus 3"), profile().devices)
    with pytest.raises(TrimtabError, match="can only be estimated from a measured device"):
        estimated("T4", Device(kind="cuda", speed=1.0), {})


def test_a_precision_the_device_lacks_is_not_estimated() -> None:
    found = estimated("V100", Device(kind="cuda", speed=1.0, model="Tesla V100-SXM2-16GB"), profile().devices)
    assert not any(key.endswith("|int8") for key in found.operators)
    assert any(key.endswith("|fp32") for key in found.operators)


def test_layers_in_other_bits_send_other_bytes() -> None:
    coded = {"4": device_profile().codec["4"], "8": device_profile().codec["4"]}
    devices = {name: replace(one, codec=coded) for name, one in profile().devices.items()}
    measured = Measured(workload(), replace(profile(), devices=devices))

    def sent(job: JobSetting) -> float:
        _, buckets = build_step(measured, cluster(), job)
        return sum(transfer.seconds for bucket in buckets for transfer in bucket.transfers)

    names = [name for name, bits in setting(bits=4).bits_of(workload()).items() if bits]
    four, eight = sent(setting(bits=4)), sent(setting(bits=8))
    assert sent(replace(setting(bits=4), layer_bits=dict.fromkeys(names, 8))) == eight
    some = replace(setting(bits=4), layer_bits={names[0]: 8})
    assert four < sent(some) < eight
    exact = replace(setting(bits=4), layer_bits=dict.fromkeys(names))
    assert sent(exact) > eight
    assert sent(replace(setting(bits=4), block=128)) > four, "every block has a range"


def test_error_feedback_costs_what_was_measured() -> None:
    owing = replace(device_profile().codec["4"], feedback=Line(a=5e-9, c=0.0))
    devices = {name: replace(one, codec={"4": owing}) for name, one in profile().devices.items()}
    measured = Measured(workload(), replace(profile(), devices=devices))

    def local_s(job: JobSetting) -> float:
        roles, _ = build_step(measured, cluster(), job)
        return sum(seconds for bucket in roles[0].local for seconds in bucket)

    values = sum(p.tensor.numel for p in workload().parameters)
    more = local_s(replace(setting(bits=4), error_feedback=True)) - local_s(setting(bits=4))
    # Two ranks gather: every value is encoded once. It is decoded again, to know what was sent.
    assert more == pytest.approx(values * (owing.feedback.a + owing.decode.a))


def test_adaptive_bits_have_their_own_codec() -> None:
    quick = replace(device_profile().codec["4"], encode=Line(a=0.0, c=0.0))
    device = replace(device_profile(), adaptive_codec=quick)
    given = replace(profile(), devices={FAST: device, SLOW: device_profile()})
    assert codec_time(given, FAST, 3, 128) is quick
    assert codec_time(given, SLOW, 3, 128) is given.devices[SLOW].codec["4"], "the nearest measured bits"
    with pytest.raises(TrimtabError, match="at 3 bits"):
        codec_time(given, FAST, 3)


def test_smaller_buckets_start_earlier_and_send_more_messages() -> None:
    measured = Measured(workload(), profile())
    (large, few), (small, many) = (
        build_step(measured, cluster(), replace(setting(), bucket_cap_mb=cap)) for cap in (25.0, 0.05)
    )
    assert len(many) > len(few)
    assert small[0].ready_s[0] < large[0].ready_s[0]
    assert small[0].ready_s[-1] == pytest.approx(large[0].ready_s[-1])
    latencies = [sum(b.transfers[0].latency_s for b in buckets) for buckets in (few, many)]
    assert latencies[1] == pytest.approx(latencies[0] * len(many) / len(few))


@pytest.mark.parametrize(("samples", "count"), [(6, 3), (7, 3), (2, 4)])
def test_micro_batches_are_exchanged_once(samples: int, count: int) -> None:
    measured = Measured(workload(), profile())
    whole = setting(samples, samples)
    roles, buckets = build_step(measured, cluster(), replace(whole, accumulate=count))
    once, same = build_step(measured, cluster(), whole)
    assert buckets == same
    # Times are linear in the samples, and a rank without samples computes one that does not count.
    computed = max(samples, count)
    elements = sum(p.tensor.numel for p in workload().parameters)
    adding = (count - 1) * elements * 1e-9 * 12 / 28
    assert roles[0].ready_s[-1] == pytest.approx(once[0].ready_s[-1] * computed / samples + adding)
    assert roles[0].optimizer_s == once[0].optimizer_s


def test_micro_batches_need_less_memory_than_the_whole_and_more_than_one() -> None:
    measured = Measured(workload(), profile())

    def peak(job: JobSetting) -> int:
        return predict_memory(measured, cluster(), job)[FAST].peak

    part, whole = peak(setting(4, 4)), peak(setting(16, 16))
    assert part < peak(replace(setting(16, 16), accumulate=4)) < whole


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    roles, buckets = build_step(Measured(workload(), profile()), cluster(), setting(bits=4))
    done = replay(roles, buckets)
    save_trace(tmp_path / "t.json", done, roles)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {"name", "pid", "tid", "ts", "dur", "cat"} <= complete[0].keys()
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(done.step_s * 1e6, rel=1e-4)
    names = {operator.name for operator in workload().operators}
    assert names <= {e["name"] for e in complete}
    for process in (1, 2):
        last = max(e["ts"] + e["dur"] for e in complete if e["pid"] == process and e["name"] in names)
        backward = max(
            s.end
            for s in done.spans
            if s.role == process - 1 and s.lane == "compute" and s.phase == "backward"
        )
        assert last == pytest.approx(backward * 1e6, rel=1e-3)


def test_an_empty_cluster_of_other_classes_is_no_crash() -> None:
    other = Cluster(
        version=1,
        devices={"odd": Device(kind="cpu", speed=1.0)},
        hosts=(Host(name="x", devices={"odd": 1}),),
    )
    with pytest.raises(TrimtabError, match="'odd'"):
        predict_step(Measured(workload(), profile()), other, setting())


def test_buckets_alone_take_the_wire_and_what_the_codec_cannot_hide() -> None:
    buckets = [
        BucketTransfers(name=str(i), transfers=(Transfer(latency_s=0.0, seconds=2.0),)) for i in range(3)
    ]
    local = [((0.5, 0.25),) * 3, ((1.0, 0.5),) * 3]
    # The slower rank's first encoding, three transfers, its last decoding.
    assert idle_seconds(buckets, local) == pytest.approx(1.0 + 3 * 2.0 + 0.5)
