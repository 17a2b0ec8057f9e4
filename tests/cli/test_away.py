"""Away from the cluster: plans and predictions from the file alone, without the model's code and its devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.predict.profiles import cluster, profile, workload

import trimtab
from trimtab.cli.plan import plan
from trimtab.cli.simulate import simulate
from trimtab.cluster import Cluster, Device, load_cluster, save_cluster
from trimtab.cluster.profile import ProbedModel
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.probe import probe
from trimtab.planning.plan import load_plan
from trimtab.workload import StoredWorkload

GONE = "module_that_is_gone:make"
MODELS = (
    "llama",
    "t5",
    "mixtral_eager",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("gpt2", "bert", "vit", "mixtral")),
)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_probed_is_planned_and_simulated_without_its_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(__file__).with_name("small_transformers.py").read_text()
    (tmp_path / "soon_gone.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = probe(f"soon_gone:{name}", batches=(2, 6), precisions=(), bits=(4,))
    (tmp_path / "soon_gone.py").unlink()
    monkeypatch.delitem(sys.modules, "soon_gone")
    two = replace(
        found, hosts=(replace(found.hosts[0], count=2, link="lan"),), links={"lan": cluster().links["lan"]}
    )
    path = tmp_path / "cluster.json"
    save_cluster(two, path)
    assert path.stat().st_size < 1 << 20
    monkeypatch.chdir(tmp_path)
    plan(path, batch_size=7, bits="none", layout="data", out=tmp_path / "plan.json")
    made = load_plan(tmp_path / "plan.json")
    assert sorted(made.shares) == [3, 4]
    capsys.readouterr()
    simulate(path, plan=tmp_path / "plan.json", batch=3, as_json=True)
    (given,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert given["step_ms"] / 1e3 == pytest.approx(made.predicted.step_s)
    if name == "mixtral_eager":
        assert any("do not grow evenly" in reason for reason in made.reasons)


def on_gpus(**changes: Any) -> Cluster:
    """The cluster of the other tests as if it had been probed on GPUs, with a model whose code is gone."""
    stored = StoredWorkload.of(workload())
    model = ProbedModel(fingerprint="0123", workloads={"cuda": stored}, **changes)
    devices = {name: replace(device, kind="cuda") for name, device in cluster().devices.items()}
    return replace(cluster(), devices=devices, profile=replace(profile(), models={GONE: model}))


def damages() -> dict[str, dict[str, float]]:
    return {name: {"int8": 1e-5} for name in workload().settings}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_profile_of_gpus_is_used_on_a_laptop(tmp_path: Path) -> None:
    save_cluster(on_gpus(), tmp_path / "c.json")
    words = [sys.executable, "-m", "trimtab.cli"]
    commands = [
        ["plan", "--batch-size", "7", "--out", "p.json", "--json"],
        ["simulate", "--batch", "3", "--plan", "p.json", "--json"],
    ]
    for command in commands:
        done = subprocess.run(
            [*words, command[0], "--cluster", "c.json", *command[1:]],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    made = load_plan(tmp_path / "p.json")
    assert made.model == "0123"
    assert sum(made.shares) == 7
    assert any("trimtab probe --damage" in reason for reason in made.reasons)


def test_stored_damages_let_precisions_be_planned_without_code() -> None:
    slow_links = on_gpus(indicator="variance", damages=damages())
    made = trimtab.plan(GONE, slow_links, 8, batch="fixed")
    assert any(role.precisions for role in made.roles.values())
    assert made.predicted.damage > 0
    # Another indicator needs the code.
    other = trimtab.plan(GONE, slow_links, 8, batch="fixed", indicator="depth")
    assert not any(role.precisions for role in other.roles.values())


def test_a_model_in_python_is_planned_for_gpus_elsewhere() -> None:
    from tests.api.test_plan import batches, model

    probed = on_gpus(indicator=None)
    assert probed.profile is not None
    known = replace(probed.profile.models[GONE], fingerprint=fingerprint(model()))
    there = replace(probed, profile=replace(probed.profile, models={GONE: known}))
    made = trimtab.plan(model(), there, 8, batches=batches(), bits=None)
    assert made.model == fingerprint(model())
    assert sum(made.shares) == 8


def test_a_model_that_changed_since_it_was_probed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_model.py").write_text(
        "from tests.api.test_plan import batches, model\n\ndef make():\n    return model(), batches()[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    there = on_gpus()
    assert there.profile is not None
    known = there.profile.models[GONE]
    there = replace(there, profile=replace(there.profile, models={"changed_model:make": known}))
    with pytest.raises(TrimtabError, match="another model than the one that was probed"):
        trimtab.plan("changed_model:make", there, 8)


def test_the_model_must_be_clear(tmp_path: Path) -> None:
    there = on_gpus()
    assert there.profile is not None
    model = there.profile.models[GONE]
    both = replace(there, profile=replace(there.profile, models={"one": model, "two": model}))
    for one, words in (
        (both, "models one, two were probed: say which"),
        (cluster(), "no model was probed: say"),
    ):
        save_cluster(one, tmp_path / "c.json")
        assert load_cluster(tmp_path / "c.json") == one
        with pytest.raises(TrimtabError, match=words):
            simulate(tmp_path / "c.json")
        with pytest.raises(TrimtabError, match=words):
            plan(tmp_path / "c.json", batch_size=8, out=tmp_path / "p.json")
    save_cluster(both, tmp_path / "c.json")
    simulate(tmp_path / "c.json", "two", batch=3, as_json=True)


def test_an_estimated_device_does_not_change_which_workload_is_used(tmp_path: Path) -> None:
    """A CPU that is only estimated beside measured GPUs."""
    there = on_gpus()
    mixed = replace(
        there, devices={**there.devices, "spare": Device(kind="cpu", speed=1.0, model="AMD EPYC 9654")}
    )
    mixed = replace(mixed, hosts=(*mixed.hosts, replace(mixed.hosts[0], name="c", devices={"spare": 1})))
    save_cluster(mixed, tmp_path / "c.json")
    simulate(tmp_path / "c.json", batch=3, as_json=True)
