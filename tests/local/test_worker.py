"""Local steps on real ranks, compared with the same rounds computed in one process."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.local.rounds import WIDTH, batch, flat, in_one_process, net, one_step, optimizer_for, wide_net
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.running_local_steps import local_steps_of
from trimtab.errors import TrimtabError


def on_ranks(
    steps: int,
    samples: Sequence[int],
    settings: dict[str, Any],
    wrap: bool,
    make: Callable[[], nn.Module] = net,
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    model = make()
    if rank:  # all begin with the first rank's weights
        for p in model.parameters():
            p.data.zero_()
    if wrap:
        model = DistributedDataParallel(model)
    trimtab.local_steps(model, **settings)
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, rank, samples[rank])
    model(batch(0, 0)[0])  # what follows the last step happens before the next forward pass
    own = flat(model).clone()
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    assert torch.equal(flat(model), own)
    local = local_steps_of(model)
    assert local is not None
    local.close()
    return own, agreed


SETTINGS = {
    "every step": {"every": 1, "fragments": 1, "delay": 0, "outer_lr": 1.0, "outer_momentum": 0.0},
    "rounds": {"every": 4, "fragments": 1, "delay": 0, "outer_lr": 0.7, "outer_momentum": 0.9},
    "delayed": {"every": 4, "fragments": 1, "delay": 3, "outer_lr": 0.7, "outer_momentum": 0.5},
    "fragments": {"every": 6, "fragments": 3, "delay": 2, "outer_lr": 1.1, "outer_momentum": 0.2},
    "one each step": {"every": 4, "fragments": 4, "delay": 1, "outer_lr": 1.1, "outer_momentum": 0.2},
    "two under way, one parameter cut": {
        "every": 6,
        "fragments": 3,
        "delay": 4,
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
        "keep": 0.75,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_are_those_of_one_process(ranks: Pool, name: str) -> None:
    settings, make = SETTINGS[name], wide_net if "cut" in name else net
    samples = (4, 4, 4)
    expected, agreed = in_one_process(14, samples, settings, make=make)
    measured = ranks(3, on_ranks, 14, samples, {**settings, "bits": None}, False, make)
    for (own, of_rank), reference in zip(measured, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_rank, agreed, rtol=1e-5, atol=1e-6)
        assert torch.equal(of_rank, measured[0][1]), "agreed weights are the same to the bit"


def test_changes_count_by_samples_and_ddp_stays_silent(ranks: Pool) -> None:
    settings, samples = SETTINGS["fragments"], (6, 1)
    expected, agreed = in_one_process(14, samples, settings)
    measured = ranks(2, on_ranks, 14, samples, {**settings, "bits": None}, True)
    for (own, of_rank), reference in zip(measured, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_rank, agreed, rtol=1e-5, atol=1e-6)
    even, _ = in_one_process(14, (1, 1), settings)
    assert not torch.allclose(expected[0], even[0], rtol=1e-3), "the shares matter"


def every_step(local: bool, steps: int) -> torch.Tensor:
    """SGD with momentum, gradients of two batches accumulated."""
    ddp = DistributedDataParallel(net())
    if local:
        trimtab.local_steps(ddp, every=1, bits=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        for part in range(2):
            ddp.require_backward_grad_sync = part == 1
            inputs, targets = batch(2 * step + part, dist.get_rank())
            (F.mse_loss(ddp(inputs), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp(batch(0, 0)[0])
    own = local_steps_of(ddp)
    if own is not None:
        own.close()
    return flat(ddp).clone()


def test_rounds_of_one_step_with_sgd_are_ddp(ranks: Pool) -> None:
    for local, ddp in zip(ranks(3, every_step, True, 12), ranks(3, every_step, False, 12), strict=True):
        torch.testing.assert_close(local, ddp, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_in_few_bits_the_agreed_weights_are_equal_to_the_bit(ranks: Pool, bits: int) -> None:
    settings, samples = SETTINGS["fragments"], (4, 4, 4)
    exact, _ = in_one_process(24, samples, settings)
    measured = ranks(3, on_ranks, 24, samples, {**settings, "bits": bits}, False)
    assert all(torch.equal(agreed, measured[0][1]) for _, agreed in measured)
    start = flat(net())
    off = (measured[0][0] - exact[0]).norm() / (exact[0] - start).norm()
    assert 0 < off < (0.5 if bits == 2 else 0.1), "rounded, and close"


def diverged(steps: int) -> tuple[bool, torch.Tensor]:
    """Rank 1's weights become NaN in the first round."""
    model = net()
    trimtab.local_steps(model, every=4, bits=None)
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, dist.get_rank())
        if step == 2 and dist.get_rank() == 1:
            next(model.parameters()).data.fill_(float("nan"))
    model(batch(0, 0)[0])
    local = local_steps_of(model)
    assert local is not None
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    local.close()
    return bool(torch.isfinite(flat(model)).all()), agreed


