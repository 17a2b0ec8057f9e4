"""Shares on a rank that is really slow, by quota, and for a while slower still."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.emulate import Emulation, parse_contention

_SCRIPT = str(Path(__file__).with_name("throttled_script.py"))


@requires(root=True, cgroup=True)
def test_a_throttled_rank_gets_what_it_can_do() -> None:
    """Host b has half of its core's time, and half of that from step 40 to 80."""
    schedule = [parse_contention("b=0.4@40:80")]
    with Emulation(pair(speed=0.5), throttle="quota", schedule=schedule) as emulation:
        outcome = emulation.run([_SCRIPT, "120"], capture=True, timeout=100)
    assert outcome.failure is None, outcome.failure
    part = [second / (first + second) for first, second in json.loads(outcome.stdout)]
    before, during, after = (statistics.median(part[end - 15 : end]) for end in (40, 80, 120))
    assert part[0] == 0.5
    assert 0.2 <= before <= 0.45
    assert during < 0.75 * before
    assert after > 1.25 * during
