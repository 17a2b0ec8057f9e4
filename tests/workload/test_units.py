"""A tensor-parallel rank's part of a step has the sizes that the converted model has."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.measure.capture.capture import capture_workload
from trimtab.workload import load_workload, save_workload
from trimtab.workload.units import sharded, shares_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool


def sizes() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    model = MODELS["gpt"]()
    workload = capture_workload(copy.deepcopy(model), batch_for("gpt", 2))
    mesh = init_device_mesh("cpu", (2,))
    converted = tensor_parallel(model, mesh, shares=[3, 1])
    own = {span.name: span.units * (3, 1)[mesh.get_rank()] // 4 for span in workload.units}
    return (
        {name: p.numel() for name, p in converted.named_parameters()},
        {p.name: p.tensor.numel for p in sharded(workload, own).parameters},
        {
            p.name: p.tensor.numel
            for p in sharded(workload, {s.name: s.units for s in workload.units}).parameters
        },
    )


def test_parameters_have_the_sizes_of_the_converted_model(ranks: Pool) -> None:
    for converted, predicted, whole in ranks(2, sizes):
        assert predicted == converted
        assert sum(whole.values()) > sum(predicted.values())


def test_only_what_is_inside_a_block_becomes_smaller(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = MODELS["gpt"]()
    workload = capture_workload(model, batch_for("gpt", 2))
    save_workload(workload, tmp_path / "workload.json")
    assert load_workload(tmp_path / "workload.json") == workload
    counts = {span.name: span.units // 2 for span in workload.units}
    small, parts = sharded(workload, counts), shares_of(workload, counts)
    for before, after in zip(workload.operators, small.operators, strict=True):
        ratio = after.flops / before.flops if before.flops else 1.0
        assert ratio == pytest.approx(parts.get(before.index, 1.0)), before.name
    assert sum(b.nbytes for b in small.buckets) == sum(p.tensor.nbytes for p in small.parameters)
