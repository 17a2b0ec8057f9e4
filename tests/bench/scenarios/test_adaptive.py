"""The tables of the adaptive bench: made with the real codec, and judged as the bench says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trimtab.bench.scenarios.adaptive.adaptive import DEFAULT, METHODS, UNIFORM, _summary
from trimtab.bench.scenarios.adaptive.tables import (
    Gradients,
    Plan,
    error_table,
    family_rows,
    many_layers,
    policy_rows,
)
from trimtab.bench.scenarios.adaptive.tasks import Task
from trimtab.bench.scenarios.loss import CANARY
from trimtab.codec import Block
from trimtab.planning.compression.bit_planner import LEAST_BITS
from trimtab.planning.compression.family import BITS, BITS_FEEDBACK, FAMILIES, SGD
from trimtab.planning.compression.policies import POLICIES
from trimtab.random_bits import stream

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class _Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.small(self.large(inputs)).square().mean()
        return loss


def a_task() -> Task:
    def inputs(seed: int, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + rank)),)

    return Task(build=_Squares, inputs=inputs, held_out=lambda: [inputs(1, 0, 0)], lr=0.01)


def test_tables_hold_the_codec_s_own_errors_of_what_would_be_compressed() -> None:
    source = Gradients(a_task())
    assert len(list(source.steps(3))) == 3
    noisy = FAMILIES[BITS]
    (layer,) = error_table(source.mean, noisy)
    gradient = source.mean["large.weight"]
    codec = Block(bits=3, stochastic=noisy.stochastic)
    payload = codec.encode(gradient, name="large.weight", stream=stream(0, 0, 0, 0))
    error = codec.decode(payload, gradient.shape, gradient.dtype) - gradient
    assert layer.errors[2] == pytest.approx(float(error.norm()))
    assert layer.costs[2] == codec.nbytes(gradient.shape, gradient.dtype)
    assert list(layer.errors) == sorted(layer.errors, reverse=True)
    assert error_table(source.mean, FAMILIES[BITS_FEEDBACK], least=2)[0].options == tuple(range(2, 9))


def test_every_policy_has_a_row_within_the_error_of_4_bits() -> None:
    source = Gradients(a_task())
    for _ in source.steps(2):
        pass
    rows = policy_rows("m", many_layers(error_table(source.mean), 20))
    assert [row["method"] for row in rows] == list(POLICIES)
    assert all(row["error_over_uniform4"] <= 1 and row["gap_to_exact"] >= -1e-4 for row in rows)
    assert rows[0]["gap_to_exact"] == 0
    assert all(row["bytes_over_uniform4"] <= 1.0 for row in rows if row["method"] != "linear")


def test_feedback_does_not_add_up_and_noise_does() -> None:
    source = Gradients(a_task())
    for _ in source.steps(2):
        pass
    rows = {row["method"]: row for row in family_rows("m", source, 50)}
    many = "error_over_uniform4_added_up"
    assert rows["uniform 2"][many] > 2
    assert rows["uniform 2, bits-feedback"][many] < 0.5 * rows["uniform 2"][many]
    assert rows["uniform 2, bits-feedback"]["error_over_uniform4"] > 1
    assert rows["uniform 2"]["bytes_over_uniform4"] < 0.6


def test_from_two_bits_on_feedback_owes_no_more_after_many_steps() -> None:
    """Why plans with feedback begin where they do."""
    owed: dict[tuple[int, int], float] = {}
    for bits in (1, LEAST_BITS):
        plan = Plan({"w": bits}, FAMILIES[BITS_FEEDBACK])
        for step in range(60):
            gradient = torch.randn(8192, generator=torch.Generator().manual_seed(step))
            plan.send({"w": gradient}, step)
            owed[bits, step] = plan.error / float(gradient.norm())
    assert owed[LEAST_BITS, 59] < 1.2 * owed[LEAST_BITS, 9] < 1
    assert owed[1, 59] > 1.3 * owed[LEAST_BITS, 59]


def test_the_summary_takes_the_cheapest_uniform_setting_that_is_not_worse() -> None:
    tables = [
        {"part": "policy", "model": model, "method": method, "solve_ms": 1.0, "gap_to_exact": gap}
        for model in ("gpt", "500 layers", "resnet")
        for method, gap in (("dynamic", 0.0), ("kmeans", 0.1))
    ]
    tables += [
        {
            "part": "family",
            "model": model,
            "method": method,
            "bytes_over_uniform4": 0.7,
            "error_over_uniform4": 4.0,
            "error_over_uniform4_added_up": 0.5,
        }
        for model in ("gpt", "resnet")
        for method in ("dynamic, bits-feedback", "dynamic, bits-feedback, error of uniform 4")
    ]
    sizes = dict.fromkeys(METHODS, 4.0) | {"uniform 3": 3.0, "uniform 2": 2.0, "uniform 2, feedback": 2.5}
    training: list[dict[str, Any]] = [
        {
            "optimiser": optimiser,
            "method": m,
            "worse": m in ("uniform 2", CANARY),
            "gap": 0.0,
            "wire_mb": s,
            "wire_mb_at_end": s,
        }
        for optimiser, default in DEFAULT.items()
        for m, s in {**sizes, default: 2.0 if optimiser == SGD else 3.0}.items()
    ]
    summary = _summary(tables, training)
    assert summary["cheapest_uniform_not_worse"] == "uniform 2, feedback"
    assert summary["default_bytes_over_cheapest_uniform"] == 0.8
    assert summary["default_bytes_over_uniform4"] == 0.5
    assert summary["adamw_default_bytes_over_uniform4"] == 0.75
    assert summary["kmeans_worst_gap_to_exact"] == 0.1
    for row in training:
        row["worse"] = row["method"] in UNIFORM
    assert _summary(tables, training)["cheapest_uniform_not_worse"] == "none"
