"""Local steps of real training loops: hosts as workers, uneven batches, and everything a script does around a step."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.local.rounds import WIDTH, batch, flat, in_one_process, net, one_step, optimizer_for
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trimtab
from trimtab.control.running_local_steps import local_steps_of
from trimtab.control.shares.script_hooks import take_over
from trimtab.model_state import state_of
from trimtab.planning.local_steps import LocalChoice
from trimtab.planning.shares.batch import Adjust

SETTINGS: dict[str, Any] = {"every": 6, "fragments": 3, "delay": 2, "outer_lr": 1.1, "outer_momentum": 0.2}


def close(model: nn.Module) -> None:
    local = local_steps_of(model)
    assert local is not None
    local.finish_step()
    local.close()


def agreed(model: nn.Module) -> torch.Tensor:
    with trimtab.agreed_weights(model):
        return flat(model).clone()


def two_hosts(module: nn.Module) -> DistributedDataParallel:
    """Ranks 0 and 1 are one host, ranks 2 and 3 another; hosts are workers."""
    before = os.environ.get("GROUP_RANK")
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        model = DistributedDataParallel(module)
        trimtab.local_steps(model, **SETTINGS, bits=None)
    finally:
        os.environ.pop("GROUP_RANK") if before is None else os.environ.update(GROUP_RANK=before)
    return model


def on_hosts(steps: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    rank = dist.get_rank()
    model = two_hosts(net())
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, rank)
    explanation = trimtab.explain(model)
    close(model)
    return flat(model).clone(), agreed(model), explanation


def test_ranks_of_a_host_are_one_worker(ranks: Pool) -> None:
    def of_host(step: int, host: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*(batch(step, rank) for rank in (2 * host, 2 * host + 1)), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    expected, of_all = in_one_process(14, (8, 8), SETTINGS, of_host)
    outcome = ranks(4, on_hosts, 14)
    for rank, (own, of_rank, explanation) in enumerate(outcome):
        torch.testing.assert_close(own, expected[rank // 2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_rank, of_all, rtol=1e-5, atol=1e-6)
        assert torch.equal(of_rank, outcome[0][1]), "agreed weights are the same to the bit"
        assert torch.equal(own, outcome[rank // 2 * 2][0]), "ranks of a host have the same weights"
        assert "2 hosts" in explanation
        assert "the loss is expected to be" in explanation


def agreement_of_hosts(alike: bool) -> tuple[float | None, bool]:
    """Hosts see the same batches, or their own; and whether running statistics stay with their rank in a round."""
    rank = dist.get_rank()
    model = two_hosts(nn.Sequential(net(), nn.BatchNorm1d(3)))
    optimizer = optimizer_for(model)
    for step in range(1, 21):
        one_step(model, optimizer, step, rank % 2 if alike else rank, samples=8)
    mean = model.module[1].running_mean
    everyone = [torch.empty_like(mean) for _ in range(4)]
    dist.all_gather(everyone, mean)
    local = local_steps_of(model)
    assert local is not None
    assert local.worker is not None
    value = local.worker.agreement.value
    close(model)
    return value, not torch.equal(everyone[0], everyone[1])


def test_agreement_is_measured_between_hosts(ranks: Pool) -> None:
    measured = {alike: ranks(4, agreement_of_hosts, alike) for alike in (True, False)}
    for outcome in measured.values():
        assert len({value for value, _ in outcome}) == 1, "all ranks have measured the same"
        assert all(apart for _, apart in outcome), "DDP broadcasts no buffers between hosts"
    alike, own = measured[True][0][0], measured[False][0][0]
    assert alike is not None
    assert own is not None
    assert alike == pytest.approx(1.0, abs=1e-3)
    assert own < 0.98


class Slow(nn.Module):
    """A step so slow that any exchange is fast enough."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        outputs: torch.Tensor = self.net(inputs)
        return outputs


def fast_enough() -> tuple[str, bool, bool, list[float]]:
    rank = dist.get_rank()
    model = DistributedDataParallel(Slow())
    trimtab.local_steps(model)
    optimizer = optimizer_for(model)
    apart = []
    for step in range(1, 10):
        one_step(model, optimizer, step, rank)
        everyone = [torch.empty_like(flat(model)) for _ in range(2)]
        dist.all_gather(everyone, flat(model))
        apart.append(float((everyone[0] - everyone[1]).abs().max()))
    local = local_steps_of(model)
    assert local is not None
    local.close()
    state = trimtab.state_dict(model)
    return trimtab.explain(model), model.require_backward_grad_sync, "local_steps" in state, apart


