"""The GPT of the examples is converted as it is."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.sharding.jobs import convert, difference

from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def train() -> tuple[list[str], float]:
    torch.manual_seed(0)
    kind: Any = runpy.run_path(str(EXAMPLE))["Gpt"]
    alone = kind(context=8, width=24, layers=1, heads=6).double()
    spread = convert(copy.deepcopy(alone), shares=[1, 2])
    tokens = torch.randint(256, (2, 9))
    for model in (alone, spread):
        model(tokens).backward()
    return list(sharded_model(spread, "").blocks), difference(alone, spread, lambda p: p.grad)


def test_the_gpt_of_the_examples_is_spread(ranks: Pool) -> None:
    for blocks, worst in ranks(2, train):
        assert blocks == ["blocks.0.attention", "blocks.0.mlp"]
        assert worst < 1e-6  # its loss is computed in single precision
