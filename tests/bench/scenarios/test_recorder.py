"""`trimtab bench recorder` on real ranks: every case is measured, and the share is made of its parts."""

from __future__ import annotations

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.recorder import PLAIN, RECORDED, recorder


@pytest.mark.soak
def test_the_cost_of_recording_is_measured() -> None:
    result = recorder(200, 2.0, lambda done, total: None)
    assert [row["method"] for row in result.rows] == [RECORDED, PLAIN, PLAIN + AA]
    assert all(row["cpu_us_per_step"] > 0 for row in result.rows)
    summary = result.summary
    parts = max(0.0, float(summary["recorder_us_per_step"])) / float(summary["realistic_step_us"])
    assert summary["share_of_step"] == pytest.approx(parts + float(summary["writer_idle_us_per_s"]) / 1e6)
    assert float(summary["live_view_us_per_frame"]) > 0
