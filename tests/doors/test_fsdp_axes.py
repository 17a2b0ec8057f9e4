"""What each axis of an FSDP2 or HSDP mesh does: measured, inside one host, alone, with feedback, with adapting bits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.doors.fsdp_net import full, loss_of, make, same_everywhere
from torch.distributed.tensor import distribute_tensor

import trimtab
from trimtab.codec import Block
from trimtab.collectives.hierarchy import one_host
from trimtab.control.compression import fsdp as fsdp_control
from trimtab.control.compression.ddp import adaptive_of
from trimtab.control.compression.fsdp import fsdp_compression_of
from trimtab.doors.fsdp import FsdpCompression, process_groups
from trimtab.doors.parameters import choose_bits

if TYPE_CHECKING:
    from tests.support.pool import Pool


def decided() -> tuple[str, bool]:
    net = make(None, replicas=2)
    os.environ["GROUP_RANK"] = str(dist.get_rank())  # a host for each rank
    try:
        trimtab.compress(net)
    finally:
        del os.environ["GROUP_RANK"]
    loss_of(net, 0).backward()
    return trimtab.explain(net), same_everywhere(full(net))


def test_without_a_codec_each_axis_is_measured(ranks: Pool) -> None:
    for message, agree in ranks(4, decided, allow_groups=True):
        assert "shard axis: not compressing: the link is" in message or "shard axis: compressing" in message
        assert (
            "replicate axis: not compressing: the link is" in message
            or "replicate axis: compressing" in message
        )
        assert agree


def decided_apart() -> bool:
    """The shard groups of two replicas measure by themselves: here one compresses and the other does not."""
    judge = fsdp_control._judge

    def judge_by_rank(config: Any, group: Any, model: Any) -> Any:
        decision, settings = judge(config, group, model)
        first_replica = dist.get_process_group_ranks(group) == [0, 1]
        return replace(decision, compress=first_replica), settings

    net = make(None, replicas=2)
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    fsdp_control._judge = judge_by_rank
    try:
        trimtab.compress(net)
    finally:
        del os.environ["GROUP_RANK"]
        fsdp_control._judge = judge
    for step in range(2):
        loss_of(net, step).backward()
    return same_everywhere(full(net))


def test_axes_that_decide_apart_do_not_wait_for_each_other(ranks: Pool) -> None:
    assert ranks(4, decided_apart, allow_groups=True) == [True] * 4


def on_one_host(replicas: int) -> tuple[float, float, bool, list[int]]:
    """How far gradients and trained weights are from plain FSDP2's, and whether all ranks agree."""
    plain, net = make(None, replicas=replicas), make(None, replicas=replicas)
    axes = dict(zip(("shard", "replicate"), process_groups(net), strict=True))
    groups = {axis: group for axis, group in axes.items() if group is not None and group.size() > 1}
    hosts = {axis: one_host(group, torch.device("cpu")) for axis, group in groups.items()}
    sizes = {name: (p.numel(), p.dim()) for name, p in net.named_parameters()}
    pieces, _ = choose_bits(sizes, Block(bits=1), {}, 2048)
    compression = FsdpCompression(
        net, Block(bits=1), pieces, hosts={axis: host for axis, host in hosts.items() if host is not None}
    )
    for model in (plain, net):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    errors = [
        max(float((full(net, g)[n] - e).norm() / e.norm()) for n, e in full(plain, g).items())
        for g in (True, False)
    ]
    agree = same_everywhere(full(net))
    dist.barrier()
    compression.close()
    return *errors, agree, [host is not None for host in hosts.values()]  # type: ignore[return-value]


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2)])
def test_on_one_host_sums_and_weights_are_exact(ranks: Pool, world: int, replicas: int) -> None:
    for gradients, weights, agree, shared in ranks(world, on_one_host, replicas, allow_groups=True):
        assert all(shared)
        assert agree
        assert gradients < 1e-5, "one bit would be far off"
        assert weights < 1e-5


