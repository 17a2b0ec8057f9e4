"""Capture knows what tensor parallelism would divide."""

from __future__ import annotations

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for

from trimtab.measure.capture.capture import capture_workload
from trimtab.workload import Workload


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
