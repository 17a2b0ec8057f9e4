"""Timing real steps: what is timed adds up, and is put where it was spent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.measure.probes import CPU, group_of_one, tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.cluster.profile import PROFILE_VERSION, DeviceProfile, Profile, merge_profiles
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.operators import (
    StepClock,
    operator_times,
    with_steps,
    without_communication,
)
from trimtab.measure.timing import StepTimes, Timed
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.operators.costs import key_of, workload_key
from trimtab.predict.operators.precision_graph import PrecisionGraph

if TYPE_CHECKING:
    from trimtab.workload import Workload


class Sleeper(nn.Module):
    """Takes a known time forward and another backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(x)  # type: ignore[no-untyped-call]
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch._subclasses.fake_tensor.is_fake(x):
            time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return g


def test_the_intervals_of_a_step_make_up_the_step() -> None:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    clock = StepClock(model, workload, CPU)
    start = time.perf_counter()
    taken = clock.step(lambda: model(*batch), lambda: None)
    whole = time.perf_counter() - start
    assert 0 < taken.total <= whole
    # Every operator is there: nothing has cost nothing.
    assert all(seconds > 0 for seconds in taken.forward)
    assert all(
        seconds > 0 for o, seconds in zip(workload.operators, taken.backward, strict=True) if o.differentiable
    )


def test_time_is_put_where_it_was_spent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Sleeper(), nn.Linear(4, 4))
    batch = torch.randn(2, 4)
    workload = capture_workload(model, (batch,), loss=lambda y: y.sum())
    taken = StepClock(model, workload, CPU).step(lambda: model(batch).sum(), lambda: time.sleep(0.03))
    linear = [o.index for o in workload.operators if o.kind == "linear"]
    between = range(linear[0] + 1, linear[1])
    assert sum(taken.forward[i] for i in between) >= 0.02
    assert sum(taken.backward[i] for i in between) >= 0.04
    assert taken.optimizer >= 0.03
    assert max(taken.forward[i] for i in linear) < sum(taken.forward[i] for i in between)


def test_waiting_for_the_others_is_nobodys_time() -> None:
    model, batch = tiny()
    clock = StepClock(model, capture_workload(model, batch), CPU)
    start = time.perf_counter()
    taken = clock.step(lambda: model(*batch), lambda: None, ready=lambda: time.sleep(0.05))
    assert taken.total <= time.perf_counter() - start - 0.05


def test_a_step_timed_as_a_whole_has_nothing_inside_it() -> None:
    model, batch = tiny()
    seen = []

    def loss() -> torch.Tensor:
        seen.append(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
        found: torch.Tensor = model(*batch)
        return found

    clock = StepClock(model, capture_workload(model, batch), CPU)
    whole = clock.step(loss, lambda: time.sleep(0.01), whole=True)
    assert seen == [False]
    assert min(sum(whole.forward), sum(whole.backward)) > 0
    assert whole.optimizer >= 0.01


def test_hooks_are_gone_after_the_step() -> None:
    model, batch = tiny()
    StepClock(model, capture_workload(model, batch), CPU).step(lambda: model(*batch), lambda: None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_operators_with_one_key_have_one_time() -> None:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    taken = [StepClock(model, workload, CPU).step(lambda: model(*batch), lambda: None) for _ in range(2)]
    found = operator_times(PrecisionGraph(workload), taken, {"blocks.0.qkv": "int8"})
    keys = {str(key_of(o)) for o in workload.operators}
    assert keys < found.keys()
    assert len(found) == len(keys) + 1


def test_pauses_that_fall_into_a_few_operators_of_every_pass_are_counted() -> None:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    count = len(workload.operators)

    def paused(place: int) -> StepTimes:
        """Operators of 1 s, and one pause of 10 s in each pass, in another place every time."""
        times = tuple(11.0 if index == place else 1.0 for index in range(count))
        return StepTimes(forward=times, backward=times, optimizer=0.0)

    found = operator_times(PrecisionGraph(workload), [paused(place) for place in range(4)], {})
    total = sum(found[str(key_of(o))].forward_s for o in workload.operators)
    assert total == pytest.approx(count + 10)


def test_what_follows_a_lowered_operator_is_timed_in_the_type_that_it_hands_on() -> None:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    count = len(workload.operators)
    taken = [StepTimes(forward=(1.0,) * count, backward=(1.0,) * count, optimizer=1.0)]
    graph = PrecisionGraph(workload, results="own", kind="cpu")
    found = operator_times(graph, taken, {"blocks.0.up": "bf16"})
    gelu, norm = workload.by_name["blocks.0/gelu"], workload.by_name["norm/native_layer_norm"]
    assert {str(key_of(gelu, dtype="bf16")), str(key_of(norm))} <= found.keys()
    assert str(key_of(norm, dtype="bf16")) not in found


def test_ddp_without_communication_leaves_gradients_as_they_are() -> None:
    model, batch = tiny()
    with group_of_one():
        ddp = DistributedDataParallel(model)
        without_communication(ddp)
        ddp(*batch).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(*batch).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("plain_first", [True, False])
def test_plain_steps_know_best_what_nobody_set(plain_first: bool) -> None:
    model, batch = tiny()
    workload = capture_workload(model, batch)
    count = len(workload.operators)
    low = dict.fromkeys((n for n in workload.settings if n.endswith("qkv")), "int8")
    slow, fast = (StepTimes(forward=(s,) * count, backward=(s,) * count, optimizer=s) for s in (2.0, 1.0))
    plain: Timed = (2, {}, [slow])
    lowered: Timed = (2, low, [fast])
    timed = [plain, lowered] if plain_first else [lowered, plain]
    found = with_steps(DeviceProfile(called="x"), workload, timed)
    for operator in workload.operators:
        assert found.operators[str(key_of(operator))].forward_s == 2.0
        if operator.setting in low:
            assert found.operators[str(key_of(operator, "int8"))].forward_s == 1.0
    assert found.optimiser is not None
    assert found.optimiser.a * sum(p.numel() for p in model.parameters()) == pytest.approx(1.5)


def test_unlike_models_of_one_class_share_no_batch_sizes_in_a_merged_file() -> None:
    def probed(width: int, *sizes: int) -> tuple[Workload, Profile]:
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        workload = capture_workload(model, torch.zeros(2, 8), loss=lambda y: y.sum())
        step = StepTimes((1e-3,) * len(workload.operators), (1e-3,) * len(workload.operators), 1e-3)
        device = with_steps(DeviceProfile(called="x"), workload, [(size, {}, [step]) for size in sizes])
        device = replace(device, too_large={workload_key(workload): 2 * sizes[-1]})
        return workload, Profile(version=PROFILE_VERSION, trimtab="0", torch="0", devices={"card": device})

    narrow, one = probed(4, 64, 128)
    wide, other = probed(16, 2, 4)
    both = merge_profiles([one, other])
    card = both.devices["card"]
    assert card.batches == {workload_key(narrow): (64, 128), workload_key(wide): (2, 4)}
    assert card.too_large == {workload_key(narrow): 256, workload_key(wide): 8}
    assert out_of_reach(both, narrow, [("card", 64)]) is None
    assert out_of_reach(both, wide, [("card", 64)]) is not None
