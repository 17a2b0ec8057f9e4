"""Models of every family in the table of docs/tensor-parallel.md train on uneven ranks as on a single device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.sharding.jobs import convert

from trimtab.bench.scenarios.tp.families import EXACT, family_gap
from trimtab.errors import TrimtabError
from trimtab.models.families import FAMILIES, REFUSED
from trimtab.models.further_families import FURTHER, IN_PART
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

SECONDS = 150.0
PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


PARTS = 4
"""The families are checked in as many calls, so that none is near its time limit on a busy machine."""


def gaps(part: int) -> dict[str, float]:
    return {family.name: family_gap(family) for family in FAMILIES[part::PARTS]}


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_trains_as_a_single_device(ranks: Pool, part: int) -> None:
    """Loss, gradients and updates of three steps with uneven shares; units move in the middle."""
    for found in ranks(2, gaps, part, timeout=SECONDS):
        assert {name: gap for name, gap in found.items() if not gap < EXACT} == {}
        assert found.keys() == {family.name for family in FAMILIES[part::PARTS]}


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_trains_as_a_single_device_on_three_ranks(ranks: Pool, part: int) -> None:
    for found in ranks(3, gaps, part, timeout=SECONDS):
        assert {name: gap for name, gap in found.items() if not gap < EXACT} == {}


def further_gaps(part: int) -> dict[str, float]:
    return {family.name: family_gap(family) for family in (*FURTHER, *IN_PART)[part :: 2 * PARTS]}


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("part", range(2 * PARTS))
def test_further_families_train_as_a_single_device(ranks: Pool, part: int) -> None:
    for found in ranks(2, further_gaps, part, timeout=SECONDS):
        assert {name: gap for name, gap in found.items() if not gap < EXACT} == {}


def test_the_docs_name_the_further_families() -> None:
    text = PAGE.read_text().replace("\n", " ")
    for families, start in ((FURTHER, "So do "), (IN_PART, "whole on every rank: ")):
        sentence = text.split(start)[1].split(". ")[0]
        assert sentence == ", ".join(family.name for family in families)


def everything_is_split() -> dict[str, dict[str, str]]:
    return {family.name: sharded_model(convert(family.make()), "").replicated for family in FAMILIES}


@pytest.mark.soak
def test_no_linear_map_of_a_layer_is_left_whole(ranks: Pool) -> None:
    for replicated in ranks(2, everything_is_split, timeout=SECONDS):
        assert {name: reasons for name, reasons in replicated.items() if reasons} == {}


DROPOUTS: dict[str, dict[str, float]] = {
    "BERT": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "T5": {"dropout_rate": 0.2},
    "OPT": {"dropout": 0.2, "attention_dropout": 0.2},
}


def dropout_losses() -> dict[str, list[float]]:
    """Losses with dropout by shares; torch's random state differs between the ranks and the shares."""
    losses: dict[str, list[float]] = {}
    for name, dropouts in DROPOUTS.items():
        family = next(family for family in FAMILIES if family.name == name)
        family = replace(family, config={**family.config, **dropouts})
        for shares in ([1, 2], [2, 1], [1, 0]):
            model = convert(family.make(), shares=shares)
            torch.manual_seed(10 * dist.get_rank() + shares[0])
            losses.setdefault(name, []).append(float(family.loss(model, 0).detach()))
        losses[name].append(float(family.loss(model.eval(), 0).detach()))
    return losses


@pytest.mark.timeout(2 * SECONDS)
def test_masks_of_dropout_depend_on_neither_rank_nor_shares(ranks: Pool) -> None:
    first, second = ranks(2, dropout_losses, timeout=SECONDS)
    for name, (*trained, evaluated) in first.items():
        assert second[name] == pytest.approx(first[name], abs=EXACT)
        assert trained == pytest.approx([trained[0]] * 3, abs=EXACT)
        assert abs(trained[0] - evaluated) > 1e-4, f"{name}: dropout did nothing"


def refusals() -> dict[str, str]:
    assert dist.get_world_size() == 2
    messages = {}
    for family in REFUSED:
        try:
            convert(family.make())
        except TrimtabError as error:
            messages[family.name] = str(error)
    return messages


@pytest.mark.timeout(2 * SECONDS)
def test_a_family_without_units_is_refused_with_the_reason(ranks: Pool) -> None:
    for messages in ranks(2, refusals, timeout=SECONDS):
        assert "layers.*.mixer.in_proj are used by" in messages["Mamba"]


def test_the_table_of_the_docs_lists_these_families() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", PAGE.read_text(), flags=re.MULTILINE)
    table = {name: units for name, units in rows if name != "family" and not name.startswith("-")}
    split = {family.name: ", ".join(family.units) for family in FAMILIES}
    assert table == {**split, **{family.name: "refused" for family in REFUSED}}
