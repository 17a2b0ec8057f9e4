"""What choosing bits for every layer can save: tables made with the real codec."""

from __future__ import annotations

import json

import pytest
import torch
from tests.support.tasks import a_task

from trimtab.bench.scenarios import bit_frontier
from trimtab.bench.scenarios.bit_frontier import BLOCKS, MODELS, Gradients, frontier, frontier_rows, rounded


def test_more_ways_to_send_a_layer_never_take_more_bytes() -> None:
    source = Gradients(a_task(), lr=0.01)
    for _ in source.steps(2):
        pass
    bits, blocks, short = frontier_rows("m", source.mean)
    assert bits["method"] == "dynamic"
    assert blocks["bytes_over_uniform4"] <= bits["bytes_over_uniform4"] <= 1
    assert all(row["error_over_uniform4"] <= 1 for row in (bits, blocks, short))
    assert bits["values_in_short_blocks"] == 0


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_ranges_of_16_bits_contain_their_values_and_hardly_add_to_the_error(bits: int) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-4 + 2e-4
    errors = []
    for block in BLOCKS:
        short, long = (rounded("w", values, bits, block, ranges) for ranges in (True, False))
        ranges = values.view(-1, block).amax(1) - values.view(-1, block).amin(1)
        largest = (short - values).abs().view(-1, block).amax(1)
        assert bool((largest <= 1.05 * ranges / ((1 << bits) - 1)).all())
        errors.append(float((short - values).norm() / (long - values).norm()))
    assert max(errors) < 1.1
    assert torch.equal(rounded("w", torch.zeros(70), bits, 64, True), torch.zeros(70))


def test_every_model_has_rows_by_model_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_frontier, "gradients_of", lambda model: Gradients(a_task(), lr=0.01))
    monkeypatch.setattr(bit_frontier, "LEARNED", 2)
    rows = frontier()
    assert [row["model"] for row in rows if row["method"] == "dynamic"] == list(MODELS)
    assert json.loads(json.dumps(rows)) == rows
