"""`trimtab.plan`: what a user sees, and every mistake by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for
from tests.planning.planning import FAST, SLOW, uneven
from tests.predict.profiles import profile, workload
from torch import nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.planning.what_if import planned, simulate


def model() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["gpt"]()


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    (sample,) = batch_for("gpt", 2)
    return [(torch.randint(0, 64, sample.shape, generator=generator),) for _ in range(2)]


def test_a_model_and_its_data_give_a_plan() -> None:
    found = trimtab.plan(model(), uneven(1.04), 8, batches=batches(), batch="fixed")
    assert found.model == fingerprint(model())
    assert found.trimtab == trimtab.__version__
    assert found.roles[FAST].precisions == {}
    low = found.roles[SLOW].precisions
    assert low
    assert set(low) <= set(workload().settings)
    assert 0 < found.predicted.damage < found.predicted.uniform_damage
    # What it predicts is what the simulator says of it.
    given, setting = planned(found, uneven(1.04))
    assert simulate(given, workload(), setting).timeline.step_s == pytest.approx(found.predicted.step_s)


def test_only_what_may_be_adjusted_is_planned() -> None:
    exact = trimtab.plan(model(), uneven(2.0), 12, batches=batches(), adjust="exact")
    assert exact.shares == (8, 4)
    assert exact.bits is None
    assert not any(role.precisions for role in exact.roles.values())
    assert exact.reasons[0] == "only shares may be adjusted"
    assert not any("probe" in reason for reason in exact.reasons), "it would not help"
    lowered = trimtab.plan(model(), uneven(2.0), 12, batches=batches(), adjust="precision")
    assert (lowered.batch, lowered.shares, lowered.bits) == ("fixed", (6, 6), None)
    assert lowered.roles[SLOW].precisions


def test_where_no_lower_precision_was_probed_the_rest_is_planned() -> None:
    cluster = uneven(2.0)
    assert cluster.profile is not None
    devices = {
        name: replace(device, operators={k: t for k, t in device.operators.items() if "|int8" not in k})
        for name, device in cluster.profile.devices.items()
    }
    unprobed = replace(cluster, profile=replace(cluster.profile, devices=devices))
    found = trimtab.plan(model(), unprobed, 12, batches=batches())
    assert found.shares == (8, 4)
    assert any("no lower precision was probed" in reason for reason in found.reasons)


def test_ranks_on_cpus_and_gpus_in_one_job_are_refused() -> None:
    mixed = uneven()
    devices = {**mixed.devices, FAST: replace(mixed.devices[FAST], kind="cuda")}
    with pytest.raises(TrimtabError, match=r"ranks on cpu \(slow\) and cuda \(fast\).*--remove NAME"):
        trimtab.plan(model(), replace(mixed, devices=devices), 8, batches=batches())


def test_plan_is_an_ordinary_function() -> None:
    assert inspect.isfunction(trimtab.plan)
    assert [*inspect.signature(trimtab.plan).parameters][:3] == ["model", "cluster", "batch_size"]
    assert "plan" in dir(trimtab)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"batch_size": 1}, "a batch of 1 is smaller than the 2 ranks"),
        ({"batch_size": "8"}, "batch_size='8': give a whole number"),
        ({"batches": None}, "pass batches="),
        ({"batches": torch.zeros(4, 8)}, "expected a list of batches, got one Tensor"),
        ({"batch": "auto"}, "batch is free or fixed; got 'auto'"),
        ({"cluster": 3}, "expected a Cluster or the path of its file, got int"),
        ({"precisions": ["fp8"]}, "'fp8' was not probed on any device class .*fast: fp32, int8"),
        ({"indicator": "tarot"}, "no indicator 'tarot'"),
        ({"indicator": "depth"}, "'depth' ranks operators but does not tell how much"),
        ({"damage": -1.0}, "damage of -1"),
        ({"damage": float("nan")}, "damage of nan"),
        ({"bits": 3}, "not measured at 3 bits"),
        ({"layout": 3}, "groups of 3 ranks are impossible with 2 ranks; possible sizes: 2"),
        ({"layout": 1}, "groups of 1 ranks are impossible"),
        ({"layout": "dta"}, "layout 'dta': use auto, data"),
        ({"bits": 4, "adjust": "exact"}, "--bits 4 and --adjust exact exclude each other"),
        ({"precisions": ["int8"], "adjust": "bits"}, "--adjust bits exclude each other"),
        ({"adjust": "routes"}, "no adjustment 'routes'"),
        ({"cluster": replace(uneven(), profile=None)}, "has no measurements; run `trimtab probe"),
        (
            {"cluster": replace(uneven(), profile=replace(profile(), trimtab="0.0.1"))},
            r"measured with trimtab 0\.0\.1",
        ),
        ({"model": nn.Sequential(nn.Linear(3, 3)), "batches": [torch.zeros(2, 3)]}, "was not measured on"),
    ],
)
def test_a_mistake_is_named(keywords: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": model(), "cluster": uneven(), "batch_size": 8, "batches": batches()}
    if "model" in keywords:
        keywords = {**keywords, "loss": lambda y: y.sum()}
    with pytest.raises(TrimtabError, match=words):
        trimtab.plan(**{**given, **keywords})


def test_another_model_is_refused_before_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    ran = []
    monkeypatch.setattr("trimtab.api.plan.damage_of", lambda *args, **kwargs: ran.append(args))
    with pytest.raises(TrimtabError, match="was not measured on"):
        trimtab.plan(other, uneven(), 8, batches=[torch.zeros(2, 3)], loss=lambda y: y.sum())
    assert not ran


@pytest.mark.parametrize(("batch_size", "far"), [(8, False), (24, False), (96, True)])
def test_batches_far_from_those_probed_are_said(
    batch_size: int, far: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trimtab.plan(model(), uneven(1.0), batch_size, batches=batches(), batch="fixed")
    said = capsys.readouterr().err
    assert (f"{SLOW} has {batch_size // 2} samples and was probed at 2, 6" in said) == far
    assert ("trimtab probe --batch 24,48,72" in said) == far
