"""`trimtab.compress` on models of `fully_shard` modules: FSDP2 and HSDP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.doors.fsdp_net import Net, full, loss_of, make, same_everywhere
from tests.doors.trimtab_default import trimtab_default
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import trimtab
from trimtab.codec import Block, PowerSGD
from trimtab.control.compression.fsdp import fsdp_compression_of

if TYPE_CHECKING:
    from tests.support.pool import Pool


def errors(bits: int, replicas: int, precision: Any = None) -> tuple[dict[str, float], bool]:
    plain, compressed = (
        make(codec, replicas=replicas, precision=precision) for codec in (None, Block(bits=bits))
    )
    for net in (plain, compressed):
        loss_of(net, 0).backward()
    got = full(compressed)
    wrong = {name: float((got[name] - e).norm() / e.norm()) for name, e in full(plain).items()}
    return wrong, same_everywhere(got)


@pytest.mark.parametrize(
    ("world", "replicas", "bits", "bound"),
    [(2, 1, 4, 0.3), (3, 1, 4, 0.3), (3, 1, 8, 0.03), (4, 2, 4, 0.4), (4, 2, 8, 0.04), (2, 2, 4, 0.3)],
)
def test_gradients_are_close_and_small_parameters_exact(
    ranks: Pool, world: int, replicas: int, bits: int, bound: float
) -> None:
    for wrong, agree in ranks(world, errors, bits, replicas, allow_groups=True):
        assert agree
        for name, error in wrong.items():
            small = name.endswith("bias") or "norm" in name
            assert error < (1e-5 if small else bound), name
            assert small or error > 1e-4, name


def test_in_lower_precision(ranks: Pool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for wrong, agree in ranks(3, errors, 8, 1, policy, allow_groups=True):
        assert agree
        assert max(wrong.values()) < 0.05


def on_average(world_same_input: bool) -> float:
    """Error of the mean over many steps of the same gradient: what noise without bias averages out."""
    plain, compressed = make(None), make(Block(bits=4))
    x = torch.randn(
        8, 33, generator=torch.Generator().manual_seed(0 if world_same_input else dist.get_rank())
    )
    for net in (plain, compressed):
        for _ in range(24):
            F.mse_loss(net(x), x.flip(1)).backward()
    exact, got = full(plain)["up.weight"], full(compressed)["up.weight"]
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (2, 2)])
def test_rounding_is_unbiased_and_differs_between_steps(ranks: Pool, world: int, replicas: int) -> None:
    """One step is off by about 0.13; were the draws the same every step, so would be the mean of 24."""
    assert max(ranks(world, on_average, replicas, allow_groups=True)) < 0.05


def replica_draws() -> tuple[bool, bool]:
    """Two replicas of a shard, with the same gradients: do they draw the same numbers?"""
    net = make(Block(bits=4), replicas=2)
    compression = fsdp_compression_of(net)
    assert compression is not None
    seen: list[torch.Tensor] = []
    for group in compression.groups:
        inner = group.all_reduce

        def spy(flat: torch.Tensor, *rest: Any, inner: Any = inner) -> bool:
            seen.append(flat.clone())
            return bool(inner(flat, *rest))

        group.all_reduce = spy  # type: ignore[method-assign, assignment]
    x = torch.randn(8, 33, generator=torch.Generator().manual_seed(0))
    F.mse_loss(net(x), x.flip(1)).backward()
    mine = torch.cat([tensor.flatten() for tensor in seen])
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    rank = dist.get_rank()
    return torch.equal(everyone[rank], everyone[(rank + 2) % 4]), same_everywhere(full(net))


def test_replicas_of_a_shard_draw_apart_and_end_with_the_same_bits(ranks: Pool) -> None:
    assert ranks(4, replica_draws, allow_groups=True) == [(False, True)] * 4


def gathered() -> dict[str, Any]:
    net = make(Block(bits=4), weight_bits=8)
    masters = full(net, gradients=False)
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        seen.append(net.up.weight.detach().clone())

    # Both after FSDP2's own hooks: the weights are gathered then.
    net.up.register_forward_pre_hook(look)
    net.up.register_forward_hook(lambda module, inputs, output: output.register_hook(look) and None)
    loss_of(net, 0).backward()
    forward, backward = seen
    handle = net.down.unshard(async_op=True)
    handle.wait()
    bias = net.down.bias.detach().clone()
    later = net.down.weight.detach().clone()
    net.down.reshard()
    after = full(net, gradients=False)
    return {
        "agree": same_everywhere({"forward": forward, "later": later}),
        "passes agree": torch.equal(forward, backward),
        "error": float((forward - masters["up.weight"]).norm() / masters["up.weight"].norm()),
        "bias exact": torch.equal(bias, masters["down.bias"]),
        "masters exact": all(torch.equal(masters[name], after[name]) for name in masters),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_gathered_weights_are_the_same_decoded_ones_everywhere(ranks: Pool, world: int) -> None:
    for outcome in ranks(world, gathered, allow_groups=True):
        assert outcome["agree"]
        assert outcome["passes agree"]
        assert 1e-5 < outcome["error"] < 0.01
        assert outcome["bias exact"]
        assert outcome["masters exact"]


def trained(codec: Block | None, weight_bits: int | None, steps: int) -> list[float]:
    settings: dict[str, Any] = {"weight_bits": weight_bits} if weight_bits is not None else {}
    net = make(codec, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def test_training_with_8_bit_weights_is_as_good_and_with_1_bit_is_not(ranks: Pool) -> None:
    plain = sum(ranks(2, trained, None, None, 80, allow_groups=True)[0][-20:])
    good = sum(ranks(2, trained, Block(bits=4), 8, 80, allow_groups=True)[0][-20:])
    harmed = sum(ranks(2, trained, Block(bits=4), 1, 80, allow_groups=True)[0][-20:])
    assert good < 1.05 * plain
    assert harmed > 1.2 * plain


def not_finite() -> list[bool]:
    outcomes = []
    for bad in (math.nan, math.inf):
        for replicas in (1, 2):
            net = make(Block(bits=4), replicas=replicas)
            (loss_of(net, 0) * (bad if dist.get_rank() == 1 else 1.0)).backward()
            outcomes.append(all(not bool(torch.isfinite(g).all()) for g in full(net).values()))
    return outcomes


def test_nan_and_inf_reach_every_shard(ranks: Pool) -> None:
    assert ranks(4, not_finite, allow_groups=True) == [[True] * 4] * 4


def interrupted() -> bool:
    whole, first, second = (make(Block(bits=4)) for _ in range(3))
    for net, steps in ((whole, range(4)), (first, range(2))):
        for step in steps:
            net.zero_grad()
            loss_of(net, step).backward()
    trimtab.load_state_dict(second, trimtab.state_dict(first))
    for step in range(2, 4):
        second.zero_grad()
        loss_of(second, step).backward()
    left, right = full(whole), full(second)
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_resumed_run_continues_with_the_same_bits(ranks: Pool) -> None:
    assert ranks(2, interrupted, allow_groups=True) == [True, True]


def accumulated(codec: Block | None) -> dict[str, torch.Tensor]:
    net = make(codec)
    for step in range(4):
        net.set_requires_gradient_sync(step == 3)
        loss_of(net, step).backward()
    return full(net)


def unused(codec: Block | None) -> dict[str, torch.Tensor]:
    net = make(codec)
    loss_of(net, 0, spare=False).backward()
    return full(net)


@pytest.mark.parametrize("run", [accumulated, unused])
def test_accumulation_and_unused_parameters(ranks: Pool, run: Any) -> None:
    plain, compressed = (ranks(2, run, codec, allow_groups=True)[0] for codec in (None, Block(bits=8)))
    assert plain.keys() == compressed.keys()
    for name, exact in plain.items():
        torch.testing.assert_close(compressed[name], exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def by_name() -> dict[str, tuple[int, int, int]]:
    net = make(Block(), overrides={"up.*": Block(bits=8, block=64), "spare.weight": None})
    loss_of(net, 0).backward()
    compression = fsdp_compression_of(net)
    assert compression is not None
    assert set(compression.pieces) == {name for name, _ in net.named_parameters()}
    return compression.pieces


def test_overrides_by_name(ranks: Pool) -> None:
    pieces = ranks(2, by_name, allow_groups=True)[0]
    assert pieces["up.weight"][1:] == (8, 64)
    assert pieces["up.bias"][1:] == (8, 64)
    assert pieces["spare.weight"][1] == 0
    assert pieces["down.weight"][1:] == (4, 1024)


def with_tied_weights(codec: Block | trimtab.Adaptive | None) -> dict[str, torch.Tensor]:
    """Gradients of a model of which one weight has two names, and another no `fully_shard` manages."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    net[2].weight = net[0].weight
    fully_shard(net)
    whole = nn.Sequential(net, nn.Linear(64, 64))
    if codec is not None:
        trimtab.compress(whole, codec)  # type: ignore[arg-type]
    for step in range(3):
        whole.zero_grad()
        whole(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    return full(net)


@pytest.mark.parametrize("codec", [Block(bits=8), trimtab.Adaptive(start_bits=8)], ids=["fixed", "adaptive"])
def test_a_tied_weight_is_compressed_once(ranks: Pool, codec: Block | trimtab.Adaptive) -> None:
    plain = ranks(2, with_tied_weights, None, allow_groups=True)[0]
    for gradients in ranks(2, with_tied_weights, codec, allow_groups=True):
        assert gradients.keys() == plain.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, plain[name], rtol=0.05, atol=0.01 * float(plain[name].abs().max())
            )


