"""Probing by several ranks at once: in step, at complementary sizes, and of one mind about what and how long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.measure.probes import CPU, task, tiny

from trimtab.cluster.profile import (
    LOCAL,
    PROFILE_VERSION,
    CodecTime,
    CollectiveTime,
    DeviceProfile,
    Line,
    Profile,
)
from trimtab.doors.ddp import stage_groups
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.device import ROUNDS, WARMUP, DeviceProbe, samples_at
from trimtab.measure.job import LINK_ROUNDS, REDUCTION_ROUNDS, probe_job
from trimtab.measure.operators import StepTrainer
from trimtab.measure.reductions import ReductionOverhead, ReductionProbe, with_overhead
from trimtab.predict.collectives import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.pool import Pool

OTHERS = 3
"""Units of the task beside steps: one codec, that of adaptive bits, and launches."""


def cache(folder: str | None) -> ProbeCache:
    found = ProbeCache(
        "cpu",
        f"rank-{dist.get_rank()}",
        torch="t",
        trimtab="v",
        folder=Path(folder or "."),
        keep=folder is not None,
    )
    found.load()
    return found


def run(
    folder: str | None, changes: Sequence[dict[str, Any]], late: Sequence[int] = (-1, -1)
) -> dict[str, Any]:
    """Probe with what is changed by rank; after `late` measurements a rank's time is up."""
    own, stop = changes[dist.get_rank()], late[dist.get_rank()]
    model, batch = tiny()
    of = task(model, batch, **own)
    taken: list[tuple[int, int]] = []
    moves: list[int] = []
    plain = StepTrainer.timed

    def timed(self: StepTrainer, samples: int, precisions: Any, **how: bool) -> Any:
        taken.append((samples, len(precisions)))
        return plain(self, samples, precisions, **how)

    def moved(done: int, _total: int) -> None:
        moves.append(done)
        if done == stop:
            probe._start -= of.seconds + 1  # as if it had begun that long ago

    StepTrainer.timed = timed  # type: ignore[method-assign]
    try:
        probe = DeviceProbe(of, CPU, cache(folder))
        found, left = probe.run(moved)
    except TrimtabError as error:
        return {"error": str(error)}
    finally:
        StepTrainer.timed = plain  # type: ignore[method-assign]
    return {
        "taken": taken,
        "moves": len(moves),
        "left": left,
        "batches": next(iter(found.batches.values()), ()),
    }


def test_while_one_rank_has_a_small_share_the_other_has_the_large_one(ranks: Pool) -> None:
    changes = [{"batches": (1, 2, 4), "precisions": p} for p in (("bf16", "fp16"), ("bf16",))]
    one, two = ranks(2, run, None, changes)
    round_ = [1, 2, 4] * 3
    assert [samples for samples, _ in one["taken"]] == round_ * (WARMUP + ROUNDS)
    assert [samples for samples, _ in two["taken"]] == round_[::-1] * (WARMUP + ROUNDS)
    # Plain steps are last, and in the place of a precision that a rank lacks.
    assert [lowered > 0 for _, lowered in one["taken"]] == ([True] * 6 + [False] * 3) * (WARMUP + ROUNDS)
    assert [lowered > 0 for _, lowered in two["taken"]] == ([True] * 3 + [False] * 6) * (WARMUP + ROUNDS)
    assert one["batches"] == two["batches"] == (1, 2, 4)


def test_neighbours_of_a_larger_job_complement_each_other() -> None:
    sizes = (2, 4, 6)
    for place in range(3):
        assert [samples_at(sizes, place, rank) for rank in range(4)] == [
            sizes[place],
            8 - sizes[place],
        ] * 2


def test_a_rank_with_a_cache_measures_with_one_that_has_none(ranks: Pool, tmp_path: Path) -> None:
    every = OTHERS + 2 * (WARMUP + ROUNDS)
    first = ranks(2, run, str(tmp_path), [{}, {}])
    assert [found["moves"] for found in first] == [every, every]
    (lost,) = tmp_path.glob("*rank-1*.json")
    lost.unlink()
    again = ranks(2, run, str(tmp_path), [{}, {}])
    assert [found["moves"] for found in again] == [every, every]
    assert not any(found["left"] for found in again)
    assert lost.exists()
    third = ranks(2, run, str(tmp_path), [{}, {}])
    assert [found["moves"] for found in third] == [0, 0]


