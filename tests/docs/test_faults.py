"""Every row of docs/faults.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_fault_names_its_tests() -> None:
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    for row in rows[1:]:
        names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert names, row
        for path, function in names:
            assert f"def {function}(" in (ROOT / path).read_text(), f"{path} has no test {function}"
