"""Tensor parallelism on slices of one GPU: replicas that divide their units differently, and a divided vocabulary."""

from __future__ import annotations

from typing import Any

from tests.gpu.ranks import on_slices
from tests.support.requirements import requires

from trimtab.bench.scenarios.tp import memory, replicas

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"])

SMALL: dict[str, Any] = {"width": 128, "heads": 8, "layers": 2, "batch": 2, "length": 64, "repeats": 3}


def test_replicas_train_alike_however_their_units_are_divided() -> None:
    rows = on_slices(4, replicas.on_rank, **SMALL, speed=1.0)
    assert replicas.replica_summary(rows)["2d_loss_gap"] < 1e-3


def test_a_divided_vocabulary_needs_less_memory_and_trains_alike() -> None:
    rows = on_slices(2, memory.on_rank, **SMALL, what="vocab", entries=8192)
    summary = memory.memory_summary(rows)
    assert summary["vocab_loss_gap"] < 1e-3
    assert summary["vocab_memory"] < 0.8


def test_activations_divided_along_the_sequence_need_less_memory_and_train_alike() -> None:
    rows = on_slices(2, memory.on_rank, **SMALL, what="sequence", entries=None)
    summary = memory.memory_summary(rows)
    assert summary["sequence_loss_gap"] < 1e-3
    assert summary["sequence_activations"] > 0
