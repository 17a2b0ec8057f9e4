"""A damaged or hostile state in a checkpoint is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

import trimtab


def hostile(good: dict[str, Any]) -> list[Any]:
    compression, adaptive = good["compression"], good["adaptive"]
    return [
        None,
        [],
        {"compression": None},
        {"compression": 3},
        {"compression": {}},
        {"compression": {**compression, "version": 99}},
        {"compression": {**compression, "bits": {"no.such.layer": 4}}},
        {"compression": {**compression, "bits": 5}},
        {"compression": {key: value for key, value in compression.items() if key != "seed"}},
        {"adaptive": {**adaptive, "config": {"look": -1}}},
        {"adaptive": {**adaptive, "history": "none"}},
        {"adaptive": b"\0" * 100},
        {"plan": "{" * 10_000},
        {"plan": 5},
    ]


def load_hostile_states() -> list[str]:
    model = DistributedDataParallel(torch.nn.Linear(128, 128))
    trimtab.compress(model, trimtab.Adaptive())
    model(torch.ones(2, 128)).sum().backward()
    outcomes = []
    for state in hostile(trimtab.state_dict(model)):
        try:
            trimtab.load_state_dict(model, state)
        except trimtab.TrimtabError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(f"accepted {str(state)[:80]}")
    return outcomes


def test_hostile_states_are_refused(ranks: Pool) -> None:
    for outcomes in ranks(2, load_hostile_states, allow_groups=True):
        assert [text for text in outcomes if text.startswith("accepted")] == []
