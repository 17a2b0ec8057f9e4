"""Samples of steps: which steps, what they add up to, and that all ranks choose alike."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from trimtab.control.step_samples import StepSamples, StepTimes, is_sampled, is_traced
from trimtab.report.events import EventWriter


def test_ten_thousand_steps_stay_small() -> None:
    sampled = [step for step in range(1, 10_001) if is_sampled(step)]
    assert sampled[:63] == list(range(1, 64))
    assert len(sampled) < 500
    assert max(b - a for a, b in pairwise(sampled)) == 32, "a live view has news, however long the job"
    assert [step for step in range(1, 1001) if is_traced(step)] == [5, 10, 20, 50, 100, 200, 500, 1000]


def times(step: int, **changes: object) -> StepTimes:
    """A step of 0.1 s: 10 ms data, 50 ms compute, 30 ms exchange, 10 ms optimizer."""
    begin = step * 0.1
    stamps = {"last_end": begin - 0.01, "begin": begin, "forward_end": begin + 0.02, "ready": begin + 0.05}
    stamps |= {"exchanged": begin + 0.08, "end": begin + 0.09}
    return StepTimes(step=step, samples=8, **{**stamps, **changes})  # type: ignore[arg-type]


def test_parts_add_up_and_codec_is_what_is_exposed_of_it(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    samples = StepSamples(torch.device("cpu"), nn.Linear(4, 4))
    # Bucket 7: one stage hidden behind the backward pass, one exposed for 10 ms; bucket 8 overlaps it.
    stages = [(7, 0, 0.52, 0.54), (7, 1, 0.56, 0.57), (8, 0, 0.565, 0.57)]
    trace, step = samples.add(times(5, stages=stages, losses=[2.0, 4.0]), writer)
    writer.close()
    assert step["kind"] == "step"
    measured = [step[name] for name in ("data", "compute", "codec", "wire", "optimizer", "exchange")]
    assert measured == pytest.approx([0.01, 0.05, 0.01, 0.02, 0.01, 0.06], abs=1e-6)
    assert step["seconds"] == pytest.approx(0.1)
    assert (step["loss"], step["samples"], step["steps"], step["bits"]) == (3.0, 8, 1, None)
    assert step["memory"] > 0
    spans = {(lane, name): end - start for lane, name, start, end in trace["spans"]}
    assert spans["wire", "bucket 0, stage 0"] == pytest.approx(0.02, abs=1e-5)
    assert spans["compute", "backward"] == pytest.approx(0.03, abs=1e-5)


def test_a_sample_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    samples = StepSamples(torch.device("cpu"), nn.Linear(4, 4))
    assert samples.add(times(65, losses=[1.0]), writer) == []
    slow = times(66, losses=[2.0], ready=6.6 + 0.07, exchanged=6.6 + 0.1, end=6.6 + 0.11)
    (step,) = samples.add(slow, writer)
    assert (step["step"], step["steps"], step["loss"]) == (66, 2, 1.5)
    assert step["compute"] == pytest.approx(0.06)
    assert step["seconds"] == pytest.approx(0.11)
    assert samples.finish() == []
    samples.add(times(67), writer)
    (last,) = samples.finish()
    assert (last["step"], last["steps"], last["loss"]) == (67, 1, None)
    assert writer.wants_live or writer.live is not None
    writer.close()


def test_a_step_without_gradients_counts_as_compute(tmp_path: Path) -> None:
    """As where a model's output is no tensor; and what a CUDA graph hides is left out."""
    writer = EventWriter(tmp_path, 0)
    samples = StepSamples(torch.device("cpu"), nn.Linear(4, 4))
    (step,) = samples.add(times(1, ready=None, exchanged=None), writer)
    assert step["compute"] == pytest.approx(0.09)
    assert step["ready"] is None
    assert samples.add(times(2, begin=None), writer) == []
    writer.close()


def test_waits_inside_the_passes_are_no_compute(tmp_path: Path) -> None:
    """A sharded model: waits overlap, one began before the step, and steps between two samples take over the last."""
    writer = EventWriter(tmp_path, 0)
    samples = StepSamples(torch.device("cpu"), nn.Linear(4, 4))
    at = 10 * 0.1
    waits = [
        ("all-gather", at - 0.005, at + 0.002),
        ("all-gather", at + 0.01, at + 0.02),
        ("reduce-scatter", at + 0.015, at + 0.024),
    ]
    trace, step = samples.add(times(10, waits=waits, exchanged=at + 0.05), writer)
    assert step["compute"] == pytest.approx(0.034, abs=1e-6)
    assert step["wire"] == pytest.approx(0.016, abs=1e-6)
    assert step["ready"] is None, "its ranks meet in every layer"
    assert [name for lane, name, _, _ in trace["spans"] if lane == "wire"] == [name for name, _, _ in waits]
    samples.add(times(65, exchanged=6.5 + 0.05), writer)
    (mean,) = samples.add(times(66, exchanged=6.6 + 0.05), writer)
    assert mean["steps"] == 2
    assert mean["wire"] == pytest.approx(0.016, abs=1e-6)
    assert mean["compute"] == pytest.approx(0.034, abs=1e-6)
    writer.close()