def test_ddp_goes_back_to_every_step_where_that_is_fast_enough(ranks: Pool) -> None:
    for explanation, synchronizes, has_state, apart in ranks(2, fast_enough):
        assert "local steps are off" in explanation
        assert "would gain nothing" in explanation
        assert synchronizes
        assert not has_state
        assert min(apart[:6]) > 0, "each rank for itself while steps are timed"
        assert max(apart[6:]) == 0, "then weights, optimizer states and gradients are the same"


def with_a_static_graph() -> tuple[str, list[float]]:
    model = DistributedDataParallel(Slow(), static_graph=True)
    trimtab.local_steps(model)
    optimizer = optimizer_for(model)
    for step in range(1, 12):
        one_step(model, optimizer, step, dist.get_rank())
    text = trimtab.explain(model)
    of_all = agreed(model).tolist()
    close(model)
    return text, of_all


def test_a_static_graph_takes_the_shortest_rounds_instead(ranks: Pool) -> None:
    (text, first), (_, second) = ranks(2, with_a_static_graph)
    assert "agree every 2 steps" in text
    assert first == second


def through_a_loader(shares: tuple[int, int], steps: int) -> torch.Tensor:
    inputs, targets = samples(8 * steps)
    data = trimtab.loader(TensorDataset(inputs, targets), 8, shares=shares, adjust=None, shuffle=False)
    model = net()
    trimtab.local_steps(model, **SETTINGS, bits=None)
    optimizer = optimizer_for(model)
    for own_inputs, own_targets in data:
        data.weigh(F.mse_loss(model(own_inputs), own_targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    close(model)
    return flat(model).clone()


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, 3, generator=generator)


def test_a_loaders_uneven_batches_count_in_the_agreement_and_not_in_the_gradient(ranks: Pool) -> None:
    inputs, targets = samples(8 * 14)

    def of_worker(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = 8 * (step - 1)
        part = slice(first, first + 6) if worker == 0 else slice(first + 6, first + 8)
        return inputs[part], targets[part]

    expected, _ = in_one_process(14, (6, 2), SETTINGS, of_worker)
    for own, reference in zip(ranks(2, through_a_loader, (6, 2), 14), expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)


def through_an_unchanged_loop(summed: bool, steps: int) -> tuple[torch.Tensor, set[str]]:
    """The script's own loader and loss; batches of 6 and 2 samples after the first three."""
    data = TensorDataset(*samples(8 * steps))
    takeover, give_back = take_over((6, 2))
    try:
        model = DistributedDataParallel(net())
        trimtab.local_steps(model, **SETTINGS, bits=None, workers="ranks")
        takeover.watch(model)
        optimizer = optimizer_for(model)
        for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
            outputs = model(inputs)
            # The sum is divided as for a batch of 4 samples with 3 values each.
            loss = F.mse_loss(outputs, targets, reduction="sum" if summed else "mean")
            (loss / 12 if summed else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        close(model)
    finally:
        give_back()
    return flat(model).clone(), takeover.texts


def test_batches_of_an_unchanged_loop_are_cut_and_count_in_the_agreement(ranks: Pool) -> None:
    inputs, targets = samples(8 * 14)

    def of_worker(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        order = [8 * (step - 1) + place for place in (0, 2, 4, 6, 1, 3, 5, 7)]
        own = 4 if step <= 3 else 6
        part = order[:own] if worker == 0 else order[own:]
        return inputs[part], targets[part]

    expected, _ = in_one_process(14, (6, 2), SETTINGS, of_worker)
    for summed in (False, True):
        for (own, texts), reference in zip(
            ranks(2, through_an_unchanged_loop, summed, 14), expected, strict=True
        ):
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
            assert any("batches of 6/2 samples" in text for text in texts)


def back_to_every_step(steps: int, after: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """As above, with SGD; at the end of the fourth round workers go back to DDP."""
    data = TensorDataset(*samples(8 * steps))
    takeover, give_back = take_over((6, 2))
    try:
        model = DistributedDataParallel(net())
        trimtab.local_steps(model, every=2, workers="ranks")
        local = local_steps_of(model)
        assert local is not None
        local._chooser = lambda **_: LocalChoice(settings=None, penalty=0.0, step_s=1.0, reason="for a test")
        takeover.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
        between = flat(model).clone()
        for step, (inputs, targets) in enumerate(loader, 1):
            outputs = model(inputs)
            if step == after:
                between = flat(model).clone()
            F.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        give_back()
    text = trimtab.explain(model)
    local.close()
    return between, flat(model).clone(), text


def test_after_going_back_to_every_step_cut_batches_count_by_their_samples(ranks: Pool) -> None:
    steps, after = 14, 10
    outcome = ranks(2, back_to_every_step, steps, after)
    inputs, targets = samples(8 * steps)
    reference = net()
    nn.utils.vector_to_parameters(outcome[0][0].clone(), reference.parameters())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(after, steps + 1):
        part = slice(8 * (step - 1), 8 * step)
        F.mse_loss(reference(inputs[part]), targets[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for between, final, text in outcome:
        assert "local steps are off: for a test" in text
        assert torch.equal(between, outcome[0][0]), "weights were averaged once"
        torch.testing.assert_close(final, flat(reference), rtol=1e-5, atol=1e-6)


def at_uneven_speed(pauses: tuple[float, float]) -> torch.Tensor:
    pause = pauses[dist.get_rank()]
    data = trimtab.loader(TensorDataset(*samples(8 * 14)), 8, shares=(6, 2), adjust=None)
    model = net()
    trimtab.local_steps(model, every=4, fragments=2, bits=2)
    optimizer = optimizer_for(model)
    for step, (inputs, targets) in enumerate(data):
        time.sleep(pause * (step % 3))
        data.weigh(F.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(model)
    return flat(model).clone()


def test_runs_with_fixed_shares_are_the_same_to_the_bit_at_any_speed(ranks: Pool) -> None:
    once, again = ranks(2, at_uneven_speed, (0.0, 0.02)), ranks(2, at_uneven_speed, (0.03, 0.0))
    assert all(map(torch.equal, once, again))


def late_with_a_loader() -> tuple[tuple[int, ...], torch.Tensor]:
    """Shares follow speeds. Rank 1 ends its third step when rank 0 has begun its fifth, beyond the second window."""
    rank, message = dist.get_rank(), torch.zeros(1)
    data = trimtab.loader(TensorDataset(*samples(8 * 10)), 8, adjust=Adjust(window=2), shuffle=False)
    model = net()
    trimtab.local_steps(model, every=10, fragments=1, bits=None)
    optimizer = optimizer_for(model)
    for step, (inputs, targets) in enumerate(data, 1):
        if rank == 0 and step == 5:
            dist.send(message, 1)
        elif rank == 1 and step == 3:
            dist.recv(message, 0)
        data.weigh(F.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    local = local_steps_of(model)
    assert local is not None
    local.finish_step()
    local.worker.fragments[0].take()  # type: ignore[union-attr]
    of_all = agreed(model)
    local.close()
    return data.shares, of_all


def test_a_late_worker_does_not_hold_others_up_where_shares_follow_speeds(ranks: Pool) -> None:
    (shares, first), (same, second) = ranks(2, late_with_a_loader)
    assert shares == same, "both have decided the same"
    assert torch.equal(first, second)


def as_scripts_do() -> dict[str, Any]:
    """A schedule, clipping, a GradScaler, EMA, gradient accumulation and an evaluation at the agreed weights."""
    rank = dist.get_rank()
    model = DistributedDataParallel(net())
    trimtab.local_steps(model, every=4, bits=4, workers="ranks")
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = optimizer_for(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    evaluations = []
    for step in range(1, 13):
        for half in range(2):
            inputs, targets = batch(2 * step + half, rank)
            scaler.scale(F.mse_loss(model(inputs), targets) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            model.eval()
            with trimtab.agreed_weights(model), torch.no_grad():
                evaluations.append(float(F.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1])))
                ema.update_parameters(model.module)
            model.train()
    worker = local_steps_of(model)
    assert worker is not None
    close(model)
    assert worker.worker is not None
    return {
        "own": flat(model).clone(),
        "agreed": agreed(model),
        "ema": flat(ema.module).clone(),
        "evaluations": evaluations,
        "lr": optimizer.param_groups[0]["lr"],
        "steps": worker.worker.steps,
        "copied": state_of(ema.module).local_steps is not None,
    }


def test_what_scripts_do_around_a_step_works(ranks: Pool) -> None:
    first, second = ranks(2, as_scripts_do)
    for one in (first, second):
        assert one["steps"] == 12, "accumulated batches are one step"
        assert one["lr"] < 1e-3, "the schedule has come to its end"
        assert not one["copied"], "a copy of the model for EMA does not train"
        assert len(set(one["evaluations"])) == 3
    assert not torch.equal(first["own"], second["own"])
    for key in ("agreed", "ema"):
        assert torch.equal(first[key], second[key])
    assert first["evaluations"] == second["evaluations"], "evaluated at the agreed weights"
