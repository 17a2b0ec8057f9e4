"""int8 on any CPU: without VNNI its products are slow, so it is not offered, but they are the same."""

from __future__ import annotations

import pytest

from trimtab.precision import devices


@pytest.fixture(autouse=True)
def _every_cpu_offers_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset({"vnni"}))