def test_when_the_time_of_one_rank_is_up_all_stop(ranks: Pool, tmp_path: Path) -> None:
    nothing = ranks(2, run, str(tmp_path), [{"seconds": 1000.0}, {"seconds": 0.0}])
    assert [found["moves"] for found in nothing] == [0, 0]
    assert all(len(found["left"]) == 5 for found in nothing)
    late = OTHERS + 2 * WARMUP + 1
    one, two = ranks(2, run, str(tmp_path), [{"seconds": 1000.0}] * 2, (-1, late))
    assert one["moves"] == two["moves"] == late
    # Each timed one of its sizes, and they were not the same.
    assert (one["batches"], two["batches"]) == ((2,), (3,))
    assert len(one["left"]) == len(two["left"]) == 2
    rest = ranks(2, run, str(tmp_path), [{}, {}])
    assert [found["moves"] for found in rest] == [2 * (WARMUP + ROUNDS) - 1] * 2
    assert all(found["batches"] == (2, 3) for found in rest)


def test_ranks_that_are_asked_for_unlike_things_all_say_so(ranks: Pool) -> None:
    for found in ranks(2, run, None, [{}, {"batches": (2, 4)}]):
        assert "rank 1 probes" in found["error"]
        assert "[2, 4]" in found["error"]


# The whole job


def probe_two() -> tuple[Profile, list[tuple[int, int]]]:
    model, batch = tiny()
    moves: list[tuple[int, int]] = []
    found = probe_job(
        task(model, batch, precisions=("bf16",)),
        CPU,
        ("fast", "slow"),
        Placement.of((1, 1)),
        LOCAL,
        progress=lambda done, total: moves.append((done, total)),
    )
    assert not found.left
    return found.profile, moves


def test_every_rank_gets_the_profile_of_the_whole_job(ranks: Pool) -> None:
    (one, moves), (two, _) = ranks(2, probe_two, allow_groups=True)
    assert one == two
    assert list(one.devices) == ["fast", "slow"]
    assert set(one.links[LOCAL]) == {"all_reduce", "all_gather", "all_to_all"}
    for device in one.devices.values():
        assert list(device.batches.values()) == [(2, 3)]
        assert {"fp32>bf16", "bf16>fp32"} <= device.casts.keys()
        assert any(key.endswith("bf16") for key in device.operators)
        assert device.sharded is not None
        assert device.sharded.unit_s + device.sharded.unit_parameter_s > 0
    assert moves[-1][0] == moves[-1][1] == len(moves)
    assert moves[-LINK_ROUNDS - REDUCTION_ROUNDS - 1][0] == moves[-1][1] - LINK_ROUNDS - REDUCTION_ROUNDS


# Compressed buckets


def reduce_buckets() -> tuple[float, int]:
    model, batch = tiny()
    world = dist.group.WORLD
    assert world is not None
    trial = ReductionProbe(capture_workload(model, batch), 4, CPU, stage_groups(world, CPU))
    before = torch.cat([flat for _, flat in trial._row]).abs().sum()
    for _, flat in trial._row:
        flat.fill_(1.0)
    trial.round()
    found = trial.seconds, sum(flat.numel() for _, flat in trial._row if bool((flat == 2.0).all()))
    trial.close()
    assert float(before) == 0
    return found


def test_buckets_are_reduced_as_a_job_reduces_them(ranks: Pool) -> None:
    model, _ = tiny()
    for seconds, summed in ranks(2, reduce_buckets, allow_groups=True):
        assert seconds > 0
        assert summed == sum(p.numel() for p in model.parameters())


def explained(seconds: float) -> Profile:
    """A link and a codec that take so long for whatever they do."""
    line = Line(a=0.0, c=seconds)
    device = DeviceProfile(called="x", codec={"4": CodecTime(encode=line, decode=line, add=line)})
    link = CollectiveTime(per_message_s=seconds, per_byte_s=0.0)
    return Profile(
        version=PROFILE_VERSION,
        trimtab="t",
        torch="t",
        devices={"cpu": device},
        links={"lan": {"all_gather": link}},
    )


def beyond() -> tuple[float, float, float, float]:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    trial = ReductionOverhead(workload, (4,), Placement.of((1, 1)), CPU, most=1)
    trial.round()
    names = ("cpu", "cpu")
    all_of_it, none = (trial.seconds(explained(s), "lan", names) for s in (0.0, 60.0))
    slower = with_overhead(explained(1.0), "lan", all_of_it).links["lan"]["all_gather"]
    measured = trial._rows[4].seconds
    trial.close()
    # A job that is probed goes on to compress: its groups are others.
    world = dist.group.WORLD
    assert world is not None
    for group in stage_groups(world, CPU):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        assert float(ones) == 2
    assert slower.per_message_s == 1.0, "more ranks send more messages, but have the same number of buckets"
    return all_of_it, none, slower.per_bucket_s, measured


def test_what_wire_and_codec_do_not_explain_is_an_overhead_of_each_bucket(ranks: Pool) -> None:
    for all_of_it, none, slower, measured in ranks(2, beyond, allow_groups=True):
        assert all_of_it == pytest.approx(measured), "one bucket, and nothing else takes time"
        assert none == 0, "a row that was faster than explained takes nothing off"
        assert slower == pytest.approx(all_of_it)
