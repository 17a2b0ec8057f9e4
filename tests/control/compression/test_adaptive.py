"""Adaptive compression in real jobs: all ranks switch together, resumed runs repeat, the guard saves a run."""

from __future__ import annotations

import contextlib
import io
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.faults import Delay, Throttle
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab import Adaptive
from trimtab.codec import Block
from trimtab.control.compression.ddp import adaptive_of, compression_of
from trimtab.control.compression.sampled_layers import Layer, SampledLayers

if TYPE_CHECKING:
    from tests.support.pool import Pool

    from trimtab.control.compression.adaptive import Controller

QUICK: dict[str, Any] = {"warmup": 4, "look": 4, "period": 8}
FAMILIES = ("bits", "bits-feedback", "bits-scaled", None)
"""None is settled by the optimiser."""


class Net(nn.Module):
    """Layers whose gradients differ by orders of magnitude, so that plans are worth making."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) * 0.1**i
        return x


def make(config: Adaptive, **arguments: Any) -> tuple[Ddp, Controller, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = trimtab.compress(Ddp(Net(), bucket_cap_mb=0.02), config, **arguments)
    controller = adaptive_of(ddp)
    assert controller is not None
    return ddp, controller, torch.optim.AdamW(ddp.parameters(), lr=1e-2)


def train(ddp: Ddp, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=generator)
        loss = (ddp(x) - x.flip(1)).square().mean()
        trimtab.observe_loss(ddp, loss)
        loss.backward()
        optimizer.step()


def flat(ddp: Ddp) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def together(family: str | None) -> tuple[list[Any], torch.Tensor, dict[str, int], float]:
    ddp, controller, optimizer = make(Adaptive(family=family, **QUICK))
    train(ddp, optimizer, range(24))
    compression = compression_of(ddp)
    assert compression is not None
    bits = {name: bits for name, (_, bits, _) in compression.pieces.items()}
    return controller.history, flat(ddp), bits, controller.cpu_seconds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world", "faults"), [(2, []), (3, []), (2, [Delay(0.005, rank=0, seed=1)])])
def test_every_rank_switches_at_the_same_step_to_the_same_bits(
    ranks: Pool, family: str | None, world: int, faults: list[object]
) -> None:
    results = ranks(world, together, family, faults=faults, allow_groups=True)
    history, parameters, bits, cpu_seconds = results[0]
    assert cpu_seconds > 0
    assert history[0].step == 6  # a look at the end of the warm-up, and two steps for the news to travel
    if family is None and history[0].reasons[0].startswith("bits-wide"):  # measured faster: 4 bits stay
        assert {bits[f"layers.{i}.weight"] for i in range(4)} == {4}
    else:
        assert history[0].reasons[0].startswith("planned")
        assert len({bits[f"layers.{i}.weight"] for i in range(4)} | {4}) > 1
    assert bits["layers.0.bias"] == 0
    for other in results[1:]:
        assert other[0] == history
        assert torch.equal(other[1], parameters)
        assert other[2] == bits


def same_run_twice() -> bool:
    first, second = together("bits-feedback"), together("bits-feedback")
    return first[0] == second[0] and torch.equal(first[1], second[1])


def test_what_is_decided_does_not_depend_on_the_clock(ranks: Pool) -> None:
    assert ranks(2, same_run_twice, faults=[Delay(0.01, seed=2)], allow_groups=True) == [True, True]


def interrupted(family: str | None, at: int) -> tuple[bool, int]:
    config = Adaptive(family=family, **QUICK)
    whole, controller, optimizer = make(config)
    train(whole, optimizer, range(at))
    checkpoint = {
        "model": {name: value.clone() for name, value in whole.module.state_dict().items()},
        "optimizer": _copied(optimizer.state_dict()),
        "trimtab": _copied(trimtab.state_dict(whole)),
    }
    train(whole, optimizer, range(at, 20))
    # Resumed with another schedule and family at hand: the checkpoint's count.
    resumed, again, optimizer = make(Adaptive(family="bits", look=6))
    resumed.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    trimtab.load_state_dict(resumed, checkpoint["trimtab"])
    train(resumed, optimizer, range(at, 20))
    same = torch.equal(flat(whole), flat(resumed)) and again.history == controller.history
    return same, len(controller.history)


def _copied(state: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world", "at"), [(2, 2), (2, 5), (3, 7), (3, 13)])
def test_a_resumed_run_makes_the_same_decisions_to_the_bit(
    ranks: Pool, family: str | None, world: int, at: int
) -> None:
    """Before the first look; between a look and its switch; after a switch; between later ones.

    With three ranks DDP's buckets decide who adds up what, and those of a first step are others.
    """
    for same, changes in ranks(world, interrupted, family, at, allow_groups=True):
        assert same
        assert changes >= 1


def noisy_descent(guarded: bool) -> tuple[float, float, list[Any], list[str]]:
    """Least squares at a step size that exact gradients bear and 1-bit ones do not."""
    torch.manual_seed(0)
    config = Adaptive(family="bits", start_bits=1, guard=guarded, warmup=10**6, period=100, look=4)
    ddp = trimtab.compress(Ddp(nn.Linear(64, 64, bias=False)), config)
    wanted = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8
    optimizer = torch.optim.SGD(ddp.parameters(), lr=16.0)
    losses = []
    for step in range(60):
        generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        x = torch.randn(256, 64, generator=generator)
        loss = (ddp(x) - x @ wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    controller = adaptive_of(ddp)
    assert controller is not None
    reasons = [reason for change in controller.history for reason in change.reasons]
    return losses[0], losses[-1], controller.history, reasons


def test_a_run_that_diverges_at_one_bit_does_not_with_the_guard(ranks: Pool) -> None:
    for first, last, history, _ in ranks(2, noisy_descent, False, allow_groups=True):
        assert not last < 10 * first
        assert history == []
    for first, last, history, reasons in ranks(2, noisy_descent, True, allow_groups=True):
        assert last < 0.1 * first
        assert history[0].bits["weight"] >= 3
        assert "of its gradient, above" in reasons[0]


def rising_loss() -> list[Any]:
    ddp, controller, _ = make(Adaptive(family="bits", **{**QUICK, "warmup": 10**6}))
    for step in range(40):
        trimtab.observe_loss(ddp, 1.0 if step < 16 else torch.tensor(2.0))
        ddp(torch.randn(4, 64)).square().mean().backward()
    return controller.history


def test_a_loss_that_rises_raises_bits(ranks: Pool) -> None:
    histories = ranks(2, rising_loss, allow_groups=True)
    assert histories[0] == histories[1]
    assert "the loss rose from 1 to 2" in histories[0][0].reasons[0]
    assert set(histories[0][0].bits.values()) == {5}


def broken_gradients() -> tuple[bool, list[Any]]:
    ddp, controller, optimizer = make(Adaptive(family="bits-feedback", **QUICK))
    for step in range(12):
        optimizer.zero_grad()
        (ddp(torch.randn(4, 64)).square().mean() * (math.inf if step in (4, 5) else 1.0)).backward()
        broken = not all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)
        assert broken == (step in (4, 5))
    return all(math.isfinite(layer.norm) for layer in _layers(controller)), controller.history


def _layers(controller: Controller) -> list[Any]:
    return controller._statistics.snapshot().layers() if controller._statistics is not None else []


def test_overflows_reach_the_user_and_do_not_poison_plans(ranks: Pool) -> None:
    for sound, history in ranks(2, broken_gradients, allow_groups=True):
        assert sound
        assert all(reason.startswith("planned") for change in history for reason in change.reasons)


def left_to_itself() -> tuple[str, str, dict[str, int]]:
    torch.manual_seed(0)
    ddp = Ddp(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
    # On a busy machine either family may be measured faster here: leave one.
    trimtab.compress(ddp, error_feedback=True)
    before = trimtab.explain(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(27):
        optimizer.zero_grad()
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
        ddp(x).square().mean().backward()
        optimizer.step()
    compression = compression_of(ddp)
    assert compression is not None
    return before, trimtab.explain(ddp), {n: bits for n, (_, bits, _) in compression.pieces.items()}


def test_the_default_on_a_slow_link_is_adaptive_and_says_so(ranks: Pool) -> None:
    slow = [Throttle(bytes_per_s=20e6)]
    for before, after, bits in ranks(2, left_to_itself, faults=slow, allow_groups=True):
        assert "the link is the bottleneck" in before
        assert "bits are chosen per layer while training runs: bits-feedback takes least time" in before
        assert "since step 25: planned" in after
        assert bits["0.weight"] <= 3


def default_under(optimiser: str | None) -> tuple[set[int], int, Any, torch.Tensor]:
    torch.manual_seed(0)
    ddp = trimtab.compress(Ddp(Net(), bucket_cap_mb=0.02), Adaptive(**QUICK))
    kinds = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adamw": torch.optim.AdamW}
    ways = [kinds[name](ddp.parameters(), lr=1e-3) for name in (optimiser or "").split("+") if name]
    for step in range(8):
        ddp.zero_grad()
        ddp(
            torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))
        ).square().mean().backward()
        for way in ways:
            way.step()
    compression, controller = compression_of(ddp), adaptive_of(ddp)
    assert compression is not None
    assert controller is not None
    coded = [(bits, block) for _, bits, block in compression.pieces.values() if bits]
    return {block for _, block in coded}, min(bits for bits, _ in coded), controller.history, flat(ddp)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw", "rmsprop", "sgd+adamw", None])
def test_the_family_is_one_that_serves_the_optimiser(ranks: Pool, optimiser: str | None) -> None:
    """One that scales every value by its own size cares for small values; one that is not seen may."""
    results = ranks(2, default_under, optimiser, allow_groups=True)
    for blocks, bits, history, weights in results:
        # Others than SGD: short blocks, or none below 4 bits, whichever is measured faster.
        assert blocks == {1024} if optimiser == "sgd" else blocks == {128} or (blocks == {1024} and bits >= 4)
        words = "this optimizer takes gradients as they come"
        if optimiser != "sgd":
            words = "this optimizer may scale"
        assert sum(words in reason for change in history for reason in change.reasons) == 1
        assert torch.equal(weights, results[0][3])


def overridden() -> tuple[dict[str, int], Any]:
    config = Adaptive(family="bits-feedback", **QUICK)
    ddp, controller, optimizer = make(config, overrides={"layers.1.*": Block(bits=8), "layers.2.*": None})
    train(ddp, optimizer, range(10))
    compression = compression_of(ddp)
    assert compression is not None
    return {name: bits for name, (_, bits, _) in compression.pieces.items()}, controller.history


def test_what_the_user_fixed_stays(ranks: Pool) -> None:
    for bits, history in ranks(2, overridden, allow_groups=True):
        assert bits["layers.1.weight"] == 8
        assert bits["layers.2.weight"] == 0
        assert history
        assert not any("layers.1" in name or "layers.2" in name for name in history[0].bits)


def threads_left() -> list[str]:
    import gc
    import threading

    before = set(threading.enumerate())  # an earlier test of this process may have left some
    ddp, controller, optimizer = make(Adaptive(family="bits", **QUICK))
    train(ddp, optimizer, range(5))
    del ddp, controller, optimizer
    gc.collect()
    left = set(threading.enumerate()) - before
    return [thread.name for thread in left if thread.name.startswith("trimtab")]


def test_threads_end_with_their_module(ranks: Pool) -> None:
    assert ranks(2, threads_left, allow_groups=True) == [[], []]


def unable_to_plan() -> tuple[dict[str, int], torch.Tensor, str]:
    ddp, controller, optimizer = make(Adaptive(family="bits", **QUICK))
    controller.planner._policy = "no such"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        train(ddp, optimizer, range(16))
    compression = compression_of(ddp)
    assert compression is not None
    return {name: bits for name, (_, bits, _) in compression.pieces.items()}, flat(ddp), errors.getvalue()


def test_a_plan_that_fails_leaves_the_bits_and_is_reported_once(ranks: Pool) -> None:
    """Training goes on: what could not be planned is worth less than the job."""
    (first, values, said), (second, others, silent) = ranks(2, unable_to_plan, allow_groups=True)
    assert first == second == {**first, "layers.0.weight": 4}
    torch.testing.assert_close(values, others, rtol=0, atol=0)
    assert said.count("there is no policy 'no such'") == 1
    assert "no such" not in silent


def gradients_that_come_late(broken: float) -> int:
    """Every matrix has a gradient of zero, or an overflow, until after the first plan is due."""
    ddp, controller, optimizer = make(Adaptive(family="bits", **QUICK))
    for step in range(24):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ((ddp(x) - x.flip(1)).square().mean() * (broken if step < 10 else 1.0)).backward()
        if step >= 10:
            optimizer.step()
    return controller.planned_at or 0


@pytest.mark.parametrize("broken", [0.0, math.inf])
def test_the_first_plan_waits_for_a_gradient(ranks: Pool, broken: float) -> None:
    first, second = ranks(2, gradients_that_come_late, broken, allow_groups=True)
    assert first == second > 10


def sampled(values: dict[str, torch.Tensor]) -> SampledLayers:
    """Layers of 4096 values, whose own gradients are their averages."""
    joined = torch.cat(list(values.values()))
    shapes = dict.fromkeys(values, (4, 1024))
    return SampledLayers(shapes, average=joined, own=joined, kept=values, current={})


def run_away(norm: float) -> dict[str, Any]:
    from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings

    planner = BitPlanner("dynamic", PlannerSettings(name="bits", gbit_per_s=1.0), guard=True)
    values = sampled(dict.fromkeys("ab", torch.randn(4096, generator=torch.Generator().manual_seed(0))))
    layers = [
        Layer(name=name, numel=4096, norm=size, latest=size, values=values)
        for name, size in (("a", 1.0), ("b", norm))
    ]
    for step in (20, 40):
        decision = planner.decide(step, layers, {"a": 4, "b": 4}, loss=None, may_plan=True, period=20)
    return decision


def test_a_layer_whose_norm_overflows_does_not_stop_plans() -> None:
    assert run_away(math.inf)["bits"].keys() <= {"a", "b"}
    assert run_away(1.0)["planned"]


@pytest.mark.parametrize("family", ["bits", "bits-scaled"])
def test_with_relative_errors_the_size_of_a_layer_s_gradient_does_not_matter(family: str) -> None:
    from trimtab.planning.compression.bit_planner import BitPlanner, PlannerSettings

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4096, generator=generator) for _ in range(3)]
    found = []
    for large in (1.0, 1000.0):
        planner = BitPlanner("dynamic", PlannerSettings(name=family, gbit_per_s=1.0), guard=False)
        of = {name: own * size for name, own, size in zip("abc", values, (1.0, 1.0, large), strict=True)}
        layers = []
        for name, own in of.items():
            norm = float(own.norm())
            layers.append(Layer(name=name, numel=4096, norm=norm, latest=norm, values=sampled(of)))
        decision = planner.decide(20, layers, dict.fromkeys("abc", 8), loss=None, may_plan=True, period=20)
        found.append(decision["bits"])
    assert (found[0] == found[1]) == (family == "bits-scaled")


def refused() -> str:
    try:
        make(Adaptive(family="bits"), error_feedback=True)
    except trimtab.TrimtabError as error:
        return str(error)
    return "not refused"


def test_mistakes_are_refused_in_words(ranks: Pool) -> None:
    assert "no family 'bits' with error_feedback=True" in ranks(2, refused, allow_groups=True)[0]
    for wrong, words in (
        ({"look": 1}, "look must be at least 2"),
        ({"period": 0}, "at least 1 step"),
        ({"policy": "best"}, "no policy 'best'; choose"),
        ({"family": "magic"}, "no family 'magic'; choose bits"),
        ({"start_bits": 9}, "1 to 8"),
    ):
        with pytest.raises(ValueError, match=words):
            Adaptive(**wrong)
