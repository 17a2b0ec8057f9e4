"""Rounds follow the agreement of workers: shorter ones, or every step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.local.rounds import batch, flat, net, one_step, optimizer_for
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.running_local_steps import local_steps_of
from trimtab.planning.local_steps import LocalChoice, local_settings


def trained(every: int | None, wrap: bool, alike: bool) -> tuple[str, int, float, float, torch.Tensor]:
    """Rounds of four steps; from the fourth on the choice is `every`, or every step."""
    rank = dist.get_rank()
    model: nn.Module = net()
    if wrap:
        model = DistributedDataParallel(model)
    trimtab.local_steps(model, every=4, bits=4)
    local = local_steps_of(model)
    assert local is not None
    asked: list[float] = []

    def choose(*, agreement: float) -> LocalChoice:
        asked.append(agreement)
        settings = None if every is None else local_settings(every, 4, 2, 4)
        return LocalChoice(settings=settings, penalty=0.0, step_s=1.0, reason="they agree too little")

    local._chooser, local._changes = choose, {}
    optimizer = optimizer_for(model)
    for step in range(1, 26):
        one_step(model, optimizer, step, 0 if alike else rank)
    model(batch(0, 0)[0])
    assert len(asked) == (1 if every is None else 2), "after four rounds, and four of the shorter ones"
    worker = local.worker
    value = -1.0 if worker is None or worker.agreement.value is None else worker.agreement.value
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    text = trimtab.explain(model)
    local.close()
    return text, 1 if worker is None else worker.settings.every, asked[0], value, agreed


def test_shorter_rounds_continue_from_the_agreement(ranks: Pool) -> None:
    outcome = ranks(2, trained, 2, False, False)
    for text, every, asked, value, agreed in outcome:
        assert every == 2
        assert "agree every 2 steps" in text
        assert "of a step in common" in text, "what was measured since"
        assert asked == outcome[0][2]
        assert 0 <= value == outcome[0][3] < 1, "measured alike on all workers"
        assert torch.equal(agreed, outcome[0][4])
        assert bool(torch.isfinite(agreed).all())


def test_workers_with_the_same_batches_agree(ranks: Pool) -> None:
    for _, _, asked, value, _ in ranks(2, trained, 2, False, True):
        assert asked == pytest.approx(1.0, abs=0.2)
        assert value == pytest.approx(1.0, abs=0.05)


def test_ddp_goes_back_to_every_step_where_workers_agree_too_little(ranks: Pool) -> None:
    outcome = ranks(2, trained, None, True, False)
    for text, every, _, _, agreed in outcome:
        assert every == 1
        assert "local steps are off: they agree too little" in text
        assert torch.equal(agreed, outcome[0][4]), "gradients are averaged in every step"


def test_a_plain_module_keeps_its_rounds(ranks: Pool) -> None:
    for text, every, _, _, _ in ranks(2, trained, None, False, False):
        assert every == 4
        assert "agree every 4 steps" in text
