"""Bits that change while a DDP job runs: at one step on every rank, and nothing else with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block, PowerSGD
from trimtab.control.compression.ddp import compression_of

if TYPE_CHECKING:
    from tests.support.pool import Pool

    from trimtab.doors.ddp import DdpCompression

NAMES = ("0.weight", "1.weight", "2.weight")
AT = 3


def make(bits: int = 4, **arguments: Any) -> tuple[Ddp, DdpCompression]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in NAMES))
    ddp = trimtab.compress(Ddp(model, bucket_cap_mb=0.02), Block(bits=bits), **arguments)
    compression = compression_of(ddp)
    assert compression is not None
    return ddp, compression


def gradients(ddp: Ddp, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    ddp.zero_grad()
    ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def run(bits: int, changes: dict[str, int] | None, steps: int = 6) -> list[dict[str, torch.Tensor]]:
    ddp, compression = make(bits)
    if changes:
        compression.set_bits(changes, at_step=AT)
    return [gradients(ddp, step) for step in range(steps)]


def both_ways() -> list[tuple[int, str, bool]]:
    """Per step and parameter: whether the changing run has the bits of the run that was so from the start."""
    changing = run(4, {"0.weight": 2, "2.weight": 7})
    fixed = {bits: run(bits, None) for bits in (2, 4, 7)}
    results = []
    for step, each in enumerate(changing):
        expected = {"0.weight": 2, "2.weight": 7} if step >= AT else {}
        for name in NAMES:
            results.append((step, name, torch.equal(each[name], fixed[expected.get(name, 4)][step][name])))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_is_what_it_would_be_had_the_bits_always_been_so(ranks: Pool, world: int) -> None:
    for results in ranks(world, both_ways, allow_groups=True):
        assert len(results) == 6 * len(NAMES)
        assert [(step, name) for step, name, same in results if not same] == []


def owed_and_sent() -> float:
    """What was sent in all, and is owed at the end, against what was meant: over a change of bits."""
    ddp, compression = make(4, error_feedback=True)
    plain = Ddp(nn.Sequential(*(nn.Linear(64, 64) for _ in NAMES)))
    plain.module.load_state_dict(ddp.module.state_dict())
    compression.set_bits(dict.fromkeys(NAMES, 2), at_step=AT)
    sent, meant = torch.zeros(64 * 64), torch.zeros(64 * 64)
    for step in range(6):
        sent += gradients(ddp, step)["1.weight"].view(-1)
        meant += gradients(plain, step)["1.weight"].view(-1)
    assert compression.feedback is not None
    residual = compression.feedback.residual("1.weight")
    assert residual is not None
    owed = residual.clone()
    dist.all_reduce(owed)
    return float((sent + owed - meant).norm() / meant.norm())


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_owed_stays_owed_over_a_change(ranks: Pool, world: int) -> None:
    assert max(ranks(world, owed_and_sent, allow_groups=True)) < 1e-5


def interrupted_before_a_change() -> bool:
    whole, compression = make(4)
    compression.set_bits({"1.weight": 2}, at_step=AT)
    state = None
    for step in range(AT + 2):
        expected = gradients(whole, step)
        if step == 0:
            state = trimtab.state_dict(whole)
    resumed, _ = make(4)
    assert state is not None
    trimtab.load_state_dict(resumed, state)
    for step in range(1, AT + 2):
        got = gradients(resumed, step)
    return all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_change_that_is_due_survives_a_checkpoint(ranks: Pool) -> None:
    assert ranks(2, interrupted_before_a_change, allow_groups=True) == [True, True]


def refused(case: str) -> str:
    try:
        if case == "family":
            _, compression = make()
            compression.codec = PowerSGD()
            compression.set_bits({"0.weight": 2}, at_step=1)
        ddp, compression = make()
        gradients(ddp, 0)
        changes = {
            "begun": {"0.weight": 2},
            "name": {"9.weight": 2},
            "raw": {"0.bias": 2},
            "bits": {"0.weight": 0},
        }[case]
        compression.set_bits(changes, at_step=0 if case == "begun" else 1)
    except trimtab.TrimtabError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("begun", "step 0 has begun"),
        ("name", "no parameter '9.weight'"),
        ("raw", "0.bias travels uncompressed"),
        ("bits", "bits must be 1 to 8, got 0"),
        ("family", "has no bits"),
    ],
)
def test_changes_that_cannot_be_are_refused(ranks: Pool, case: str, words: str) -> None:
    for message in ranks(2, refused, case, allow_groups=True):
        assert words in message


def other_bits_on_rank_one() -> str:
    ddp, compression = make()
    compression.set_bits({"1.weight": 2 + dist.get_rank()}, at_step=1)
    try:
        for step in range(2):
            gradients(ddp, step)
    except Exception as error:
        return str(error)
    return "not refused"


def test_other_bits_on_one_rank_end_with_an_error_not_a_hang(ranks: Pool) -> None:
    for message in ranks(2, other_bits_on_rank_one, allow_groups=True):
        assert "compress gradients with other settings" in message
