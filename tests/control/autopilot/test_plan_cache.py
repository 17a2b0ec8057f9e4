"""A kept plan is taken for the job that it was made for, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.control.autopilot.observed_step import ObservedStep, StepKind
from trimtab.control.autopilot.plan_cache import PlanCache
from trimtab.planning.plan_search import BUDGET

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Module(nn.Linear):
    """Has the attribute by which Lightning's modules say how they optimize."""

    automatic_optimization = True


class Other(Module):
    """The same parameters, other code."""


def keys() -> list[str]:
    def key(kind: type[Module] = Module, manual: bool = False, frozen: bool = False) -> str:
        model = kind(4, 4)
        model.automatic_optimization = not manual
        model.weight.requires_grad_(not frozen)
        return PlanCache.of_job(DistributedDataParallel(model), frozenset({"bits"}), BUDGET).path.name

    made = [key(), key(), key(Other), key(manual=True), key(frozen=True)]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    made.append(key())
    torch.set_float32_matmul_precision(before)
    return made


def test_what_a_plan_depends_on_is_in_its_name(ranks: Pool) -> None:
    first, again, *others = ranks(1, keys)[0]
    assert first == again
    assert len({first, *others}) == 5


def test_steps_that_one_plan_fits() -> None:
    step = ObservedStep(batch={"x": torch.zeros(8, 64), "y": torch.zeros(8), "flag": True}, autocast="bf16")
    kind = step.kind
    assert sorted(kind.elements) == [0, 1, 64]
    assert kind.like(ObservedStep(batch={**step.batch, "x": torch.zeros(5, 70)}, autocast="bf16").kind)
    assert not kind.like(ObservedStep(batch={**step.batch, "x": torch.zeros(8, 256)}, autocast="bf16").kind)
    assert not kind.like(ObservedStep(batch=step.batch, autocast=None).kind)
    assert not kind.like(StepKind(autocast="bf16", elements=(64,)))
