"""Sharded steps that can be worked out by hand, and what must hold of any of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.profiles import FAST, SLOW, cluster, profile, workload
from torch import nn

import trimtab
from trimtab.cluster import Cluster, Device, Host
from trimtab.cluster.profile import (
    LOCAL,
    PROFILE_VERSION,
    CodecTime,
    CollectiveTime,
    DeviceProfile,
    Line,
    OperatorTime,
    Profile,
    ShardedTime,
)
from trimtab.errors import TrimtabError
from trimtab.measure.capture.capture import capture_workload
from trimtab.predict.fsdp import LATE, build_fsdp, predict_fsdp
from trimtab.predict.fsdp_units import Sharding, fsdp_units, shard_numel
from trimtab.predict.operators.costs import key_of, workload_key
from trimtab.predict.operators.measured import Measured
from trimtab.predict.step import JobSetting, RankSetting

if TYPE_CHECKING:
    from trimtab.predict.replay.timeline import Timeline
    from trimtab.workload import Workload

FREE = Line(a=0.0, c=0.0)
SHARD = 64 * 64 * 4 // 2
"""Bytes of a layer's shard on each of two ranks."""


class Layers(nn.Module):
    """Two equal layers and a head of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).sum()
        return loss


@cache
def layers() -> Workload:
    with torch.device("meta"):
        return capture_workload(Layers(), (torch.zeros(8, 64),))


def job(
    kind: Literal["cpu", "cuda"] = "cpu",
    *,
    hosts: tuple[int, ...] = (1, 1),
    slower: float = 1.0,
    sharded: ShardedTime | None = None,
    optimizer: Line = FREE,
) -> Cluster:
    """A layer takes a second forward and two backward; gathering a layer's shard takes a second on the link.

    The last host's devices are so many times slower.
    """
    free = CodecTime(encode=FREE, decode=FREE, add=FREE)

    def device(times: float) -> DeviceProfile:
        seconds = {str(key_of(o)): times if o.kind == "linear" else 0.0 for o in layers().operators}
        return DeviceProfile(
            called="d",
            operators={k: OperatorTime(forward_s=s, backward_s=2 * s) for k, s in seconds.items()},
            codec={"4": free, "8": free},
            batches={workload_key(layers()): (8,)},
            optimiser=optimizer,
            sharded=sharded or ShardedTime(copy=FREE, unit_s=0.0, parameter_s=0.0),
        )

    def link(per_byte_s: float) -> dict[str, CollectiveTime]:
        one = CollectiveTime(per_message_s=0.0, per_byte_s=per_byte_s)
        return dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), one)

    return Cluster(
        version=1,
        devices={name: Device(kind=kind, speed=1.0) for name in (FAST, SLOW)},
        links=cluster().links,
        hosts=tuple(
            Host(name="ab"[i], devices={FAST if i == 0 else SLOW: n}, link="lan") for i, n in enumerate(hosts)
        ),
        profile=Profile(
            version=PROFILE_VERSION,
            trimtab=trimtab.__version__,
            torch=torch.__version__,
            devices={FAST: device(1.0), SLOW: device(slower)},
            links={"lan": link(1 / SHARD), LOCAL: link(2 / SHARD)},
        ),
    )


GATHERS = 5 * LATE
WHOLE = GATHERS + 3 + 6 + 6
"""A step on two CPU ranks: see `test_on_a_cpu_nothing_overlaps`."""


def step(on: Cluster, sharding: Sharding | None = None, bits: int | None = None) -> Timeline:
    assert on.profile is not None
    setting = JobSetting(
        ranks={name: RankSetting(samples=8, precisions={}) for name in (FAST, SLOW)},
        bits=bits,
        sharding=sharding,
    )
    return predict_fsdp(Measured(layers(), on.profile), on, setting)


def test_units_are_the_repeated_blocks_and_the_root() -> None:
    root, *blocks = fsdp_units(workload())
    names = [p.name for unit in (root, *blocks) for p in unit.parameters]
    assert sorted(names) == sorted(p.name for p in workload().parameters)
    assert [unit.name for unit in blocks] == [m for block in workload().blocks for m in block.modules]
    assert all(p.name.startswith(f"{unit.name}.") for unit in blocks for p in unit.parameters)
    assert root.parameters


def test_shards_are_padded_along_the_first_axis() -> None:
    weight = layers().parameters[0]
    assert shard_numel(weight, 2) == 32 * 64
    assert shard_numel(weight, 3) == 22 * 64


def test_on_a_cpu_nothing_overlaps() -> None:
    done = step(job())
    # Three gathers and three layers; then two gathers, three layers of two seconds, and three reductions of two:
    # Gloo's reduce-scatter is an all-reduce, which sends twice as much. Between two ranks its gather starts the second
    # direction half a shard late.
    assert done.step_s == pytest.approx(WHOLE)
    assert done.breakdown()["wire"] == pytest.approx(GATHERS + 6)
    assert [role.wait_s for role in done.roles] == pytest.approx([GATHERS + 6] * 2)


@pytest.mark.parametrize(("kind", "pauses"), [("cpu", 11), ("cuda", 0)])
def test_ranks_that_wait_for_collectives_pause_before_each(kind: Literal["cpu", "cuda"], pauses: int) -> None:
    """On a CPU five gathers and three reductions are waited for, by ranks that have just computed."""
    given = job(kind)
    assert given.profile is not None
    paused = replace(
        given.profile,
        links={
            link: {
                name: replace(time, awaited_message_s=0.1, awaited_byte_s=time.per_byte_s)
                for name, time in collectives.items()
            }
            for link, collectives in given.profile.links.items()
        },
    )
    # A gather between two ranks has one message, a reduction by an all-reduce two.
    longer = step(replace(given, profile=paused)).step_s - step(given).step_s
    assert longer == pytest.approx(pauses * 0.1, abs=1e-9)


def test_on_a_gpu_a_unit_is_gathered_while_the_one_before_computes() -> None:
    done = step(job("cuda"))
    # Root and first layer are waited for (2), the second arrives in time, forward ends at 5. The head's backward hides
    # the gather of layer 2, whose backward hides that of layer 1; its reduction hides behind layer 1's backward. The
    # last two reductions of a second each are exposed.
    assert done.step_s == pytest.approx(2 + 3 + 6 + 2)


def test_the_slower_rank_is_waited_for_at_every_unit() -> None:
    done = step(job(slower=2.0))
    assert done.step_s == pytest.approx(2 * 9 + GATHERS + 6)
    assert done.roles[0].wait_s == pytest.approx(9 + GATHERS + 6)


def test_kept_weights_are_gathered_once() -> None:
    assert step(job(), Sharding(keep=True)).step_s == pytest.approx(WHOLE - 2 * LATE)


def test_bits_of_gradients_and_of_weights() -> None:
    gradients = 2 * 8 + 2048 // 2  # two quantization blocks with a range each
    # The gathers of the root and of the first layer are waited for; all others travel while a layer computes.
    assert step(job(), bits=4).step_s == pytest.approx(2 + 9 + 3 * gradients / SHARD)
    weights = 8 * 8 + 2048
    both = step(job(), Sharding(weight_bits=8), bits=4).step_s
    assert both == pytest.approx(2 * weights / SHARD + 9 + 3 * gradients / SHARD)


def test_hsdp_shards_inside_a_host_and_reduces_between_hosts() -> None:
    # Inside, rates are half as fast as between hosts: five gathers of 2 s, three reductions of 4 s; and three
    # all-reduces of 2 s between hosts.
    hybrid = Sharding(hybrid=True)
    assert step(job(hosts=(2, 2)), hybrid).step_s == pytest.approx(9 + 2 * GATHERS + 12 + 6)
    # Gathered weights need not leave the host: with four ranks in two hosts FSDP2 sends three quarters of them.
    between = [b for b in build(job(hosts=(2, 2)), hybrid) if b.startswith("weights")]
    assert len(between) == 5
    packed = 2 * 8 + 2048 // 2
    got = step(job(hosts=(2, 2)), hybrid, bits=4).step_s
    # Two shards at once through each host's interface; two hosts exchange them in one all-gather.
    assert got == pytest.approx(9 + 2 * GATHERS + 3 * (2 * packed + 2 * packed) / SHARD)
    with pytest.raises(TrimtabError, match="same number of ranks"):
        step(job(hosts=(2, 1)), hybrid)


def build(on: Cluster, sharding: Sharding) -> list[str]:
    assert on.profile is not None
    setting = JobSetting(
        ranks={name: RankSetting(samples=8, precisions={}) for name in (FAST, SLOW)}, sharding=sharding
    )
    _, buckets = build_fsdp(Measured(layers(), on.profile), on, setting)
    return [bucket.name for bucket in buckets]


def test_collectives_are_in_the_order_of_torch() -> None:
    expected = [
        "weights of the root",
        "weights of blocks.0",
        "weights of blocks.1",
        "weights of blocks.1",
        "weights of blocks.0",
        "gradients of blocks.1",
        "gradients of blocks.0",
        "gradients of the root",
    ]
    for kind in ("cpu", "cuda"):
        assert build(job(kind), Sharding()) == expected


def test_the_optimizer_has_a_shard_and_torch_its_overheads() -> None:
    done = step(job(optimizer=Line(a=1e-3, c=0.5)))
    assert done.step_s == pytest.approx(WHOLE + 0.5 + 1e-3 * 3 * 32 * 64)
    slow = ShardedTime(copy=Line(a=1e-3, c=0.0), unit_s=0.1, unit_parameter_s=0.02, parameter_s=0.25)
    done = step(job(sharded=slow))
    gathers, reductions = 5 * (2.048 + 4.096), 3 * (2 * 4.096 + 2.048)
    assert done.step_s == pytest.approx(WHOLE + 8 * (0.1 + 0.02) + 3 * 0.25 + gathers + reductions)


def test_one_rank_sends_nothing() -> None:
    alone = job(hosts=(1,))
    done = step(alone)
    assert done.step_s == pytest.approx(9)
    assert {span.lane for span in done.spans} == {"compute"}


@given(
    slower=st.floats(1.0, 50.0),
    bits=st.sampled_from([None, 4]),
    keep=st.booleans(),
    kind=st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=15, deadline=None)
def test_a_slower_link_is_never_faster_and_fewer_gathers_neither(
    slower: float, bits: int | None, keep: bool, kind: Literal["cpu", "cuda"]
) -> None:
    def predicted(times: float, keep: bool) -> float:
        link = {
            name: replace(time, per_byte_s=time.per_byte_s * times, drag={})
            for name, time in profile().links["lan"].items()
        }
        known = replace(profile(), links={"lan": link})
        devices = {name: Device(kind=kind, speed=1.0) for name in (FAST, SLOW)}
        setting = JobSetting(
            ranks={name: RankSetting(samples=2, precisions={}) for name in (FAST, SLOW)},
            bits=bits,
            sharding=Sharding(keep=keep),
        )
        on = replace(cluster(), devices=devices)
        return predict_fsdp(Measured(workload(), known), on, setting).step_s

    assert predicted(slower, keep) >= predicted(1.0, keep) - 1e-12
    assert predicted(slower, False) >= predicted(slower, True) - 1e-12
