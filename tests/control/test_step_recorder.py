"""What is recorded of a model of `fully_shard` modules on real ranks: the waits of FSDP2 are no compute."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trimtab.control.step_recorder import record_steps
from trimtab.environment import RUN_DIR
from trimtab.report import events
from trimtab.report.run_folder import load_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.pool import Pool

STEPS = 6


def train_sharded(folder: str) -> None:
    os.environ[RUN_DIR] = folder
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
        record_steps(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        events.close(0)
    finally:
        del os.environ[RUN_DIR]
        events._Current.closed, events._Current.at_close = False, []


def test_waits_of_a_sharded_model_are_no_compute(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, train_sharded, str(tmp_path))
    run = load_run(tmp_path)
    assert sorted(run.steps) == [0, 1]
    for rank, samples in run.steps.items():
        assert [sample["step"] for sample in samples] == list(range(1, STEPS + 1))
        assert all(sample["ready"] is None for sample in samples)
        assert all(sample["wire"] + sample["waiting"] > 0 for sample in samples)
        assert all(sample["compute"] > 0 for sample in samples)
        for sample in samples:
            parts = ("data", "compute", "codec", "wire", "waiting", "optimizer")
            assert sum(sample[name] for name in parts) == pytest.approx(sample["seconds"], abs=1e-4)
        (trace,) = run.ranks[rank].of("trace")
        names = [(lane, name) for lane, name, _, _ in trace["spans"]]
        assert names.count(("wire", "all-gather")) >= 4  # each module in forward, and in backward
        assert ("wire", "reduce-scatter") in names
    for sample, other in zip(run.steps[0], run.steps[1], strict=True):
        assert (sample["waits_for"], other["waits_for"]) in ((1, None), (None, 0), (None, None))