def on_the_backend() -> tuple[float, float]:
    group = trimtab_default(codec=Block(bits=4))
    wrong, agree = errors(8, 2)
    assert agree
    # What FSDP2 sends by itself is exact on the backend's groups.
    assert group.sequence == 0
    return wrong["norm.weight"], wrong["up.weight"]


def test_on_the_backend_trimtab(ranks: Pool) -> None:
    for small, large in ranks(4, on_the_backend, allow_groups=True):
        assert small < 1e-5
        assert 1e-4 < large < 0.04


def refused(case: str) -> str:
    try:
        if case == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            trimtab.compress(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))  # type: ignore[arg-type]
        elif case == "twice":
            trimtab.compress(make(Block()), Block())
        elif case == "family":
            make(PowerSGD())  # type: ignore[arg-type]
        elif case == "feedback":
            trimtab.compress(make(None), error_feedback=True)
        elif case == "pattern":
            make(Block(), overrides={"typo.*": None})
        elif case == "weights":
            make(Block(), weight_bits=9)
        elif case == "ddp":
            trimtab.compress(nn.parallel.DistributedDataParallel(Net()), Block(), weight_bits=8)
        elif case == "state":
            net = make(Block())
            state = trimtab.state_dict(net)
            state["compression"]["steps"]["other"] = (1, 1)
            trimtab.load_state_dict(net, state)
        elif case == "settings":
            net = make(Block(bits=4 + dist.get_rank()))
            loss_of(net, 0).backward()
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fsdp1", "fully_shard (FSDP2) instead"),
        ("twice", "already compressed"),
        ("family", "use Block(bits=...)"),
        ("feedback", "error_feedback=True needs a codec"),
        ("pattern", "no parameter matches the pattern 'typo.*'"),
        ("weights", "weight_bits must be 1 to 8"),
        ("ddp", "weight_bits is for FSDP2"),
        ("state", "belongs to another model"),
        ("settings", "with other settings"),
    ],
)
def test_what_is_refused(ranks: Pool, case: str, words: str) -> None:
    for message in ranks(2, refused, case, allow_groups=True):
        assert words in message
