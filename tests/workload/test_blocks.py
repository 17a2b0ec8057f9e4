from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for
from torch import nn

from trimtab.measure.capture.capture import capture_workload

if TYPE_CHECKING:
    from trimtab.workload import Workload


def captured(name: str) -> Workload:
    with torch.device("meta"):
        return capture_workload(MODELS[name](), batch_for(name, 2))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gpt", "blocks.{}"),
        ("torch_gpt", "body.layers.{}"),
        ("gpt2", "model.transformer.h.{}"),
        ("llama", "model.model.layers.{}"),
    ],
)
def test_layers_are_one_block(name: str, modules: str) -> None:
    workload = captured(name)
    (block,) = workload.blocks
    assert block.modules == tuple(modules.format(i) for i in range(3))
    for place in range(block.length):
        twins = [workload.operators[start + place] for start in block.starts]
        assert len({(o.kind, o.target, o.input_tensors, o.outputs) for o in twins}) == 1


def test_layers_that_differ_are_not_alike() -> None:
    def blocks(*middles: nn.Module) -> list[tuple[str, ...]]:
        layers = [nn.Sequential(middle, nn.ReLU()) for middle in middles]
        workload = capture_workload(nn.Sequential(*layers, nn.Linear(8, 4)), torch.zeros(2, 8))
        return [block.modules for block in workload.blocks]

    assert blocks(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)) == [("0", "1", "2")]
    assert blocks(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)) == [("0", "2")]
    assert blocks(nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 8)) == []


def test_stages_of_a_resnet_are_blocks_of_their_own() -> None:
    workload = captured("resnet")
    for block in workload.blocks:
        assert len(block.modules) > 1
        assert len({module.rpartition(".")[0] for module in block.modules}) == 1
    inside = [
        i for block in workload.blocks for start in block.starts for i in range(start, start + block.length)
    ]
    assert len(inside) == len(set(inside))
