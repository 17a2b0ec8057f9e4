"""The launcher's settings travel to its ranks as one argument."""

from __future__ import annotations

import pytest

from trimtab.run_settings import RunSettings


@pytest.mark.parametrize(
    "settings", [RunSettings(), RunSettings(plan="/a b/plan.json"), RunSettings(local_steps="16")]
)
def test_they_arrive_as_they_left(settings: RunSettings) -> None:
    arguments = [*settings.arguments(), "train.py", "--settings", "own"]
    assert RunSettings.take_from(arguments) == settings
    assert arguments == ["train.py", "--settings", "own"], "the script's arguments are left alone"


def test_defaults_are_not_told() -> None:
    assert RunSettings().arguments() == []
