"""Capture knows what tensor parallelism would divide."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for

from trimtab.measure.capture.capture import capture_workload
from trimtab.models.families import FAMILIES
from trimtab.workload import Workload
from trimtab.workload.units import sharded


def captured(name: str) -> Workload:
    with torch.device("meta"):
        model = MODELS[name]()
    return capture_workload(model, batch_for(name, 2))


def test_blocks_are_those_of_tensor_parallel_with_all_between_their_projections() -> None:
    workload = captured("gpt")
    names = [[workload.operators[i].name for i in (*s.into, *s.inside, s.out)] for s in workload.units[:2]]
    assert [(span.name, span.units) for span in workload.units[:2]] == [
        ("blocks.0.attention", 4),
        ("blocks.0.mlp", 256),
    ]
    assert names == [
        ["blocks.0.qkv", "blocks.0/attention", "blocks.0.out"],
        ["blocks.0.up", "blocks.0/gelu", "blocks.0.down"],
    ]


def test_a_model_that_tensor_parallel_refuses_has_none() -> None:
    assert captured("conv").units == ()


@pytest.mark.parametrize("tied", [False, True])
def test_conv1d_of_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    workload = capture_workload(model, {"input_ids": ids, "labels": ids}, loss=lambda output: output.loss)
    assert [(span.name, span.units) for span in workload.units] == [
        ("transformer.h.0.attn", 4),
        ("transformer.h.0.mlp", 128),
    ]


class Torch(torch.nn.Module):
    """A layer of torch's own, with self-attention, cross-attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0](x, x * 2)
        return y


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_attention_of_torch_is_divided_by_heads(device: str) -> None:
    with torch.device(device):
        model, x = Torch(), torch.zeros(2, 8, 32)
    workload = capture_workload(model, x, loss=lambda output: output.sum())
    parameters = [
        {name for index in (*span.into, span.out) for name in workload.operators[index].parameters}
        for span in workload.units
    ]
    assert [(span.name, span.units) for span in workload.units] == [
        ("layers.0.self_attn", 4),
        ("layers.0.multihead_attn", 4),
        ("layers.0.mlp", 64),
    ]
    assert all("in_proj_weight" in " ".join(names) for names in parameters[:2])
    half = sharded(workload, {span.name: span.units // 2 for span in workload.units})
    shapes = {p.name: p.tensor.shape for p in half.parameters}
    for attention in ("self_attn", "multihead_attn"):
        assert prod(shapes[f"layers.0.{attention}.in_proj_weight"]) == 48 * 32
        assert sorted(shapes[f"layers.0.{attention}.out_proj.weight"]) == [16, 32]


def test_experts_are_units() -> None:
    pytest.importorskip("transformers")
    family = next(each for each in FAMILIES if each.name == "Mixtral")
    model: Any = family.make().float()
    ids = torch.arange(16).view(2, 8)
    workload = capture_workload(
        model, {"input_ids": ids, "labels": ids}, loss=lambda output: output.loss, real=True
    )
    spans = {span.name: span for span in workload.units}
    experts = next(span for name, span in spans.items() if name.endswith("mlp.experts"))
    assert experts.units == model.config.num_local_experts
    assert workload.operators[experts.out].name.split("/")[1].startswith("index_add")
    first = workload.operators[experts.into[0]]
    assert first.input_tensors[0].shape[-1] == model.config.hidden_size  # what is summed in backward
    names = {name.rpartition(".")[2] for i in experts.into for name in workload.operators[i].parameters}
    assert names == {"gate_up_proj", "down_proj"}
    half = sharded(workload, {name: span.units // 2 for name, span in spans.items()})
    shapes = {p.name: p.tensor.shape for p in half.parameters if "experts" in p.name}
    assert shapes
    assert {shape[0] for shape in shapes.values()} == {experts.units // 2}
