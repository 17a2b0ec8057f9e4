"""The tables of the study of bit policies: made with the real codec, and judged as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from benchmarks.studies.bit_policies import (
    SentBits,
    error_table,
    family_rows,
    many_layers,
    policy_rows,
    summary,
)
from tests.support.tasks import a_task

from trimtab.bench.scenarios.bit_frontier import MODELS, Gradients
from trimtab.codec import Block
from trimtab.planning.compression.family import BITS, BITS_FEEDBACK, FAMILIES, LEAST_BITS
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


def test_tables_hold_the_codec_s_own_errors_of_what_would_be_compressed() -> None:
    source = Gradients(a_task(), lr=0.01)
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
    source = Gradients(a_task(), lr=0.01)
    for _ in source.steps(2):
        pass
    rows = policy_rows("m", many_layers(error_table(source.mean), 20))
    assert [row["method"] for row in rows] == list(POLICIES)
    assert all(row["error_over_uniform4"] <= 1 and row["gap_to_exact"] >= -1e-4 for row in rows)
    assert rows[0]["gap_to_exact"] == 0
    assert all(row["bytes_over_uniform4"] <= 1.0 for row in rows if row["method"] != "linear")


def test_feedback_does_not_add_up_and_noise_does() -> None:
    source = Gradients(a_task(), lr=0.01)
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
        plan = SentBits({"w": bits}, FAMILIES[BITS_FEEDBACK])
        for step in range(60):
            gradient = torch.randn(8192, generator=torch.Generator().manual_seed(step))
            plan.send({"w": gradient}, step)
            owed[bits, step] = plan.error / float(gradient.norm())
    assert owed[LEAST_BITS, 59] < 1.2 * owed[LEAST_BITS, 9] < 1
    assert owed[1, 59] > 1.3 * owed[LEAST_BITS, 59]


def test_the_summary_takes_the_figures_of_the_rows_that_it_names() -> None:
    policies = [
        {"model": model, "method": method, "solve_ms": ms, "gap_to_exact": gap}
        for model, ms in (("gpt", 1.0), ("500 layers", 9.0), ("resnet", 2.0), ("llama", 3.0))
        for method, gap in (("dynamic", 0.0), ("kmeans", ms / 10))
    ]
    families = [
        {
            "model": model,
            "method": method,
            "bytes_over_uniform4": size,
            "error_over_uniform4": 4.0,
            "error_over_uniform4_added_up": 0.5,
        }
        for model in MODELS
        for method, size in (
            ("dynamic, bits-feedback", 0.5),
            ("dynamic, bits-feedback, error of uniform 4", 0.7),
        )
    ]
    figures = summary(policies, families)
    assert figures["dynamic_ms_500_layers"] == 9.0
    assert figures["kmeans_worst_gap_to_exact"] == 0.9
    assert figures["resnet_bytes_over_uniform4_at_its_error"] == 0.7
    assert figures["gpt_feedback_error_added_up"] == 0.5
