"""Scripts that do more to their weights than step an optimizer: local steps notice, or step aside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.local.rounds import batch, flat, net, one_step, optimizer_for
from tests.support.pool import Pool
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.running_local_steps import local_steps_of
from trimtab.errors import TrimtabError


def other_weights() -> dict[str, torch.Tensor]:
    return {name: value + 1.0 for name, value in net().state_dict().items()}


def close(model: nn.Module) -> None:
    local = local_steps_of(model)
    assert local is not None
    local.close()


def loaded(at: int, every: int | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights are loaded after so many steps; the learning rate is 0 from then on."""
    ddp = DistributedDataParallel(net())
    trimtab.local_steps(ddp, every=every, workers="ranks")  # type: ignore[arg-type]
    optimizer = optimizer_for(ddp)
    for step in range(at):
        one_step(ddp, optimizer, step, dist.get_rank())
    ddp.module.load_state_dict(other_weights())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in range(14):
        one_step(ddp, optimizer, step, dist.get_rank())
    ddp(batch(0, 0)[0])
    with trimtab.agreed_weights(ddp):
        agreed = flat(ddp).clone()
    close(ddp)
    return flat(ddp).clone(), agreed


@pytest.mark.parametrize(("at", "every"), [(0, 4), (6, 4), (0, "auto"), (3, "auto")])
def test_training_continues_from_weights_that_the_script_loads(
    ranks: Pool, at: int, every: int | str
) -> None:
    expected = torch.cat([value.reshape(-1) for value in other_weights().values()])
    for own, agreed in ranks(2, loaded, at, every):
        assert torch.equal(own, expected)
        if every != "auto":
            assert torch.equal(agreed, expected)


def evaluated_elsewhere(swap: bool) -> torch.Tensor:
    """Rank 0 evaluates other weights now and then, and loads its own again."""
    model = net()
    trimtab.local_steps(model, every=4)
    optimizer = optimizer_for(model)
    for step in range(14):
        one_step(model, optimizer, step, dist.get_rank())
        if swap and step % 3 == 0 and dist.get_rank() == 0:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(other_weights())
            model.load_state_dict(own)
    model(batch(0, 0)[0])
    close(model)
    return flat(model).clone()


def test_weights_that_are_loaded_and_put_back_change_nothing(ranks: Pool) -> None:
    for plain, swapped in zip(
        ranks(2, evaluated_elsewhere, False), ranks(2, evaluated_elsewhere, True), strict=True
    ):
        assert torch.equal(plain, swapped)


def updated_by_hand(model: nn.Module, steps: int) -> None:
    for step in range(steps):
        inputs, targets = batch(step, dist.get_rank())
        F.mse_loss(model(inputs), targets).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
                p.grad = None


def stepped_aside(how: str, every: int | str) -> tuple[str, torch.Tensor]:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(net())
    trimtab.local_steps(ddp, every=every, workers="ranks")  # type: ignore[arg-type]
    optimizer: Any = optimizer_for(ddp)
    if how == "zero":
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    if how == "join":
        with Join([ddp]):
            for step in range(8 + 2 * rank):
                one_step(ddp, optimizer, step, rank)
    elif how == "zero":
        for step in range(8):
            one_step(ddp, optimizer, step, rank)
    else:
        updated_by_hand(ddp, 8)
    text = trimtab.explain(ddp)
    close(ddp)
    return text, flat(ddp).clone()


@pytest.mark.parametrize("every", [4, "auto"])
@pytest.mark.parametrize(
    ("how", "reason"), [("hand", "without a step of a torch"), ("zero", "ZeroRedundancy"), ("join", "Join")]
)
def test_where_rounds_cannot_be_ddp_exchanges_every_step(
    ranks: Pool, how: str, reason: str, every: int | str
) -> None:
    (text, first), (_, second) = ranks(2, stepped_aside, how, every)
    assert "local steps are off" in text
    assert reason in text
    assert torch.equal(first, second)


def by_hand_without_ddp() -> str:
    model = net()
    trimtab.local_steps(model, every=4)
    with pytest.raises(TrimtabError) as raised:
        updated_by_hand(model, 8)
    close(model)
    return str(raised.value)


def test_a_plain_module_that_is_updated_by_hand_is_refused(ranks: Pool) -> None:
    assert all("without a step of a torch optimizer" in message for message in ranks(2, by_hand_without_ddp))


def saved_by_one(steps: int, settings: dict[str, Any]) -> int:
    """The first rank saves alone, when settings are to be chosen or something to be sent, while the other waits."""
    ddp = DistributedDataParallel(net())
    trimtab.local_steps(ddp, **settings)
    optimizer = optimizer_for(ddp)
    for step in range(1, steps + 1):
        one_step(ddp, optimizer, step, dist.get_rank())
        if dist.get_rank() == 0:
            if settings.get("delay") != 0:
                with trimtab.agreed_weights(ddp):
                    pass
            trimtab.state_dict(ddp)
        dist.barrier()
    close(ddp)
    return step


@pytest.mark.parametrize("settings", [{}, {"every": 2}, {"every": 5}, {"every": 2, "delay": 0}])
def test_one_rank_may_save_alone_at_any_step(ranks: Pool, settings: dict[str, Any]) -> None:
    assert ranks(2, saved_by_one, 9, settings) == [9, 9]


def complex_weights() -> str:
    with pytest.raises(TrimtabError) as raised:
        trimtab.local_steps(nn.Linear(2, 2, dtype=torch.complex64), every=4)
    return str(raised.value)


def test_complex_weights_are_refused(ranks: Pool) -> None:
    assert all("is complex" in message for message in ranks(2, complex_weights))
