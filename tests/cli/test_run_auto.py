"""`trimtab run --auto` and `--adjust`: what travels to the ranks, and contradictions before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.control.plans.plan_cases import net, plan_for

from trimtab.cli.run import BOOTSTRAP, torchrun_command
from trimtab.errors import TrimtabError
from trimtab.planning.plan import save_plan
from trimtab.run_settings import RunSettings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    save_plan(plan_for(net()), "plan.json")
    return tmp_path


def settings(*flags: str) -> RunSettings:
    command = torchrun_command([*flags, "--nproc-per-node", "2", "train.py", "--auto"])
    assert command[-2:] == ["train.py", "--auto"], "the script's arguments are its own"
    assert command[3:6] == ["--nproc-per-node", "2", "-m"], "torchrun gets its flags alone"
    return RunSettings.take_from(command[command.index(BOOTSTRAP) + 1 :])


def test_defaults() -> None:
    assert settings() == RunSettings()
    assert RunSettings().adjust == "bits,shares"
    assert settings("--auto") == RunSettings(adjust="auto", auto=True)
    assert settings("--plan", "plan.json").adjust == "auto", "as planned"


def test_what_may_be_adjusted() -> None:
    assert settings("--auto", "--adjust", "exact") == RunSettings(adjust="exact", auto=True)
    assert settings("--adjust=none") == RunSettings(adjust="none")
    assert settings("--adjust", "bits,precision").auto, "a precision needs a plan"
    assert not settings("--adjust", "auto", "--plan", "plan.json").auto, "there is one"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--auto", "--plan", "plan.json"], "--auto and --plan exclude each other"),
        (["--auto", "--local-steps", "8"], "--local-steps and --auto exclude each other"),
        (["--adjust", "bits", "--local-steps", "8"], "--local-steps and --adjust exclude each other"),
        (["--auto", "--adjust", "none"], "--auto and --adjust none exclude each other"),
        (["--plan", "plan.json", "--adjust", "none"], "--plan and --adjust none exclude each other"),
        (["--adjust", "speed"], "run: --adjust: there is no adjustment 'speed'"),
        (["--adjust", "exact", "--batch-sizes", "equal"], "equal and --adjust exact exclude each other"),
        (
            ["--auto", "--adjust", "shares", "--batch-sizes", "24,11"],
            "24,11 and --adjust shares exclude each other",
        ),
    ],
)
def test_contradictions_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        settings(*flags)