def one_axis(shard: bool) -> tuple[float, bool, list[int]]:
    plain, net = make(None, replicas=2), make(None, replicas=2)
    sizes = {name: (p.numel(), p.dim()) for name, p in net.named_parameters()}
    pieces, _ = choose_bits(sizes, Block(bits=8), {}, 2048)
    compression = FsdpCompression(net, Block(bits=8), pieces, shard=shard, replicate=not shard)
    for model in (plain, net):
        for step in range(2):
            loss_of(model, step).backward()
    exact, got = full(plain)["up.weight"], full(net)["up.weight"]
    steps = [sum(counts) for counts in zip(*(group.steps for group in compression.groups), strict=True)]
    return float((got - exact).norm() / exact.norm()), same_everywhere(full(net)), steps


@pytest.mark.parametrize("shard", [True, False])
def test_one_axis_of_hsdp_alone(ranks: Pool, shard: bool) -> None:
    for wrong, agree, steps in ranks(4, one_axis, shard, allow_groups=True):
        assert 1e-4 < wrong < 0.03
        assert agree
        assert steps == ([6, 0] if shard else [0, 6])


def summed(net: Any, steps: range) -> torch.Tensor:
    """The sum over steps of the gradients of one parameter, each from the same weights and data."""
    total: Any = 0.0
    for _ in steps:
        net.zero_grad()
        loss_of(net, 0).backward()
        total = total + full(net)["up.weight"]
    return torch.as_tensor(total)


def carried_over(replicas: int) -> tuple[float, float, bool, bool]:
    """What is missing after many steps without and with error feedback; whether a resumed run has the same bits."""
    codec, steps = Block(bits=2, stochastic=False), 12
    exact = summed(make(None, replicas=replicas), range(1)) * steps
    without = summed(make(codec, replicas=replicas), range(steps))
    net = make(codec, replicas=replicas, error_feedback=True)
    first = summed(net, range(steps // 2))
    state = trimtab.state_dict(net)
    with_it = first + summed(net, range(steps // 2))
    again = make(codec, replicas=replicas, error_feedback=True)
    trimtab.load_state_dict(again, state)
    resumed = first + summed(again, range(steps // 2))
    missing = [float((total - exact).norm() / exact.norm()) for total in (without, with_it)]
    return *missing, same_everywhere(full(net)), torch.equal(resumed, with_it)  # type: ignore[return-value]


def test_error_feedback_of_the_scatter_sends_in_the_end_what_was_meant(ranks: Pool) -> None:
    for without, with_it, agree, resumed in ranks(3, carried_over, 1, allow_groups=True):
        assert with_it < 0.4 * without
        assert agree
        assert resumed


def adapting(replicas: int) -> tuple[list[Any], dict[str, int], bool, bool]:
    """History and bits, whether replicas agree, and whether a resumed run makes the same decisions."""
    config = trimtab.Adaptive(family="bits-scaled", warmup=4, period=4, look=4)

    def train(net: Any, steps: range) -> None:
        for step in steps:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()

    net = make(None, replicas=replicas)
    trimtab.compress(net, config)
    train(net, range(7))
    saved = {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}
    state = trimtab.state_dict(net)
    train(net, range(7, 12))
    again = make(None, replicas=replicas)
    trimtab.compress(again, trimtab.Adaptive(family="bits", look=6))
    with torch.no_grad():
        for name, p in again.named_parameters():
            local = distribute_tensor(saved[name], p.device_mesh, p.placements).to_local()
            p.to_local().copy_(local)
    trimtab.load_state_dict(again, state)
    train(again, range(7, 12))
    same = all(torch.equal(full(again, False)[n], v) for n, v in full(net, False).items())
    compression = fsdp_compression_of(net)
    assert compression is not None
    bits = {name: bits for name, (_, bits, _) in compression.pieces.items()}
    controller = adaptive_of(net)
    assert controller is not None
    return controller.history, bits, same_everywhere(full(net)), same


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2)])
def test_bits_adapt_on_all_ranks_alike(ranks: Pool, world: int, replicas: int) -> None:
    results = ranks(world, adapting, replicas, allow_groups=True)
    for history, bits, agree, resumed in results:
        assert history
        assert history[0].step == 6
        assert (history, bits) == (results[0][0], results[0][1])
        assert bits["up.bias"] == 0
        assert 1 <= bits["up.weight"] < 4
        assert agree
        assert resumed