def test_a_worker_with_nan_takes_the_weights_of_the_others(ranks: Pool) -> None:
    outcome = ranks(2, diverged, 12)
    assert [finite for finite, _ in outcome] == [True, True]
    assert torch.equal(outcome[0][1], outcome[1][1])
    assert bool(torch.isfinite(outcome[0][1]).all())


def resumed(at: int, steps: int, model_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Train, save and load into a new model in the middle; and without the break."""
    rank, runs = dist.get_rank(), []
    for stop in (None, at):
        model: nn.Module = wide_net()
        trimtab.local_steps(model, every=6, fragments=3, delay=4, bits=4)
        optimizer = optimizer_for(model)
        for step in range(1, steps + 1):
            one_step(model, optimizer, step, rank)
            if step == stop:
                file = io.BytesIO()
                # As a script would save it: between two steps, on every rank.
                torch.save((model.state_dict(), optimizer.state_dict(), trimtab.state_dict(model)), file)
                before = local_steps_of(model)
                assert before is not None
                before.close()
                file.seek(0)
                saved = torch.load(file)
                model = wide_net()
                trimtab.local_steps(model, every=6, fragments=3, delay=4, bits=4)
                optimizer = optimizer_for(model)
                if model_first:
                    model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                trimtab.load_state_dict(model, saved[2])
                if not model_first:
                    model.load_state_dict(saved[0])
        model(batch(0, 0)[0])
        local = local_steps_of(model)
        assert local is not None
        assert local.worker is not None
        sums = torch.tensor(list(local.worker.agreement.state_dict().values()))
        runs.append(torch.cat([flat(model), sums]))
        local.close()
    return runs[0], runs[1]


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_a_resumed_job_continues_to_the_bit(ranks: Pool, at: int, model_first: bool) -> None:
    for whole, continued in ranks(2, resumed, at, 15, model_first):
        assert torch.equal(whole, continued)


def grown(steps: int, state: dict[str, Any]) -> torch.Tensor:
    model = wide_net()
    trimtab.local_steps(model, every=6, fragments=3, delay=2, bits=4)
    trimtab.load_state_dict(model, state)
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, dist.get_rank())
    model(batch(0, 0)[0])
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    local = local_steps_of(model)
    assert local is not None
    local.close()
    return agreed


def saved_state(steps: int) -> dict[str, Any]:
    model = wide_net()
    trimtab.local_steps(model, every=6, fragments=3, delay=2, bits=4)
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, dist.get_rank())
    state = trimtab.state_dict(model)
    local = local_steps_of(model)
    assert local is not None
    local.close()
    return state


def test_other_numbers_of_workers_continue_from_the_agreement(ranks: Pool) -> None:
    state = ranks(2, saved_state, 9)[0]
    agreed = ranks(3, grown, 12, state)
    assert all(torch.equal(each, agreed[0]) for each in agreed)


def agreed_at_the_end(steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = wide_net()
    trimtab.local_steps(
        model, every=6, fragments=3, delay=4, bits=None, outer_lr=1.0, outer_momentum=0.0, keep=0.5
    )
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, dist.get_rank())
    local = local_steps_of(model)
    assert local is not None
    local.finish_step()
    assert local.worker is not None
    local.worker.finish()
    own = flat(model).clone()
    with trimtab.agreed_weights(model, now=True):
        agreed = flat(model).clone()
    one_step(model, optimizer, steps + 1, dist.get_rank())  # and the round goes on
    local.finish_step()
    local.close()
    return own, agreed, flat(model)


def test_workers_can_agree_on_all_that_they_did_until_now(ranks: Pool) -> None:
    (own, agreed, _), (other, same, _) = ranks(2, agreed_at_the_end, 9)
    assert not torch.equal(own, other)
    torch.testing.assert_close(agreed, (own + other) / 2)
    assert torch.equal(agreed, same)


def with_grad_scaler() -> int:
    """Rank 1's gradient is infinite in one step, which its GradScaler skips."""
    model = net()
    trimtab.local_steps(model, every=4, bits=None)
    optimizer = optimizer_for(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(1, 10):
        inputs, targets = batch(step, dist.get_rank())
        loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss * (float("inf") if step == 3 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    local = local_steps_of(model)
    assert local is not None
    local.finish_step()
    local.close()
    assert local.worker is not None
    return local.worker.steps


def test_a_step_that_a_grad_scaler_skips_counts(ranks: Pool) -> None:
    assert ranks(2, with_grad_scaler) == [9, 9]


def running_means(delay: int) -> list[torch.Tensor]:
    """The running mean of a batch norm before and after each round's average is taken."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 3))
    trimtab.local_steps(model, every=4, fragments=1, delay=delay, bits=None)
    optimizer = optimizer_for(model)
    local = local_steps_of(model)
    assert local is not None
    mean, means = norm.running_mean, []
    assert mean is not None
    for step in range(1, 4 + delay + 1):
        one_step(model, optimizer, step, dist.get_rank())
        means.append(mean.clone())
        local.finish_step()
    means.append(mean.clone())
    local.close()
    return means


@pytest.mark.parametrize("delay", [0, 2])
def test_running_statistics_become_their_mean(ranks: Pool, delay: int) -> None:
    first, second = ranks(2, running_means, delay)
    assert not torch.equal(first[3], second[3]), "each worker has its own until the average is taken"
    torch.testing.assert_close(first[-1], (first[3] + second[3]) / 2)
    assert torch.equal(first[-1], second[-1])


def refusals() -> list[str]:
    messages = []
    for options in (
        {"every": 0},
        {"every": "often"},
        {"every": 4, "delay": 5},
        {"every": 4, "bits": 9},
        {"every": 4, "fragments": 5, "delay": 0},
        {"max_penalty": 0.0},
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
    ):
        with pytest.raises(TrimtabError) as raised:
            trimtab.local_steps(net(), **options)
        messages.append(str(raised.value))
    model = net()
    trimtab.local_steps(model, every=4)
    with pytest.raises(TrimtabError) as raised:
        trimtab.local_steps(model, every=4)
    messages.append(str(raised.value))
    local = local_steps_of(model)
    assert local is not None
    local.close()
    return messages


def test_bad_input_is_refused_before_work_starts(ranks: Pool) -> None:
    for messages in ranks(2, refusals):
        for words, message in zip(
            (
                "every=0",
                "'auto'",
                "delay=5",
                "bits=9",
                "fragments=5",
                "max_penalty",
                "none of the model's",
                "call it once",
            ),
            messages,
            strict=True,
        ):
            assert words in message


def automatic(steps: int) -> tuple[str, torch.Tensor]:
    model = net()
    trimtab.local_steps(model)
    optimizer = optimizer_for(model)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step, dist.get_rank())
    model(batch(0, 0)[0])
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    local = local_steps_of(model)
    assert local is not None
    text = trimtab.explain(model)
    local.close()
    return text, agreed


def test_settings_are_chosen_from_measurements(ranks: Pool) -> None:
    # The longest round of two workers has 130 steps, and a fragment is taken at most half a round after its turn.
    outcome = ranks(2, automatic, 220)
    assert "workers agree every" in outcome[0][0]
    assert torch.equal(outcome[0][1], outcome[1][1])
    assert not torch.equal(outcome[0][1], flat(net()))
