"""Predicted against measured peak memory: models, precisions, optimizers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support.requirements import requires

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = requires(cuda=1, modules=["triton", "transformers"])

LARGEST_ERROR = 0.05


@pytest.mark.parametrize("model", ["gpt2", "vit", "resnet"])
def test_predicted_peak_is_the_measured_one(
    model: str, record_property: Callable[[str, object], None]
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.memory_cases", model], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    record_property("rows", rows)
    assert len(rows) >= 4
    assert [row for row in rows if abs(row["error"]) > LARGEST_ERROR] == []
