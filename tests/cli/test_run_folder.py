"""`trimtab run` records a job: one job on two ranks, of which one is slow, and everything that looks at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trimtab.cli.app import app
from trimtab.cli.run import parse, torchrun_command
from trimtab.cli.run_view import RunView
from trimtab.errors import TrimtabError
from trimtab.report.run_folder import load_run
from trimtab.report.trace import chrome_trace

SCRIPT = """
import sys, time
import torch, torch.distributed as dist, trimtab
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
trimtab.compress(ddp, trimtab.codec.Block(bits=4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in torch.utils.data.DataLoader(range(12)):
    loss = ddp(torch.randn(8 + 8 * dist.get_rank(), 64)).square().mean()
    if dist.get_rank() == 1:
        time.sleep(0.05)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("the script's own line", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
    )


def test_a_job_is_recorded_and_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "run", "--nproc-per-node", "2", "train.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script's own line") == 2
    (folder,) = (tmp_path / "trimtab-runs").iterdir()
    assert folder.name.endswith("-train")
    recorded = load_run(folder)
    assert recorded.info["command"] == [
        "trimtab",
        "run",
        "--nproc-per-node",
        "2",
        "train.py",
        "--epochs",
        "1",
    ]
    assert (recorded.info["world_size"], recorded.world_size, recorded.problems) == (2, 2, [])
    assert recorded.ended
    for rank, samples in recorded.steps.items():
        assert [sample["step"] for sample in samples] == list(range(1, 13))
        assert {sample["samples"] for sample in samples} == {8 + 8 * rank}
        assert all(sample["loss"] > 0 for sample in samples), "seen without a word from the script"
        assert all(sample["sent"] < sample["sent_plain"] / 4 for sample in samples)
        for sample in samples:
            parts = ("data", "compute", "codec", "wire", "waiting", "optimizer")
            assert sum(sample[name] for name in parts) == pytest.approx(sample["seconds"], abs=1e-4)
    waited = [sample["waits_for"] for sample in recorded.steps[0][1:]]
    assert waited.count(1) > len(waited) / 2, "rank 0 waits for the slow one"
    assert [(event["total_steps"], event["epoch_ends"]) for event in recorded.events("progress")] == [
        (12, 12)
    ]
    (host,) = recorded.info["cluster"]["hosts"]
    (device,) = recorded.info["cluster"]["devices"].values()
    assert (sum(host["devices"].values()), device["kind"]) == (2, "cpu")
    assert device["memory_gib"] > 0
    (layers,) = recorded.events("layers")
    assert [name for name, _, _ in layers["layers"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert recorded.events("bits")[0]["bits"] == {"0.weight": 4, "0.bias": 0, "2.weight": 4, "2.bias": 0}
    spans = {
        (event["pid"], event["cat"])
        for event in chrome_trace(recorded, 10)["traceEvents"]
        if event["ph"] == "X"
    }
    assert {(rank, lane) for rank in (0, 1) for lane in ("compute", "codec", "wire", "optimizer")} <= spans
    summary = [line for line in done.stderr.splitlines() if line.startswith("trimtab: ")]
    assert any("12 steps in" in line for line in summary)
    assert any("instead of" in line for line in summary)
    assert all(len(line) <= 120 for line in summary)

    shown = CliRunner().invoke(app, ["top", str(folder), "--once"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert "train.py: ended, step 12" in shown.output


def view(*arguments: str) -> RunView:
    return RunView(parse(arguments), arguments)


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRIMTAB_RUN_DIR", raising=False)
    assert view("--no-run-dir", "train.py").environment() == {"TRIMTAB_RUN_DIR": ""}
    assert view("--run-dir", "own", "--quiet", "train.py").environment() == {
        "TRIMTAB_RUN_DIR": str(tmp_path / "own")
    }
    assert not (tmp_path / "trimtab-runs").exists()
    assert json.loads((tmp_path / "own" / "run.json").read_text())["script"] == "train.py"
    several = ("--nnodes", "2", "--rdzv-id", "job 7", "train.py")
    assert view(*several).folder == view(*several).folder == tmp_path / "trimtab-runs" / "job-7-train"
    monkeypatch.setenv("TRIMTAB_RUN_DIR", "named")
    assert view("train.py").folder == tmp_path / "named"
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    assert view("train.py").folder is None


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert view("--run-dir", str(tmp_path / "file" / "x"), "train.py").folder is None
    assert capfd.readouterr().err.count("no events are written") == 1


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(TrimtabError, match="exclude each other"):
        view("--run-dir", "own", "--no-run-dir", "train.py")


def test_our_flags_do_not_reach_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    plain = torchrun_command(["--nproc-per-node", "2", script, "--quiet"])
    assert plain == torchrun_command(
        ["--quiet", "--run-dir", "own", "--nproc-per-node", "2", "--no-run-dir", script, "--quiet"]
    )
